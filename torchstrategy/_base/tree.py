"""Nested containers: taking them apart, and putting them together again.

Containers are lists, tuples, named tuples, dicts, and all types that are registered
with torch's pytree. Anything else is a leaf: a tensor, a string, a set, an object of
the user's own class.

Some leaves are objects with known parts: dataclasses and mutable mappings, which this
file calls records. The trees do not look into them; `leaves_within` and `map_within`
do.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrategy._base import torch_internals
from torchstrategy._base.errors import an
from torchstrategy._base.plain import PLAIN_TYPES, ROW_OBJECTS
from torchstrategy._base.torch_internals import TreeSpec
from torchstrategy._base.types import Tree

# Says which values are leaves, though they may be containers.
IsLeaf = Callable[[Tree], bool]


def is_one_thing(value: Tree) -> bool:
    """Whether a value is a subclass of tuple that the library treats as a leaf."""
    return isinstance(value, (torch.Size, PackedSequence))


def tree_flatten(
    tree: Tree, is_leaf: IsLeaf = is_one_thing
) -> tuple[list[Tree], TreeSpec]:
    """The leaves of `tree`, and its structure.

    `is_leaf` says which containers not to look into.

    torch's own `tree_flatten` creates, at each call, a function that refers to itself:
    the memory of this reference cycle is freed only by the garbage collector.
    """
    leaves: list[Tree] = []
    try:
        return leaves, _flatten(tree, is_leaf, leaves)
    except RecursionError:
        check_depth(tree)
        raise


def tree_leaves(tree: Tree) -> list[Tree]:
    """The leaves of `tree`, whose structure nobody asks for."""
    # Lists, tuples and dicts, as most trees are, are quicker to walk than to flatten.
    kind = type(tree)
    if kind is dict:
        tree = list(tree.values())
    elif kind is not list and kind is not tuple:
        return [tree] if kind in PLAIN_LEAVES else tree_flatten(tree)[0]
    leaves: list[Tree] = []
    try:
        for item in tree:
            if type(item) in KNOWN_LEAVES:
                leaves.append(item)
            else:
                leaves += tree_leaves(item)
    except RecursionError:
        check_depth(tree)
        raise
    return leaves


PLAIN_LEAVES = frozenset({torch.Tensor, *PLAIN_TYPES})
# These, and what else is never looked into: the class of most values of replicas adds
# itself.
KNOWN_LEAVES: set[Any] = set(PLAIN_LEAVES)


@final
class RowColumn(list[Tree]):
    """What replicas have in one place of a list with a plain object for each row.

    The same object in all of them is one for each: there is only one object for a class
    name that all have found.
    """


def is_plain_list(value: Tree) -> bool:
    """Whether a value is a list with a text, a number or the like for each row.

    Each item may also be a container of such values.

    So is a tuple of texts, as a `DataLoader` makes it of texts.
    """
    if type(value) is tuple:
        return bool(value) and all(isinstance(item, (str, bytes)) for item in value)
    return type(value) is list and bool(value) and all(map(_is_plain, value))


def _is_plain(value: Tree) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, ROW_OBJECTS)


def is_container(value: Tree) -> bool:
    """Whether a value is a container, also an empty one."""
    return not torch_internals.tree_is_leaf(value, is_leaf=is_one_thing)


def map_leaves(
    fn: Callable[[Tree], Tree], tree: Tree, is_leaf: IsLeaf = is_one_thing
) -> Tree:
    """`tree` with every leaf replaced by `fn(leaf)`.

    `is_leaf` says which containers not to look into.
    """
    try:
        if is_leaf(tree):
            return fn(tree)
        # Lists, tuples and dicts, as most batches are, are quicker to walk than to
        # flatten.
        kind = type(tree)
        if kind is list or kind is tuple:
            return kind([map_leaves(fn, item, is_leaf) for item in tree])
        if kind is dict:
            return {key: map_leaves(fn, item, is_leaf) for key, item in tree.items()}
        leaves, spec = tree_flatten(tree, is_leaf)
        return spec.unflatten([fn(leaf) for leaf in leaves])
    except RecursionError:
        check_depth(tree)
        raise


def by_name(tree: Tree) -> tuple[list[str], list[Tree], Callable[[list[Tree]], Tree]]:
    """The names and leaves of `tree` in the order of the names.

    With them comes a function that builds the tree from other leaves.
    """
    named = leaves_with_names(tree)
    order = sorted(range(len(named)), key=lambda i: named[i][0])
    spec = tree_flatten(tree)[1]

    def put_back(leaves: list[Tree]) -> Tree:
        placed = dict(zip(order, leaves, strict=True))
        return spec.unflatten([placed[i] for i in range(len(order))])

    return [named[i][0] for i in order], [named[i][1] for i in order], put_back


def leaves_with_names(
    tree: Tree, is_leaf: IsLeaf = is_one_thing
) -> list[tuple[str, Tree]]:
    """Every leaf with its path as in Python code: `"['mask'][0]"`.

    If the tree is one leaf, the path is `""`.

    Args:
        tree: Any tree.
        is_leaf: Which containers not to look into.
    """
    try:
        named = torch_internals.tree_leaves_with_path(tree, is_leaf=is_leaf)
    except RecursionError:
        check_depth(tree)
        raise
    return [("".join(str(key) for key in path), leaf) for path, leaf in named]


def _flatten(tree: Tree, is_leaf: IsLeaf, leaves: list[Tree]) -> TreeSpec:
    kind = torch_internals.kind_of_node(tree)
    if kind not in torch_internals.kinds_of_nodes or is_leaf(tree):
        leaves.append(tree)
        return LEAF
    children, context = torch_internals.kinds_of_nodes[kind].flatten_fn(tree)
    return TreeSpec(
        kind, context, [_flatten(child, is_leaf, leaves) for child in children]
    )


LEAF = torch_internals.tree_flatten(None)[1]  # the structure of a tree that is one leaf


class Unlike(ValueError):
    """Trees differ in structure.

    The arguments are the index of a tree that differs from the first one, and where and
    how it differs.

    Such as `(2, "['a']: a list of 2 and a list of 3")`.
    """


def zip_leaves(
    trees: Sequence[Tree], is_leaf: IsLeaf = is_one_thing, are_results: bool = False
) -> tuple[list[list[Tree]], TreeSpec]:
    """The leaves of several trees of one structure, side by side, and that structure.

    Dicts with the same keys in another order have the same structure. `is_leaf` says
    which containers not to look into. If `are_results`, lists that differ in length are
    leaves, and the columns within plain lists are `RowColumn`s.

    Raises:
        Unlike: If the trees differ in structure.
    """
    columns: list[list[Tree]] = []
    try:
        return columns, _zip((), trees, is_leaf, are_results, columns)
    except RecursionError:
        for tree in trees:
            check_depth(tree)
        raise


def _zip(
    path: tuple[object, ...],
    trees: Sequence[Tree],
    is_leaf: IsLeaf,
    are_results: bool,
    columns: list[list[Tree]],
    in_rows: bool = False,
) -> TreeSpec:
    kinds = set(map(type, trees))
    are_uneven = False
    if are_results and (kinds == {list} or kinds == {tuple}):
        in_rows = in_rows or all(is_plain_list(tree) for tree in trees if tree)
        are_uneven = len(set(map(len, trees))) > 1 and (in_rows or kinds == {list})
    nodes = (
        []
        if are_uneven or PLAIN_LEAVES.issuperset(kinds)
        else [_open_container(tree, is_leaf) for tree in trees]
    )
    if not any(kind for kind, _ in nodes):
        columns.append(RowColumn(trees) if in_rows else list(trees))
        return LEAF
    kind, parts = nodes[0]
    for index, (other, others) in enumerate(nodes):
        if other != kind or others.keys() != parts.keys():
            if in_rows:  # rows need not be alike
                columns.append(RowColumn(trees))
                return LEAF
            where = "".join(f"[{key!r}]" for key in path) or "the result"
            raise Unlike(index, f"{where}: {_difference(trees[0], trees[index])}")
    inner = [
        _zip(
            (*path, key),
            [own[key] for _, own in nodes],
            is_leaf,
            are_results,
            columns,
            in_rows,
        )
        for key in parts
    ]
    node = torch_internals.kind_of_node(trees[0])
    return TreeSpec(
        node, torch_internals.kinds_of_nodes[node].flatten_fn(trees[0])[1], inner
    )


def _open_container(tree: Tree, is_leaf: IsLeaf) -> tuple[object, Mapping[Any, Tree]]:
    """What containers of one structure have alike, and their parts by index or key.

    For a leaf, it is None.
    """
    kind = torch_internals.kind_of_node(tree)
    if kind not in torch_internals.kinds_of_nodes or is_leaf(tree):
        return None, {}
    if kind in (dict, OrderedDict, defaultdict):
        return dict, tree
    children, context = torch_internals.kinds_of_nodes[kind].flatten_fn(tree)
    # What torch has of a deque besides is its `maxlen`, which may depend on the rows.
    return (kind, None if kind is deque else context), dict(enumerate(children))


def _difference(first: Tree, other: Tree) -> str:
    if isinstance(first, dict) and isinstance(other, dict):
        return f"keys {sorted(map(str, first))} and keys {sorted(map(str, other))}"
    return f"{_describe(first)} and {_describe(other)}"


def columns_of(
    trees: Sequence[Tree],
    replicas: Sequence[int],
    are_results: bool,
    what: str = "values",
) -> tuple[list[list[Tree]], TreeSpec]:
    """The leaves of some replicas' trees side by side, and their common structure.

    If `are_results`, lists that differ in length are leaves.

    Raises:
        ValueError: If the trees differ in structure.
    """
    if PLAIN_LEAVES.issuperset(map(type, trees)):
        return [list(trees)], LEAF
    try:
        return zip_leaves(trees, are_results=are_results)
    except Unlike as unlike:
        other, how = unlike.args
        raise ValueError(
            f"Replicas {replicas[0]} and {replicas[other]} returned {what} of "
            f"different structure, which cannot be put together: {how}. Return the "
            "same containers from every replica."
        ) from None


def _describe(value: Tree) -> str:
    kind = an(type(value).__name__)
    return f"{kind} of {len(value)}" if isinstance(value, (list, tuple, dict)) else kind


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass instance or a mutable mapping.

    Such an object can be copied with other parts.
    """
    return _has_fields(value) or isinstance(value, MutableMapping)


def parts_of(record: Any) -> dict[str, Tree]:
    """The parts of a record, by the code that reads them from it: `".x"`, `"['x']"`.

    Unset fields are left out.
    """
    if _has_fields(record):
        return {
            f".{f.name}": getattr(record, f.name)
            for f in fields(record)
            if hasattr(record, f.name)
        }
    return {f"[{key!r}]": part for key, part in record.items()}


def leaves_within(
    tree: Tree,
    name: str,
    is_leaf: IsLeaf = is_one_thing,
    is_record: Callable[[Any], bool] = is_record,
) -> Iterator[tuple[str, Tree]]:
    """The leaves of a tree, with those in its records, and the code that reads each.

    The leaves of a record take the record's place.

    Args:
        tree: Any tree.
        name: How Python code reads the tree itself.
        is_leaf: Which containers not to look into.
        is_record: Which of the leaves are records to look into.
    """
    try:
        for path, leaf in leaves_with_names(tree, is_leaf):
            if not is_record(leaf):
                yield f"{name}{path}", leaf
                continue
            for part, held in parts_of(leaf).items():
                yield from leaves_within(
                    held, f"{name}{path}{part}", is_leaf, is_record
                )
    except RecursionError:
        check_depth(tree)
        raise


def map_within(
    fn: Callable[[Tree], Tree],
    tree: Tree,
    is_leaf: IsLeaf = is_one_thing,
    is_record: Callable[[Any], bool] = is_record,
) -> Tree:
    """`tree` with `fn(leaf)` in place of each leaf, also in its records.

    A record of which no part changes stays the same object.

    The arguments are as for `leaves_within`.
    """

    def change(leaf: Tree) -> Tree:
        if not is_record(leaf):
            return fn(leaf)
        parts = parts_of(leaf)
        changed = {
            name: map_within(fn, part, is_leaf, is_record)
            for name, part in parts.items()
        }
        is_same = all(changed[name] is part for name, part in parts.items())
        return leaf if is_same else with_parts(leaf, lambda name, _: changed[name])

    return map_leaves(change, tree, is_leaf)


def with_parts(record: Any, change: Callable[[str, Tree], Tree]) -> Any:
    """A copy of a record with `change(name, part)` in place of each part.

    The copy does not have the record's cached properties.

    Raises:
        TypeError: If a copy of a mapping shares its items with the original, which has
            to stay as it is.
    """
    if not _has_fields(record):
        return _copy_with_items(record, change)
    changed = copy.copy(record)
    put = object.__setattr__ if record.__dataclass_params__.frozen else setattr
    for name, part in parts_of(record).items():
        put(changed, name[1:], change(name, part))
    for name in list(getattr(changed, "__dict__", {})):
        if isinstance(getattr(type(record), name, None), functools.cached_property):
            del changed.__dict__[name]
    return changed


# Python walks through several times as many, with some calls for each.
MOST_LEVELS = 100


def check_depth(tree: Tree) -> None:
    """Says that a value has no end, or too many levels.

    A walk through the value came to Python's limit of nested calls.

    A walk of its own: it needs no further calls for further levels.

    Raises:
        ValueError: If a container holds itself, or is nested in more than `MOST_LEVELS`
            levels.
    """
    # The containers on the way down, each with its parts to come.
    levels = [(tree, iter(_list_parts(tree).items()))]
    path: list[str] = []
    while levels:
        name, part = next(levels[-1][1], (None, None))
        if name is None:
            levels.pop()
            path = path[: max(0, len(levels) - 1)]
            continue
        held = _list_parts(part)
        path = [*path[: len(levels) - 1], name]
        above = [
            depth
            for depth, (container, _) in enumerate(levels)
            if held and container is part
        ]
        if above:
            kind = type(part).__name__
            raise ValueError(
                f"This {kind} holds itself: value{''.join(path)} is "
                f"value{''.join(path[: above[0]])} again, so it has no last level. "
                "Make a container without this item, or an object of a plain class of "
                "your own, which is not looked into."
            ) from None
        if len(levels) > MOST_LEVELS:
            raise ValueError(
                f"Containers are nested in more than {MOST_LEVELS} levels, at "
                f"value{''.join(path[:3])}...: that is more than Python can walk "
                "through. Make a flat list of what they hold, or an object of a plain "
                "class of your own, which is not looked into."
            ) from None
        levels.append((part, iter(held.items())))


def _list_parts(value: Tree) -> dict[str, Tree]:
    """The parts of a container or record, by the code that reads them; else none."""
    if is_record(value):
        return parts_of(value)
    kind, parts = _open_container(value, is_one_thing)
    return {f"[{key!r}]": part for key, part in parts.items()} if kind else {}


def _has_fields(value: Any) -> bool:
    # A dataclass that is also a mapping counts as a dataclass.
    return is_dataclass(value) and not isinstance(value, type)


def _copy_record(record: MutableMapping[Any, Tree]) -> Any:
    try:
        return copy.copy(record)
    except KeyError:
        # Python 3.10 looks for `__getstate__`, which every object has in newer ones. A
        # dict whose items are attributes takes it for the key of an item.
        if sys.version_info >= (3, 11) or not isinstance(record, dict):
            raise
        changed = record.__class__.__new__(record.__class__)
        vars(changed).update(vars(record))
        dict.update(changed, record)
        return changed


def _copy_with_items(
    record: MutableMapping[Any, Tree], change: Callable[[str, Tree], Tree]
) -> Any:
    changed, before = _copy_record(record), dict(record)
    for (key, part), name in zip(before.items(), parts_of(record), strict=True):
        changed[key] = change(name, part)
        if record[key] is not part and record[key] is changed[key]:
            record.update(before)
            kind = type(record).__name__
            raise TypeError(
                f"copy.copy() of {an(kind)} shares its items with the original, which "
                f"must stay as it is. Give {kind} a method __copy__, or say how its "
                f"batches are split: torchstrategy.register_batch_type({kind}, "
                "rows=..., take=..., apply=...)."
            )
    return changed
