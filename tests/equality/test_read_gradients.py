"""A gradient that a step reads is that of the whole batch.

It is, whoever has added to it, and so is what the step does with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import torchstrategy
from problems import assert_close, built, compare, data, deal, gradients, mse, sgd
from topologies import SIMULATED
from torchstrategy import RunOptions
from torchstrategy._turns.switch import IN_TURNS

# ---- parameters that only some replicas use


class Experts(nn.Module):
    """Each row goes to one expert, which it names.

    Most replicas have no gradient of some of them.
    """

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3, dtype=torch.float64)
        self.experts = nn.ModuleList(
            nn.Linear(3, 2, dtype=torch.float64) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        hidden, out = self.trunk(x).tanh(), x.new_zeros(len(x), 2)
        for name in names.unique().tolist():
            out = out.index_put(
                (names == name,), self.experts[name](hidden[names == name])
            )
        return out


def experts_loss(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0], batch[2]) - batch[1]).square().mean()


ROWS = [
    (*data(7, seed=3), torch.tensor([0, 0, 0, 1, 1, 2, 2])),
    (*data(7, seed=4), torch.tensor([3, 1, 3, 3, 0, 0, 0])),
    (*data(7, seed=5), torch.tensor([2, 2, 2, 2, 2, 2, 1])),
]


def _norms(model: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.norm() for p in model.parameters()]


def _scale_each(parameters: Any, factor: float) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _clip(model: Any, batch: Any) -> None:
    experts_loss(model, batch).backward()
    clip_grad_norm_(model.parameters(), 0.05)


def _clip_in_parts(model: Any, batch: Any) -> None:
    experts_loss(model, batch).backward()
    clip_grad_norm_(model.trunk.parameters(), 0.02)
    for expert in reversed(model.experts):
        clip_grad_norm_(expert.parameters(), 0.01)


def _clip_twice(model: Any, batch: Any) -> None:
    experts_loss(model, batch).backward()
    clip_grad_value_(model.parameters(), 0.01)
    clip_grad_norm_(model.parameters(), 0.015)
    _scale_each(
        model.parameters(),
        1 + float(sum(norm for norm in _norms(model) if norm is not None)),
    )


def _look_before(model: Any, batch: Any) -> None:
    _norms(model.trunk)
    _norms(model.experts[1])
    experts_loss(model, batch).backward()
    _scale_each(model.experts[0].parameters(), 0.5)
    _scale_each(model.experts.parameters(), 0.5)


def _two_losses(model: Any, batch: Any) -> None:
    loss = experts_loss(model, batch)
    model.trunk.weight.square().sum().backward()
    _scale_each(model.trunk.parameters(), 0.5)
    loss.backward()
    _scale_each(model.experts[3].parameters(), 0.5)
    _scale_each(model.experts[1].parameters(), 3)


def _read_one_again(model: Any, batch: Any) -> None:
    loss = experts_loss(model, batch)
    for expert in model.experts:
        first = expert.bias.grad
        assert first is None or first.isfinite().all()
        loss.backward(retain_graph=True)
        if expert.bias.grad is not None:
            expert.bias.grad.mul_(0.5)


def _micro_batches(model: Any, batch: Any) -> None:
    for _ in range(2):
        experts_loss(model, batch).backward()
        _scale_each(reversed(list(model.parameters())), 0.5)


def _zero_by_reading(model: Any, batch: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    experts_loss(model, batch).backward()
    _scale_each(reversed(list(model.experts.parameters())), 0.5)


def _not_all_run_backward(model: Any, batch: Any) -> None:
    chosen = batch[2] < 2
    if chosen.any():
        (
            experts_loss(model, [part[chosen] for part in batch])
            * chosen.sum()
            / len(chosen)
        ).backward()
    clip_grad_norm_(model.parameters(), 0.05)


# Replicas in turns cannot know in time that others have run a backward.
TOLD_TO_RUN_ONE = pytest.raises(
    RuntimeError, match=r"\(outputs\.sum\(\) \* 0\)\.backward\(\)"
)


EXPERTS = [
    _clip,
    _clip_in_parts,
    _clip_twice,
    _look_before,
    _two_losses,
    _read_one_again,
    _micro_batches,
    _zero_by_reading,
    _not_all_run_backward,
]


@pytest.mark.parametrize(
    "use", EXPERTS, ids=[use.__name__.strip("_") for use in EXPERTS]
)
@pytest.mark.parametrize(
    "clear", ["zero_grad first", "zero_grad(set_to_none=False) first"]
)
def test_a_read_meets_also_where_only_other_replicas_use_the_parameter(
    make, use, clear
):
    """It was refused: a replica without a gradient of its own took it for settled.

    It was what the replica read.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad(set_to_none=clear == "zero_grad first")
        use(model, batch)
        optimizer.step()

    is_told = IN_TURNS and use is _not_all_run_backward
    with TOLD_TO_RUN_ONE if is_told else nullcontext():
        compare(make, 3, step, build=Experts, batches=ROWS)


@pytest.mark.parametrize(
    "use",
    [use for use in EXPERTS if use is not _not_all_run_backward],
    ids=lambda use: use.__name__,
)
def test_so_it_does_where_the_step_clears_nothing_before(make, use):
    def clears_at_the_end(model: Any, optimizer: Any, batch: Any) -> None:
        use(model, batch)
        optimizer.step()
        model.zero_grad()

    def accumulates(model: Any, optimizer: Any, batch: Any) -> None:
        use(model, batch)

    compare(make, 2, clears_at_the_end, build=Experts, batches=ROWS)
    compare(
        make, 3, accumulates, build=Experts, batches=ROWS, after=lambda m, o: o.step()
    )


def test_a_replica_that_runs_no_backward_and_clears_nothing_is_told_what_to_write(make):
    """It may not know that others ran one.

    It was told to call no meeting depend on data, and not what to do.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        _not_all_run_backward(model, batch)
        optimizer.step()

    with TOLD_TO_RUN_ONE:
        compare(make, 3, step, build=Experts, batches=ROWS)


def test_a_replica_that_meets_at_another_read_is_told_that_it_missed_one(make):
    """The trunk was read where others met, and an expert where it met.

    Two reads were taken for the same.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.experts.zero_grad(set_to_none=False)
        _not_all_run_backward(model, batch)

    def accumulate(model: Any, optimizer: Any, batch: Any) -> None:
        experts_loss(model, batch).backward()

    strategy = make(3)
    (model, optimizer), _ = built(strategy, Experts, sgd)
    strategy.run(accumulate, args=(model, optimizer, deal(strategy, ROWS[0])))
    before = gradients(model)
    with TOLD_TO_RUN_ONE:
        strategy.run(step, args=(model, optimizer, deal(strategy, ROWS[2])))
    assert_close(
        gradients(model), before, "a run that fails leaves gradients as they were"
    )


# ---- what a step does to gradients, and reads again


def _own(model: Any, batch: Any, loss: Any) -> Any:
    parameters = list(model.parameters())
    return zip(
        parameters, torch.autograd.grad(loss(model, batch), parameters), strict=True
    )


def _assign(model: Any, batch: Any, loss: Any = mse) -> None:
    for p, g in _own(model, batch, loss):
        p.grad = g


def _add(model: Any, batch: Any, loss: Any = mse) -> None:
    for p, g in _own(model, batch, loss):
        p.grad = g if p.grad is None else p.grad + g


def _add_in_place(model: Any, batch: Any, loss: Any = mse) -> None:
    for p, g in _own(model, batch, loss):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.add_(g)


def _iadd(model: Any, batch: Any, loss: Any = mse) -> None:
    for p, g in _own(model, batch, loss):
        if p.grad is None:
            p.grad = g
        else:
            p.grad += g


def _decayed(model: Any, batch: Any, loss: Any = mse) -> None:
    for p, g in _own(model, batch, loss):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.mul_(0.9)
        p.grad.add_(g)


@contextmanager
def refused_in_turns() -> Iterator[None]:
    """A block that may be refused in turns, where a replica clips what it has assigned.

    Only `loss.backward()` makes a gradient of the whole batch at once.
    """
    try:
        yield
    except RuntimeError as error:
        if not IN_TURNS or "gradient of its own rows" not in str(error):
            raise


FILL = [_assign, _add, _add_in_place, _iadd, _decayed]


def _clip_norm(model: Any) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def _clip_value(model: Any) -> None:
    clip_grad_value_(model.parameters(), 0.02)


def _clip_by_hand(model: Any) -> None:
    norm = torch.stack([p.grad.detach().norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.detach().mul_(0.1 / (norm + 0.1))


def _clip_both_ways(model: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad.clamp(-0.05, 0.05)
    total = clip_grad_norm_(model.parameters(), 0.08)
    for p in model.parameters():
        p.grad *= 1 + total


@pytest.mark.parametrize("clear", ["to None", "to zeros", "by reading", "never"])
@pytest.mark.parametrize("fill", FILL, ids=[fill.__name__ for fill in FILL])
def test_gradients_that_a_step_puts_in_place_are_clipped_as_those_of_the_whole_batch(
    make, fill, clear
):
    """Each replica clipped its own gradient.

    A gradient that had been shown was taken for that of the whole batch.
    """
    # The last one does what the others do; on simulated devices each takes its time.
    clips = (
        [_clip_both_ways]
        if SIMULATED
        else [_clip_norm, _clip_value, _clip_by_hand, _clip_both_ways]
    )
    for backward in (False, True):

        def step(
            model: Any, optimizer: Any, batch: Any, clip: Any, backward: bool = backward
        ) -> None:
            if clear.startswith("to"):
                optimizer.zero_grad(set_to_none=clear == "to None")
            for p in model.parameters() if clear == "by reading" else ():
                if p.grad is not None:
                    p.grad.zero_()
            if backward:
                mse(model, batch).backward()
            fill(model, batch)
            clip(model)
            fill(model, batch)
            optimizer.step()

        for clip in clips:
            case = f"{clip.__name__}, backward: {backward}"
            with refused_in_turns():
                compare(
                    make,
                    3,
                    lambda m, o, b, clip=clip, step=step: step(m, o, b, clip),
                    case=case,
                    steps=2,
                )


@pytest.mark.parametrize("fill", FILL[:-1], ids=[fill.__name__ for fill in FILL[:-1]])
def test_so_they_are_under_a_sum(make, fill):
    """What replaced zeros was taken for a change of what they had replaced."""
    for zeros in (False, True):

        def step(model: Any, optimizer: Any, batch: Any, zeros: bool = zeros) -> None:
            optimizer.zero_grad(set_to_none=not zeros)
            fill(
                model,
                batch,
                lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / 7,
            )
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        with refused_in_turns():
            compare(
                make,
                3,
                step,
                options=RunOptions(gradient_reduction="sum"),
                case=f"zeros: {zeros}",
            )


@pytest.mark.parametrize("write", ["add_", "copy_"])
def test_what_torch_does_not_count_is_seen_in_host_memory(write):
    """Through `.data` each replica put its own there, unnoticed, and clipped that.

    No read noticed.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for p, g in _own(model, batch, mse):
            getattr(p.grad.data, write)(g)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for make in (torchstrategy.CentralStorageStrategy, torchstrategy.MirroredStrategy):
        compare(lambda n, make=make: make(["cpu"] * n), 3, step)


def test_a_gradient_may_lie_in_memory_column_by_column(make):
    """A random program: that of an orthogonal weight does.

    The step that put it there could not read it again.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for p, g in _own(model, batch, mse):
            p.grad = g.t().contiguous().t() if g.dim() == 2 else g
        clip_grad_norm_(model.parameters(), 0.1)
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    with refused_in_turns():
        compare(make, 3, step)


def test_a_gradient_that_was_read_is_the_one_that_is_read_after_a_meeting(make):
    """A step may keep what it has read.

    In plain PyTorch it is the gradient, whatever is done to it meanwhile.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        held = [p.grad for p in model.parameters()]
        for gradient in held:
            gradient.mul_(0.5)
        clip_grad_norm_(model.parameters(), 0.05)
        for gradient in held:
            gradient.add_(0.01)
        optimizer.step()

    compare(make, 3, step)


def test_a_gradient_that_was_read_is_so_after_a_merge_function_and_an_update(make):
    """A tensor that the step kept was written, and the write was on nothing."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        held = [p.grad for p in model.parameters()]
        context = torchstrategy.get_replica_context()
        context.merge_call(lambda _: clip_grad_norm_(model.parameters(), 0.05))
        for gradient in held:
            gradient.mul_(2)
        optimizer.step()
        for gradient in held:
            gradient.mul_(0.5)

    compare(make, 3, step)


def test_what_all_replicas_do_alike_is_done_once(make):
    """Clipping, scaling and reading again for a log.

    Nothing is averaged or reduced a second time.
    """
    met: list[str] = []

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        clip_grad_norm_(model.parameters(), 0.05)
        for p in model.parameters():
            p.grad = p.grad * 3
        met.extend(str(float(p.grad.norm())) for p in model.parameters())
        optimizer.step()

    compare(make, 3, step)
    assert len(met) == 4 * 3 * 4
    assert len({f"{float(norm):.9f}" for norm in met}) <= 4 * 3


@pytest.mark.parametrize("clip", ["by data", "not at all"])
def test_a_sparse_gradient_that_is_zeroed_stays_sparse(make, clip):
    """A random program: zeros were dense, which `SparseAdam` refuses.

    A write through `.data` reached them.
    """

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x.sum(1) > 0).long())

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        mse(model, batch).backward()
        assert model.table.weight.grad.layout is torch.sparse_coo
        if clip == "by data":
            model.table.weight.grad.data.mul_(0.5)
        optimizer.step()

    compare(make, 3, step, build=Rows)
