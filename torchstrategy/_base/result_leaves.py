"""The leaves of what steps return, each with its path for messages.

The leaves in dataclasses and mappings are included.
"""

from __future__ import annotations

from collections.abc import Callable

from torchstrategy._base.distributed_values import ABSENT, PerReplica, regroup_in_worker
from torchstrategy._base.tree import (
    IsLeaf,
    check_depth,
    is_container,
    is_one_thing,
    is_record,
    leaves_with_names,
    parts_of,
    tree_flatten,
    with_parts,
)
from torchstrategy._base.types import Tree


def map_results(
    fn: Callable[[Tree], Tree],
    value: Tree,
    path: str = "",
    is_leaf: IsLeaf = is_one_thing,
) -> Tree:
    """What `run` returned, with `fn(leaf)` in place of each leaf.

    An error of `fn` names one leaf of several.

    Args:
        fn: The function.
        value: What `run` returned.
        path: How Python code reads it, for a message.
        is_leaf: Which containers not to look into.

    Raises:
        ValueError: If the records of two replicas have different parts, or hold
            themselves.
    """
    return _visit(lambda leaf, _: fn(leaf), value, path, is_leaf)


def paths_of_results(value: Tree, is_leaf: IsLeaf = is_one_thing) -> list[str]:
    """How Python code reads each leaf of what `run` returned.

    The paths are in the order in which `map_results` comes to the leaves.

    Raises:
        ValueError: As `map_results` does.
    """
    paths: list[str] = []

    def note(leaf: Tree, path: str) -> Tree:
        paths.append(path)
        return leaf

    _visit(note, value, "", is_leaf)
    return paths


_Visit = Callable[[Tree, str], Tree]


def _visit(visit: _Visit, value: Tree, path: str, is_leaf: IsLeaf) -> Tree:
    try:
        return _map_results(visit, value, path, is_leaf)
    except RecursionError:
        for component in value._components if type(value) is PerReplica else [value]:
            check_depth(component)
        raise


# Processes may have the items of a dict in another order each, and each leaf is an
# exchange with the others. So leaves are visited in the order of their paths.
def _map_results(visit: _Visit, value: Tree, path: str, is_leaf: IsLeaf) -> Tree:
    if type(value) is PerReplica:
        components, spare = value._components, value.understudy
        there = [component for component in components if component is not ABSENT] or [
            spare
        ]
        if is_record(there[0]):
            names = parts_of(there[0]).keys()
            if not all(
                is_record(one) and parts_of(one).keys() == names for one in there
            ):
                raise ValueError(
                    f"value{path}: the {type(there[0]).__name__} of each replica has "
                    "other parts."
                )

            def part(name: str) -> Tree:
                of_each = [
                    ABSENT if one is ABSENT else parts_of(one)[name]
                    for one in components
                ]
                if is_understudy := there[0] is spare and not value.values:
                    of_each[0] = parts_of(spare)[name]
                found = regroup_in_worker(
                    of_each, is_understudy=is_understudy, are_results=True
                )
                return _map_results(visit, found, path + name, is_leaf)

            made = {name: part(name) for name in sorted(parts_of(there[0]))}
            return with_parts(there[0], lambda name, _: made[name])
    elif is_container(value) and not is_leaf(value):
        named = leaves_with_names(value, is_leaf)
        found: list[Tree] = [None] * len(named)
        for index in sorted(range(len(named)), key=lambda index: named[index][0]):
            name, leaf = named[index]
            found[index] = _map_results(visit, leaf, path + name, is_leaf)
        return tree_flatten(value, is_leaf)[1].unflatten(found)
    try:
        return visit(value, path)
    except (TypeError, ValueError) as error:
        if not path:
            raise
        located = type(error)(f"value{path}: {error}")
        # These attributes note whether other processes know of the error.
        vars(located).update(vars(error))
        raise located from None
