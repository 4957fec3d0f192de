"""torchstrategy.nn.SyncBatchNorm: batch normalisation of the whole batch.

It is, whoever has its rows.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchstrategy
from conditions import for_changes
from problems import (
    assert_close,
    built,
    close,
    context,
    deal,
    gradients,
    parameters,
    replica_id,
    sgd,
    where_it_is,
)
from topologies import SIMULATED, TOPOLOGIES, central, compute_devices
from torchstrategy import ReduceOp, RunOptions
from torchstrategy._turns.switch import IN_TURNS
from torchstrategy.nn import SyncBatchNorm, compute_average_loss
from torchstrategy.testing import count_traffic

Maker = Callable[[int], torchstrategy.Strategy]
STRATEGIES = {replicas: central(replicas) for replicas in range(2, 5)}
quickly = settings(
    max_examples=10 if SIMULATED else 25, deadline=None, derandomize=True, database=None
)
convert = SyncBatchNorm.convert_sync_batchnorm
PRECISE = {torch.float64: 1e-12, torch.float32: 1e-5}


def point_net(
    dims: int, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> nn.Module:
    """Something to learn before a layer of batch normalisation.

    It is for inputs with so many dimensions after the second.
    """
    before = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d][dims]
    norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims]
    return nn.Sequential(before(2, 3, *[1] * bool(dims)), norm(3, **kwargs)).to(dtype)


def pair(
    strategy: torchstrategy.Strategy,
    build: Callable[[], nn.Module],
    optimizer: Any = None,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """A converted model of a strategy, and a plain one.

    No parameter is what layers make of it at first.
    """

    def different() -> nn.Module:
        model = build()
        for k, p in enumerate(model.parameters()):
            p.data += 0.3 * torch.cos(torch.arange(p.numel()) + k).view_as(p)
        return model

    (model, ours), (twin, plain) = built(strategy, different, optimizer)
    return (convert(model), ours), (twin, plain)


def values(
    *size: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> torch.Tensor:
    return (
        torch.randn(
            *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).to(dtype)
        * 2
        + 3
    )


def row_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    """Of each row; not symmetric, so that no gradient is zero by chance."""
    out = model(batch)
    return ((out - 0.3) ** 3).flatten(1).sum(1)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in model.state_dict().items()
    }


def check(
    strategy: torchstrategy.Strategy,
    models: tuple[Any, Any],
    x: torch.Tensor,
    options: RunOptions | None = None,
    precision: float = 1e-12,
    rows: Any = slice(None),
) -> None:
    """A converted model's outputs, gradients and buffers have to be a plain one's.

    The plain one has all rows; the other is in replicas.
    """
    model, twin = models

    def step(batch: torch.Tensor) -> torch.Tensor:
        compute_average_loss(row_losses(model, batch)).backward()
        return model(batch).detach()

    for m in models:
        m.zero_grad()
    out = strategy.gather(
        strategy.run(step, args=(deal(strategy, x),), options=options), axis=0
    )
    whole = where_it_is(twin, [x])[0][rows]
    row_losses(twin, whole).mean().backward()
    close(out[rows], twin(whole).detach(), rtol=10 * precision, atol=precision)
    assert_close(gradients(model), gradients(twin), "gradient", precision, precision)
    assert_close(state(model), state(twin), "state", precision, precision)


# Equal to plain batch normalisation of the whole batch


@pytest.mark.parametrize("dtype", PRECISE, ids=str)
@pytest.mark.parametrize("size", [(), (4,), (2, 3), (2, 1, 3)], ids=str)
def test_forward_backward_and_statistics_are_those_of_the_whole_batch(
    make: Maker, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    strategy = make(3)
    (model, _), (twin, _) = pair(strategy, lambda: point_net(len(size), dtype))
    # 4 rows are two for either of two replicas, and none for the third.
    for k, rows in enumerate((7, 4)):
        check(
            strategy,
            (model, twin),
            values(rows, 2, *size, dtype=dtype, seed=k),
            precision=PRECISE[dtype],
        )


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "cumulative": {"momentum": None},
    "momentum 0": {"momentum": 0.0},
    "momentum 1": {"momentum": 1.0},
    "eps": {"eps": 0.1},
    "no parameters": {"affine": False},
    "no statistics": {"track_running_stats": False},
    "nothing": {"affine": False, "track_running_stats": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_trains_and_evaluates_like_plain(
    make: Maker, kind: str
) -> None:
    strategy = make(2)
    (model, _), (twin, _) = pair(strategy, lambda: point_net(1, **KINDS[kind]))
    for k in range(2):
        check(strategy, (model, twin), values(5, 2, 3, seed=k))
    for m in (model, twin):
        m.eval()
    check(strategy, (model, twin), values(5, 2, 3, seed=2))


def test_every_strategy_has_it(strategy: torchstrategy.Strategy) -> None:
    (model, _), (twin, _) = pair(strategy, lambda: point_net(1))
    check(strategy, (model, twin), values(5, 2, 3))


@for_changes
@quickly
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.integers(2, 9),
    st.integers(1, 3),
    st.sampled_from(list(ReduceOp)),
    st.booleans(),
    st.floats(-1e3, 1e3),
)
def test_no_rows_or_options_change_anything(
    replicas: int,
    rows: int,
    length: int,
    reduction: ReduceOp,
    empty: bool,
    offset: float,
) -> None:
    options = RunOptions(gradient_reduction=reduction, run_empty_replicas=empty)
    models = shared_models(STRATEGIES[replicas])
    check(
        STRATEGIES[replicas],
        models,
        values(rows, 2, length) + offset,
        options,
        precision=1e-9,
    )


@functools.cache
def shared_models(strategy: torchstrategy.Strategy) -> tuple[Any, Any]:
    (model, _), (twin, _) = pair(strategy, lambda: point_net(1))
    return model, twin


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Conv2d(3, 2, 3, stride=2),
        nn.BatchNorm2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.BatchNorm1d(4),
    ).double()


@pytest.mark.parametrize("inside", [True, False], ids=["step_inside", "step_outside"])
def test_a_network_trains_as_it_does_on_one_device(make: Maker, inside: bool) -> None:
    strategy = make(3)
    (model, ours), (twin, plain) = pair(strategy, conv_net, sgd)

    def step(model: nn.Module, optimizer: Any, batch: Any, update: bool) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        if update:
            optimizer.step()

    for k in range(5):
        batch = [values(7, 1, 7, 7, seed=k), torch.arange(7) % 4]
        strategy.run(
            lambda b: step(model, ours, b, inside), args=(deal(strategy, batch),)
        )
        if not inside:
            ours.step()
        step(twin, plain, where_it_is(twin, batch), True)
        assert_close(parameters(model), parameters(twin), f"step {k}", 1e-10, 1e-12)
        assert_close(state(model), state(twin), f"step {k}", 1e-10, 1e-12)
    for m in (model, twin):
        m.eval()
    batch = values(5, 1, 7, 7)
    out = strategy.gather(
        strategy.run(lambda b: model(b).detach(), args=(deal(strategy, batch),)), axis=0
    )
    close(out, twin(where_it_is(twin, [batch])[0]).detach(), rtol=1e-9, atol=1e-10)


def test_statistics_are_the_same_whichever_replica_returns_them() -> None:
    device = compute_devices(1)[0]
    strategy = torchstrategy.CentralStorageStrategy(
        [device] * 3, device, buffer_aggregation="only_first_replica"
    )
    (model, _), (twin, _) = pair(strategy, lambda: point_net(0))
    check(strategy, (model, twin), values(7, 2))


def test_values_far_from_zero_lose_no_digits() -> None:
    x = values(9, 3, dtype=torch.float32) + torch.tensor([1e4, -1e5, 0])
    strategy = STRATEGIES[3]
    with strategy.scope():
        norm = SyncBatchNorm(3)
    out = strategy.gather(
        strategy.run(lambda b: norm(b).detach(), args=(deal(strategy, x),)), axis=0
    )
    close(
        out,
        nn.BatchNorm1d(3).double()(x.double()).detach().float().to(out.device),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rows_of_a_replica_whose_gradient_is_dropped_do_not_count() -> None:
    strategy = STRATEGIES[3]
    (model, _), (twin, _) = pair(strategy, lambda: point_net(0))
    x = values(6, 2)
    x[2:4] = torch.nan
    for reduction in ReduceOp:
        options = RunOptions(examples=[2, 0, 2], gradient_reduction=reduction)
        check(strategy, (model, twin), x, options, rows=[0, 1, 4, 5])


def test_a_replica_without_rows_meets_the_others() -> None:
    strategy = STRATEGIES[4]
    (model, _), (twin, _) = pair(strategy, lambda: point_net(1))
    for reduction in ReduceOp:
        options = RunOptions(run_empty_replicas=True, gradient_reduction=reduction)
        check(strategy, (model, twin), values(2, 2, 3), options)


def test_a_gradient_penalty_is_that_of_the_whole_batch(make: Maker) -> None:
    strategy = make(3)
    (model, _), (twin, _) = pair(
        strategy,
        lambda: nn.Sequential(point_net(0), nn.Tanh(), nn.Linear(3, 1).double()),
    )

    def step(model: nn.Module, x: torch.Tensor, rows: int) -> None:
        x = x.detach().requires_grad_()
        # A replica's gradient is that of the mean of its rows: of the whole batch once
        # it weighs as many rows.
        (slope,) = torch.autograd.grad(
            row_losses(model, x).mean(), x, create_graph=True
        )
        ((slope * rows).square().sum(1) - 1).square().mean().backward()

    x = values(6, 2)
    strategy.run(lambda b: step(model, b, len(b)), args=(deal(strategy, x),))
    step(twin, where_it_is(twin, [x])[0], 6)
    assert_close(gradients(model), gradients(twin), "gradient", 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gives_what_plain_gives(dtype: torch.dtype) -> None:
    strategy = STRATEGIES[3]
    for cast in (torch.float32, dtype):  # of the parameters
        (model, _), (twin, _) = pair(
            strategy, lambda cast=cast: point_net(1, cast)[1:], None
        )
        x = values(7, 3, 4, dtype=dtype)
        out = strategy.gather(
            strategy.run(lambda b, m=model: m(b).detach(), args=(deal(strategy, x),)),
            axis=0,
        )
        expected = twin(where_it_is(twin, [x])[0]).detach()
        assert out.dtype == expected.dtype == dtype
        coarse = 4 * torch.finfo(dtype).eps
        close(out, expected, rtol=coarse, atol=coarse)
        assert_close(state(model), state(twin), "state", coarse, coarse)


def test_autocast_gives_what_plain_gives() -> None:
    strategy = STRATEGIES[3]
    (model, _), (twin, _) = pair(strategy, lambda: point_net(1, torch.float32))
    x = values(7, 2, 4, dtype=torch.float32)
    device = compute_devices(1)[0].type
    with torch.autocast(device, torch.bfloat16):
        outs = strategy.run(lambda b: row_losses(model, b), args=(deal(strategy, x),))
        expected = row_losses(twin, where_it_is(twin, [x])[0])
    close(strategy.gather(outs, axis=0).detach(), expected.detach(), rtol=0.1, atol=0.1)
    assert_close(state(model), state(twin), "state", 1e-2, 1e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_meet_again_in_backward(
    make: Maker, reentrant: bool
) -> None:
    strategy = make(3)
    (model, _), (twin, _) = pair(
        strategy, lambda: nn.Sequential(point_net(0), nn.Tanh(), point_net(0)[1:])
    )

    def step(model: nn.Module, x: torch.Tensor) -> None:
        x = x.detach().requires_grad_()
        hidden = checkpoint(model[0], x, use_reentrant=reentrant)
        ((model[2](hidden.tanh()) - 0.3) ** 3).sum(1).mean().backward()

    x = values(7, 2)
    strategy.run(lambda b: step(model, b), args=(deal(strategy, x),))
    step(twin, where_it_is(twin, [x])[0])
    assert_close(gradients(model), gradients(twin), "gradient")
    assert_close(state(model), state(twin), "state")


@for_changes
@pytest.mark.slow  # the first to import the compiler
# Which the compiler asks for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_the_same_and_is_compiled_for_all_runs() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = point_net(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body[1](self.body[0](x * 2)) / 2

    strategy = STRATEGIES[3]
    (model, _), (twin, _) = pair(strategy, Net)
    compiled = torch.compile(model, backend=backend)
    x, counts = values(9, 2), []
    for _ in range(3):
        strategy.run(
            lambda b: row_losses(compiled, b).mean().backward(),
            args=(deal(strategy, x),),
        )
        row_losses(twin, where_it_is(twin, [x])[0]).mean().backward()
        assert_close(gradients(model), gradients(twin), "gradient")
        counts.append(len(graphs))
    assert counts[0] > 0
    compiled_from = [
        node.meta.get("stack_trace", "")
        for graph in graphs
        for node in graph.graph.nodes
    ]
    assert not any(torchstrategy.nn.__path__[0] in where for where in compiled_from)
    assert counts[1] == counts[2]


# Where there is nobody to meet


def test_outside_of_replicas_it_is_plain() -> None:
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm2d(3), SyncBatchNorm(3)
    x = values(4, 3, 2, 2, dtype=torch.float32)
    assert torch.equal(ours(x), plain(x))
    with STRATEGIES[2].scope():
        assert torch.equal(ours(x), plain(x))
    assert_close(state(ours), state(plain), "state")


@pytest.mark.parametrize("topology", ["default", "one_device", "central_1", "copies_1"])
def test_a_lone_replica_meets_nobody(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    with strategy.scope():
        norm = SyncBatchNorm(3)
    x = values(4, 3, dtype=torch.float32)
    with count_traffic() as traffic:
        out = strategy.run(lambda b: norm(b), args=(deal(strategy, x),))
    close(out, nn.BatchNorm1d(3)(x))
    assert not traffic.meetings


def test_evaluation_meets_nobody() -> None:
    strategy = STRATEGIES[3]
    with strategy.scope():
        norm = SyncBatchNorm(3).eval()
    with count_traffic() as traffic:
        strategy.run(norm, args=(deal(strategy, values(4, 3, dtype=torch.float32)),))
    assert not traffic.meetings


def test_a_layer_meets_once_forward_and_once_backward() -> None:
    strategy = STRATEGIES[3]
    (model, _), _ = pair(strategy, conv_net)
    batch = deal(strategy, values(7, 1, 7, 7))
    with count_traffic() as traffic:
        strategy.run(lambda b: model(b).square().mean().backward(), args=(batch,))
    assert traffic.meetings == {
        "SyncBatchNorm(axis=0)": 3,
        "the backward of a collective": 3,
        # In turns, the end of a backward is one.
        **({"the gradients of backward 1": 1} if IN_TURNS else {}),
    }
    with count_traffic() as traffic, torch.no_grad():
        strategy.run(lambda b: model(b), args=(batch,))
    assert traffic.meetings == {"SyncBatchNorm(axis=0)": 3}


# What is refused


def test_a_whole_batch_with_one_value_a_channel_is_refused() -> None:
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = SyncBatchNorm(3)
    x = deal(strategy, values(1, 3, dtype=torch.float32))
    with pytest.raises(
        ValueError, match=r"^Expected more than 1 value per channel when training"
    ):
        strategy.run(norm, args=(x,), options=RunOptions(run_empty_replicas=True))
    with pytest.raises(
        ValueError, match=r"^Expected more than 1 value per channel when training"
    ):
        strategy.run(norm, args=(x,))
    assert norm.num_batches_tracked == 0
    out = strategy.run(norm, args=(deal(strategy, values(2, 3, dtype=torch.float32)),))
    assert all(part.shape == (1, 3) for part in out.values)


def test_a_whole_batch_without_rows_changes_no_statistics() -> None:
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = SyncBatchNorm(3)
    out = strategy.run(lambda: norm(torch.empty(0, 3, device=norm.weight.device)))
    assert all(part.shape == (0, 3) for part in out.values)
    assert_close(
        state(norm),
        {**state(nn.BatchNorm1d(3)), "num_batches_tracked": torch.tensor(1)},
        "state",
    )


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((4,), r"^expected at least 2D input \(got 1D input\)"),
        (
            (4, 2),
            (
                r"^SyncBatchNorm\(3\) was given an input of shape \(2, 2\), which has "
                r"2 channels in dimension 1\."
            ),
        ),
        ((4, 1), r"^SyncBatchNorm\(3\) was given an input of shape \(2, 1\)"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    size: tuple[int, ...], message: str
) -> None:
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = SyncBatchNorm(3)
    with pytest.raises(ValueError, match=message):
        strategy.run(norm, args=(deal(strategy, torch.ones(size)),))


def test_a_layer_that_not_every_replica_comes_to_is_an_error() -> None:
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = SyncBatchNorm(3)
    x = deal(strategy, values(4, 3, dtype=torch.float32))
    with pytest.raises(
        RuntimeError,
        match=r"replica 0 is at SyncBatchNorm\(axis=0\), replica 1 has ended",
    ):
        strategy.run(lambda b: norm(b) if replica_id() == 0 else b, args=(x,))


def test_a_backward_after_the_run_is_an_error_and_does_not_hang() -> None:
    strategy = STRATEGIES[2]
    (model, _), _ = pair(strategy, lambda: point_net(0))
    x = deal(strategy, values(4, 2))
    message = (
        r"^Replica \d came to the backward of a collective, .* after its run .* Call "
        r"backward in the step"
    )
    losses = strategy.run(lambda b: row_losses(model, b).mean(), args=(x,))
    with pytest.raises(RuntimeError, match=message):
        sum(loss.to("cpu") for loss in losses.values).backward()
    losses = strategy.run(lambda b: row_losses(model, b).mean(), args=(x,))
    with pytest.raises(RuntimeError, match=message):
        # A later run is not that one.
        strategy.run(lambda loss: loss.backward(), args=(losses,))


def test_a_meeting_on_a_thread_of_the_steps_own_is_an_error() -> None:
    def step() -> str:
        x = torch.ones(2, requires_grad=True)
        total = context().all_reduce("sum", x).sum()
        errors: list[str] = []

        def backward() -> None:
            try:
                total.backward()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        return errors[0]

    for error in STRATEGIES[2].run(step).values:
        assert "on another thread than that of its step" in error


# Converting


def test_a_converted_model_has_the_tensors_names_and_flags_of_the_old_one() -> None:
    model = conv_net()
    model[1].eval()
    model[4].tag = "mine"
    model[4].weight.requires_grad_(False)
    before = dict(model.named_parameters()), dict(model.named_buffers())
    paths, printed = [name for name, _ in model.named_modules()], state(model)
    assert convert(model) is model
    assert [type(layer) is SyncBatchNorm for layer in model] == [
        k in (1, 4, 8) for k in range(9)
    ]
    assert [name for name, _ in model.named_modules()] == paths
    for old, new in zip(
        before,
        (dict(model.named_parameters()), dict(model.named_buffers())),
        strict=True,
    ):
        assert list(old) == list(new)
        assert all(old[name] is new[name] for name in old)
    assert [layer.training for layer in model] == [k != 1 for k in range(9)]
    assert model[4].tag == "mine" and not model[4].weight.requires_grad
    conv_net().load_state_dict(model.state_dict())
    model.load_state_dict(printed)
    assert repr(model[1]) == repr(conv_net()[1]).replace("BatchNorm2d", "SyncBatchNorm")


def test_hooks_are_kept_and_can_be_taken_away() -> None:
    norm = nn.BatchNorm1d(2)
    seen: list[str] = []
    handle = norm.register_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    norm.register_full_backward_hook(
        lambda module, grads, outs: seen.append("backward")
    )
    model = convert(nn.Sequential(norm))
    model(torch.randn(3, 2, requires_grad=True)).sum().backward()
    assert seen == ["SyncBatchNorm", "backward"]
    handle.remove()
    model(torch.randn(3, 2))
    assert len(seen) == 2


def test_a_layer_that_is_used_twice_stays_one() -> None:
    norm = nn.BatchNorm1d(2)
    model = convert(nn.Sequential(norm, nn.Tanh(), norm, nn.Sequential(norm)))
    assert type(model[0]) is SyncBatchNorm
    assert model[0] is model[2] is model[3][0]


def test_everything_else_is_left_alone() -> None:
    others = nn.ModuleDict(
        {
            "lstm": nn.LSTM(2, 3),
            "instance": nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            "layer": nn.LayerNorm(3),
            "group": nn.GroupNorm(1, 3),
            "sync": SyncBatchNorm(3),
        }
    )
    before = list(others.modules())
    assert all(
        old is new for old, new in zip(before, convert(others).modules(), strict=True)
    )


def test_a_layer_itself_is_converted_to_one_in_its_place() -> None:
    norm = nn.BatchNorm3d(2, affine=False, momentum=None)
    new = convert(norm)
    assert type(new) is SyncBatchNorm and type(norm) is nn.BatchNorm3d
    assert new.running_mean is norm.running_mean and new.momentum is None
    assert convert(new) is new
    theirs = convert(nn.SyncBatchNorm(2))
    assert type(theirs) is SyncBatchNorm and theirs.process_group is None


def test_a_layer_without_a_bias_stays_without() -> None:
    plain = nn.BatchNorm1d(2)
    plain.register_parameter("bias", None)
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = convert(copy.deepcopy(plain))
    x = values(5, 2, dtype=torch.float32)
    out = strategy.gather(
        strategy.run(lambda b: norm(b).detach(), args=(deal(strategy, x),)), axis=0
    )
    close(out, plain(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["in the scope", "after the scope", "made before"])
def test_a_model_may_be_converted_anywhere(make: Maker, when: str) -> None:
    strategy = make(3)
    (model, ours), (twin, plain) = built(strategy, lambda: point_net(0), sgd)
    if when == "made before":
        model = strategy.distribute_module(convert(copy.deepcopy(twin)))
        ours = sgd(model)
        strategy.distribute_optimizer(ours)
    elif when == "in the scope":
        with strategy.scope():
            convert(model)
    else:
        convert(model)
    for k in range(2):
        train(strategy, (model, ours), (twin, plain), values(8, 2, seed=k))
        assert_close(state(model), state(twin), f"step {k}", 1e-10, 1e-12)


def test_a_model_may_be_converted_in_the_middle_of_training(make: Maker) -> None:
    strategy = make(2)
    (model, ours), (twin, plain) = built(strategy, lambda: point_net(0), sgd)
    train(strategy, (model, ours), (twin, plain), values(8, 2))
    convert(model)
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    for k in range(2):
        train(strategy, (model, ours), (twin, plain), values(8, 2, seed=k))
        assert_close(state(model), state(twin), f"step {k}", 1e-10, 1e-12)


def train(
    strategy: torchstrategy.Strategy,
    replicated: tuple[Any, Any],
    plain: tuple[Any, Any],
    x: Any,
) -> None:
    def step(model: nn.Module, optimizer: Any, b: torch.Tensor) -> None:
        optimizer.zero_grad()
        row_losses(model, b).mean().backward()
        optimizer.step()

    strategy.run(lambda b: step(*replicated, b), args=(deal(strategy, x),))
    step(*plain, where_it_is(plain[0], [x])[0])


def test_a_layer_of_its_own_in_the_scope_belongs_to_the_strategy() -> None:
    strategy = STRATEGIES[2]
    with strategy.scope():
        norm = convert(nn.BatchNorm1d(2))
    x = values(5, 2, dtype=torch.float32)
    strategy.run(lambda b: (norm(b) ** 3).mean().backward(), args=(deal(strategy, x),))
    plain = nn.BatchNorm1d(2)
    (plain(x) ** 3).mean().backward()
    assert_close(gradients(norm), gradients(plain), "gradient", 1e-5, 1e-6)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "pickle"],
)
def test_a_converted_model_can_be_copied_and_saved(
    again: Callable[[nn.Module], nn.Module],
) -> None:
    model = convert(point_net(1))
    other = again(model)
    assert type(other[1]) is SyncBatchNorm
    assert other[1].weight is not model[1].weight
    assert_close(state(other), state(model), "state")
    x = values(3, 2, 2)
    assert torch.equal(other(x), model(x))


class Shifted(nn.BatchNorm1d):
    """What people write: another default."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=0.1)


class Activated(nn.BatchNorm1d):
    """What would be lost."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Kept(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(2))
        self.layers = [self[0]]


def grouped() -> nn.Module:
    norm = nn.SyncBatchNorm(2)
    norm.process_group = object()
    return norm


def test_a_class_that_only_sets_other_arguments_is_converted() -> None:
    (layer,) = convert(nn.Sequential(Shifted(2)))
    assert type(layer) is SyncBatchNorm and layer.eps == 0.1


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a forward of its own": (
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Activated(2))),
        (
            r"^Sequential\.1\.0 is a Activated, with forward of its own, which a "
            r"SyncBatchNorm .* would not have\. Derive"
        ),
    ),
    "lazy": (
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d()),
        (
            r"^Sequential\.1 is a LazyBatchNorm1d, .* a lazy layer becomes a plain one "
            r"when it sees a batch\."
        ),
    ),
    "in a list": (
        Kept,
        (
            r"^Kept\.layers\[0\] is a BatchNorm1d in a plain attribute, .* "
            r"torch\.nn\.ModuleList"
        ),
    ),
    "processes": (
        lambda: nn.Sequential(nn.BatchNorm1d(2), grouped()),
        r"^Sequential\.1 is .* with a process_group",
    ),
    "no module": (
        lambda: [nn.BatchNorm1d(2)],
        r"^convert_sync_batchnorm takes a module; got \[BatchNorm1d.*, a list\.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_converted_is_refused_and_left_as_it_was(
    what: str,
) -> None:
    build, message = REFUSED[what]
    model = build()
    with pytest.raises(TypeError, match=message):
        convert(model)
    assert SyncBatchNorm not in {
        type(layer) for part in model for layer in nn.ModuleList([part]).modules()
    }
