"""Lints name each planted mistake, but no right twin or other right program."""

from __future__ import annotations

import json
import textwrap
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import linted
import planted
import ranked_programs
import right_trainings
from conditions import for_changes, for_releases
from planted import PAIRS, RANKS
from processes import NO_ACCELERATOR, python
from torchstrategy.testing import Finding, RankRecord, lint_training, run_ranks

SUPPORT = Path(planted.__file__)

# Of torch, about names that programs use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def findings_of(name: str, is_right: bool) -> list[Finding]:
    return of_pair(PAIRS[name], is_right)


def of_pair(pair: planted.Pair, is_right: bool) -> list[Finding]:
    if not pair.has_ranks:
        return linted.findings_of(lambda: pair.main(0, is_right))
    return linted.findings_of(
        lambda: run_ranks(lambda rank: pair.main(rank, is_right), RANKS)
    )


ON_CPU = [name for name, pair in PAIRS.items() if not pair.needs_device]


@for_changes
@pytest.mark.parametrize("name", ON_CPU)
def test_a_planted_mistake_is_named(name: str) -> None:
    (finding,) = findings_of(name, is_right=False)
    assert finding.name == PAIRS[name].lint
    assert finding.lines and all(
        line.startswith("planted.py:") for line in finding.lines
    )


@for_releases
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step_is_made_before_gradients_are_there", "step()` (planted.py:"),
        (
            "body_is_unfrozen_after_it_was_wrapped",
            "`requires_grad` was False when DistributedDataParallel wrapped",
        ),
        (
            "gradients_are_unscaled_before_they_are_reduced",
            "has skipped 1 step on rank 1 and 0 on rank 0",
        ),
    ],
)
def test_a_finding_says_why(name: str, words: str) -> None:
    assert words in findings_of(name, is_right=False)[0].says


@pytest.mark.parametrize("name", ON_CPU)
def test_its_right_twin_is_not(name: str) -> None:
    assert findings_of(name, is_right=True) == []


@for_changes
@pytest.mark.parametrize(
    "program", right_trainings.IN_RANKS, ids=lambda program: program.__name__
)
def test_a_right_program_of_ranks_is_left_alone(program: Callable[[int], None]) -> None:
    with lint_training():
        run_ranks(program, RANKS)


@pytest.mark.parametrize(
    "program", right_trainings.ALONE, ids=lambda program: program.__name__
)
def test_a_right_program_without_ranks_is_left_alone(
    program: Callable[[], None],
) -> None:
    with lint_training():
        program()


@for_changes
@pytest.mark.parametrize(
    "program", ranked_programs.EVERYWHERE, ids=lambda program: program.__name__
)
def test_a_program_of_four_ranks_is_left_alone(
    program: Callable[[ranked_programs.Place], RankRecord],
) -> None:
    with warnings.catch_warnings(), lint_training():
        warnings.simplefilter("ignore")  # of torch's internals, about themselves
        program(lambda rank: torch.device("cpu"))


@for_changes
@pytest.mark.parametrize("is_right", [False, True])
def test_gradients_that_are_reduced_over_the_wrong_group_are_named(
    is_right: bool,
) -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        torch.manual_seed(rank % 2)  # each of two ranks has a part of the model
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in planted.rows_of(rank // 2):
            optimizer.zero_grad()
            model(rows.cpu()).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(
                    parameter.grad,
                    group=copies[rank % 2] if is_right else shards[rank // 2],
                )
                parameter.grad /= 2
            optimizer.step()

    found = linted.findings_of(lambda: run_ranks(main, 4))
    assert [finding.name for finding in found] == (
        [] if is_right else ["reduced-over-wrong-group"]
    )
    assert all(
        "have the same weights: 0, 2 and 1, 3." in finding.write for finding in found
    )


# Silence


PROGRAM = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for _ in range(4):
        (
            model(torch.randn(2, 4)).square()
            .mean().backward()  # COMMENT
        )
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("", 1),
        ("torchstrategy: ignore[loss-not-divided]", 0),
        ("nosec torchstrategy: ignore[same-order, loss-not-divided]", 0),
        ("torchstrategy: ignore[same-order]", 1),
        ("torchstrategy: ignore", 1),
    ],
)
def test_a_comment_on_the_statement_silences_a_finding(
    comment: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("COMMENT", comment))
    assert len(linted.findings_of_file(tmp_path / "program.py")) == count


ONE_OF_EACH = {PAIRS[name].lint: name for name in ON_CPU}


@for_releases
@pytest.mark.parametrize("lint", ONE_OF_EACH)
def test_a_comment_silences_each_lint(lint: str, tmp_path: Path) -> None:
    """On any of the lines that a finding names."""
    name = ONE_OF_EACH[lint]
    (finding,) = findings_of(name, is_right=False)
    for at in finding.lines:
        lines = SUPPORT.read_text().split("\n")
        lines[int(at.partition(":")[2]) - 1] += f"  # torchstrategy: ignore[{lint}]"
        file = tmp_path / "planted.py"
        file.write_text("\n".join(lines))
        program: Any = types.ModuleType("silenced")
        exec(compile(file.read_text(), str(file), "exec"), vars(program))
        assert of_pair(program.PAIRS[name], is_right=False) == [], at
        tmp_path = tmp_path / "next"  # the lines of a file are read once
        tmp_path.mkdir()


def test_a_finding_fails_the_block_with_all_of_its_words() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(
            AssertionError,
            match=(
                r"(?s)seems to be wrong.*loss-not-divided: The gradients of 3 mean "
                r"losses"
            ),
        ),
        lint_training(),
    ):
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()


def test_a_second_block_is_refused() -> None:
    with (
        lint_training(),
        pytest.raises(RuntimeError, match="leave that block first"),
        lint_training(),
    ):
        pass


# The runner


def run(
    folder: Path, name: str, which: str, *options: str
) -> tuple[int, list[str], str]:
    """Runs a program on simulated devices.

    Returns the status, the names of the findings, and what it said.
    """
    file, pair = folder / "report.json", PAIRS[name]
    ranks = ["--ranks", str(RANKS)] if pair.has_ranks else []
    done = python(
        *(
            "-W",
            "ignore",
            "-m",
            "torchstrategy.testing.run",
            "--as-cuda",
            "--json",
            str(file),
            *ranks,
            *options,
        ),
        str(SUPPORT),
        folder=folder,
        PLANTED=f"{name} {which}",
        **NO_ACCELERATOR,
    )
    found = json.loads(file.read_text())["findings"] if file.exists() else []
    return done.returncode, [finding["name"] for finding in found], done.stderr


@for_changes
def test_the_runner_reports_findings_and_is_strict(tmp_path: Path) -> None:
    status, names, said = run(tmp_path, "set_epoch_is_missing", "bad", "--strict")
    assert status == 1 and names == ["same-order"], said
    assert "Findings: 1\n  same-order: " in said and "set_epoch(epoch)" in said
    status, names, said = run(tmp_path, "set_epoch_is_missing", "good", "--strict")
    assert status == 0 and names == [], said


CAPTURED = """
    import torch

    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1, device="cuda"), capturable=True)
    weight.grad = torch.ones(4, device="cuda")
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    assert abs(weight[0].item() - 0.8) < 1e-3
"""  # noqa: E501


@for_changes
def test_lints_do_not_wait_for_a_learning_rate_on_the_device(tmp_path: Path) -> None:
    """A graph that captures the step of such an optimizer failed.

    A lint compared the rate with 0.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(CAPTURED))
    arguments = (
        "-m",
        "torchstrategy.testing.run",
        "--as-cuda",
        "--strict",
        "program.py",
    )
    done = python("-W", "ignore", *arguments, folder=tmp_path, **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
    assert "a number is read  program.py:7" not in done.stderr


USES_ITS_RESULTS = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
    averages = {name: value.detach() * 1 for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = []
    for step in range(4):
        before = [value.detach() * 1 for value in model.parameters()]
        model(torch.randn(8, 4, device="cuda")).square().mean().backward()
        for value in model.parameters():
            value.grad = value.grad / 2
            value.grad.data = value.grad.data.clamp(-1, 1)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.named_parameters():
            averages[name] = averages[name] * 0.9 + value.detach() * 0.1
        changes.append([(value.detach() - old).norm() for value, old in zip(model.parameters(), before)])
        with torch.no_grad():
            for value in model.parameters():
                value.data = value * 0.99
        torch.save({name: value * 0.5 for name, value in averages.items()}, "averages.pt")
        print([float((value * 2).sum()) for value in model.parameters()])
"""  # noqa: E501


@for_changes
def test_results_that_are_kept_or_read_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(USES_ITS_RESULTS))
    arguments = (
        "-m",
        "torchstrategy.testing.run",
        "--as-cuda",
        "--strict",
        "program.py",
    )
    done = python("-W", "ignore", *arguments, folder=tmp_path, **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
