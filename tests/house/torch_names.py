"""Lists the private names of torch in the package, and which torch versions have them.

python tests/house/torch_names.py

looks for each name in the torch that is installed, and writes what it finds into
torch_names.txt beside this file. For another torch: `tests/versions.sh PYTHON TORCH
names`. So you see without that torch which names it lacks.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).with_suffix(".txt")
# The files that may use private names of torch, in the package.
FILES = [
    *[
        f"{room}/torch_internals.py"
        for room in ("_base", "testing/_ranks", "testing/_simulation")
    ],
    "testing/_ranks/torch_settings.py",
]

# Names that some versions lack, each with the reason why the package does without.
# `_ranks/torch_internals.py` keeps apart those variables of a process that a torch has.
_VARIABLE = (
    "a variable of newer versions, of which ranks get their own where there is one"
)
_REDISTRIBUTE = "torch.distributed.tensor._redistribute"
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
# Some are functions of CUDA. Simulated devices replace those that there are.
OF_CUDA = "a build without CUDA lacks it, whatever its version"
_NAMES_OF_CUDA = (
    "_broadcast",
    "_broadcast_coalesced",
    "_broadcast_out",
    "_gather",
    "_gather_out",
    "_scatter",
    "_scatter_out",
)
_NAMES_OF_CUDNN = ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit")
MAY_BE_MISSING = {
    **{
        f"torch._C.{name}": OF_CUDA
        for name in (*_NAMES_OF_CUDA, "_nccl_all_reduce", *_NAMES_OF_CUDNN)
    },
    "._maybe_attach_flight_recorder": (
        "since torch 2.15; before, groups of other backends have no such recorder"
    ),
    "._fsdp_param_groups": (
        "since torch 2.12; before, `_fsdp_param_group` is read in its place"
    ),
    f"{_REDISTRIBUTE}._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION": _VARIABLE,
    f"{_REDISTRIBUTE}._warned_flatten_issues": _VARIABLE,
    f"{_FSDP_PARAM}._orig_param_uid_counter": _VARIABLE,
}

# Of a name, whether each of some versions has it.
Versions = dict[str, bool]


def used_names(package: Path) -> set[str]:
    """The private names of torch in the package.

    `torch._C._len_torch_function_stack` is found by this path. `._call_impl` is an
    attribute of some object of torch.
    """
    names: set[str] = set()
    for file in FILES:
        names |= names_in(ast.parse((package / file).read_text()))
    return names


def names_in(tree: ast.Module) -> set[str]:
    """The private names of torch in one file."""
    visitor = _Visitor()
    visitor.visit(tree)
    return visitor.names


def is_private(name: str) -> bool:
    """Whether a part of a path is private. `__get__` and its like are Python's."""
    return name.startswith("_") and not name.startswith("__")


class _Visitor(ast.NodeVisitor):
    """Collects names, with what each variable of the file stands for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._paths: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._paths[alias.asname or "torch"] = (
                    alias.name if alias.asname else "torch"
                )
                self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.split(".")[0] == "torch":
            for alias in node.names:
                self._paths[alias.asname or alias.name] = f"{module}.{alias.name}"
                self._add(f"{module}.{alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        if [target.id for target in node.targets if isinstance(target, ast.Name)] != [
            "__slots__"
        ]:  # our own names
            self._bind(node.targets, node.value)
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind([node.target], node.value)
        self.generic_visit(node)

    def _bind(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        path = self._path(value)
        for target in targets:
            if path is not None and isinstance(target, ast.Name):
                self._paths[target.id] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None:
            self._add(path)
            return
        if is_private(node.attr) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            self.names.add(f".{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._visit_sequence(node, node.args)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._visit_sequence(node, node.elts)

    def _visit_sequence(self, node: ast.AST, values: list[ast.expr]) -> None:
        """`getattr(torch, "_name")`, and rows of tables as `(c10d, "_name", f)`."""
        named = set()
        for owner, name in pairwise(values):
            path = self._path(owner)
            if (
                path is not None
                and isinstance(name, ast.Constant)
                and _is_path(name.value, of_torch=False)
            ):
                self._add(f"{path}.{name.value}")
                named.add(name)
        for child in ast.iter_child_nodes(node):
            if child not in named:
                self.visit(child)

    def visit_Constant(self, node: ast.Constant) -> None:
        if (
            _is_path(node.value, of_torch=False)
            and is_private(node.value)
            and len(node.value) > 1
        ):
            self.names.add(f".{node.value}")

    def _path(self, node: ast.AST | None) -> str | None:
        """What of torch an expression is.

        `_c10d._World` may be `torch._C._distributed_c10d._World`.
        """
        if isinstance(node, ast.Name):
            return self._paths.get(node.id)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("torch.")
        ):
            return node.value if _is_path(node.value, of_torch=True) else None
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            return None if path is None else f"{path}.{node.attr}"
        return None

    def _add(self, path: str) -> None:
        parts = path.split(".")
        dunders = [index for index, part in enumerate(parts) if part.startswith("__")]
        parts = parts[: dunders[0]] if dunders else parts
        while parts and not is_private(
            parts[-1]
        ):  # public names of a private module are for the others to hold
            if any(map(is_private, parts)):
                break
            parts.pop()
        if parts:
            self.names.add(".".join(parts))


def _is_path(value: object, of_torch: bool) -> bool:
    """Whether a text is the path of a module of torch, or else one within a module."""
    is_path = (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value) is not None
    )
    return is_path and value.startswith("torch.") is of_torch


# What an installed torch has


def has(name: str) -> bool:
    """Whether the torch that is installed has a name."""
    if name.startswith("."):
        return name[1:] in _words()
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            functools.reduce(getattr, parts[count:], found)
        except AttributeError:
            return False
        return True
    return False


@functools.cache
def _words() -> set[str]:
    """All private words in the Python files of torch.

    An attribute of objects is one of them, wherever it is set.
    """
    folder = Path(torch.__file__).parent
    words: set[str] = set()
    for pattern in ("*.py", "*.pyi"):
        for path in folder.rglob(pattern):
            words.update(
                re.findall(
                    r"\b_\w+", path.read_text(encoding="utf-8", errors="replace")
                )
            )
    return words


def installed() -> str:
    """The version of torch that is installed, without what it was built for."""
    return torch.__version__.split("+")[0]


# The record


def read_record() -> dict[str, Versions]:
    """Each name of the file, with the versions in which it was looked for."""
    record: dict[str, Versions] = {}
    for line in RECORD.read_text().splitlines() if RECORD.exists() else []:
        name, *versions = line.split()
        record[name] = {
            version.lstrip("!"): not version.startswith("!") for version in versions
        }
    return record


def lines(record: dict[str, Versions]) -> Iterator[str]:
    """A name in each line, and the versions; those that lack it have a `!`."""
    for name, versions in sorted(record.items()):
        ordered = sorted(
            versions.items(),
            key=lambda item: [int(part) for part in item[0].split(".")],
        )
        yield " ".join(
            [
                name,
                *(
                    version if is_there else f"!{version}"
                    for version, is_there in ordered
                ),
            ]
        )


def main() -> None:
    """Looks for the names in the torch that is installed, and writes the record."""
    known = read_record()
    record: dict[str, Versions] = {}
    for name in used_names(Path(__file__).resolve().parents[2] / "torchstrategy"):
        record[name] = {**known.get(name, {}), installed(): has(name)}
    RECORD.write_text("\n".join(lines(record)) + "\n")
    missing = [name for name, versions in record.items() if not versions[installed()]]
    print(
        f"torch {installed()}: {len(record) - len(missing)} of {len(record)} names; "
        f"missing: {sorted(missing)}"
    )


if __name__ == "__main__":
    main()
