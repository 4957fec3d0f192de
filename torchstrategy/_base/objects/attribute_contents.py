"""What plain attributes hold, at any depth.

They hold containers, objects and tensors, which have attributes themselves.

Each replica has copies of all containers, objects and tensors that a step may change in
place. A program may set attributes on tensors, too, as in `weight.is_expert = True`.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import nn

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._base.plain import PLAIN, PLAIN_TYPES

SEQUENCES = (list, deque, set)
# The containers of Python's own that a step may change in place. `type(value) in` them:
# a subclass may hold more.
OPEN_CONTAINERS = (
    *SEQUENCES,
    dict,
    OrderedDict,
    defaultdict,
    Counter,
    types.SimpleNamespace,
)
# The attributes of functions are not looked at, since replicas share functions. Modules
# are not looked at either, since other files compare them.
_CLOSED = (
    *PLAIN,
    torch.Tensor,
    nn.Module,
    np.ndarray,
    torch.Generator,
    types.ModuleType,
    type,
)
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class CopiedThing(NamedTuple):
    """An attribute, or what it holds, with the copies of the replicas.

    What an attribute holds is a container, an object or a tensor.
    """

    path: str
    original: Any
    local: Sequence[Any]  # by replica


def find_copied_things(
    named: Iterable[CopiedThing],
) -> tuple[dict[int, CopiedThing], dict[int, CopiedThing], list[CopiedThing]]:
    """All that attributes hold and that may be changed in place.

    The keys of the result are the ids of the user's objects.

    Returns:
        The containers and objects; the leaves, which are tensors, and arrays as tensors
        that share their memory; and the arrays and `PerReplica`s themselves.
    """
    places: dict[int, CopiedThing] = {}
    leaves: dict[int, CopiedThing] = {}
    others: list[CopiedThing] = []
    walks = (
        _walk(attribute.path, attribute.original, attribute.local, set())
        for attribute in named
    )
    for place in chain.from_iterable(walks):
        where, value, copies = place
        if isinstance(value, torch.Tensor):
            are_tensors = all(type(copied) is torch.Tensor for copied in copies)
            if are_tensors and not any(copied is value for copied in copies):
                leaves[id(value)] = place
        elif isinstance(value, (np.ndarray, PerReplica)):
            others.append(place)
            # No array, or one of a dtype that torch does not have.
            with suppress(TypeError, ValueError):
                leaves[id(value)] = CopiedThing(
                    where, _share_memory(value), list(map(_share_memory, copies))
                )
        elif not isinstance(value, nn.Module):
            places[id(value)] = place
    return places, leaves, others


def _share_memory(array: Any) -> torch.Tensor:
    """A tensor that shares the memory of an array."""
    with catch_warnings():
        # torch warns of a read-only array, on which the library does not write.
        simplefilter("ignore")
        return torch.from_numpy(array)


def things_in(
    path: str, value: Any, has_data: bool = False
) -> Iterator[tuple[str, Any]]:
    """The tensors, containers and other objects in a value, each with its path.

    The other objects include arrays, modules and `PerReplica`s.

    What is in a container of many entries is left out if all of it is data, unless
    `has_data`.
    """
    walked = (
        () if type(value) in PLAIN_TYPES else _walk(path, value, (), set(), has_data)
    )
    return ((where, held) for where, held, _ in walked)


def _walk(
    path: str, value: Any, local: Sequence[Any], seen: set[int], has_data: bool = True
) -> Iterator[CopiedThing]:
    if isinstance(value, (torch.Tensor, np.ndarray, nn.Module, PerReplica)):
        yield CopiedThing(path, value, local)
    has_attributes = isinstance(value, torch.Tensor) and bool(vars(value))
    if id(value) in seen or any(copied is value for copied in local):
        return
    if isinstance(value, (*_CLOSED, *_CALLED)) and not has_attributes:
        return
    if (
        type(value).__module__.partition(".")[0] == "torchstrategy"
        and not has_attributes
    ):
        return  # an object of this library, such as a strategy or a dataset
    seen.add(id(value))
    if not isinstance(value, (tuple, frozenset, torch.Tensor)):
        yield CopiedThing(path, value, local)
    if isinstance(value, (list, tuple, deque)) and set(map(type, value)) <= PLAIN_TYPES:
        return  # there may be many
    may_be_data = not has_data and isinstance(value, (list, tuple, dict))
    if may_be_data and len(value) > _MANY and data_in(value) is not None:
        return
    items, of_copies = named_items(value), list(map(named_items, local))
    for place, item in items.items():
        if type(item) not in PLAIN_TYPES and all(
            place in of_copy for of_copy in of_copies
        ):
            shown, key = place
            yield from _walk(
                path + shown.format(key),
                item,
                [of_copy[place] for of_copy in of_copies],
                seen,
                has_data,
            )


_MANY = 256  # entries of a container: it takes long to walk through so many one by one
_DEPTH = 20  # how deep data may be nested
_MOST = 10_000_000  # entries of what is equally deep


class Data(NamedTuple):
    """What is in a value that is nothing but data.

    Data is numbers, strings and the like, in containers and plain objects.
    """

    entries: int  # how many all containers have
    holders: list[Any]  # the containers and objects that may be changed in place


def data_in(value: Any) -> Data | None:
    """What is in a value that is nothing but data; None if it holds anything else.

    There may be many entries. So there is no Python call for each of them: all that is
    equally deep is looked at in one.
    """
    count, level = 0, [value]
    holders: list[Any] = []
    for _ in range(_DEPTH):
        kinds = [kind for kind in set(map(type, level)) if not issubclass(kind, PLAIN)]
        if not kinds:
            return Data(count, holders)
        held: list[Any] = []
        for kind in kinds:
            alike = [one for one in level if type(one) is kind]
            inside = _entries(kind, alike)
            if inside is None:
                return None
            held += inside
            if not issubclass(kind, (tuple, frozenset)):
                holders += alike
        count, level = count + len(held), held
    return None


def _entries(kind: Any, alike: Sequence[Any]) -> Iterable[Any] | None:
    """What some containers or objects of one class hold, one after the other.

    It is None if they may hold more than that.
    """
    is_sized = issubclass(kind, (tuple, dict)) or kind in (list, set, frozenset, deque)
    if is_sized and sum(map(len, alike)) > _MOST:
        return None  # a list that holds itself often
    if issubclass(kind, tuple):
        return (
            None
            if kind.__dictoffset__
            else chain.from_iterable(map(tuple.__iter__, alike))
        )
    if kind in (list, set, frozenset, deque):
        return chain.from_iterable(alike)
    if kind in (dict, defaultdict, OrderedDict, Counter):
        keys = set(map(type, chain.from_iterable(map(dict.keys, alike))))
        has_more = kind.__dictoffset__ and any(map(vars, alike))
        are_data = all(issubclass(key, (*PLAIN, tuple, frozenset)) for key in keys)
        return (
            chain.from_iterable(map(dict.values, alike))
            if are_data and not has_more
            else None
        )
    if not is_plain_holder(alike[0]):
        return None
    return chain.from_iterable(named_items(one).values() for one in alike)


# How a path shows an item of a container, or an attribute.
ITEM, ATTRIBUTE = "[{!r}]", ".{}"
CONTENTS = ""  # how a path shows what a variable holds: by the name of the variable


def named_items(value: Any) -> dict[tuple[str, Any], Any]:
    """What a value holds, by how a path shows it and by its position, key or name."""
    named: dict[tuple[str, Any], Any] = {}
    if isinstance(value, (list, tuple, deque)):
        named.update(((ITEM, i), item) for i, item in enumerate(value))
    elif isinstance(value, set):
        named.update(((ITEM, item), item) for item in value)
    elif isinstance(value, dict):
        named.update(
            ((ITEM, key), item) for key, item in table_type(value).items(value)
        )
    elif isinstance(value, functools.partial):
        named.update(
            ((ITEM, key), item)
            for key, item in chain(enumerate(value.args), value.keywords.items())
        )
    elif isinstance(value, types.CellType):
        with suppress(ValueError):  # the variable is not assigned
            named[CONTENTS, None] = value.cell_contents
    named.update(((ATTRIBUTE, key), item) for key, item in attributes(value).items())
    return named


def attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object, in its `__dict__` and in slots.

    Finding them calls no method of the object.
    """
    try:
        found: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        found = {}
    # What a tensor has in slots is its library's.
    if not hasattr(type(thing), "__slots__") or isinstance(thing, torch.Tensor):
        return found
    found = dict(found)
    for base in type(thing).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # not assigned
                    found[name] = member.__get__(thing)
    return found


def cells_in_closure(fn: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """The variables of functions around it that a function uses, with their names."""
    return zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)


def variables_in_closure(fn: types.FunctionType) -> list[tuple[str, Any]]:
    """The values of these variables, with their names.

    Variables that are not assigned yet are left out.
    """
    found = []
    for name, cell in cells_in_closure(fn):
        with suppress(ValueError):
            found.append((name, cell.cell_contents))
    return found


def globals_of(fn: types.FunctionType) -> list[str]:
    """The global names that a function may use."""
    return [name for name in globals_in(fn.__code__) if name in fn.__globals__]


_OF_GLOBALS = frozenset(
    {
        "LOAD_GLOBAL",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "LOAD_NAME",
        "STORE_NAME",
        "DELETE_NAME",
    }
)


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals in a function and in functions inside it, each once.

    An attribute may have the name of a global that is something else:
    `optimizer.step()` is no use of a global `step`.
    """
    inner = [
        globals_in(constant)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    ]
    own = [
        one.argval for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS
    ]
    return tuple(dict.fromkeys([*own, *chain.from_iterable(inner)]))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function, each once.

    The names in functions and comprehensions inside it count, too.
    """
    inner = [
        names_in(constant)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    ]
    return tuple(dict.fromkeys([*code.co_names, *chain.from_iterable(inner)]))


def is_plain_holder(value: Any) -> bool:
    """Whether a value is known to be no more than what it holds.

    Such a value is a plain container, or an object with attributes.

    Such an object has no lock, file or random generator, and nothing that is called.
    """
    cls: Any = type(value)
    if isinstance(value, (tuple, frozenset)) or cls in OPEN_CONTAINERS:
        return True
    is_usual = (cls.__reduce__, cls.__reduce_ex__) == (
        object.__reduce__,
        object.__reduce_ex__,
    )
    is_closed = isinstance(value, (*_CLOSED, *_CALLED)) or cls.__module__.split(".")[
        0
    ] in ("torch", "torchstrategy")
    if is_closed or not is_usual or hasattr(cls, "__deepcopy__"):
        return False
    with suppress(TypeError):  # a part of it is known to C code only
        return value.__reduce_ex__(4)[0] is vars(copyreg)["__newobj__"]
    return False


def table_type(table: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class whose methods work on a dict without calling methods of the user's."""
    # An `OrderedDict` has a list of its keys besides, which `dict.update(table, ...)`
    # leaves as it is.
    return OrderedDict if isinstance(table, OrderedDict) else dict


def drop(value: Any, item: object) -> None:
    """Removes an item from all containers in a value that can be written."""
    for _, container in list(things_in("", value)):
        is_open = isinstance(container, torch.Tensor) or not isinstance(
            container, (*_CLOSED, PerReplica)
        )
        named = named_items(container) if is_open else {}
        if any(held is item for held in named.values()):
            write_items(
                container,
                {place: held for place, held in named.items() if held is not item},
            )


def write_items(container: Any, named: Mapping[tuple[str, Any], Any]) -> None:
    """Gives a container, which stays the same object, another one's `named_items`."""
    if isinstance(container, types.CellType):
        del container.cell_contents
        for value in named.values():
            container.cell_contents = value
        return
    items, inside = (
        {key: v for (how, key), v in named.items() if how == shown}
        for shown in (ITEM, ATTRIBUTE)
    )
    if isinstance(container, SEQUENCES):
        container.clear()
        getattr(container, "update" if isinstance(container, set) else "extend")(
            items.values()
        )
    elif isinstance(container, dict):
        table = table_type(container)
        table.clear(container)
        for key, value in items.items():
            table.__setitem__(container, key, value)
    for name in attributes(container).keys() - inside.keys():
        object.__delattr__(container, name)
    for name, value in inside.items():
        object.__setattr__(container, name, value)
