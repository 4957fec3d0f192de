"""What objects of each kind hold: the values, and what a user calls them.

The walk asks for both, once. Each later run asks for the values only, and compares: so
`values` is as quick as it can be, and gives them in the same order each time.
"""

from __future__ import annotations

import argparse
import dis
import functools
import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrategy._base.distributed_values import PerReplica
from torchstrategy._turns.opaque import is_opaque
from torchstrategy._variables.variable import is_variable


class _Missing:
    """The class of `MISSING`."""

    def __repr__(self) -> str:
        return "nothing"


# What a place holds that holds nothing.
MISSING = _Missing()
# What acts once for all replicas. What it holds is its own, but for settings.
ACTING = (Optimizer, LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)


F = TypeVar("F", bound=Callable[..., Any])


def _remembered(function: F) -> F:
    """`functools.lru_cache`, which has no types for a class as an argument."""
    return functools.lru_cache(maxsize=4096)(function)  # type: ignore[return-value]


class Parts(NamedTuple):
    """How to look into objects of a class."""

    values: Callable[[Any], Sequence[Any]]
    names: Callable[[Any], Iterable[str]]


# Values and names, kind by kind


def _attribute_values(thing: Any) -> Sequence[Any]:
    table = dict_of(thing)
    found = [] if table is None else list(table.values())
    cls = type(thing)
    found += [read_slot(thing, member) for _, member in slots_of(cls)]
    return [*found, cls]


def _attribute_names(thing: Any) -> Iterable[str]:
    names = [*(dict_of(thing) or ()), *(name for name, _ in slots_of(type(thing)))]
    return [*(f".{name}" for name in names), ""]


def _tensor_values(tensor: torch.Tensor) -> Sequence[Any]:
    return () if is_variable(tensor) else list(vars(tensor).values())


def _tensor_names(tensor: torch.Tensor) -> Iterable[str]:
    return () if is_variable(tensor) else [f".{name}" for name in vars(tensor)]


def _nothing(thing: Any) -> Sequence[Any]:
    return ()


def _function_values(fn: types.FunctionType) -> Sequence[Any]:
    cells = fn.__closure__ or ()
    found = [*map(read_cell, cells), *(fn.__defaults__ or ())]
    found += (fn.__kwdefaults__ or {}).values()
    if not is_installed(fn.__module__):
        names = names_in(fn.__code__)
        for name in names.used:
            value = fn.__globals__.get(name, MISSING)
            if type(value) is types.ModuleType:
                found += _program_values(value, names.attributes)
            else:
                found.append(value)
        found += vars(fn).values()
    return [*cells, *found, fn.__code__]


def _function_names(fn: types.FunctionType) -> Iterable[str]:
    cells = fn.__code__.co_freevars
    found = [*cells]
    found += [f"a default argument of {fn.__name__}"] * len(fn.__defaults__ or ())
    found += fn.__kwdefaults__ or {}
    if not is_installed(fn.__module__):
        names = names_in(fn.__code__)
        for name in names.used:
            value = fn.__globals__.get(name, MISSING)
            if type(value) is types.ModuleType:
                shown = [f"{value.__name__}.{inner}" for inner in names.attributes]
                found += [] if is_installed(value.__name__) else shown
            else:
                found.append(name)
        found += [f"{fn.__name__}.{name}" for name in vars(fn)]
    return [*([""] * len(cells)), *found, ""]


def _program_values(module: types.ModuleType, names: Iterable[str]) -> Sequence[Any]:
    """What a function names of a file of the program that was imported."""
    if is_installed(module.__name__):
        return ()
    inside = vars(module)
    return [inside.get(name, MISSING) for name in names]


def _partial_values(call: Any) -> Sequence[Any]:
    return [call.func, *call.args, *call.keywords.values(), *vars(call).values()]


def _partial_names(call: Any) -> Iterable[str]:
    count = len(call.args) + len(call.keywords)
    argument = "an argument of functools.partial"
    return ["", *[argument] * count, *(f".{name}" for name in vars(call))]


def _item_values(items: Any) -> Sequence[Any]:
    if type(items) in OPEN or type(items) is tuple:
        return list(items)
    return [*items, *_attribute_values(items)]


def _item_names(items: Any) -> Iterable[str]:
    own = [f"[{i}]" for i in range(len(items))]
    if type(items) in OPEN or type(items) is tuple:
        return own
    return [*own, *_attribute_names(items)]


def _table_values(table: Any) -> Sequence[Any]:
    # A dict's own method: that of a subclass may do more.
    values = list(dict.values(table))
    return values if type(table) in OPEN else [*values, *_attribute_values(table)]


def _table_names(table: Any) -> Iterable[str]:
    own = [f"[{key!r}]" for key in dict.keys(table)]
    return own if type(table) in OPEN else [*own, *_attribute_names(table)]


def _acting_values(thing: Any) -> Sequence[Any]:
    found: list[Any] = []
    for group in groups_of(thing):
        # A learning rate may be a tensor.
        found += [v for v in group.values() if isinstance(v, torch.Tensor)]
        found += group["params"]
    for value in vars(thing).values():
        if isinstance(value, (*ACTING, nn.Module)):
            found.append(value)
        elif type(value) in (list, tuple):
            found += [one for one in value if isinstance(one, ACTING)]
    return found


def _acting_names(thing: Any) -> Iterable[str]:
    found: list[str] = []
    for i, group in enumerate(groups_of(thing)):
        own = f".param_groups[{i}]"
        found += [
            f"{own}[{name!r}]"
            for name, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        found += [f"{own}['params'][{k}]" for k in range(len(group["params"]))]
    for name, value in vars(thing).items():
        if isinstance(value, (*ACTING, nn.Module)):
            found.append(f".{name}")
        elif type(value) in (list, tuple):
            found += [
                f".{name}[{i}]"
                for i, one in enumerate(value)
                if isinstance(one, ACTING)
            ]
    return found


def _class_values(cls: type) -> Sequence[Any]:
    if not has_attributes_of_program(cls):
        return ()
    return [*cls.__bases__, *vars(cls).values()]


def _class_names(cls: type) -> Iterable[str]:
    if not has_attributes_of_program(cls):
        return ()
    names = [f"{cls.__name__}.{name}" for name in vars(cls)]
    return [*[""] * len(cls.__bases__), *names]


def _property_values(found: Any) -> Sequence[Any]:
    return [found.fget, found.fset, found.fdel]


def _iterator_values(iterator: Any) -> Sequence[Any]:
    found = []
    if type(iterator).__module__ in ("builtins", "itertools"):
        # One that goes through another one, as `enumerate` does.
        found = [i for i in gc.get_referents(iterator) if hasattr(type(i), "__next__")]
    return [*found, *_closed_attribute_values(iterator)]


def _closed_attribute_values(thing: Any) -> Sequence[Any]:
    return () if is_closed(type(thing)) else _attribute_values(thing)


def _no_names(thing: Any) -> Iterable[str]:
    return [""] * len(parts_of(type(thing)).values(thing))


def read_cell(cell: types.CellType) -> Any:
    """What a variable of a closure holds; `MISSING` if it is not assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def read_slot(thing: Any, member: Any) -> Any:
    """What a slot of an object holds; `MISSING` if it is not assigned."""
    try:
        return member.__get__(thing)
    except AttributeError:
        return MISSING


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups that an optimizer has itself, and does not ask another one for."""
    if not isinstance(optimizer, Optimizer):
        return []
    found: list[dict[str, Any]] = vars(optimizer).get("param_groups", [])
    return found


def dict_of(thing: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None if it has none."""
    try:
        table = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return table if type(table) is dict else None


# Containers of Python's own, and what is no container and has nothing to exchange.
OPEN = (list, dict, OrderedDict, defaultdict, deque, set, Counter)
CLOSED = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        _Missing,
        types.ModuleType,
        types.BuiltinFunctionType,
        types.CodeType,
        types.CellType,
        types.WrapperDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
        weakref.ProxyType,
        weakref.CallableProxyType,
    }
)
# Python's own classes whose objects are nothing but attributes.
_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def has_attributes_of_program(cls: type) -> bool:
    """Whether a class is the program's own, which may count in its attributes."""
    return not (is_installed(cls.__module__) or cls.__flags__ & _IMMUTABLE)


@_remembered
def is_plain_container(cls: type) -> bool:
    """Whether a container reads and writes as the class of Python's own that it is."""
    if cls in OPEN:
        return True
    base = next((b for b in cls.__mro__ if b in OPEN), None)
    names = (
        "__getitem__",
        "__setitem__",
        "__iter__",
        "__len__",
        "keys",
        "values",
        "items",
        "update",
        "clear",
        "extend",
    )
    return base is not None and all(
        getattr(cls, name, None) is getattr(base, name, None) for name in names
    )


@_remembered
def is_closed(cls: type) -> bool:
    """Whether objects of a class are looked at by nobody: Python's and torch's own."""
    if issubclass(cls, (*_HOLDERS, nn.Module)):
        return False
    package = (cls.__module__ or "").partition(".")[0]
    return package in sys.stdlib_module_names - {"__main__"} or package in _OURS


_OURS = frozenset({"torch", "numpy", "torchstrategy", "_pytest", "pytest", "pluggy"})


@_remembered
def is_installed(module: str | None) -> bool:
    """Whether a module is Python's own or of an installed package."""
    package = (module or "").partition(".")[0]
    if package == "__main__":
        return False
    if package in sys.stdlib_module_names or package in _OURS:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


# Where torch is installed, other packages are.
_INSTALLED = str(Path(torch.__file__).parents[1])


@_remembered
def slots_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """The slots of a class, each with its descriptor."""
    return tuple(
        (name, member)
        for base in cls.__mro__
        if not is_closed(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


class NamesInCode(NamedTuple):
    """The names in a function and in the functions inside of it."""

    used: tuple[str, ...]
    stored: tuple[str, ...]
    attributes: tuple[str, ...]  # the names of attributes, of whatever object


@_remembered
def names_in(code: types.CodeType) -> NamesInCode:
    """The names that a function uses, and the globals that it assigns or deletes."""
    used: dict[str, None] = {}
    stored: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            used[one.argval] = None
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored[one.argval] = None
        elif one.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD"):
            attributes[one.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for own, of_inner in zip(
                (used, stored, attributes), names_in(inner), strict=True
            ):
                own.update(dict.fromkeys(of_inner))
    return NamesInCode(tuple(used), tuple(stored), tuple(attributes))


@_remembered
def parts_of(cls: type) -> Parts:
    """How to look into objects of a class."""
    if is_opaque(cls):
        return Parts(_nothing, _nothing)
    for kinds, parts in _KINDS:
        if issubclass(cls, kinds):
            return parts
    if issubclass(cls, (dict, list, set, deque)) and is_plain_container(cls):
        if issubclass(cls, dict):
            return Parts(_table_values, _table_names)
        return Parts(_item_values, _item_names)
    if hasattr(cls, "__next__"):
        return Parts(_iterator_values, _no_names)
    if is_closed(cls):
        return Parts(_nothing, _nothing)
    return Parts(_attribute_values, _attribute_names)


_KINDS: Sequence[tuple[Any, Parts]] = (
    (torch.Tensor, Parts(_tensor_values, _tensor_names)),
    (nn.Module, Parts(_attribute_values, _attribute_names)),
    (types.FunctionType, Parts(_function_values, _function_names)),
    (types.MethodType, Parts(lambda m: [m.__self__, m.__func__], _no_names)),
    (functools.partial, Parts(_partial_values, _partial_names)),
    ((tuple, frozenset), Parts(_item_values, _item_names)),
    (ACTING, Parts(_acting_values, _acting_names)),
    (PerReplica, Parts(lambda value: value.values, _no_names)),
    (weakref.ref, Parts(lambda reference: [reference()], _no_names)),
    ((staticmethod, classmethod), Parts(lambda m: [m.__func__], _no_names)),
    (property, Parts(_property_values, _no_names)),
    (functools.cached_property, Parts(lambda found: [found.func], _no_names)),
    (type, Parts(_class_values, _class_names)),
)
