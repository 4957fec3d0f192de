"""Writes that torch does not count reach every replica.

They go through `.data`, by NumPy, by optimizers of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy
from topologies import central, compute_devices, mirrored, mirrored_with_copies
from torchstrategy.testing import assert_replicas_agree

F64 = {"dtype": torch.float64}
ROWS = 5


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, **F64), nn.Tanh(), nn.Linear(4, 2, **F64))
    model[0].register_buffer("scale", torch.ones((), **F64))
    model[0].constant = torch.ones(2, **F64)
    model.register_forward_hook(
        lambda m, inputs, output: output * m[0].scale * m[0].constant
    )
    return model


def batches(count: int) -> list[torch.Tensor]:
    return list(
        torch.randn(count, ROWS, 3, generator=torch.Generator().manual_seed(1), **F64)
    )


def gradients(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()


def train(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    gradients(model, optimizer, x)
    optimizer.step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check(
    strategy: torchstrategy.Strategy,
    between: Callable[[Any, Any, int], object],
    step: Callable[..., None] = train,
    optimizer: Callable[[Any], Any] = sgd,
) -> None:
    """Trains in replicas and plainly; after each step, all replicas evaluate.

    Before that, `between` does what the user does.
    """
    plain = net()
    plain_updates = optimizer(plain.parameters())
    with strategy.scope():
        model = net()
        updates = optimizer(model.parameters())
    dealt = strategy.experimental_distribute_dataset(batches(4))
    for k, (x, batch) in enumerate(zip(batches(4), dealt, strict=True)):
        step(plain, plain_updates, x)
        strategy.run(lambda x: step(model, updates, x), args=(batch,))
        between(plain, plain_updates, k)
        between(model, updates, k)
        with torch.no_grad():
            seen = strategy.gather(
                strategy.run(lambda x: model(x), args=(batch,)), axis=0
            )
            torch.testing.assert_close(
                seen.cpu(),
                plain(x),
                rtol=1e-10,
                atol=1e-12,
                msg=lambda m, k=k: f"step {k}: {m}",
            )
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            ours.cpu(),
            theirs,
            rtol=1e-10,
            atol=1e-12,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    assert_replicas_agree(strategy, model, updates)


STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(2),
    "mirrored": lambda: mirrored(3),
    "copies in one memory": lambda: mirrored_with_copies(2),
    "parameters on the CPU": lambda: torchstrategy.CentralStorageStrategy(
        compute_devices(2), "cpu"
    ),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


def by_numpy(tensor: torch.Tensor) -> None:
    """Memory that NumPy cannot reach is written through `.data`."""
    if tensor.is_cpu:
        np.asarray(tensor.detach()).__imul__(0.5)
    else:
        tensor.data.mul_(0.5)


def of_storage(tensor: torch.Tensor) -> None:
    if tensor.is_cpu:
        torch.empty(0, **F64).set_(tensor.untyped_storage()).mul_(0.5)
    else:
        tensor.data.mul_(0.5)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda t: t.data.mul_(0.5),
    "a part of data": lambda t: t.data.view(-1)[:1].fill_(0.25),
    "data of a view": lambda t: t.detach().view(-1).data.add_(0.125),
    "NumPy": by_numpy,
    "another tensor of the storage": of_storage,
    "foreach": lambda t: torch._foreach_mul_([t.data], 0.5),
}
THINGS: dict[str, Callable[[Any, Any], list[torch.Tensor]]] = {
    "parameters": lambda m, o: list(m.parameters()),
    "a buffer": lambda m, o: [m[0].scale],
    "a tensor in an attribute": lambda m, o: [m[0].constant],
    "the state of the optimizer": lambda m, o: [
        state["momentum_buffer"] for state in o.state.values()
    ],
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_between_runs_reaches_every_replica(
    strategy: torchstrategy.Strategy, how: str, thing: str
) -> None:
    """Such writes reached no copy with memory of its own.

    Replicas went on with old values, and drifted apart.
    """
    check(
        strategy,
        lambda m, o, k: (
            [WRITES[how](t) for t in THINGS[thing](m, o)] if k == 1 else None
        ),
    )


def test_a_view_of_the_data_that_is_kept_may_be_written_in_any_run(
    strategy: torchstrategy.Strategy,
) -> None:
    """An average is written into the weights after each step, by views made once."""
    views: dict[int, list[torch.Tensor]] = {}

    def between(model: Any, optimizer: Any, k: int) -> None:
        for view in views.setdefault(id(model), [p.data for p in model.parameters()]):
            view.mul_(0.9)

    check(strategy, between)


def test_a_view_of_the_data_may_be_older_than_the_first_run(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model = net()
    views = [p.data for p in model.parameters()]
    (batch,) = strategy.experimental_distribute_dataset(batches(1))
    for factor in (1.0, 0.5, 0.25):
        for view in views:
            view.mul_(factor)
        with torch.no_grad():
            seen = strategy.gather(
                strategy.run(lambda x: model(x), args=(batch,)), axis=0
            )
            torch.testing.assert_close(
                seen.cpu(), model(batches(1)[0].to(model[0].weight.device)).cpu()
            )


class ByData(torch.optim.Optimizer):
    """As optimizers of many packages are written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("average", torch.zeros_like(p.data))
            average.data.mul_(0.9).add_(p.grad.data, alpha=0.1)
            p.data.add_(average, alpha=-0.1)


@pytest.mark.parametrize("inside", [True, False], ids=["in the step", "after the run"])
def test_an_optimizer_that_writes_data_updates_every_replica(
    strategy: torchstrategy.Strategy, inside: bool
) -> None:
    if inside:
        check(strategy, lambda m, o, k: None, optimizer=ByData)
    else:
        check(strategy, lambda m, o, k: o.step(), step=gradients, optimizer=ByData)


@pytest.mark.parametrize(
    "ops",
    [None, torchstrategy.HierarchicalCopyAllReduce, torchstrategy.ReductionToOneDevice],
)
def test_gradients_written_after_the_run_are_those_that_every_replica_updates_with(
    strategy: torchstrategy.Strategy, ops: Any
) -> None:
    """Replicas updated with gradients that the all-reduce had left, and drifted.

    It had left them with the replicas.
    """
    if ops is not None:
        strategy = torchstrategy.MirroredStrategy(
            strategy.extended.worker_devices, ops()
        )

    def between(model: Any, optimizer: Any, k: int) -> None:
        for p in model.parameters():
            p.grad.data.clamp_(-0.01, 0.01)
        optimizer.step()

    check(strategy, between, step=gradients)


@pytest.mark.parametrize(
    "ops",
    [None, torchstrategy.HierarchicalCopyAllReduce, torchstrategy.ReductionToOneDevice],
)
def test_a_scaler_unscales_what_every_replica_updates_with(
    strategy: torchstrategy.Strategy, ops: Any
) -> None:
    """The kernel that unscales counts no version.

    All replicas but the first updated with scaled gradients.
    """
    if ops is not None:
        strategy = torchstrategy.MirroredStrategy(
            strategy.extended.worker_devices, ops()
        )
    device = strategy.extended.worker_devices[0].type

    plain = net()
    plain_updates = sgd(plain.parameters())
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with strategy.scope():
        model = net()
        updates = sgd(model.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=8.0)

    def run(model: Any, optimizer: Any, scaler: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for x, batch in zip(
        batches(3), strategy.experimental_distribute_dataset(batches(3)), strict=True
    ):
        run(plain, plain_updates, plain_scaler, x)
        strategy.run(lambda x: run(model, updates, scaler, x), args=(batch,))
    torch.testing.assert_close(
        model[0].weight.cpu(), plain[0].weight, rtol=1e-10, atol=1e-12
    )
    assert_replicas_agree(strategy, model, updates)


class Codebook(nn.Module):
    """Two tensors of which `write` makes others in each forward."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, **F64))
        self.register_buffer("codes", torch.zeros(2, **F64))
        self.seen = torch.zeros(1, **F64)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return x * self.weight


def writes_through_data(model: Any) -> None:
    model.codes.data.add_(1)
    model.seen.data.add_(2)


def gives_other_memory(model: Any) -> None:
    """An assignment to `.data` was not seen.

    It counts no version and writes nothing on the memory that was there.
    """
    model.codes.data = model.codes.data + 1
    model.seen.data = model.seen.data + 2


@pytest.mark.parametrize(
    ("write", "count", "expected"),
    [
        (writes_through_data, 2, ([2.0, 2.0], [4.0])),
        (gives_other_memory, 3, ([3.0, 3.0], [6.0])),
    ],
)
def test_what_forward_writes_through_data_is_that_of_the_model(
    strategy: torchstrategy.Strategy,
    write: Callable[[Any], None],
    count: int,
    expected: tuple[list[float], ...],
) -> None:
    with strategy.scope():
        model = Codebook(write)
    for batch in strategy.experimental_distribute_dataset(batches(count)):
        strategy.run(lambda x: model(x).detach(), args=(batch,))
    assert (model.codes.tolist(), model.seen.tolist()) == expected
    assert_replicas_agree(strategy, model)


def test_parameters_may_be_swapped_between_runs(
    strategy: torchstrategy.Strategy,
) -> None:
    """torch refuses to swap a tensor with a weak reference.

    There was one to each parameter.
    """
    check(
        strategy,
        lambda m, o, k: torch.utils.swap_tensors(
            m[0].weight, nn.Parameter(m[0].weight.detach() * 0.5)
        ),
    )


def test_old_fashioned_clearing_of_gradients_works_after_packed_sums() -> None:
    """`p.grad.detach_()` refuses views, and a gradient was a view of its pack.

    It came in that pack.
    """
    strategy = torchstrategy.MirroredStrategy(
        ["cpu"] * 2, torchstrategy.HierarchicalCopyAllReduce()
    )

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def between(model: Any, optimizer: Any, k: int) -> None:
        optimizer.step()
        for p in model.parameters():
            p.grad.detach_()
            p.grad.zero_()

    check(strategy, between, step=step)


# What is looked at
