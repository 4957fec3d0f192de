"""docs/several-machines.md says what is so.

Its programs, commands and snippets run in several processes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchstrategy
from conditions import for_changes, for_releases
from documents import dead_links_of
from processes import NO_ACCELERATOR, python
from workers.cluster import Cluster, alone, free_ports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-machines.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
(PROGRAM,), SHELL, (POD,), (DIFF,) = (
    [text for kind, text in BLOCKS if kind == k]
    for k in ("python", "shell", "yaml", "diff")
)
SNIPPETS = [
    (text, following[1] if following[0] == "text" else None)
    for (kind, text), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "py"
]
BEGINNING = PROGRAM.partition("\n\nfor epoch")[0]


# The program and the commands that start it


def losses_in(output: str) -> list[float]:
    return [
        float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)$", output, re.M)
    ]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of the program in one process."""
    done = python(
        "-c",
        PROGRAM.replace('torch.save(model.state_dict(), "model.pt")', ""),
        **NO_ACCELERATOR,
    )
    losses = losses_in(done.stdout)
    assert len(losses) == 3 and losses[2] < losses[0], done.stderr
    return losses


TASKS = """#!/bin/bash
# Runs a command as often as srun would.
for ((task = 0; task < SLURM_STEP_NUM_TASKS; task++)); do
  SLURM_PROCID=$task "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program, and with stand-ins for the commands of Slurm."""
    (tmp_path / "train.py").write_text(PROGRAM)
    for name, text in {
        "srun": TASKS,
        "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def started(command: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(
        [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    paths = os.pathsep.join(
        filter(
            None, [str(ROOT) if (ROOT / "torchstrategy").is_dir() else "", *PYTHONPATH]
        )
    )
    settings = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        **NO_ACCELERATOR,
        **environment,
    }
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


PYTHONPATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)


def printed_by(*processes: subprocess.Popen[str]) -> str:
    try:
        told = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, output + errors
    return "".join(output for output, _ in told)


def here(command: str) -> str:
    """The command, for machines that are all this one, and have one process each."""
    for there, own in {
        "node0": "127.0.0.1",
        "29500": str(free_ports(1)[0]),
        "--nproc-per-node 8": "--nproc-per-node 1",
        "--nproc-per-node 4": "--nproc-per-node 1",
        "--ntasks-per-node=4": "--ntasks-per-node=1",
    }.items():
        command = command.replace(there, own)
    return command


def commands() -> list[Any]:
    """That of Slurm takes several seconds."""
    return [
        pytest.param(
            command,
            marks=[for_changes] if "srun python" in command else [],
            id=command.replace("\\\n", "").split("\n")[-2][:60],
        )
        for command in SHELL
    ]


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_a_command_trains_what_one_process_trains(
    command: str, folder: Path, expected: list[float]
) -> None:
    environment = {}
    if "#SBATCH" in command:
        assert "--nodes=2" in command
        environment = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[0-1]",
        }
        environment |= {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "127.0.0.1,localhost",
        }
        environment |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    if "srun python" in command:
        resolver = "torchstrategy.cluster_resolver.SlurmClusterResolver()"
        assert f"MultiWorkerMirroredStrategy({resolver})" in TEXT
        resolver = resolver.replace("()", f"(port_base={free_ports(1)[0]})")
        (folder / "train.py").write_text(
            PROGRAM.replace("MirroredStrategy()", f"MirroredStrategy({resolver})")
        )
    machines = 2 if "--nnodes 2" in command else 1
    command = here(command)
    output = printed_by(
        *(started(command, folder, **environment) for _ in range(machines))
    )
    assert losses_in(output) == pytest.approx(expected, rel=1e-3)
    assert (folder / "model.pt").exists()
    if "--log-dir" in command:
        assert "[default0]:epoch 0" in output and list(
            (folder / "logs").rglob("stdout.log")
        )


@pytest.mark.slow
@for_releases
def test_the_pods_train_what_one_process_trains(
    folder: Path, expected: list[float]
) -> None:
    commands = re.findall(r"^ *command: (\[.*\])$", POD, re.M)
    pods = sum(map(int, re.findall(r"^ *replicas: (\d+)$", POD, re.M)))
    assert len(set(commands)) == 1 and len(commands) == pods == 2
    command = shlex.join(re.findall(r'"(.+?)"', commands[0]))
    # What the operator sets.
    common = {
        "WORLD_SIZE": str(pods),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }
    output = printed_by(
        *(started(command, folder, RANK=str(rank), **common) for rank in range(pods))
    )
    assert losses_in(output) == pytest.approx(expected, rel=1e-3)


# The snippets


def of_snippet(code: str, folder: str) -> tuple[str, str]:
    """What a worker prints, and the exception that it raises, if any."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, raised = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        exec(BEGINNING, names)
        names["torchstrategy"] = __import__("torchstrategy.testing")
        try:
            exec(code, names)
        except Exception as error:
            raised = "".join(traceback.format_exception_only(error)).removesuffix("\n")
    return printed.getvalue(), raised


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Cluster]]:
    """Two processes, and after one of them was killed two new ones."""
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.end()


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "shown"), SNIPPETS, ids=[str(i) for i in range(len(SNIPPETS))]
)
def test_a_snippet_says_what_the_page_shows(
    code: str,
    shown: str | None,
    pair: list[Cluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in NO_ACCELERATOR.items():
        monkeypatch.setenv(name, value)
    if not pair or not pair[-1].is_alive:
        pair.append(Cluster(2))
    # They are ended if they hang.
    first, second = pair[-1].outcomes(of_snippet, code, str(tmp_path))
    if shown is None:
        assert [first.value[1], second.value[1]] == ["", ""]
        return
    if "Error: " not in shown:
        assert "".join(
            outcome.value[0] for outcome in (first, second) if outcome.value[0] != ""
        ).startswith(shown)
        return
    assert same(shown, first.value[1]), (
        f"{code}\nraises\n\n{first.value[1]}\n\nand not\n\n{shown}"
    )
    if "SIGKILL" in code:
        assert second.error == "ended"
    elif "raise ValueError" in code:
        assert second.value[1] == "ValueError: a bad row"
    elif "sleep" not in code:
        assert same(shown, second.value[1])


def same(shown: str, raised: str) -> bool:
    """Whether a message is the one that is shown, but for the names of processes."""
    shown, raised = (
        re.sub(r"\([^()\s]+,\sprocess \d+\)", "(NAME)", text)
        for text in (shown, raised)
    )
    return OutputChecker().check_output(
        shown, f"{raised}\n", ELLIPSIS | NORMALIZE_WHITESPACE
    )


# The program before and after


def before() -> str:
    """The program that the diff changes into that of the page."""
    program = PROGRAM
    for hunk in DIFF.split("@@\n"):
        old, new = (
            "".join(
                line[1:] or "\n" for line in hunk.splitlines(True) if line[0] in side
            )
            for side in (" -\n", " +\n")
        )
        assert program.count(new) == 1, f"the program does not have\n{new}"
        program = program.replace(new, old)
    return program


@pytest.mark.slow
@for_releases
def test_both_programs_train_the_same_model(folder: Path) -> None:
    command = "torchrun --standalone --nproc-per-node 2 train.py"
    found = []
    for program in (before(), PROGRAM):
        assert program.count("shuffle=True") == 1
        program = program.replace("shuffle=True", "shuffle=False")
        # One of six times, a process with gloo aborts when torch destroys the group:
        # "terminate called without an active exception". That happens without the
        # library, so these processes end before it.
        at_once = "dist.barrier()\nprint(end='', flush=True)\n__import__('os')._exit(0)"
        (folder / "train.py").write_text(
            program.replace("dist.destroy_process_group()", at_once)
        )
        losses = losses_in(printed_by(started(command, folder)))
        found.append((losses, torch.load(folder / "model.pt")))
    (losses, weights), (expected, wanted) = found
    assert losses == pytest.approx(expected, rel=1e-3) and len(losses) == 3
    torch.testing.assert_close(weights, wanted)


# The table of lines


def table() -> list[list[list[str]]]:
    """Of each of its rows, the code in each cell."""
    _, _, below = TEXT.partition(
        "\n| with `DistributedDataParallel` | with the strategy |\n|---|---|\n"
    )
    rows = [
        line.strip("| ").split(" | ")
        for line in below.partition("\n\n")[0].splitlines()
    ]
    return [
        [
            re.findall("`(.+?)`", row[0] if cell.startswith("the same") else cell)
            for cell in row
        ]
        for row in rows
    ]


def names_before(path: Path) -> dict[str, Any]:
    """What lines find in a script with `DistributedDataParallel`."""
    found = common_names(path)
    found["model"] = model = DistributedDataParallel(found["net"])
    found["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    found["sampler"] = DistributedSampler(found["dataset"])
    found["loader"] = DataLoader(
        found["dataset"], batch_size=4, sampler=found["sampler"]
    )
    found["rows"], found["classes"] = next(iter(found["loader"]))
    found["saved"] = model.state_dict()
    found["loss"] = torch.ones(())
    return found


def names_after(path: Path) -> dict[str, Any]:
    """What lines find in a script with a strategy."""
    found = common_names(path)
    found["strategy"] = strategy = torchstrategy.MultiWorkerMirroredStrategy()
    found["model"] = model = strategy.distribute_module(found["net"])
    found["optimizer"] = strategy.distribute_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )
    found["loader"] = DataLoader(found["dataset"], batch_size=8, shuffle=True)
    found["batch"] = next(
        iter(strategy.experimental_distribute_dataset(found["loader"]))
    )
    found["saved"] = {
        f"module.{name}": value for name, value in model.state_dict().items()
    }
    found["losses"] = strategy.run(lambda batch: batch[0][:, 0], args=(found["batch"],))
    return found


def common_names(path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    rows, classes = torch.randn(16, 4), torch.randint(3, (16,))
    found: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "F": F,
        "Join": Join,
        "DataLoader": DataLoader,
    }
    found |= {
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedSampler": DistributedSampler,
    }
    found |= {
        "torchstrategy": torchstrategy,
        "net": nn.Linear(4, 3),
        "device": "cpu",
        "path": path,
    }

    def backward_step(batch: Any) -> torch.Tensor:
        rows, classes = batch
        loss = F.cross_entropy(found["model"](rows), classes)
        loss.backward()
        return loss.detach()

    def train_step(batch: Any) -> torch.Tensor:
        found["optimizer"].zero_grad()
        loss = backward_step(batch)
        found["optimizer"].step()
        return loss

    found |= {
        "dataset": TensorDataset(rows, classes),
        "backward_step": backward_step,
        "train_step": train_step,
    }
    return found


def of_column(column: int, folder: str) -> list[str]:
    """Runs each line of a column in its own kind of script; returns what fails."""
    failed = []
    # The group that the first row makes is there for the others.
    for codes in sorted(
        (row[column] for row in table()), key=lambda codes: "destroy" in " ".join(codes)
    ):
        first = any(
            "init_process_group" in code or "MultiWorkerMirroredStrategy()" in code
            for code in codes
        )
        found = (
            {"dist": dist, "torchstrategy": torchstrategy}
            if first
            else (names_before, names_after)[column](Path(folder, "model.pt"))
        )
        for code in codes:
            try:
                exec(f"{code} pass" if code.endswith(":") else code, found)
            except Exception as error:
                failed.append(f"{code}: {type(error).__name__}: {error}")
    return failed


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("column", [0, 1])
def test_each_line_of_the_table_runs(column: int, tmp_path: Path) -> None:
    assert len(table()) > 20 and all(row[0] for row in table())
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": "2",
        **NO_ACCELERATOR,
    }
    for outcome in alone(
        of_column,
        [{**place, "RANK": str(rank)} for rank in range(2)],
        column,
        str(tmp_path),
    ):
        assert (outcome.error, outcome.value) == (None, []), outcome.trace


# The table of other ways


def test_the_table_of_other_ways_says_what_they_have() -> None:
    fully_sharded = pytest.importorskip("torch.distributed.fsdp").FSDPModule
    assert hasattr(DistributedDataParallel, "join") and issubclass(
        DistributedDataParallel, Joinable
    )
    assert hasattr(fully_sharded, "set_gradient_divide_factor") and not issubclass(
        fully_sharded, Joinable
    )
    assert dist.constants.default_pg_timeout == timedelta(minutes=30)
    assert dist.constants.default_pg_nccl_timeout in (None, timedelta(minutes=10))
    assert "drop_last" in inspect.signature(DistributedSampler).parameters


@for_releases
def test_the_table_says_what_accelerate_and_fabric_have() -> None:
    accelerate = pytest.importorskip("accelerate")
    fabric = pytest.importorskip("lightning_fabric")
    settings = inspect.signature(accelerate.DataLoaderConfiguration).parameters
    assert (
        settings["even_batches"].default is True
        and settings["split_batches"].default is False
    )
    for name in (
        "gather_for_metrics",
        "join_uneven_inputs",
        "save_state",
        "load_state",
        "skip_first_batches",
    ):
        assert hasattr(accelerate.Accelerator, name), name
    assert hasattr(accelerate, "debug_launcher")
    loaders = inspect.signature(fabric.Fabric.setup_dataloaders).parameters
    assert loaders["use_distributed_sampler"].default is True
    assert hasattr(fabric.Fabric, "save") and hasattr(fabric.Fabric, "load")
    assert not hasattr(fabric.Fabric, "join")


def test_each_source_of_the_table_is_cited_and_each_citation_leads_somewhere() -> None:
    cited = set(re.findall(r"\]\[([\w-]+)\]", TEXT))
    assert (
        cited == set(re.findall(r"^\[([\w-]+)\]: https://\S+$", TEXT, re.M))
        and len(cited) > 10
    )


# Where links lead


def test_links_of_the_page_and_to_it_lead_somewhere() -> None:
    assert dead_links_of(PAGE) == []
    for page in (
        ROOT / "README.md",
        PAGE.parent / "data.md",
        PAGE.parent / "performance.md",
    ):
        assert f"({PAGE.relative_to(page.parent)})" in page.read_text(), page
