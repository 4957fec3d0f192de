"""Large attributes of modules, which replicas get when a step first reads them.

A vocabulary or an index has many entries, and most steps never look at it. So a plain
attribute that is nothing but data and has many entries is not copied with its module.
In a replica's copy of the module an object of `Later` stands in its place, and the copy
has a subclass of the user's class. There, the attribute is a descriptor: the first step
that reads it makes the copies for all replicas. From then on the attribute is one like
all others, and the copy has the user's class again.

An attribute is copied at once if another attribute holds a part of it, too: the copies
are to share this part.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import nn

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.objects.attribute_contents import (
    CopiedThing,
    Data,
    data_in,
    things_in,
)
from torchstrategy._base.objects.changes import MISSING, Snapshot
from torchstrategy._base.objects.module_traversal import TORCHS_OWN, computed_by_hooks
from torchstrategy._base.objects.proxies import Proxy, hidden_subclass, plain_class
from torchstrategy._base.plain import PLAIN

LARGE = 1000  # entries: to look through fewer in each run costs little

# By the position of a module, and the name of the attribute.
Late = dict[tuple[int, str], "Later"]


@final
class Later:
    """Stands for an attribute in the copies of a module, until a step reads it.

    Args:
        path: What to call the attribute.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Puts the replicas' copies in its place.
        self.bring: Callable[[], None] = self._refuse

    def _refuse(self, *args: Any) -> NoReturn:
        raise RuntimeError(
            f"The step took {self.path} out of the `__dict__` of a module. It is "
            "large, and a replica gets its copy when the step reads the attribute: "
            "read it by its name, or by getattr(module, name)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = __call__ = (
        __reduce_ex__
    ) = _refuse


def is_large(data: Data | None) -> bool:
    """Whether something is data, and has many entries."""
    return data is not None and data.entries >= LARGE


def find_late(
    modules: Sequence[nn.Module], insides: Sequence[dict[str, Any]]
) -> set[tuple[int, str]]:
    """The attributes that replicas may get when a step reads them.

    They are by the position of the module and their name.

    Args:
        modules: The user's modules, or the copies of a replica.
        insides: The `__dict__`s of the user's modules.
    """
    if any(map(_is_compiled, modules)):
        return set()  # the compiler is to see no descriptors of ours
    holders: dict[tuple[int, str], list[Any]] = {}
    held: Counter[int] = Counter()  # how many attributes hold something, by its id
    for position, (module, inside) in enumerate(zip(modules, insides, strict=True)):
        left_out = TORCHS_OWN | computed_by_hooks(module)
        for name in inside.keys() - left_out:
            value = inside[name]
            if isinstance(value, PLAIN):
                continue
            data = None if _is_hidden(module, name) else data_in(value)
            if data is not None and is_large(data):
                holders[position, name] = data.holders
                held.update(set(map(id, data.holders)))
            else:
                held.update(
                    {id(thing) for _, thing in things_in("", value, has_data=True)}
                )
    return {
        key
        for key, of_one in holders.items()
        if all(held[id(holder)] == 1 for holder in of_one)
    }


def _is_compiled(module: nn.Module) -> bool:
    return (
        module._compiled_call_impl is not None
        or plain_class(type(module)).__name__ == "OptimizedModule"
    )


def _is_hidden(module: nn.Module, name: str) -> bool:
    """Whether the class has a property of this name.

    It comes before the attribute.
    """
    return hasattr(type(getattr(plain_class(type(module)), name, None)), "__set__")


def postpone(copied: nn.Module, names: Set[str]) -> None:
    """Makes some attributes of a replica's copy of a module wait.

    They wait until a step reads them, beside those that wait already.
    """
    waiting = {
        name for name, value in _inside_of(copied).items() if type(value) is Later
    }
    _set_class(
        copied, _waiting_class(plain_class(type(copied)), frozenset(waiting | names))
    )


def settle(copied: nn.Module) -> None:
    """Gives a copy the user's class again, if no attribute of it waits."""
    if not any(_list_waiting(copied)):
        _set_class(copied, plain_class(type(copied)))


_set_class = vars(object)["__class__"].__set__
_inside_of: Callable[[nn.Module], dict[str, Any]] = vars(nn.Module)["__dict__"].__get__


def _list_waiting(copied: nn.Module) -> Iterator[Later]:
    return (
        value for value in list(_inside_of(copied).values()) if type(value) is Later
    )


class _WithLateAttributes(Proxy):
    """A replica's copy of a module, with attributes that wait until they are read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied: Any = self
        for value in _list_waiting(copied):
            value.bring()
        settle(copied)
        return copied.__reduce_ex__(protocol)  # of the user's class, which it has again


@functools.cache
def _waiting_class(cls: type, names: frozenset[str]) -> type:
    return hidden_subclass(
        cls, _WithLateAttributes, {name: _LateAttribute(name) for name in names}
    )


@final
class _LateAttribute:
    """An attribute in the `__dict__` of a copy, as Python finds it.

    If it waits, its copies are made first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, copied: Any, owner: type) -> Any:
        if copied is None:
            return getattr(plain_class(owner), self._name)
        value = self._bring(copied)
        return self._read_from_class(copied) if value is MISSING else value

    def _bring(self, copied: Any) -> Any:
        value = _inside_of(copied).get(self._name, MISSING)
        if type(value) is not Later:
            return value
        value.bring()
        return _inside_of(copied)[self._name]

    def _read_from_class(self, copied: Any) -> Any:
        cls = plain_class(type(copied))
        for base in cls.__mro__:
            if self._name in vars(base):
                found = vars(base)[self._name]
                return (
                    found.__get__(copied, cls) if hasattr(found, "__get__") else found
                )
        raise AttributeError(f"{cls.__name__!r} object has no attribute {self._name!r}")

    def __set__(self, copied: Any, value: Any) -> None:
        # Or a replica that brings the copies later would put one in the place of this
        # value.
        self._bring(copied)
        _inside_of(copied)[self._name] = value

    def __delete__(self, copied: Any) -> None:
        if self._bring(copied) is MISSING:
            raise AttributeError(self._name)
        del _inside_of(copied)[self._name]


@dataclass(eq=False)
class LateCopies:
    """An attribute that waited until a step has read it, which made the copies.

    Args:
        path: The path of its module.
        name: Its name.
        copies: The copies.
        containers: The containers in it, by their paths.
        originals: What these hold in the user's attribute.
        local: What they hold in the copies, by replica.
    """

    path: str
    name: str
    copies: Sequence[Any]
    containers: dict[str, CopiedThing]
    originals: Snapshot
    local: Sequence[Snapshot]

    @classmethod
    def of(
        cls,
        path: str,
        name: str,
        copies: Sequence[Any],
        containers: dict[str, CopiedThing],
    ) -> LateCopies:
        """Notes what all containers hold now."""
        originals = Snapshot({where: one.original for where, one in containers.items()})
        local: list[Snapshot] = []
        for r in range(len(copies)):
            local.append(
                Snapshot({where: one.local[r] for where, one in containers.items()})
            )
        return cls(path, name, copies, containers, originals, local)


def has_containers(value: Any) -> bool:
    """Whether a value holds anything else that may be changed in place.

    That is anything beside tensors and modules.
    """
    closed = (*PLAIN, torch.Tensor, nn.Module, PerReplica)
    return any(
        not isinstance(thing, closed)
        for _, thing in things_in("", value, has_data=True)
    )


NO_DATA = (
    "{path} was nothing but data when replicas got their copies of the module, and "
    "since then something else was put into it: a tensor, an array, a module or a "
    "function. Assign the attribute anew, and replicas get it before the next run: "
    "module.index = dict(module.index)."
)
