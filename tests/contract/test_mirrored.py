"""MirroredStrategy: what it has of its own.

All that it shares with others is tested where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchstrategy
from conditions import for_releases, needs_simulated_devices
from problems import close, data, deal, mse, replica_id
from topologies import central, compute_devices, mirrored, mirrored_with_copies
from torchstrategy._turns.switch import IN_TURNS
from torchstrategy.testing import assert_replicas_agree, count_traffic

F64: dict[str, Any] = {"dtype": torch.float64}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8, **F64),
        nn.BatchNorm1d(8, **F64),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(8, 2, **F64),
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_one_by_one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam_of_a_tensor_rate": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01), foreach=False
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, maximize=True),
    "sgd": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


class _Drawing(torch.optim.SGD):
    """A user's own, which draws random numbers: a copy of it would draw others."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=0.01)


SENT = {
    "users_own": lambda p: _Drawing(p, lr=0.1),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def made(
    new: Any, replicas: int = 3, strategy: Any = None
) -> tuple[torchstrategy.Strategy, Any, Any]:
    strategy = strategy or mirrored_with_copies(replicas)
    torch.manual_seed(0)
    with strategy.scope():
        model = net()
        optimizer = new(model.parameters())
    return strategy, model, optimizer


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *SENT])
def test_all_replicas_stay_equal_bit_by_bit(name: str, inside: bool) -> None:
    strategy, model, optimizer = made({**OPTIMIZERS, **SENT}[name], 4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if inside:
            optimizer.step()

    for k in range(4):
        # Of 6 rows, one has none.
        strategy.run(step, args=(deal(strategy, data((8, 6)[k % 2], seed=k)),))
        if not inside:
            optimizer.step()
    assert_replicas_agree(strategy, model, optimizer)


@for_releases
@pytest.mark.slow
def test_fifty_steps_with_dropout_and_adam_leave_all_replicas_equal_bit_by_bit() -> (
    None
):
    strategy, model, optimizer = made(OPTIMIZERS["adam"], 4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for k in range(50):
        strategy.run(step, args=(deal(strategy, data(9, seed=k)),))
        scheduler.step()
    assert_replicas_agree(strategy, model, optimizer)


def test_each_replica_has_parameters_and_state_of_its_own() -> None:
    strategy, model, optimizer = made(OPTIMIZERS["adam"])

    def step(batch: Any) -> Any:
        mse(model, batch).backward()
        optimizer.step()
        weight = model[0].weight
        return (
            weight.data_ptr(),
            optimizer.state[weight]["exp_avg"].data_ptr(),
            weight.device == batch[0].device,
        )

    weights, averages, are_here = strategy.run(step, args=(deal(strategy, data(9)),))
    for pointers in () if IN_TURNS else (weights, averages):
        assert len(set(strategy.experimental_local_results(pointers))) == 3
    assert strategy.experimental_local_results(weights)[0] == model[0].weight.data_ptr()
    assert all(strategy.experimental_local_results(are_here))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_no_parameter_is_sent_when_all_update_their_own(inside: bool) -> None:
    strategy, model, optimizer = made(OPTIMIZERS["adam"])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if inside:
            optimizer.step()

    batch = deal(strategy, data(9))
    for _ in range(2):
        strategy.run(step, args=(batch,))
        if not inside:
            optimizer.step()
    before = [p._version for p in _copies(strategy, model)]
    strategy.run(lambda: None)
    assert [p._version for p in _copies(strategy, model)] == before
    with torch.no_grad():
        model[0].weight.mul_(2)
    strategy.run(lambda: None)
    assert (
        sum(
            p._version != b
            for p, b in zip(_copies(strategy, model), before, strict=True)
        )
        == 1
    )


def _copies(strategy: torchstrategy.Strategy, model: nn.Module) -> list[torch.Tensor]:
    """The parameters of replica 1."""
    found: list[torch.Tensor] = []
    strategy.run(
        lambda: found.extend(model.parameters()) if replica_id() == 1 else None
    )
    return found


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "a rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "a weight": lambda model, optimizer: nn.init.ones_(model[0].weight),
    "the state in place": lambda model, optimizer: optimizer.state[model[0].weight][
        "exp_avg"
    ].mul_(2),
    "the state of all": lambda model, optimizer: optimizer.state.clear(),
    "both, loaded": lambda model, optimizer: (
        model.load_state_dict(
            {name: value * 0.5 for name, value in model.state_dict().items()}
        ),
        optimizer.load_state_dict(optimizer.state_dict()),
    ),
    "a step outside": lambda model, optimizer: optimizer.step(),
    "a group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(2))]}
    ),
    "frozen": lambda model, optimizer: model[4].requires_grad_(False),
    "another layer": lambda model, optimizer: model.__setitem__(3, nn.ReLU()),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_what_is_changed_between_steps_reaches_all_replicas(
    what: str, inside: bool
) -> None:
    (strategy, model, optimizer), (other, twin, theirs) = (
        made(OPTIMIZERS["adam"]),
        made(OPTIMIZERS["adam"], 3, central(3)),
    )

    def stepped(model: Any, optimizer: Any) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            mse(model, batch).backward()
            if inside:
                optimizer.step()

        return step

    for k in range(4):
        if k == 2:
            CHANGES[what](model, optimizer)
            CHANGES[what](twin, theirs)
        for each, step, its in (
            (strategy, stepped(model, optimizer), optimizer),
            (other, stepped(twin, theirs), theirs),
        ):
            torch.manual_seed(k)
            each.run(step, args=(deal(each, data(9, seed=k)),))
            if not inside:
                its.step()
        assert_replicas_agree(strategy, model, optimizer)
    for mine, wanted in zip(
        model.state_dict().values(), twin.state_dict().values(), strict=True
    ):
        close(mine, wanted)


def test_a_scaler_that_skips_a_step_skips_it_in_all_replicas() -> None:
    strategy, model, optimizer = made(OPTIMIZERS["adam"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(batch: Any, is_bad: bool) -> None:
        optimizer.zero_grad()
        loss = mse(model, batch) * (
            float("inf") if is_bad and replica_id() == 1 else 1.0
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for is_bad in (False, True, False):
        strategy.run(step, args=(deal(strategy, data(9)), is_bad))
        assert_replicas_agree(strategy, model, optimizer)
    assert (
        scaler.get_scale() == 2.0 and int(optimizer.state[model[0].weight]["step"]) == 2
    )


def test_a_step_that_fails_leaves_all_replicas_as_they_were() -> None:
    strategy, model, optimizer = made(OPTIMIZERS["adam"])

    def step(batch: Any, fails: bool) -> None:
        mse(model, batch).backward()
        if fails and replica_id() == 2:
            raise KeyError("broken")
        optimizer.step()

    batch = deal(strategy, data(9))
    strategy.run(step, args=(batch, False))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError, match="broken"):
        strategy.run(step, args=(batch, True))
    assert all(
        torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)
    )
    strategy.run(step, args=(batch, False))
    assert_replicas_agree(strategy, model, optimizer)


def test_parameters_are_on_the_devices_of_all_replicas() -> None:
    strategy = mirrored(3)
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert len(strategy.extended.parameter_devices) == 3


@needs_simulated_devices  # replicas on one device send nothing
def test_what_is_sent_is_gradients_and_no_parameters() -> None:
    strategy, model, optimizer = made(OPTIMIZERS["adam"])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    batch = deal(strategy, data(9))
    strategy.run(step, args=(batch,))
    with count_traffic() as traffic:
        strategy.run(step, args=(batch,))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    # To the first replica, and back to two others.
    assert size * 4 <= traffic.bytes <= size * 4 + 8 * buffers + 64


# ---- how gradients get to all replicas


class _Counting(torchstrategy.CrossDeviceOps):
    """A user's own, in host memory: the public methods are all that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced = 0

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.reduced += 1
        total = sum(value.cpu() for value in per_replica_value.values)
        if reduce_op is torchstrategy.ReduceOp.MEAN:
            total = total / len(per_replica_value.values)
        return self.broadcast(total, destinations)


OPS: dict[str, Callable[[], Any]] = {
    "one device": torchstrategy.ReductionToOneDevice,
    "another device": lambda: torchstrategy.ReductionToOneDevice("cpu"),
    "hierarchical": lambda: torchstrategy.HierarchicalCopyAllReduce(num_packs=2),
    "users own": _Counting,
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_go_the_way_that_one_says(name: str, inside: bool) -> None:
    ops = OPS[name]()
    devices = compute_devices(3)
    strategy, model, optimizer = made(
        OPTIMIZERS["adam"],
        strategy=torchstrategy.MirroredStrategy(devices, cross_device_ops=ops),
    )
    other, twin, theirs = made(OPTIMIZERS["adam"], strategy=central(3))

    def stepped(model: Any, optimizer: Any) -> Callable[[Any, int], Any]:
        def step(batch: Any, k: int) -> Any:
            if k % 2 == 0:  # gradients of two batches add up, and are clipped
                optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            if k % 3 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if inside:
                optimizer.step()
            return loss.detach()

        return step

    for k in range(5):
        losses = []
        for each, step, its in (
            (strategy, stepped(model, optimizer), optimizer),
            (other, stepped(twin, theirs), theirs),
        ):
            torch.manual_seed(k)
            loss = each.run(step, args=(deal(each, data((9, 6)[k % 2], seed=k)), k))
            losses.append(each.reduce("mean", loss, axis=None))
            if not inside:
                its.step()
        close(*losses)
        assert_replicas_agree(strategy, model, optimizer)
        for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            close(mine.grad, wanted.grad)
    for mine, wanted in zip(
        model.state_dict().values(), twin.state_dict().values(), strict=True
    ):
        close(mine, wanted)
    assert name != "users own" or ops.reduced > 0


def test_what_cannot_bring_gradients_together_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"cross_device_ops is a "
            r"torchstrategy\.CrossDeviceOps or None; got 'nccl'"
        ),
    ):
        torchstrategy.MirroredStrategy(["cpu", "cpu"], "nccl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NCCL"):
        torchstrategy.MirroredStrategy(["cpu", "cpu"], torchstrategy.NcclAllReduce())
