"""Lints of programs that go on from a checkpoint.

Right twins, and programs that only take weights, are left alone.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from linted import findings_of, names_of
from torchstrategy.testing import run_ranks

RANKS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    for _step in range(first, last):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def saved(
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam, **more: Any
) -> io.BytesIO:
    """A checkpoint of an earlier job, which made 20 steps."""
    model = make_model()
    optimizer = make(model)
    fit(model, optimizer, 0, 20)
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, file
    )
    file.seek(0)
    return file


# The state of the optimizer


def resume(
    file: io.BytesIO, restores: bool
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = make_model()
    optimizer = adam(model)
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    if restores:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, checkpoint


def go_on_by_steps(file: io.BytesIO, restores: bool) -> None:
    model, optimizer, checkpoint = resume(file, restores)
    fit(model, optimizer, checkpoint["step"], 24)


def go_on_by_epochs(file: io.BytesIO, restores: bool) -> None:
    model, optimizer, checkpoint = resume(file, restores)
    for _epoch in range(checkpoint["epoch"] + 1, 6):
        fit(model, optimizer, 0, 3)


class Trainer:
    """Counts in an attribute, and not in a variable."""

    def __init__(self, file: io.BytesIO, restores: bool) -> None:
        self.model, self.optimizer, checkpoint = resume(file, restores)
        self.iteration = checkpoint["progress"]["iteration"]

    def train(self) -> None:
        while self.iteration < 24:
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
            self.iteration += 1


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize(
    ("program", "more", "words"),
    [
        (go_on_by_steps, {"step": 20}, "its `step` 20: `_step` was 20"),
        (go_on_by_epochs, {"epoch": 3}, "its `epoch` 3: `_epoch` was 4"),
        (
            lambda file, restores: Trainer(file, restores).train(),
            {"progress": {"iteration": 20}},
            "its `iteration` 20: `iteration` was 20",
        ),
    ],
    ids=["steps", "epochs", "attribute"],
)
def test_training_that_goes_on_without_the_state_of_its_optimizer(
    program: Callable[[io.BytesIO, bool], None],
    more: dict[str, Any],
    words: str,
    restores: bool,
) -> None:
    file = saved(**more)
    found = findings_of(lambda: program(file, restores))
    assert [finding.name for finding in found] == (
        [] if restores else ["optimizer-not-restored"]
    )
    for finding in found:
        assert (
            words in finding.says
            and "The Adam has made that step with an empty state." in finding.says
        )
        assert (
            finding.write == "Call `optimizer.load_state_dict(...)` before you train."
            and len(finding.lines) == 3
        )


def test_a_checkpoint_without_the_state_of_an_optimizer() -> None:
    file = io.BytesIO()
    torch.save({"model": make_model().state_dict(), "step": 20}, file)
    file.seek(0)
    (finding,) = findings_of(lambda: go_on_by_steps(file, restores=False))
    assert "The checkpoint has no state for it." in finding.says
    assert finding.write.startswith(
        "Save `optimizer.state_dict()` in the checkpoint, and call "
    )


def test_weights_that_are_trained_for_something_else_are_left_alone() -> None:
    def program(file: io.BytesIO) -> None:
        model, optimizer, checkpoint = resume(file, restores=False)
        print(f"pretrained for {checkpoint['epoch']} epochs")
        for _epoch in range(1, 4):
            fit(model, optimizer, 0, 6)

    file = saved(epoch=3, step=20, config={"batch_size": 6, "epochs": 3})
    assert names_of(lambda: program(file)) == []


def test_an_optimizer_of_another_kind_is_left_alone() -> None:
    file = saved(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step=20
    )
    assert names_of(lambda: go_on_by_steps(file, restores=False)) == []


def test_an_optimizer_that_needs_no_state_is_left_alone() -> None:
    def program(file: io.BytesIO) -> None:
        model, _, checkpoint = resume(file, restores=False)
        fit(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint["step"], 24)

    file = saved(step=20)
    assert names_of(lambda: program(file)) == []


def test_a_new_head_is_left_alone() -> None:
    def program(file: io.BytesIO) -> None:
        body, _, checkpoint = resume(file, restores=False)
        model = nn.Sequential(body, nn.Linear(1, 1))
        fit(model, adam(model), checkpoint["step"], 24)

    file = saved(step=20)
    assert names_of(lambda: program(file)) == []


def test_the_best_weights_of_the_same_training_are_left_alone() -> None:
    def program() -> None:
        model = make_model()
        optimizer = adam(model)
        fit(model, optimizer, 0, 20)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "step": 20}, file)
        file.seek(0)
        model.load_state_dict(torch.load(file)["model"])
        fit(model, adam(model), 20, 24)  # a second stage begins with a new optimizer

    assert names_of(program) == []


def test_an_evaluation_of_a_checkpoint_is_left_alone() -> None:
    def program(file: io.BytesIO) -> None:
        model, _, _ = resume(file, restores=False)
        with torch.no_grad():
            model(torch.randn(6, 4))

    file = saved(step=20)
    assert names_of(lambda: program(file)) == []


# Epochs


def train_epochs(
    file: io.BytesIO,
    first: Callable[[int], int],
    restores: bool = True,
    sets_epoch_before: bool = False,
) -> None:
    dist.init_process_group("gloo")
    model, optimizer, checkpoint = resume(io.BytesIO(file.getvalue()), restores)
    wrapped = DistributedDataParallel(model)
    data = TensorDataset(torch.randn(32, 4))
    sampler = DistributedSampler(data)
    loader, begin = (
        DataLoader(data, batch_size=4, sampler=sampler),
        first(checkpoint.get("epoch", 0)),
    )
    if sets_epoch_before:
        sampler.set_epoch(0)
        for _ in loader:  # looks at the data once
            pass
    for epoch in range(begin, begin + 2):
        sampler.set_epoch(epoch)
        for (rows,) in loader:
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (lambda epoch: 0, ["epoch-again"]),
        (lambda epoch: epoch - 1, ["epoch-again"]),
        (lambda epoch: epoch, []),
        (lambda epoch: epoch + 1, []),
    ],
    ids=["zero", "one before", "the same", "the next"],
)
def test_the_first_epoch_after_a_checkpoint(
    first: Callable[[int], int], expected: list[str]
) -> None:
    file = saved(epoch=3)
    found = findings_of(
        lambda: run_ranks(lambda rank: train_epochs(file, first), RANKS)
    )
    assert [finding.name for finding in found] == expected
    for finding in found:
        orders = (
            "the orders of epochs 0 to 2 come"
            if first(3) == 0
            else "the order of epoch 2 comes"
        )
        assert (
            "`epoch` 3 (test_lints_of_checkpoints.py:" in finding.says
            and orders in finding.says
        )


def test_epochs_of_weights_that_are_trained_for_something_else_are_left_alone() -> None:
    file = saved(epoch=30)
    assert (
        names_of(
            lambda: run_ranks(
                lambda rank: train_epochs(file, lambda _: 0, restores=False), RANKS
            )
        )
        == []
    )


def test_a_pass_without_training_is_left_alone() -> None:
    file = saved(epoch=3)

    def program(rank: int) -> Any:
        return train_epochs(file, lambda epoch: epoch, sets_epoch_before=True)

    assert names_of(lambda: run_ranks(program, RANKS)) == []


@pytest.mark.parametrize(
    "more",
    [
        {"scheduler": {"last_epoch": 20, "_step_count": 21}},
        {"plateau": {"last_epoch": 20, "num_bad_epochs": 1}},
        {"epoch": 0, "best": {"epoch": 20}},
        {"history": [{"epoch": 20}]},
        {"epoch": True},
    ],
    ids=str,
)
def test_other_numbers_are_no_epoch_of_the_checkpoint(more: dict[str, Any]) -> None:
    file = saved(**more)
    assert (
        names_of(lambda: run_ranks(lambda rank: train_epochs(file, lambda _: 0), RANKS))
        == []
    )


# States that are kept


def keep(take: Callable[[nn.Module], Any], between: int = 3) -> None:
    """A state is taken after three steps, and loaded after some more."""
    model = make_model()
    optimizer = adam(model)
    fit(model, optimizer, 0, 3)
    state = take(model)
    fit(model, optimizer, 3, 3 + between)
    model.load_state_dict(state)


@pytest.mark.parametrize(
    "take", [lambda model: model.state_dict(), lambda model: dict(model.state_dict())]
)
def test_a_state_that_has_followed_the_steps(take: Callable[[nn.Module], Any]) -> None:
    (finding,) = findings_of(lambda: keep(take))
    assert finding.name == "state-is-the-weights" and len(finding.lines) == 2
    assert (
        "the 3 steps since then" in finding.says and "all 4 parameters" in finding.says
    )


def test_a_state_that_is_loaded_again_at_once_is_left_alone() -> None:
    assert names_of(lambda: keep(lambda model: model.state_dict(), between=0)) == []


def test_a_state_with_other_tensors_is_left_alone() -> None:
    def take(model: nn.Module) -> dict[str, Any]:
        state = model.state_dict()
        return {**state, "0.weight": torch.zeros_like(state["0.weight"])}

    assert names_of(lambda: keep(take)) == []


@pytest.mark.parametrize(
    "take",
    [
        lambda model: copy.deepcopy(model.state_dict()),
        lambda model: {
            name: value.clone() for name, value in model.state_dict().items()
        },
        lambda model: copy.deepcopy(model).state_dict(),
    ],
)
def test_a_copy_of_a_state_is_left_alone(take: Callable[[nn.Module], Any]) -> None:
    assert names_of(lambda: keep(take)) == []


# Silence
