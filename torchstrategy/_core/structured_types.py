"""Objects with known parts, such as dataclasses, which are no containers for torch.

Dataclasses and mutable mappings are such objects; this file calls them records. `_core/tree` does not look into them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torchstrategy._core.errors import an
from torchstrategy._core.tree import leaves_with_names
from torchstrategy._core.types import Tree


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass instance or a mutable mapping: an object that can be copied with other parts."""
    return _has_fields(value) or isinstance(value, MutableMapping)


def parts_of(record: Any) -> dict[str, Tree]:
    """The parts of a record, by the code that reads them from it: `".x"`, `"['x']"`. Unset fields are left out."""
    if _has_fields(record):
        names = [field.name for field in fields(record)]
        return {f".{name}": getattr(record, name) for name in names if hasattr(record, name)}
    return {f"[{key!r}]": part for key, part in record.items()}


def leaves_within(
    tree: Tree, name: str, is_leaf: Callable[[Tree], bool] | None = None, is_record: Callable[[Any], bool] = is_record
) -> Iterator[tuple[str, Tree]]:
    """The leaves of a tree, with the leaves in its records in place of these, and how Python code reads each of them.

    Args:
        tree: Any tree.
        name: How Python code reads the tree itself.
        is_leaf: Which containers not to look into.
        is_record: Which of the leaves are records to look into.
    """
    for path, leaf in leaves_with_names(tree, is_leaf):
        if not is_record(leaf):
            yield f"{name}{path}", leaf
            continue
        for part, held in parts_of(leaf).items():
            yield from leaves_within(held, f"{name}{path}{part}", is_leaf, is_record)


def with_parts(record: Any, change: Callable[[str, Tree], Tree]) -> Any:
    """A copy of a record with `change(name, part)` in place of each part, and without its cached properties.

    Raises:
        TypeError: If a copy of a mapping shares its items with the original, which has to stay as it is.
    """
    return _with_fields(record, change) if _has_fields(record) else _with_items(record, change)


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)  # a dataclass that is also a mapping counts as this


def _with_fields(record: Any, change: Callable[[str, Tree], Tree]) -> Any:
    changed = copy.copy(record)
    put = object.__setattr__ if record.__dataclass_params__.frozen else setattr
    for name, part in parts_of(record).items():
        put(changed, name[1:], change(name, part))
    for name in list(getattr(changed, "__dict__", {})):
        if isinstance(getattr(type(record), name, None), functools.cached_property):
            del changed.__dict__[name]
    return changed


def _with_items(record: MutableMapping[Any, Tree], change: Callable[[str, Tree], Tree]) -> Any:
    changed, before = copy.copy(record), dict(record)
    for (key, part), name in zip(before.items(), parts_of(record), strict=True):
        changed[key] = change(name, part)
        if record[key] is not part and record[key] is changed[key]:
            record.update(before)
            kind = type(record).__name__
            raise TypeError(
                f"copy.copy() of {an(kind)} shares its items with the original, which must stay as it is. Give {kind} "
                f"a method __copy__, or say how its batches are split: torchstrategy.register_batch_type({kind}, "
                "rows=..., take=..., apply=...)."
            )
    return changed
