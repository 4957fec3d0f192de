"""Public names have docstrings with examples, and these do what they say."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchstrategy
from conditions import for_changes
from house.public_names import public_things
from house.rooms import files, listed, nodes_of, short_name

EXAMPLE = re.compile(r"^Example:\n    >>> ", re.MULTILINE)
SOURCE = re.compile(
    r"^Source: https://(www\.tensorflow|docs\.pytorch)\.org/", re.MULTILINE
)


def test_every_public_name_has_an_example_and_a_source() -> None:
    lacking = []
    for namespace, name, thing in public_things():
        text = inspect.cleandoc(thing.__doc__ or "")
        if not EXAMPLE.search(text):
            lacking.append(f"{namespace}.{name} has no `Example:` with `>>>` below")
        if namespace != "torchstrategy.testing" and not SOURCE.search(text):
            lacking.append(
                f"{namespace}.{name} has no source: `Source: https://`, then the page "
                "of TensorFlow or PyTorch that describes it"
            )
    assert not lacking, f"write this into the docstrings:{listed(lacking)}"


def test_every_public_method_has_a_docstring() -> None:
    lacking = [
        f"{namespace}.{name}.{method}"
        for namespace, name, thing in public_things()
        if inspect.isclass(thing)
        for method in public_methods(thing)
        if not (inspect.getdoc(getattr(thing, method)) or "").strip()
    ]
    assert not lacking, f"these methods need a docstring:{listed(lacking)}"


def public_methods(cls: type) -> Iterator[str]:
    """The public methods and properties that a class has from the package."""
    kinds = (property, classmethod, staticmethod, type(lambda: 0))
    for owner in cls.__mro__:
        if owner.__module__.startswith("torchstrategy"):
            for name, value in vars(owner).items():
                if not name.startswith("_") and isinstance(value, kinds):
                    yield name


@for_changes
def test_every_example_does_what_it_says() -> None:
    failed = [
        report
        for path in files()
        for test in examples_in(path)
        if (report := report_of_failure(test))
    ]
    assert not failed, f"these examples print something else:{listed(failed)}"


def examples_in(path: Path) -> Iterator[doctest.DocTest]:
    """The examples in each docstring of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in nodes_of(path):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            name = f"{short_name(path)}: {getattr(node, 'name', 'the docstring')}"
            line = getattr(node, "lineno", 0)
            yield doctest.DocTestParser().get_doctest(
                docstring, names_of_users(), name, str(path), line
            )


def names_of_users() -> dict[str, Any]:
    """What an example may use without an import."""
    names = {name: getattr(torchstrategy, name) for name in torchstrategy.__all__}
    return {**names, "torch": torch, "torchstrategy": torchstrategy}


def report_of_failure(test: doctest.DocTest) -> str:
    """What doctest says of an example that fails; nothing of one that passes."""
    if not test.examples:
        return ""
    torch.default_generator.manual_seed(0)  # each example draws the same numbers alone
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return f"{test.name}\n{''.join(said)}" if result.failed else ""
