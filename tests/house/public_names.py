"""Lists the public names of the package with their signatures, a line for each.

python tests/house/public_names.py

writes public_names.txt beside this file. A change of a public name is a change of that
file, which nobody overlooks.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

NAMESPACES = (
    "torchstrategy",
    "torchstrategy.cluster_resolver",
    "torchstrategy.compat.v1",
    "torchstrategy.compat.v1.experimental",
    "torchstrategy.experimental",
    "torchstrategy.nn",
    "torchstrategy.testing",
)
LIST = Path(__file__).with_name("public_names.txt")


def public_things() -> Iterator[tuple[str, str, Any]]:
    """Each public name with its namespace and what it stands for, without modules."""
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        for name in module.__all__:
            thing = getattr(module, name)
            if not isinstance(thing, ModuleType):
                yield namespace, name, thing


def lines() -> Iterator[str]:
    """The names of all namespaces."""
    for namespace, name, thing in public_things():
        yield from _lines_of(f"{namespace}.{name}", thing)


def _lines_of(name: str, thing: Any) -> Iterator[str]:
    yield f"{name}{_signature(thing)}"
    if not inspect.isclass(thing):
        return
    for member in sorted(member for member in dir(thing) if not member.startswith("_")):
        home = next(cls for cls in thing.__mro__ if member in vars(cls))
        # Not what torch or Python give it.
        if home.__module__.startswith("torchstrategy"):
            value = inspect.getattr_static(thing, member)
            kinds = (classmethod, staticmethod)
            is_method = inspect.isfunction(value) or isinstance(value, kinds)
            signature = _signature(getattr(thing, member)) if is_method else ""
            yield f"{name}.{member}{signature}"


def _signature(thing: Any) -> str:
    """The parameters with their kinds and defaults.

    What they are annotated with is for the type checker to compare.
    """
    if not callable(thing):
        return ""
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        return ""  # nobody makes new members, and each Python says it in another way
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return "(...)"
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(
        signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    )


if __name__ == "__main__":
    LIST.write_text("\n".join(lines()) + "\n")
