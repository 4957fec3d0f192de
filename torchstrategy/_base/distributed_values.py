"""One value per replica: how such values are made, and what they refuse.

It also takes such values apart and prints them.

A replica that gets no rows of a batch takes no part in the step, and then has no value:
`ABSENT` is in its place. All functions in this file work on the values of the other
replicas, which are called present.
"""

from __future__ import annotations

import copy
import operator
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any, Generic, final

import torch
from typing_extensions import Self, TypeVar

from torchstrategy._base.context import current_replica_context
from torchstrategy._base.errors import plural, unpicklable
from torchstrategy._base.tree import (
    KNOWN_LEAVES,
    PLAIN_LEAVES,
    RowColumn,
    columns_of,
    is_one_thing,
    is_plain_list,
    map_leaves,
    tree_flatten,
    tree_leaves,
)
from torchstrategy._base.types import Tree

# A value of which nobody says what it holds holds anything.
T = TypeVar("T", covariant=True, default=Any)


@final
class _Absent:
    """The class of `ABSENT`. It is not `None`, since a step may return `None`."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        # The name of the one object, so that copying and pickling make no second one.
        return "ABSENT"


# The placeholder for the value of a replica that took no part in the step.
ABSENT = _Absent()


@final
class Unmade:
    """A placeholder for a part of a batch without rows.

    The part is made only when somebody reads it.

    Args:
        make: Makes the part.
    """

    def __init__(self, make: Callable[[], Tree]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "a piece without rows"


# ABCMeta lets variables, which are tensors, be registered as subclasses.
class DistributedValues(Generic[T], metaclass=ABCMeta):
    """The values of several replicas in one container: a component per replica.

    `Strategy.run` returns and takes such values.

    It is a container, not a tensor: it has no arithmetic, no length and no index, and
    says what to write instead. A step that gets one as an argument sees its own
    replica's component. Outside of replicas, `Strategy.reduce`, `Strategy.gather` and
    `Strategy.experimental_local_results` read the components.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> def step():
        ...     return torchstrategy.get_replica_context().replica_id_in_sync_group + 10
        >>> value = strategy.run(step)
        >>> isinstance(value, torchstrategy.DistributedValues)
        True
        >>> value
        PerReplica:{
          0: 10,
          1: 11
        }
        >>> value.values
        (10, 11)

    Differs from tf.distribute:
        A replica that gets no rows of a batch takes no part in the step and has no
        component; see `RunOptions`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/DistributedValues
    """

    __slots__ = ("__weakref__", "_components")

    def __init__(self, components: Sequence[Tree]) -> None:
        if type(self) is DistributedValues:
            raise TypeError(
                "DistributedValues is only the common type of such values. Make one "
                "with strategy.experimental_distribute_values_from_function(value_fn)."
            )
        self._components = tuple(components)

    @property
    def values(self) -> tuple[T, ...]:
        """The components of the replicas that are present, in replica order."""
        # Components are plain nearly always, and this check is cheaper.
        is_plain = _SPECIAL.isdisjoint(map(type, self._components))
        return (
            self._components
            if is_plain
            else tuple(_make_if_unmade(v) for v in self._components if v is not ABSENT)
        )

    def __repr__(self) -> str:
        return describe_components(type(self).__name__, self._components)

    def __copy__(self) -> Self:
        return self._with(self._components)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(copy.deepcopy(self._components, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            self,
            "it has a component for each replica of a strategy of this process. Save "
            "what they are, strategy.experimental_local_results(value), or make one of "
            "them first: strategy.reduce(...) or strategy.gather(...).",
        )

    def _with(self, components: Sequence[Tree]) -> Self:
        """A value of the same class with other components."""
        return type(self)(components)

    def _in_replica(self, replica: int) -> Tree:
        """The component that a step sees in a replica."""
        return self._components[replica]


def describe_components(kind: str, components: Sequence[Tree]) -> str:
    """The printed form of a value of several replicas.

    It has one line for each replica that is present.
    """
    lines = ",\n".join(
        f"  {r}: {describe_value(value)}"
        for r, value in enumerate(components)
        if value is not ABSENT
    )
    return f"{kind}:{{\n{lines}\n}}"


def describe_value(value: Tree) -> str:
    """The printed form of a value.

    A long one shows its beginning, and a big tensor its shape, dtype and device.
    """
    is_tensor = isinstance(value, torch.Tensor) and not value.is_nested
    text = "" if is_tensor and value.numel() > _MANY else f"{value}"
    if is_tensor and not 0 < len(text) <= _LONG:
        return (
            f"tensor(shape={tuple(value.shape)}, dtype={value.dtype}, "
            f"device={str(value.device)!r})"
        )
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


_MANY = 1000  # elements of a tensor that is not printed in full
_LONG = 200  # characters of a printed value


_SPECIAL = frozenset({type(ABSENT), Unmade})  # what stands in the place of a component


def _make_if_unmade(value: Tree) -> Tree:
    return value.make() if type(value) is Unmade else value


@final
class PerReplica(DistributedValues[T]):
    """Components that may differ from replica to replica.

    Such a value is a batch that was split, or what a step returned.

    Using it as a tensor or a number, as in `loss.item()` or `total + loss`, raises an
    error that says what to write: `Strategy.reduce`, `Strategy.gather` or
    `Strategy.experimental_local_results`. `==`, `hash` and `print` work.

    Args:
        components: One for each replica.
        rows: How many rows of the global batch each replica got; the distributed
            dataset that split the batch sets it. The gradients of the replicas are
            weighted by it, so that they are exact for an uneven batch. None: the value
            was not split from a batch, and every replica has the same weight.
        understudy: A value of a process whose replicas have no rows or take no part,
            while those of other processes do. A replica that runs the step as an
            understudy gets it, and it does not count. None: some component is there.
        is_kept: Whether it is kept in a module. Then it is copied and pickled with the
            module.
        rows_of_all: How many rows each replica of all workers got, if that is known.
        read: What several processes compare of the batch that it was split from. None:
            they compare nothing.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> def step():
        ...     context = torchstrategy.get_replica_context()
        ...     return torch.ones(()) * context.replica_id_in_sync_group
        >>> loss = strategy.run(step)
        >>> isinstance(loss, torchstrategy.PerReplica), loss.values
        (True, (tensor(0.), tensor(1.)))
        >>> strategy.reduce("mean", loss, axis=None).item()
        0.5

    Differs from tf.distribute:
        It is public, and says what to write where a tensor is wanted.

    Source: https://www.tensorflow.org/api_docs/python/tf/types/experimental/distributed/PerReplica
    """

    __slots__ = ("_earlier", "is_kept", "read", "rows", "rows_of_all", "understudy")

    def __init__(
        self,
        components: Sequence[Tree],
        rows: tuple[int, ...] | None = None,
        understudy: Tree = None,
        is_kept: bool = False,
        rows_of_all: tuple[int, ...] | None = None,
        read: Any = None,
    ) -> None:
        super().__init__(components)
        self.rows = rows
        self.rows_of_all = rows_of_all
        self.understudy = understudy
        self.is_kept = is_kept
        self.read = read
        # Where it is kept on an object: by replica, for those that took no part in the
        # last run, what they had before, with which they go on. It is no component, so
        # that nobody takes it for a part of the last batch.
        self._earlier: dict[int, Tree] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_kept:
            return super().__reduce_ex__(protocol)
        return (PerReplica, (self._components, self.rows, self.understudy, True))

    def _with(self, components: Sequence[Tree]) -> Self:
        return PerReplica(
            components,
            self.rows,
            self.understudy,
            self.is_kept,
            self.rows_of_all,
            self.read,
        )

    def _in_replica(self, replica: int) -> Tree:
        own = self._components[replica]
        return self.understudy if own is ABSENT and self.understudy is not None else own

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(_misuse_message(self, f'f"{{value:{spec}}}"'))
        return str(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = next(
            found for found in tree_leaves((args, kwargs)) if isinstance(found, cls)
        )
        raise TypeError(
            _misuse_message(value, f"torch.{getattr(func, '__name__', func)}(value)")
        )


KNOWN_LEAVES.add(PerReplica)


def _misuse_message(value: Any, use: str) -> str:
    """The message for a program that wrote `use` of a per-replica value."""
    return (
        f"{use} does not work: this value is a PerReplica, with a component for each "
        f"of {_replicas_of(value)}, and not one tensor or number.\n"
        "In the step, use it as an argument: strategy.run(step, args=(value,)) gives "
        "each replica its own component.\n"
        "Outside of the step, write\n"
        '  strategy.reduce("mean", value, axis=None)      for the mean over replicas; '
        "over rows: weights=batch\n"
        "  strategy.gather(value, axis=0)                 for the rows of all replicas "
        "in one tensor\n"
        "  strategy.experimental_local_results(value)     for the component of each "
        "replica: the tuple value.values\n"
        "  strategy.count_rows(batch)                     for the number of rows of "
        "all replicas, if this is a batch"
    )


def _replicas_of(value: Any) -> str:
    """How many replicas have a component.

    If the value is a batch, it also says how many rows each of them got.
    """
    count = len(value._components)
    replicas = plural(count, "replica")
    if value.rows_of_all is not None and len(value.rows_of_all) > count:
        replicas = (
            f"this worker's {replicas}, of {len(value.rows_of_all)} in all workers"
        )
    elif count == 1:  # only a worker makes a value of one replica
        replicas = "this worker's replicas, of which there is one"
    return (
        replicas
        if value.rows is None
        else f"{replicas} (rows of the batch: {', '.join(map(str, value.rows))})"
    )


def _no_attribute(self: PerReplica, name: str) -> Any:
    # Python, torch and numpy ask every object for some names with underscores, and
    # expect a short answer.
    raise AttributeError(
        name if name.startswith("_") else _misuse_message(self, f"value.{name}")
    )


def _refuse_use(use: str) -> Callable[..., Any]:
    def refuse(self: PerReplica, *others: Any, **options: Any) -> Any:
        raise TypeError(_misuse_message(self, use))

    return refuse


# Every use as a tensor or number ends in one message. `==` and `hash` stay those of an
# object, since dicts, sets and `in` need them.
_CALLS = ("float", "int", "bool", "complex", "len", "iter", "abs", "round", "divmod")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
}
_SIGNS |= {
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
_USES = {f"__{name}__": f"{name}(value)" for name in _CALLS}
_USES |= {f"__{name}__": f"math.{name}(value)" for name in ("floor", "ceil", "trunc")}
_USES |= {
    f"__{name}__": f"value {sign} ..." for name, sign in (_SIGNS | _COMPARISONS).items()
}
_USES |= {f"__r{name}__": f"... {sign} value" for name, sign in _SIGNS.items()}
_USES |= {
    "__neg__": "-value",
    "__pos__": "+value",
    "__invert__": "~value",
    "__getitem__": "value[...]",
}
_USES |= {
    "__setitem__": "value[...] = ...",
    "__index__": "value as an index",
    "__array__": "value as a numpy array",
}
# They are set here and not written in the class: a type checker shall not take every
# name for an attribute.
for _name, _method in {
    "__getattr__": _no_attribute,
    **{name: _refuse_use(use) for name, use in _USES.items()},
}.items():
    setattr(PerReplica, _name, _method)


@final
class Mirrored(DistributedValues):
    """Components that are known to be equal, such as a value sent to several devices.

    Unlike a per-replica value, it can be used as a tensor: in a replica as that
    replica's component, elsewhere as the component of the first replica.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = map_leaves(_component_here, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_component_here(self), name)


def _forward(name: str, operation: Callable[..., Any]) -> None:
    def forward(self: Mirrored, *others: Any) -> Any:
        return operation(*map(_component_here, (self, *others)))

    setattr(Mirrored, name, forward)


def _component_here(value: Any) -> Any:
    """The component of a mirrored value that the caller uses.

    A replica uses its own component. Elsewhere, the caller uses the first one.
    """
    if not isinstance(value, Mirrored):
        return value
    context = current_replica_context()
    r = 0 if context is None else context.replica_id_in_sync_group
    # A strategy of several processes has the components of its own replicas only.
    own = value._components[r % len(value._components)]
    return value.values[0] if own is ABSENT else own


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _operation = getattr(operator, _name)
    _forward(f"__{_name}__", _operation)
    _forward(f"__r{_name}__", lambda a, b, operation=_operation: operation(b, a))
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "getitem"):
    _forward(f"__{_name}__", getattr(operator, _name))
_forward("__len__", len)
_forward("__float__", float)


def local_results(value: Tree, num_replicas: int) -> tuple[Tree, ...]:
    """The present components of `value`.

    A container becomes one container per replica. Anything else becomes `(value,)`.
    """
    if isinstance(value, DistributedValues):
        return value.values
    leaves, spec = tree_flatten(value)
    if spec.is_leaf():
        return (value,)
    distributed = [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]
    count = len(distributed[0]._components) if distributed else num_replicas
    replicas = [
        r
        for r in range(count)
        if all(d._components[r] is not ABSENT for d in distributed)
    ]

    def own(leaf: Tree, r: int) -> Tree:
        return (
            _make_if_unmade(leaf._components[r])
            if isinstance(leaf, DistributedValues)
            else leaf
        )

    return tuple(spec.unflatten([own(leaf, r) for leaf in leaves]) for r in replicas)


def distributed_within(tree: Tree) -> list[DistributedValues]:
    """The distributed values in a tree, of which most trees have none."""
    return list(filter(_is_distributed, tree_leaves(tree)))


def _is_distributed(value: Tree) -> bool:
    # The type is nearly always one of these. A check by the common class takes a call.
    kind = type(value)
    return kind is PerReplica or (
        kind not in PLAIN_LEAVES and isinstance(value, DistributedValues)
    )


def select(tree: Tree, replica: int) -> Tree:
    """`tree` as replica `replica` sees it.

    In new containers, the replica's component takes the place of every distributed
    value.
    """
    # Lists, tuples and dicts, as most arguments are, are quicker to walk than to
    # flatten.
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind(
            [
                item if type(item) in PLAIN_LEAVES else select(item, replica)
                for item in tree
            ]
        )
    if kind is dict:
        return {key: select(item, replica) for key, item in tree.items()}
    if kind in PLAIN_LEAVES:
        return tree
    if kind is PerReplica or isinstance(tree, DistributedValues):
        own = tree._in_replica(replica)
        return own.make() if type(own) is Unmade else own
    return map_leaves(
        lambda leaf: (
            select(leaf, replica) if isinstance(leaf, DistributedValues) else leaf
        ),
        tree,
    )


def select_for_understudy(tree: Tree) -> Tree:
    """`tree` for a replica that runs the step as an understudy.

    Borrowed rows take the place of a batch.

    A distributed value that lends nothing stays in the tree, and `select` takes its
    component.
    """

    def borrow(leaf: Tree) -> Tree:
        return (
            _make_if_unmade(leaf.understudy)
            if type(leaf) is PerReplica and leaf.understudy is not None
            else leaf
        )

    return map_leaves(borrow, tree)


def check_component_counts(leaves: Sequence[Tree], num_replicas: int) -> None:
    """Raises an error for values that were made for another number of replicas.

    Raises:
        ValueError: If one has more or fewer components than there are replicas.
    """
    for leaf in leaves:
        is_distributed = type(leaf) is PerReplica or isinstance(leaf, DistributedValues)
        if is_distributed and len(leaf._components) != num_replicas:
            raise ValueError(
                f"A value with {plural(len(leaf._components), 'component')} was given "
                f"to a strategy with {plural(num_replicas, 'replica')}: there must be "
                "one for each. Did another strategy make it?"
            )


_NUMBERS = frozenset({int, float, complex})


def regroup(
    by_replica: Sequence[Tree], *, always_wrap: bool = False, are_results: bool = False
) -> Tree:
    """Makes one tree of the trees of all replicas, with a `PerReplica` at every leaf.

    If a leaf is the very same object in every replica, the result has this object
    without a `PerReplica`; so it does with the leaves of a strategy's only replica. Two
    equal tensors are different objects and stay two components. `None` gets no
    `PerReplica` even when only one replica is present.

    Args:
        by_replica: One tree per replica; `ABSENT` for a replica that took no part in
            the step.
        always_wrap: Whether every leaf gets a `PerReplica`.
        are_results: Whether the trees are what replicas computed. Then lists of
            different lengths, such as lists with an item for each row, are one
            component each. So are numbers: Python has only one object for each small
            integer, so that the same object says nothing about where a number comes
            from. The same holds for the texts and the like in a list that has one for
            each row.

    Raises:
        ValueError: If the containers of two replicas differ in type, length or keys.
    """
    present = [r for r, tree in enumerate(by_replica) if tree is not ABSENT]
    columns, spec = columns_of([by_replica[r] for r in present], present, are_results)

    def join(column: list[Tree]) -> Tree:
        """One leaf of those that the present replicas have in the same place."""
        first, is_alone = column[0], len(by_replica) == 1
        must_wrap = always_wrap or (type(column) is RowColumn and not is_alone)
        # That one object is in all replicas says nothing where only one of several is
        # present, nor of a number.
        is_telling = len(column) > 1 and not (are_results and type(first) in _NUMBERS)
        may_be_one = is_alone or is_telling or first is None
        if not must_wrap and may_be_one and all(value is first for value in column):
            return first
        components: list[Tree] = [ABSENT] * len(by_replica)
        for r, value in zip(present, column, strict=True):
            components[r] = value
        return PerReplica(components)

    return spec.unflatten([join(column) for column in columns])


def regroup_in_worker(
    by_replica: Sequence[Tree], *, is_understudy: bool, are_results: bool = False
) -> Tree:
    """`regroup` where other processes have replicas, too.

    There, a value of a single replica is not the value of all replicas.

    Args:
        by_replica: One tree for each replica of this process; `ABSENT` for a replica
            that took no part in the step.
        is_understudy: Whether nothing of it counts. Then every leaf is a `PerReplica`
            that has only an understudy.
        are_results: Whether the trees are what replicas computed. If not, objects that
            cannot be reduced stay what they are.
    """
    count = len(by_replica)
    if count > 1 and not is_understudy:
        return regroup(by_replica, are_results=are_results)

    def wrap(value: Tree) -> Tree:
        return (
            PerReplica([ABSENT] * count, understudy=value)
            if is_understudy
            else PerReplica([value])
        )

    def wrap_if_own(value: Tree) -> Tree:
        if are_results and is_plain_list(value):
            return map_leaves(wrap, value)
        is_shared = isinstance(value, (DistributedValues, type(None)))
        if is_shared or not (
            are_results or isinstance(value, (torch.Tensor, int, float, complex))
        ):
            return value
        return wrap(value)

    def is_leaf(value: Tree) -> bool:
        return is_one_thing(value) or (are_results and is_plain_list(value))

    return map_leaves(
        wrap_if_own, next(tree for tree in by_replica if tree is not ABSENT), is_leaf
    )
