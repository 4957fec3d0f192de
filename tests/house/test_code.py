"""What no file of the package does, and what no test does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conditions import for_changes
from house.rooms import ROOT, core_files, files, listed, nodes_in, nodes_of, short_name

READS_BY_RUNNING = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
}
LOADS_BY_RUNNING = {"marshal.loads", "marshal.load", "torch.load"}


def unpickling_lines(nodes: list[ast.AST]) -> Iterator[str]:
    """The lines that read bytes which may hold code."""
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = {alias.name.partition(".")[0] for alias in node.names}
            if modules & READS_BY_RUNNING:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            if module in {*READS_BY_RUNNING, "marshal"}:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            sends_objects = node.value.id == "dist" and "object" in node.attr
            if name in LOADS_BY_RUNNING or sends_objects:
                yield f"line {node.lineno}: {name}"


@for_changes
def test_nothing_unpickles() -> None:
    """Workers once unpickled messages: who reached their port could run anything."""
    assert list(unpickling_lines(nodes_in("import pickle.x"))), "finds nothing"
    found = [
        f"{short_name(path)}, {line}"
        for path in core_files()
        for line in unpickling_lines(nodes_of(path))
    ]
    assert not found, (
        "this can run code that somebody else sent. Send values as "
        f"`_group/processes/wire.py` does:{listed(found)}"
    )


# The files whose purpose is to use private names of torch.
OF_PRIVATE_NAMES = {
    "_base/torch_internals.py",
    "testing/_lints/torch_internals.py",
    "testing/_ranks/torch_internals.py",
    "testing/_ranks/torch_settings.py",
    "testing/_simulation/torch_internals.py",
}
# Each line uses one private name of torch.
LINES_WITH_A_PRIVATE_NAME = [
    "import torch._C",
    "import torch.utils._pytree as tree",
    "from torch.utils._pytree import tree_map",
    "from torch.overrides import _push_mode",
    "import torch\ntorch._foreach_add_",
    "import torch\ntorch.Tensor._make_subclass",
    "from torch import nn\nnn.modules._x",
    "from torch.optim import Optimizer as O\nO._step",
]


def is_private(path: str) -> bool:
    """Whether a dotted name has a private part. `__init__` and such are Python's."""
    parts = path.split(".")
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_imports(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The lines that import a private name of torch."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if is_of_torch(name) and is_private(name):
                yield node.lineno, ast.unparse(node)


def names_of_torch(nodes: list[ast.AST]) -> set[str]:
    """The names in a file that stand for torch, or for something in it."""
    found = {"torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias for alias in node.names if is_of_torch(alias.name)]
            found.update(alias.asname or "torch" for alias in modules)
        elif isinstance(node, ast.ImportFrom) and is_of_torch(node.module or ""):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def is_of_torch(path: str) -> bool:
    return path.split(".")[0] == "torch"


def private_attributes(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The lines that read a private name of torch, as `torch._foreach_add_`."""
    of_torch = names_of_torch(nodes)
    for node in nodes:
        is_private_name = isinstance(node, ast.Attribute) and is_private(node.attr)
        if is_private_name and root_of(node) in of_torch:
            yield node.lineno, ast.unparse(node)


def root_of(node: ast.expr) -> str | None:
    """`torch` for `torch.nn.modules`; None where a call or the like comes first."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_names(nodes: list[ast.AST]) -> list[str]:
    found = [*private_imports(nodes), *private_attributes(nodes)]
    return [f"line {line}: {text}" for line, text in found]


@for_changes
def test_private_names_of_torch_stand_in_files_of_their_own() -> None:
    missed = [
        line
        for line in LINES_WITH_A_PRIVATE_NAME
        if len(private_names(nodes_in(line))) != 1
    ]
    assert not missed, f"these private names are not found:{listed(missed)}"
    found = [
        f"{short_name(path)}, {name}"
        for path in files()
        if short_name(path) not in OF_PRIVATE_NAMES
        for name in private_names(nodes_of(path))
    ]
    assert not found, (
        "torch may change or drop a private name in any version. Use a public one, or "
        "give this one a name of ours, with the reason, in `_base/torch_internals.py`; "
        f"for ranks, lints and simulated devices, in their own:{listed(found)}"
    )


def test_nobody_looks_at_the_frames_of_callers() -> None:
    found = [
        short_name(path)
        for path in core_files()
        if "_getframe" in path.read_text(encoding="utf-8")
    ]
    assert not found, (
        "what the library does must not depend on who calls it; pass what you need as "
        f"an argument in place of `sys._getframe`:{listed(found)}"
    )


def says_what_it_is(path: Path) -> bool:
    file, *_ = nodes_of(path)
    return isinstance(file, ast.Module) and bool(ast.get_docstring(file))


def test_every_file_says_what_it_is() -> None:
    found = [short_name(path) for path in files() if not says_what_it_is(path)]
    assert not found, f"begin these files with a docstring:{listed(found)}"


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def asserted_times(nodes: list[ast.AST]) -> list[int]:
    """The lines of assertions that ask a clock."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and asks_a_clock(call)
    ]


def asks_a_clock(call: ast.Call) -> bool:
    module, _, function = ast.unparse(call.func).removesuffix("_ns").rpartition(".")
    return module == "time" and function in CLOCKS


def files_with_clocks() -> list[Path]:
    """The tests that can ask a clock. That of virtual time is computed, and may be."""
    return [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.stem != "test_virtual_time"
        and "import time" in path.read_text(encoding="utf-8")
    ]


def test_no_test_asserts_how_long_something_took() -> None:
    """One gave a program 20 seconds, and failed while the machine was busy."""
    example = "x = time.time()\nassert time.monotonic() - x < 20"
    assert asserted_times(nodes_in(example)) == [2]
    found = [
        f"{path.relative_to(ROOT)}, line {line}"
        for path in files_with_clocks()
        for line in asserted_times(nodes_of(path))
    ]
    assert not found, (
        "a machine may be ten times as slow as yours. Count what happens instead:"
        f"{listed(found)}"
    )
