"""The rules of the house: what may import what, what is public, and what an import must not do."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchstrategy
import torchstrategy.testing
from house.picture import ROOT, floors, listed, modules_imported_by, package
from house.public_names import NAMESPACES

PACKAGE = package()
FILES = sorted(PACKAGE.rglob("*.py"))
OF_TENSORFLOW = [
    namespace for namespace in NAMESPACES if namespace != "torchstrategy.testing"
]
PUBLIC = [
    (namespace, name)
    for namespace in NAMESPACES
    for name in importlib.import_module(namespace).__all__
    if not isinstance(getattr(importlib.import_module(namespace), name), ModuleType)
]
OTHER_NAMES = {
    "CollectiveCommunication": "CommunicationImplementation"
}  # of one thing, which says the second

# Inside of public folders, whose docstrings are for users: a file imports only from floors below its own. Inside of the
# other rooms, and of the folders in them, the docstring has the order of the files.
FLOORS: dict[tuple[str, ...], list[set[str]]] = {
    ("cluster_resolver",): [{"_slurm_lists"}, {"_cluster_resolver"}],
    ("compat",): [{"v1"}],
    ("compat", "v1"): [
        {"_strategies"},
        {"experimental"},
    ],
    ("nn",): [{"_losses", "_sync_batch_norm"}],
    ("testing",): [
        {"_simulation"},
        {"_ranks"},
        {"_lints", "_virtual_time"},
        {"_runner"},  # up to here, nothing knows a strategy: see `WITHOUT_STRATEGIES`
        {"_instruments", "_refusals"},
        {
            "_counters",
            "_drift",
            "_faults",
            "_leaks",
            "_lockstep",
            "_replica_clocks",
            "_topologies",
        },
        {"_machine", "_same_as_plain", "_worker_drift"},
        {"run"},
    ],
    ("testing", "_simulation"): [
        {"torch_internals"},
        {
            "dtypes",
            "facades",
            "listeners",
            "replacing",
            "ordinals",
            "pending",
            "pinned",
            "shapes",
            "sync_debug",
            "thread_modes",
            "uses",
        },  # which devices there are, and what happens on them
        {"deterministic", "words"},
        {"fakes", "generators", "program", "streams"},
        {"checksums", "pinned_creation"},
        {"recorder"},
        {"accounts"},
        {"memory"},
        {"storages"},
        {"cuda_graphs", "kernels", "module", "tensors"},
        {"cuda_calls", "cuda_more", "registered"},
        {"cuda_names"},
        {"accelerator", "backend", "cuda_alias", "parallel", "scripted"},
        {
            "attention",
            "autocast",
            "batch_norm",
            "creation",
            "layers",
            "recurrent",
            "sparse",
        },
    ],
    ("testing", "_virtual_time"): [
        {"hosts", "profiles", "spans", "steps"},
        {"acts", "collectives", "costs", "timeline"},
        {"clock", "replay", "step_times"},
        {"advice", "fused"},
        {"report"},
        {"perfetto", "picture"},
        {"trace"},
        {"limits", "virtual_time"},
    ],
    ("testing", "_ranks"): [
        {
            "happened",
            "injection",
            "orders",
            "part",
            "record",
            "swaps",
            "torch_internals",
            "torch_settings",
            "witnesses",
        },
        {"process", "turns"},
        {"imports", "lines", "moments", "tensors"},
        {"names", "refusals"},
        {"exchanges"},
        {"world"},
        {"store"},
        {"belongings", "faults", "groups", "profilers", "signals"},
        {"alone"},
        {"run_ranks"},
        {"marked_tests"},
    ],
    ("testing", "_lints"): [
        {"torch_internals"},
        {"evidence"},
        {"findings"},
        {"lint"},
        {
            "checkpoints",
            "collectives",
            "gathered",
            "layers",
            "means",
            "optimizers",
            "precision",
            "rows",
        },
        {"failures", "gradients", "weights"},
        {"sharding"},
        {"session"},
        {"watching"},
        {"lint_training"},
    ],
    ("testing", "_runner"): [
        {
            "comparison",
            "deep_alias",
            "launching",
            "messages",
            "observer",
            "output",
            "prediction",
            "programs",
        },
        {"report"},
        {"command"},
    ],
    ("testing", "_same_as_plain"): [
        {"device_errors", "held", "loss_counts", "row_statistics"},
        {"kept_state", "record"},
        {"difference", "randomness"},
        {"training"},
        {"comparison"},
        {"experiments"},
        {"causes"},
        {"messages"},
        {"same_as_plain"},
    ],
}


# The rooms whose users need no strategy, and the words of the core that they may use: those that know no strategy.
WITHOUT_STRATEGIES = {
    ("testing", room)
    for room in ("_simulation", "_virtual_time", "_ranks", "_lints", "_runner")
}
_BASE = (
    "errors",
    "memory",
    "recurrent_layers",
    "torch_internals",
    "trace",
    "worker_threads",
)
BASE_WORDS = {("_base", word) for word in _BASE}


@functools.cache
def staircase(folder: tuple[str, ...]) -> list[set[str]]:
    """What stands in a folder, floor by floor from below."""
    if not folder:
        return [{room.name for room in floor} for floor in floors()]
    if folder in FLOORS:
        return FLOORS[folder]
    return [{name} for name, _ in listed(PACKAGE.joinpath(*folder) / "__init__.py")]


def floor_of(folder: tuple[str, ...], module: str) -> int:
    floors = staircase(folder)
    if module in ("__init__", "__main__"):
        return len(floors)
    return next(floor for floor, modules in enumerate(floors) if module in modules)


def parts_of(path: Path) -> tuple[str, ...]:
    """`("_data", "dataset")` for torchstrategy/_data/dataset.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def name_of(path: Path) -> str:
    return ".".join(("torchstrategy", *parts_of(path)))


# Imports


def test_every_room_and_every_file_has_a_place() -> None:
    there: dict[tuple[str, ...], set[str]] = {}
    for *folders, module in map(parts_of, FILES):
        for depth, name in enumerate([*folders, module]):
            there.setdefault(tuple(folders[:depth]), set()).add(name)
    for folder, names in there.items():
        if names == {"__init__"} or folder == ("compat",):
            continue  # a folder of names only
        floors = staircase(folder)
        placed = names - {"__init__", "__main__"}  # these two are above all floors
        assert {name for floor in floors for name in floor} == placed
        assert sum(map(len, floors)) == len(placed), (
            f"a part of {folder} stands on two floors"
        )


def test_the_house_has_few_rooms() -> None:
    folders = [
        entry
        for entry in PACKAGE.iterdir()
        if entry.is_dir() and entry.name != "__pycache__"
    ]
    assert len(folders) <= 12


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_only_go_down(path: Path) -> None:
    here = parts_of(path)
    for imported in modules_imported_by(path):
        # The innermost folder that both are in; importing a folder is importing its `__init__`.
        depth = next(d for d in range(len(here)) if here[: d + 1] != imported[: d + 1])
        folder = here[:depth]
        below = imported[depth] if len(imported) > depth else "__init__"
        assert floor_of(folder, below) < floor_of(folder, here[depth]), (
            f"{name_of(path)} imports {imported}"
        )


def knows_no_strategy(module: tuple[str, ...]) -> bool:
    return module[:2] in WITHOUT_STRATEGIES or module[:2] in BASE_WORDS


@pytest.mark.parametrize(
    "path", [path for path in FILES if knows_no_strategy(parts_of(path))], ids=name_of
)
def test_devices_clocks_ranks_and_the_runner_need_no_strategy(path: Path) -> None:
    """Their users have DDP, FSDP or a loop of their own, and no strategy.

    Such a user, or somebody who reads or mends these rooms, is not to meet the core, nor an error that speaks of it.
    What replicas of strategies are in them comes from above, as `testing/_replica_clocks` does.
    """
    assert [
        found for found in modules_imported_by(path) if not knows_no_strategy(found)
    ] == []


WITHOUT_ANY_STRATEGY = """
import sys
import types

# Packages without what their `__init__.py` imports.
for name in ("torchstrategy", "torchstrategy.testing"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]

import torch
import torch.distributed as dist

import torchstrategy.testing._runner.command
from torchstrategy.testing._ranks import run_ranks
from torchstrategy.testing._simulation import record_streams, simulate_devices
from torchstrategy.testing._virtual_time import virtual_time

def main(rank):
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("nccl")
    one = torch.ones(4, device=f"sim:{rank}")
    dist.all_reduce(one)
    return one.sum().item()

simulate_devices(2)
with virtual_time("H100-SXM") as trace, record_streams():
    results, record = run_ranks(main, 2)
assert results == [8.0, 8.0] and trace.seconds > 0, (results, trace.seconds)
print(*sorted(name for name in sys.modules if name.startswith("torchstrategy.")))
"""


def test_devices_clocks_and_ranks_run_where_there_is_no_strategy() -> None:
    """The same, by running them: nothing else of the package is imported meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ANY_STRATEGY],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = [tuple(name.split(".")[1:]) for name in done.stdout.split()]
    assert [
        module for module in loaded if len(module) > 1 and not knows_no_strategy(module)
    ] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_are_absolute_whole_and_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert all(alias.name != "*" for alias in node.names), (
                f"line {node.lineno}: a star import"
            )
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = [n.lineno for n in ast.walk(node) if is_import(n)]
            allowed = (
                parts_of(path) == ("__init__",) and node.name == "__getattr__"
            )  # it brings `testing` when asked
            assert not inside or allowed, f"line {inside}: an import in a function"


def is_import(node: ast.AST) -> bool:
    """Whether this imports, in a statement or by a call."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return name.strip("_") in ("import", "import_module")
    return isinstance(node, (ast.Import, ast.ImportFrom))


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "from torch import nn",
        "importlib.import_module(x)",
        "__import__(x)",
    ],
)
def test_an_import_is_found(line: str) -> None:
    assert len([node for node in ast.walk(ast.parse(line)) if is_import(node)]) == 1


_RUNS_WHAT_IT_READS = (
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
)


@pytest.mark.parametrize(
    "path", [path for path in FILES if parts_of(path)[0] != "testing"], ids=name_of
)
def test_nothing_that_workers_send_can_run(path: Path) -> None:
    """Messages between workers were unpickled, so whoever reached a port of one could let it run anything."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = {alias.name.partition(".")[0] for alias in node.names}
            assert imported.isdisjoint(_RUNS_WHAT_IT_READS), (
                f"line {node.lineno} imports {imported}"
            )
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in (
                *_RUNS_WHAT_IT_READS,
                "marshal",
            )
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            assert (owner, node.attr) not in {
                ("marshal", "loads"),
                ("marshal", "load"),
                ("torch", "load"),
            }
            is_of_torch = owner == "dist" and ("object" in node.attr)
            assert not is_of_torch, (
                f"line {node.lineno}: dist.{node.attr} unpickles what others send"
            )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch that a file uses, with the line."""
    of_torch = {"torch"}  # the names in this file that stand for something of torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    of_torch.add((alias.asname or alias.name).split(".")[0])
                    if any(map(is_private, alias.name.split("."))):
                        yield f"line {node.lineno}: import {alias.name}"
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "torch"
        ):
            for alias in node.names:
                of_torch.add(alias.asname or alias.name)
                if any(map(is_private, [*(node.module or "").split("."), alias.name])):
                    yield f"line {node.lineno}: from {node.module} import {alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in of_torch:
                yield f"line {node.lineno}: {ast.unparse(node)}"


OF_PRIVATE_NAMES = {
    ("_base", "torch_internals"),
    ("testing", "_lints", "torch_internals"),
    ("testing", "_ranks", "torch_internals"),
    ("testing", "_ranks", "torch_settings"),
    ("testing", "_simulation", "torch_internals"),
}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if parts_of(path) not in OF_PRIVATE_NAMES],
    ids=name_of,
)
def test_private_names_of_torch_are_used_in_files_of_their_own(path: Path) -> None:
    assert list(private_torch_names(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "import torch.utils._pytree as tree",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _push_mode",
        "import torch\ntorch._foreach_add_",
        "import torch\ntorch.Tensor._make_subclass",
        "from torch import nn\nnn.modules._x",
        "from torch.optim import Optimizer as O\nO._step",
    ],
)
def test_a_private_name_of_torch_is_found(line: str) -> None:
    assert len(list(private_torch_names(ast.parse(line)))) == 1


ASKING_FOR_WRITES = {("_base", name) for name in ("marks", "torch_internals", "writes")}


@pytest.mark.parametrize(
    "path", [path for path in FILES if parts_of(path)[0] != "testing"], ids=name_of
)
def test_one_place_knows_whether_a_tensor_was_written(path: Path) -> None:
    """Fourteen files compared torch's versions by hand, and each had its own answer for an inference tensor."""
    if parts_of(path) in ASKING_FOR_WRITES:
        return
    asked = {"version", "versions", "pointers", "_version"}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torchstrategy._base.torch_internals"
        ):
            assert asked.isdisjoint(alias.name for alias in node.names), (
                "take `Versions` or `version_of` of `_base/marks`"
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {
                ("torch_internals", name) for name in asked
            }
        assert not (isinstance(node, ast.Attribute) and node.attr == "_version")


def test_the_module_of_private_names_is_where_they_are() -> None:
    assert list(
        private_torch_names(
            ast.parse((PACKAGE / "_base" / "torch_internals.py").read_text())
        )
    )


# Names


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_lists_every_public_name_in_order(namespace: str) -> None:
    module = importlib.import_module(namespace)
    # A module below it that somebody has imported is an attribute, too.
    public = [
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and not isinstance(v, ModuleType)
    ]
    assert [
        n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)
    ] == sorted(public)
    assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize(("namespace", "name"), PUBLIC)
def test_public_names_report_their_public_home(namespace: str, name: str) -> None:
    thing = getattr(importlib.import_module(namespace), name)
    assert thing.__module__ in NAMESPACES
    assert getattr(importlib.import_module(thing.__module__), name) is thing
    assert thing.__qualname__ == OTHER_NAMES.get(name, name)


def test_a_name_has_one_home() -> None:
    homes: dict[int, set[str]] = {}
    for namespace, name in PUBLIC:
        thing = getattr(importlib.import_module(namespace), name)
        homes.setdefault(id(thing), set()).add(thing.__module__)
    assert all(len(found) == 1 for found in homes.values())


@pytest.mark.parametrize(
    "strategy",
    [
        torchstrategy.CentralStorageStrategy,
        torchstrategy.OneDeviceStrategy,
        torchstrategy.compat.v1.OneDeviceStrategy,
        torchstrategy.compat.v1.experimental.CentralStorageStrategy,
    ],
)
def test_a_strategy_is_a_constructor_and_overrides_no_public_method(
    strategy: type,
) -> None:
    assert [name for name in vars(strategy) if not name.startswith("_")] == []
    assert getattr(
        strategy, "__final__", sys.version_info < (3, 11)
    )  # older Pythons do not mark what is final


# Documents


@pytest.mark.parametrize(("namespace", "name"), PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example_and_a_source(
    namespace: str, name: str
) -> None:
    documentation = inspect.cleandoc(
        getattr(importlib.import_module(namespace), name).__doc__ or ""
    )
    assert re.search(r"^Example:\n    >>> ", documentation, re.MULTILINE), (
        f"{name} has no example"
    )
    if namespace in OF_TENSORFLOW:
        source = re.search(
            r"^Source: https://(www\.tensorflow|docs\.pytorch)\.org/",
            documentation,
            re.MULTILINE,
        )
        assert source, f"{name} has no source"


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        (namespace, name)
        for namespace, name in PUBLIC
        if inspect.isclass(vars(importlib.import_module(namespace))[name])
    ],
)
def test_every_public_method_has_a_docstring(namespace: str, name: str) -> None:
    cls = getattr(importlib.import_module(namespace), name)
    for owner in (
        base for base in cls.__mro__ if base.__module__.startswith("torchstrategy")
    ):
        for member, value in vars(owner).items():
            if not member.startswith("_") and isinstance(
                value, (property, classmethod, staticmethod, type(lambda: 0))
            ):
                assert (inspect.getdoc(getattr(cls, member)) or "").strip(), (
                    f"{name}.{member}"
                )


def docstrings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Every docstring of a file: of what, below which line, and its text."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, int, str]]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, (ast.ClassDef, ast.FunctionDef)):
                inner_name = f"{name}.{inner.name}"
                yield inner_name, inner.lineno, ast.get_docstring(inner) or ""
                yield from below(inner, inner_name)

    tree = ast.parse(path.read_text())
    yield name_of(path), 0, ast.get_docstring(tree) or ""
    yield from below(tree, name_of(path))


EXAMPLES = {
    name: (text, path, line)
    for path in FILES
    for name, line, text in docstrings(path)
    if doctest.DocTestParser().get_examples(text)
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_do_what_they_say(name: str) -> None:
    text, path, line = EXAMPLES[name]
    globs: dict[str, Any] = {
        public: getattr(torchstrategy, public) for public in torchstrategy.__all__
    }
    globs.update(torch=torch, torchstrategy=torchstrategy)
    test = doctest.DocTestParser().get_doctest(text, globs, name, str(path), line)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False, optionflags=0).run(
        test, out=said.append
    )
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def test_the_version_is_that_of_the_newest_heading_in_the_changelog() -> None:
    headings = re.findall(
        r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert torchstrategy.__version__ == headings[0]


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    data = re.search(
        r"^\[tool\.setuptools\.package-data\]\n(.+)$",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert data is not None
    assert data[1] == 'torchstrategy = ["py.typed"]'


# Files


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), (
        f"{path.name} has no docstring"
    )


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def asserted_times(tree: ast.AST) -> list[int]:
    """The lines of assertions that ask a clock."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).removesuffix("_ns") in {f"time.{c}" for c in CLOCKS}
    ]


TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


# The clock of virtual time is computed.
@pytest.mark.parametrize(
    "path",
    [p for p in TESTS if p.stem != "test_virtual_time"],
    ids=lambda path: path.stem,
)
def test_no_test_asserts_how_long_something_took(path: Path) -> None:
    """One gave a page's program 20 seconds, and failed on a machine that was busy with something else."""
    assert asserted_times(ast.parse(path.read_text())) == []


def test_an_assertion_of_a_time_is_found() -> None:
    assert asserted_times(
        ast.parse("x = time.time()\nassert time.monotonic() - x < 20")
    ) == [2]


# What an import does not do

REPORT = """
import json, logging, os, signal, sys, threading, warnings
import numpy, torch, typing_extensions
from torch.nn.modules import module
from torch.optim import Optimizer
from torch.utils import _pytree

def state():
    return {
        "environment": dict(os.environ),
        "cuda": torch.cuda.is_initialized(),
        "log handlers": [str(logging.root.handlers), logging.root.level, *(
            str(logger.handlers) for logger in logging.root.manager.loggerDict.values() if hasattr(logger, "handlers")
        )],
        "optimizers": [repr(Optimizer.__init__), repr(Optimizer.step), repr(vars(Optimizer).keys())],
        "modules": [repr(vars(torch.nn.Module).keys()), repr(torch.nn.Module.__init__), repr(torch.nn.Module.__call__)],
        "hooks": [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")],
        "threads": [thread.name for thread in threading.enumerate()],
        "warning filters": [repr(f) for f in warnings.filters],
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "containers": len(_pytree.SUPPORTED_NODES),
        "random numbers": torch.get_rng_state().sum().item(),
        "modes": [torch.is_grad_enabled(), str(torch.get_default_dtype()), str(torch.get_default_device())],
        "path": sys.path,
    }

before, known = state(), set(sys.modules)
import torchstrategy
after = state()
strangers = {name.split(".")[0] for name in set(sys.modules) - known}
strangers -= {"torchstrategy", "torch", "numpy", "typing_extensions", *sys.stdlib_module_names}
print(json.dumps({"before": before, "after": after, "strangers": sorted(strangers)}))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What a fresh interpreter says of itself before and after the import, in which a warning is an error."""
    command = [sys.executable, "-W", "error::UserWarning:torchstrategy", "-c", REPORT]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_import_leaves_the_process_as_it_was(report: dict[str, Any]) -> None:
    before, after = report["before"], report["after"]
    changed = {
        aspect: (before[aspect], after[aspect])
        for aspect in before
        if after[aspect] != before[aspect]
    }
    assert not changed
    assert before["cuda"] is False


def test_an_import_needs_torch_numpy_and_typing_extensions_only(
    report: dict[str, Any],
) -> None:
    assert report["strangers"] == []


LATER = """
import sys
import torchstrategy
assert "torchstrategy.testing" not in sys.modules
assert "testing" in dir(torchstrategy) and not hasattr(torchstrategy, "no_such_name")
assert "torchstrategy.testing" not in sys.modules
assert torchstrategy.testing is sys.modules["torchstrategy.testing"]
print(torchstrategy.testing.run_ranks(lambda rank: rank, 2)[0])
"""


def test_testing_is_there_and_comes_when_it_is_asked_for() -> None:
    """Pages and messages say `torchstrategy.testing.run_ranks`, which was not there after `import torchstrategy`."""
    done = subprocess.run(
        [sys.executable, "-c", LATER],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


def test_a_name_that_there_is_not_is_an_error_of_its_module() -> None:
    with pytest.raises(
        AttributeError,
        match="module 'torchstrategy' has no attribute 'MirorredStrategy'",
    ) as error:
        getattr(torchstrategy, "MirorredStrategy")  # noqa: B009
    assert (error.value.name, error.value.obj) == ("MirorredStrategy", torchstrategy)


def test_what_is_required_is_what_is_imported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    required = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert required is not None
    assert re.findall(r'"([\w-]+)', required[1]) == [
        "torch",
        "numpy",
        "typing-extensions",
    ]
