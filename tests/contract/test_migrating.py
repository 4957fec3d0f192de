"""What people from torch.nn.DataParallel rely on, if no other test says it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchstrategy
from conditions import for_changes
from problems import assert_close, close, data, deal, mlp, parameters, sgd
from topologies import central, compute_devices

FIRST = compute_devices(1)[0]


def drop_in(module: nn.Module, replicas: int = 3) -> torchstrategy.DataParallel:
    return torchstrategy.DataParallel(module.to(FIRST), compute_devices(replicas))


# Running statistics


@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_running_statistics_are_those_of_all_replicas_or_as_before_of_the_first(
    aggregation: str, rows: int
) -> None:
    strategy = central(2, buffer_aggregation=aggregation)
    norm = strategy.distribute_module(nn.BatchNorm1d(3, dtype=torch.float64))
    x, _ = data(rows)
    strategy.run(norm, args=(deal(strategy, x),))
    pieces = x.chunk(2) if aggregation == "mean" else x.chunk(2)[:1]
    shares = [len(piece) / sum(map(len, pieces)) for piece in pieces]
    mean, variance = (
        sum(
            share * statistic(piece)
            for share, piece in zip(shares, pieces, strict=True)
        )
        for statistic in (lambda piece: piece.mean(0), lambda piece: piece.var(0))
    )
    close(norm.running_mean, 0.1 * mean)
    close(norm.running_var, 0.9 + 0.1 * variance)
    assert norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("aggregation", ["sum", "MEAN", None, 1, ["mean"]], ids=str)
def test_an_aggregation_of_buffers_that_is_none_is_refused(aggregation: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"buffer_aggregation=.* is neither 'mean' nor 'only_first_replica'",
    ):
        torchstrategy.CentralStorageStrategy(
            ["cpu", "cpu"], buffer_aggregation=aggregation
        )


# What a script may still have in it


def in_scope(module: Callable[[], nn.Module]) -> Callable[[], object]:
    strategy = central(2)
    with strategy.scope():
        model = module()
    return lambda: strategy.run(model, args=(torch.ones(2, 2),))


def distributed(module: Callable[[], nn.Module]) -> Callable[[], object]:
    strategy = central(2)
    model = strategy.distribute_module(module())
    return lambda: strategy.run(model, args=(torch.ones(2, 2),))


def in_data_parallel(module: Callable[[], nn.Module]) -> Callable[[], object]:
    return lambda: drop_in(module())(torch.ones(2, 2))


@pytest.mark.parametrize("given_to", [in_scope, distributed, in_data_parallel])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "DataParallel"),
        (
            lambda: nn.Sequential(nn.Tanh(), nn.DataParallel(nn.Linear(2, 2))),
            r"Sequential\.1",
        ),
    ],
    ids=["whole", "part"],
)
def test_a_data_parallel_of_torchs_in_a_model_is_refused_by_name(
    given_to: Any, module: Any, name: str
) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^{name} is a torch.nn.DataParallel.* Use the module that it wraps",
    ):
        given_to(module)()


def test_in_a_step_a_type_of_device_means_that_of_the_replica() -> None:
    strategy = central(3)
    model = strategy.distribute_module(nn.Linear(2, 2))

    def step() -> torch.device:
        rows = torch.ones(2, 2, device="cpu").to(FIRST.type)
        model(rows).sum().backward()
        return rows.device

    devices = strategy.experimental_local_results(strategy.run(step))
    assert [device.index for device in devices] == [
        device.index for device in compute_devices(3)
    ]


# Few rows, and keyword arguments


@for_changes
@given(
    rows=st.integers(0, 9),
    replicas=st.integers(1, 4),
    names=st.sets(st.sampled_from("abc")),
)
def test_keyword_arguments_are_given_to_those_who_have_rows(
    rows: int, replicas: int, names: set[str]
) -> None:
    class Sum(nn.Module):
        def forward(
            self, x: torch.Tensor, factor: float = 1.0, **terms: torch.Tensor
        ) -> torch.Tensor:
            assert not rows or len(x) > 0
            return factor * sum(terms.values(), x)

    x, _ = data(rows)
    terms = {name: x * (index + 2) for index, name in enumerate(sorted(names))}
    close(
        drop_in(Sum(), replicas)(x, factor=2.0, **terms), Sum()(x, factor=2.0, **terms)
    )
    close(
        drop_in(Sum(), replicas)(x=x, factor=2.0, **terms),
        Sum()(x, factor=2.0, **terms),
    )


# What a replica sees, and what it costs


def test_a_drop_in_counts_the_operations_of_all_replicas_forward_and_backward() -> None:
    model, (x, _) = drop_in(mlp()), data(7)
    model(x)
    counted = []
    for forward in (model, model.module):
        with FlopCounterMode(display=False) as flops:
            forward(x.to(FIRST)).sum().backward()
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


# Going on from a checkpoint


def test_a_training_goes_on_from_a_checkpoint_of_data_parallel() -> None:
    """Of its weights and of the state of its optimizer, in both ways on."""
    plain = mlp()
    optimizer = sgd(plain)
    take_step(plain, optimizer, 0)
    state, weights = copy.deepcopy(
        (optimizer.state_dict(), nn.ModuleDict({"module": plain}).state_dict())
    )

    model = drop_in(mlp())
    model.load_state_dict(weights)
    resumed = sgd(model)
    resumed.load_state_dict(copy.deepcopy(state))
    take_step(model, resumed, 1)

    strategy = central(3)
    module = strategy.distribute_module(mlp())
    nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")
    module.load_state_dict(weights)
    ours = strategy.distribute_optimizer(sgd(module))
    ours.load_state_dict(copy.deepcopy(state))
    batch = deal(strategy, data(7, seed=1))
    strategy.run(lambda batch: take_step_with(module, ours, *batch), args=(batch,))

    take_step(plain, optimizer, 1)
    assert_close(parameters(model.module), parameters(plain), "drop-in", 1e-12)
    assert_close(parameters(module), parameters(plain), "strategy", 1e-12)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    device = next(model.parameters()).device
    take_step_with(
        model, optimizer, *(tensor.to(device) for tensor in data(7, seed=seed))
    )


def take_step_with(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
