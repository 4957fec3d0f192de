"""How the user's object acts as the replica's own.

A step closes over the user's `model` and `optimizer`. During a run, their class is
replaced by a subclass, the proxy class. At each attribute access, the proxy looks up
which replica the thread is in and uses that replica's copy of the object; for a
trainer, the attributes that it has in this replica. Outside of replicas it uses the
user's own object. When no run is under way, the object has its own class again: between
runs, nothing of this library is in it.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import types
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import local_object
from torchstrategy._base.objects.torch_hooks import Stepper, guards, others_are_told
from torchstrategy._base.torch_internals import raw_grad, set_raw_grad, take_inputs_by

_lock = threading.Lock()


# Note [What a proxy must not change]
# A proxy is the user's own object with another class. In a replica, each kind of proxy
# changes this and no more:
# - The proxy of a module changes everything: whatever is read, set or deleted on it is
#   that of the replica's copy.
# - The proxy of an optimizer changes `step`, `zero_grad`, `param_groups`, `state`, and
#   the public methods that the user's class adds to torch's. It refuses
#   `add_param_group` and `load_state_dict`.
# - The proxy of a parameter changes `.grad`, and the attributes that are in its
#   `__dict__`. Its values are the user's.
# - The proxy of a scheduler or scaler changes `step`, `update` and `unscale_`, which
#   act once for all replicas.
# - The proxy of a trainer changes the attributes that are in its `__dict__`. Methods
#   and properties are the user's.
# Code that does not belong to the step must not notice a proxy:
# - The object has the proxy class only during a run. Also then, `__class__` and
#   `isinstance` see the user's class, and so do pickles and copies. Only `type()` shows
#   the proxy class, which has the name and the module of the user's.
# - To make a proxy class, neither the user's metaclass nor `__init_subclass__` is
#   called: they may register classes.
# - Only a thread that is in a replica sees the replica's object. All other threads see
#   the user's own object, and so do the replicas of other strategies, since
#   `local_object` asks the innermost replica of this very thread.
# - If several runs have proxies of one object at the same time, it gets its class back
#   when the last of them ends.
# - A thread that is in no replica may be in a method of a proxy class when that
#   happens. `super()` would raise there, since the object is no proxy any more. So
#   methods of proxy classes call `_in_users_class`.
# - torch's optimizers look at `type()` of parameters. So these can get their class back
#   while the replicas stand still.
class Proxy:
    """The base of all proxy classes.

    A proxy is pickled and copied as an object of the user's class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hides proxy classes from `__init_subclass__` of the user's.

        See Note [What a proxy must not change].
        """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The user's class.

        pickle compares it with the class in the result of `__reduce_ex__`.
        """
        return plain_class(type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = _in_users_class(self, "__reduce_ex__")(self, protocol)
        if (
            not isinstance(reduced, tuple)
            or reduced[0] is not vars(copyreg)["__newobj__"]
        ):
            return reduced  # for example a string, the name of a global object
        function, (_, *arguments), *rest = reduced
        return function, (plain_class(type(self)), *arguments), *rest


def _in_users_class(thing: object, name: str) -> Any:
    """What the user's class has under a name.

    This is a property, or a method that takes the object as its first argument.

    It is the same whether the object is a proxy or not. See Note [What a proxy must not
    change].
    """
    return getattr(plain_class(type(thing)), name)


class _ModuleProxy(Proxy):
    """A module that acts, in a replica, as this replica's copy."""

    def __getattribute__(self, name: str) -> Any:
        local = local_object(self)
        return (
            _in_users_class(self, "__getattribute__")(self, name)
            if local is self
            else getattr(local, name)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        local = local_object(self)
        if local is self:
            _in_users_class(self, "__setattr__")(self, name, value)
        else:
            setattr(local, name, value)

    def __delattr__(self, name: str) -> None:
        local = local_object(self)
        if local is self:
            _in_users_class(self, "__delattr__")(self, name)
        else:
            delattr(local, name)


def users_own(optimizer: Any, name: str) -> Any:
    """The `param_groups`, `state` or `step` of the user's own optimizer.

    It may be a property of the user's class: an optimizer that wraps another one takes
    it from there.
    """
    inside = vars(optimizer)
    return (
        inside[name]
        if name in inside
        else _in_users_class(optimizer, name).__get__(optimizer)
    )


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer updates, in order.

    They are the user's own, also while the optimizer is a proxy.
    """
    return list(
        chain.from_iterable(map(_members_of, users_own(optimizer, "param_groups")))
    )


def _members_of(group: dict[str, Any]) -> Iterable[torch.Tensor]:
    # Some groups of the program's own have none.
    members: Iterable[torch.Tensor] = group.get("params", ())
    return members


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is torch's own."""
    return plain_class(type(optimizer)).__module__.startswith("torch.optim.")


def has_own_code_only(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer runs torch's code only, and none of the user's."""
    inside: dict[str, Any] = vars(optimizer)
    cls: Any = plain_class(type(optimizer))
    # A learning-rate scheduler puts a `step` there that calls the one of the class.
    step = inside.get("step")
    is_of_class = step is None or (
        hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is cls.step
    )
    has_hooks = inside.get("_optimizer_step_pre_hooks") or inside.get(
        "_optimizer_step_post_hooks"
    )
    return (
        is_torchs(optimizer) and is_of_class and not has_hooks and not others_are_told()
    )


def _of_replica(name: str) -> property:
    """The `param_groups`, `state` or `step` of a proxy.

    In a replica, you get that of the replica's `ReplicaOptimizer`.
    """

    def get(optimizer: Any) -> Any:
        local: Any = local_object(optimizer)
        return (
            users_own(optimizer, name) if local is optimizer else getattr(local, name)
        )

    def put(optimizer: Any, value: Any) -> None:
        _only_outside(optimizer, f"{name} = ...")
        computed: Any = getattr(plain_class(type(optimizer)), name, None)
        if hasattr(computed, "__set__"):
            computed.__set__(optimizer, value)
        else:
            vars(optimizer)[name] = value

    return property(get, put)


class _OptimizerProxy(Proxy):
    """An optimizer that acts, in a replica, as this replica's `ReplicaOptimizer`."""

    param_groups = _of_replica("param_groups")
    state = _of_replica("state")
    # This is a property and no method: a learning-rate scheduler puts its own `step` on
    # the instance.
    step = _of_replica("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        local: Any = local_object(self)
        if local is self:
            _in_users_class(self, "zero_grad")(self, set_to_none)
        else:
            local.zero_grad(set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        _only_outside(self, "add_param_group()")
        _in_users_class(self, "add_param_group")(self, param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        _only_outside(self, "load_state_dict()")
        _in_users_class(self, "load_state_dict")(self, state_dict)


def _methods_of(cls: type) -> dict[str, Any]:
    """The public methods that the user's class of optimizers adds to torch's.

    Replicas call such a method together, as they call `step`.

    Methods that torch's `Optimizer` also has are not among them, and neither are
    private methods, since other methods call those.
    """
    classes = [
        base for base in cls.__mro__ if not base.__module__.startswith("torch.optim.")
    ]
    names = [
        name
        for base in classes
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType)
    ]
    return {
        name: _called_once(name)
        for name in names
        if not name.startswith("_") and not hasattr(Optimizer, name)
    }


def _called_once(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        local: Any = local_object(self)
        if local is self:
            return _in_users_class(self, name)(self, *args, **kwargs)
        return local.call(name, *args, **kwargs)

    return method


def _only_outside(optimizer: Any, what: str) -> None:
    if local_object(optimizer) is not optimizer:
        raise RuntimeError(
            f"{plain_class(type(optimizer)).__name__}.{what} was called in a replica, "
            "which shares the optimizer with the others. Call it outside of "
            "strategy.run, or from a merge function: "
            "get_replica_context().merge_call(...)."
        )


class ShowsLocalGrad(nn.Parameter):
    """A parameter that shows, in a replica, the gradient of the replica's parameter."""

    @property
    def grad(self) -> Any:
        """The gradient of the parameter.

        In a replica, it is the gradient of the replica's own parameter.
        """
        local: Any = local_object(self)
        return raw_grad(self) if local is self else local.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        local: Any = local_object(self)
        if local is self:
            set_raw_grad(self, value)
        else:
            local.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class _Attributes:
    """Gives an object its own attributes in each replica.

    The object is a trainer, or a parameter of the user's.

    In the order in which methods are looked up, it comes after all classes of the
    user's and before `object`. So a `__getattribute__` or `__setattr__` of the user's
    class is called first.
    """

    def __getattribute__(self, name: str) -> Any:
        attributes = _attributes_in_replica(self)
        if attributes is None:
            return object.__getattribute__(self, name)
        if name == "__dict__":
            return attributes
        if name in attributes and not hasattr(
            type(getattr(type(self), name, None)), "__set__"
        ):
            return attributes[name]
        if name in object.__getattribute__(self, "__dict__"):
            # The replica has deleted the attribute; the class may have one of this
            # name.
            return _of_class(self, name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        attributes = _attributes_in_replica(self)
        if attributes is None or hasattr(
            type(getattr(type(self), name, None)), "__set__"
        ):
            object.__setattr__(self, name, value)
        else:
            attributes[name] = value

    def __delattr__(self, name: str) -> None:
        attributes = _attributes_in_replica(self)
        if attributes is None or hasattr(
            type(getattr(type(self), name, None)), "__delete__"
        ):
            object.__delattr__(self, name)
        elif name in attributes:
            del attributes[name]
        else:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )

    def __getstate__(self) -> Any:
        # `object.__getstate__` would not look up `__dict__`, and would get the user's
        # own attributes.
        return vars(self)


def _attributes_in_replica(thing: Any) -> dict[str, Any] | None:
    """The attributes that an object has in the replica of this thread.

    Outside of replicas, it is None.
    """
    local = local_object(thing)
    if local is thing:
        return None
    # The replica's own object for a trainer is a dict.
    own: dict[str, Any] = vars(local) if isinstance(local, torch.Tensor) else local
    return own


def _of_class(thing: object, name: str) -> Any:
    found = next(
        (vars(base)[name] for base in type(thing).__mro__ if name in vars(base)),
        _Attributes,
    )
    if found is _Attributes:
        raise AttributeError(
            f"{type(thing).__name__!r} object has no attribute {name!r}"
        )
    return found.__get__(thing, type(thing)) if hasattr(found, "__get__") else found


class _ParameterProxy(Proxy, ShowsLocalGrad, _Attributes):
    """The user's parameter, which in a replica shows the replica's gradient.

    It also shows the attributes of the replica's parameter.

    A gradient that is asked for by such a parameter, as `backward(inputs=...)` does, is
    that of the replica's, too.
    All else is the user's: operations on it use the user's own parameter, also in a
    replica. This is enough for a step that clears, clips, logs or asks for the
    gradients of a list of parameters that was made outside of the step.
    """

    def __getattribute__(self, name: str) -> Any:
        # No attribute of the user's can take the place of these, and a step reads
        # `grad` of all parameters.
        if name in _FIELDS:
            return object.__getattribute__(self, name)
        return _Attributes.__getattribute__(self, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = nn.Parameter(
            self.detach().clone(), self.requires_grad
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its result names no class but Parameter.
        return nn.Parameter.__reduce_ex__(self, protocol)


_FIELDS = {
    name
    for name in dir(torch.Tensor)
    if hasattr(type(getattr(torch.Tensor, name)), "__set__")
} - {"__dict__"}


class _SharedStepperProxy(Proxy):
    """A scheduler or a scaler.

    What it does once per step, it does once for all replicas that call it.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _ONCE_A_STEP and (local := local_object(self)) is not self:
            return functools.partial(local.call, name)
        return _in_users_class(self, "__getattribute__")(self, name)


_ONCE_A_STEP = frozenset({"step", "unscale_", "update"})

# An object of any other class is a trainer.
_KINDS: dict[Any, type] = {
    nn.Module: _ModuleProxy,
    Optimizer: _OptimizerProxy,
    Stepper: _SharedStepperProxy,
}


# The runs that are under way, and the objects that each has proxies of.
_under_way: dict[object, Sequence[object]] = {}


def install(objects: Sequence[object], run: object) -> None:
    """Makes proxies of the objects, until `uninstall`. May be called again.

    See Note [What a proxy must not change].

    If a run is interrupted in this function, it can call `uninstall` for all of the
    objects.
    """
    with _lock:
        _under_way[run] = objects
        guards.begin()
        _tell_autograd()
        _exchange_classes(objects, _proxy_class)


@functools.cache  # once in a process
def _tell_autograd() -> None:
    """Lets a backward that is asked for a proxy's gradient make the replica's.

    From here on, the gradient is that of the replica's parameter.
    """
    take_inputs_by(local_object)


def uninstall(objects: Sequence[object], run: object) -> None:
    """The reverse of `install`, which you may call again.

    Objects that another run has proxies of stay proxies.
    """
    with _lock:
        _exchange_classes(_find_unshared(objects, run), plain_class)
        _under_way.pop(run, None)
        if not _under_way:
            guards.end()


@contextmanager
def suspended(objects: Sequence[object], run: object) -> Iterator[None]:
    """A block in which some objects have their own class again.

    The replicas of the run must stand still meanwhile.

    See Note [What a proxy must not change].
    """
    with _lock:
        at_rest = _find_unshared(objects, run)
        _exchange_classes(at_rest, plain_class)
    try:
        yield
    finally:
        with _lock:
            if run in _under_way:
                _exchange_classes(at_rest, _proxy_class)


def _find_unshared(objects: Sequence[object], run: object) -> Sequence[object]:
    """The objects that no other run has proxies of."""
    others = {
        id(thing)
        for other, things in _under_way.items()
        if other is not run
        for thing in things
    }
    return (
        [thing for thing in objects if id(thing) not in others] if others else objects
    )


def _exchange_classes(
    objects: Sequence[object], class_for: Callable[[type], type]
) -> None:
    deque(map(_set_class, objects, map(class_for, map(type, objects))), maxlen=0)


# Sets `__class__` without the property of the same name.
_set_class = vars(object)["__class__"].__set__


_LAYOUT = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")


def is_all_in_dict(thing: object) -> bool:
    """Whether all of an object is in its `__dict__`.

    This is not so for a dict, or an object of a class with slots.
    """
    cls = plain_class(type(thing))
    return (
        all(getattr(cls, name) == getattr(_Attributes, name) for name in _LAYOUT)
        and cls.__module__ != "types"
    )


def _find_plain_class(cls: type) -> type:
    """The user's class, if `cls` is its proxy class; else `cls` itself."""
    if cls is _ParameterProxy:
        return nn.Parameter
    return cls.__bases__[0] if issubclass(cls, Proxy) else cls


def _make_proxy_class(cls: type) -> type:
    """The proxy class of a class of the user's; or `cls` itself, if it is one."""
    if issubclass(cls, Proxy):
        return cls
    if cls is nn.Parameter:
        return _ParameterProxy
    kind = next((kind for base, kind in _KINDS.items() if issubclass(cls, base)), None)
    return hidden_subclass(
        cls, kind, _methods_of(cls) if kind is _OptimizerProxy else {}
    )


def hidden_subclass(cls: type, kind: type | None, members: Mapping[str, Any]) -> type:
    """A subclass of a user's class that shows, by name and `__class__`, as that class.

    Args:
        cls: The user's class.
        kind: A subclass of `Proxy` whose attributes come before those of the user's
            class; None: that of trainers.
        members: What the subclass has besides.
    """
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
    }
    body |= members
    made: Any = type(type(cls))  # usually `type`
    meta = made(
        type(cls).__name__,
        (type(cls),),
        {"mro": lambda new: _order_classes(new, cls, kind)},
    )
    # The metaclass is not called: the user's own may count classes, or refuse a second
    # one of the same name. See Note [What a proxy must not change].
    made = ABCMeta if issubclass(meta, ABCMeta) else type
    proxy: type = made.__new__(meta, cls.__name__, (cls,), body)
    return proxy


# A run looks up the class of every object.
plain_class: Callable[[type], type] = functools.cache(_find_plain_class)
_proxy_class: Callable[[type], type] = functools.cache(_make_proxy_class)


def _order_classes(proxy: type, cls: type, kind: type | None) -> list[type]:
    """The method resolution order of a proxy class.

    `kind` comes first, though the user's class is the only base.

    `Proxy` cannot be a base before the user's class. If the first base of that class
    has empty `__slots__`, as `ABC` and `Generic` have, the memory layouts would then
    differ, and CPython would refuse the change of `__class__`.
    """
    if kind is None:
        return [proxy, Proxy, *cls.__mro__[:-1], _Attributes, object]
    return [proxy, *kind.__mro__[:-1], *cls.__mro__]
