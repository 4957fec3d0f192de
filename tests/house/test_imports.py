"""What a module may import, and what an import of the package does to a program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

import torchstrategy
from conditions import for_changes
from house.rooms import ROOT, listed, package

LINT_IMPORTS = "from importlinter.cli import lint_imports_command as lint; lint()"


def test_imports_keep_the_contracts_of_pyproject() -> None:
    """Rooms import only rooms below them, and there is no circle."""
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--no-logo"],
        capture_output=True,
        text=True,
        cwd=ROOT,  # where pyproject.toml is
        check=False,
    )
    are_kept = done.returncode == 0
    assert are_kept, (
        "an import breaks a contract of pyproject.toml; the report says which, and "
        f"what to do:\n{done.stdout}{done.stderr}"
    )


# A fresh interpreter says of itself what it was before and after the import.
PROGRAM = """
import json, logging, os, signal, sys, threading, warnings
import numpy, torch, typing_extensions
from torch.nn.modules import module
from torch.optim import Optimizer
from torch.utils import _pytree

def log_handlers():
    loggers = logging.root.manager.loggerDict.values()
    handlers = [str(each.handlers) for each in loggers if hasattr(each, "handlers")]
    return [str(logging.root.handlers), logging.root.level, *handlers]

def hooks():
    names = sorted(name for name in vars(module) if name.endswith("_hooks"))
    return [len(getattr(module, name)) for name in names]

def signals():
    numbers = sorted(signal.valid_signals())
    return [repr(signal.getsignal(number)) for number in numbers]

def state():
    Module = torch.nn.Module
    return {
        "environment": [f"{name}={value}" for name, value in os.environ.items()],
        "cuda": torch.cuda.is_initialized(),
        "log handlers": log_handlers(),
        "optimizers": list(map(repr, (Optimizer.__init__, Optimizer.step))),
        "names of Optimizer": sorted(vars(Optimizer)),
        "modules": list(map(repr, (Module.__init__, Module.__call__))),
        "names of Module": sorted(vars(Module)),
        "hooks of all modules": hooks(),
        "threads": [thread.name for thread in threading.enumerate()],
        "warning filters": list(map(repr, warnings.filters)),
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "signals": signals(),
        "containers of pytree": len(_pytree.SUPPORTED_NODES),
        "random numbers": torch.get_rng_state().sum().item(),
        "grad mode": torch.is_grad_enabled(),
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "path": sys.path,
    }

before, known = state(), set(sys.modules)
import torchstrategy
after = state()
report = {"before": before, "after": after}
report["imported"] = sorted({name.split(".")[0] for name in {*sys.modules} - known})

report["testing came by itself"] = "torchstrategy.testing" in sys.modules
report["names"] = dir(torchstrategy)
report["a misspelt name is there"] = hasattr(torchstrategy, "no_such_name")
report["testing was not asked for"] = "torchstrategy.testing" in sys.modules
report["ranks"] = torchstrategy.testing.run_ranks(lambda rank: rank, 2)[0]
print(json.dumps(report))
"""


# Of the variables of this process, which has imported the package itself.
VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SYSTEMROOT", "TMPDIR")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What that interpreter says. A warning of the package is an error in it."""
    command = [sys.executable, "-W", "error::UserWarning:torchstrategy", "-c", PROGRAM]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=package().parent,
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@for_changes
def test_an_import_leaves_the_process_as_it_was(report: dict[str, Any]) -> None:
    before, after = report["before"], report["after"]
    changed = [
        f"{what}: {difference(before[what], after[what])}"
        for what in before
        if after[what] != before[what]
    ]
    assert not changed, (
        "`import torchstrategy` must change nothing of the program that imports it; "
        f"do this where a strategy is made:{listed(changed)}"
    )
    assert before["cuda"] is False


def difference(before: Any, after: Any) -> str:
    if not isinstance(before, list):
        return f"{before} became {after}"
    new, gone = Counter(after) - Counter(before), Counter(before) - Counter(after)
    return f"new {sorted(new, key=str)}, gone {sorted(gone, key=str)}"


def test_an_import_needs_only_what_is_required(report: dict[str, Any]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (required,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    names = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', required)}
    strangers = (
        {*report["imported"]} - names - {"torchstrategy"} - sys.stdlib_module_names
    )
    assert not strangers, (
        f"`import torchstrategy` imports {sorted(strangers)}. Import it where it is "
        "needed, or name it in the `dependencies` of pyproject.toml"
    )


def test_testing_comes_when_it_is_asked_for(report: dict[str, Any]) -> None:
    """Pages say `torchstrategy.testing.run_ranks`, which once had to be imported."""
    assert not report["testing came by itself"], (
        "`import torchstrategy` must not bring torchstrategy.testing: programs that do "
        "not test start sooner"
    )
    assert "testing" in report["names"], "dir(torchstrategy) does not list `testing`"
    assert not report["a misspelt name is there"]
    assert not report["testing was not asked for"], (
        "dir() or hasattr() brings torchstrategy.testing"
    )
    assert report["ranks"] == [0, 1]


def test_a_misspelt_name_is_an_error_of_the_package() -> None:
    with pytest.raises(
        AttributeError,
        match="module 'torchstrategy' has no attribute 'MirorredStrategy'",
    ) as error:
        getattr(torchstrategy, "MirorredStrategy")  # noqa: B009
    assert (error.value.name, error.value.obj) == ("MirorredStrategy", torchstrategy)
