"""What a step writes on a model, its buffers among it, is written once, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conditions import for_changes
from nets import F64, outputs, train, trained
from problems import assert_close, close, compare, data, deal, mlp, mse
from torchstrategy import RunOptions

# ---- what a step writes


def test_what_a_step_writes_on_plain_attributes_reaches_the_original_once(make):
    strategy = make(3)
    model, _, twin, _ = trained(strategy)
    assert model.calls == twin.calls == 2
    x = data(2)[0]

    def step(m: Any) -> None:
        m.train(False)
        m.head = "b"
        m.encoder[2].p = 0.25
        m.note = "new"
        for _ in range(3):
            m(x.to(m.scale.device))

    strategy.run(lambda: step(model))
    step(twin)
    assert (
        (model.calls, model.head, model.note, model.encoder[2].p)
        == (5, "b", "new", 0.25)
        == (
            twin.calls,
            twin.head,
            twin.note,
            twin.encoder[2].p,
        )
    )
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert outputs(
        strategy, lambda: f"{model.calls} {model.training} {model.encoder[2].p}"
    ) in (
        ["5 False 0.25"],
        ["5 False 0.25"] * 3,
    )


def test_a_counter_in_a_module_without_parameters_counts_a_run_once(make):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return F.mse_loss(a, b)

    strategy = make(3)
    with strategy.scope():
        criterion, model = Loss(), mlp()
    for _ in range(2):
        strategy.run(
            lambda b: criterion(model(b[0]), b[1]).backward(),
            args=(deal(strategy, data(7)),),
        )
    assert criterion.calls == 2


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def _plain_or_refused(make: Any, step: Any, **kwargs: Any) -> None:
    """A step's own writes on parameters do what they do in plain PyTorch, or raise.

    Never is anything else silent.
    """
    try:
        compare(make, 3, step, **kwargs)
    except RuntimeError as error:
        assert "parameter" in str(error), error


def test_a_moving_average_of_parameters_that_the_step_keeps_is_updated_once_or_refused(
    make,
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(
                model.average.parameters(), model.model.parameters(), strict=True
            ):
                kept.mul_(0.9).add_(p, alpha=0.1)

    _plain_or_refused(
        make,
        step,
        build=Ema,
        optimizer=lambda m: torch.optim.SGD(m.model.parameters(), lr=0.1),
    )


def test_clipping_weights_in_the_step_clips_the_users_weights_or_is_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)

    _plain_or_refused(make, step)


def test_clipping_the_data_of_weights_in_the_step_clips_the_users_weights_or_is_refused(
    make,
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for p in model.parameters():  # as in the paper on Wasserstein GANs
            p.data.clamp_(-0.2, 0.2)

    _plain_or_refused(make, step)


def test_an_update_by_hand_in_the_step_is_made_once_or_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.zero_grad()
        mse(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    _plain_or_refused(make, step, optimizer=None)


def test_loading_a_state_in_the_step_changes_the_users_model_or_is_refused(make):
    torch.manual_seed(3)
    state = mlp().state_dict()

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.load_state_dict(state)
        mse(model, batch).backward()

    _plain_or_refused(make, step)


def test_an_embedding_with_a_largest_norm_keeps_it_or_is_refused(make):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 2, max_norm=0.3, **F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    batches = [
        (torch.tensor([0, 1, 2, 3, 3, 8, 1]), data(7)[1]),
        (torch.tensor([5, 5, 5, 0, 2, 2, 7]), data(7)[1]),
    ]
    _plain_or_refused(make, train, build=Table, batches=batches)


# ---- buffers


@for_changes
def test_batch_norm_averages_statistics_by_share_and_applies_its_momentum_once(make):
    for momentum in (0.1, 0.5, None):
        for rows, pieces in [(8, [3, 3, 2]), (9, [3, 3, 3]), (5, [2, 2, 1])]:
            x = data(rows)[0]
            if pieces[-1] == 1:
                # (rows, 3, 2): statistics of one row are enough.
                x = x.unsqueeze(-1).expand(-1, -1, 2).cumsum(-1)
            for reduction in ("mean", "sum"):
                strategy = make(3)
                with strategy.scope():
                    layer = nn.BatchNorm1d(3, momentum=momentum, **F64)
                wanted = copy.deepcopy(layer).cpu()
                options = RunOptions(gradient_reduction=reduction)
                for _ in range(2):
                    strategy.run(
                        lambda b, m=layer: m(b).detach(),
                        args=(deal(strategy, x),),
                        options=options,
                    )
                    parts = []
                    for piece in x.split(pieces):
                        part = copy.deepcopy(wanted)
                        part(piece)
                        parts.append(part)
                    for name in ("running_mean", "running_var"):
                        mean = sum(
                            getattr(p, name) * k / rows
                            for p, k in zip(parts, pieces, strict=True)
                        )
                        getattr(wanted, name).copy_(mean)
                    wanted.num_batches_tracked += 1
                case = f"momentum {momentum}, {rows} rows, {reduction}"
                assert_close(
                    dict(layer.named_buffers()), dict(wanted.named_buffers()), case
                )
                assert int(layer.num_batches_tracked) == 2, case
                seen: list[Any] = []
                strategy.run(
                    lambda m=layer, x=x, seen=seen: seen.append(
                        m.eval()(x.to(m.weight.device))
                    )
                )
                for got in seen:
                    close(got, copy.deepcopy(wanted).eval()(x))


def test_batch_norm_counts_each_forward_of_a_step_and_a_model_in_evaluation_counts_none(
    make,
):
    strategy = make(3)
    with strategy.scope():
        layer = nn.BatchNorm1d(3, **F64)
    x = deal(strategy, data(9)[0])
    strategy.run(lambda b: [layer(b) for _ in range(3)] and None, args=(x,))
    assert int(layer.num_batches_tracked) == 3
    layer.eval()
    before = copy.deepcopy(dict(layer.named_buffers()))
    strategy.run(lambda b: layer(b).detach(), args=(x,))
    assert_close(dict(layer.named_buffers()), before, "evaluation")


def test_statistics_that_plain_training_has_written_reach_every_replica(make):
    layers: dict[str, Any] = {
        "batch_norm": (nn.BatchNorm1d(3, **F64), data(6)[0]),
        "instance_norm": (
            nn.InstanceNorm1d(3, track_running_stats=True, **F64),
            data(12)[0].view(6, 2, 3).mT,
        ),
    }
    for name, (layer, x) in layers.items():
        strategy = make(3)
        twin = nn.Sequential(layer)
        model = strategy.distribute_module(copy.deepcopy(twin))

        def normalised(m: nn.Module, x: torch.Tensor = x) -> torch.Tensor:
            return m(x.to(next(m.buffers()).device)).detach()

        strategy.run(lambda m=model: normalised(m.eval()))
        for _ in range(2):
            for m in (model, twin):
                normalised(m.train())  # outside of replicas
                m.eval()
            seen: list[torch.Tensor] = []
            strategy.run(lambda m=model, seen=seen: seen.append(normalised(m)))
            for got in seen:
                close(
                    got, normalised(twin), msg=lambda text, name=name: f"{name}: {text}"
                )


def test_batch_norm_ignores_a_replica_that_ran_without_rows_and_one_that_sat_out(make):
    # Four rows on three replicas: 2, 2, 0.
    x = torch.stack([data(4)[0], -data(4)[0]], -1)
    for empty in (False, True):
        strategy = make(3)
        with strategy.scope():
            layer = nn.BatchNorm1d(3, **F64)
        parts = [copy.deepcopy(layer).cpu() for _ in range(2)]

        def step(b: torch.Tensor, layer: Any = layer) -> None:
            if len(b):
                layer(b)

        strategy.run(
            step,
            args=(deal(strategy, x),),
            options=RunOptions(run_empty_replicas=empty),
        )
        for part, piece in zip(parts, x.split(2), strict=True):
            part(piece)
        for name in ("running_mean", "running_var"):
            close(
                getattr(layer, name),
                (getattr(parts[0], name) + getattr(parts[1], name)) / 2,
            )
        assert int(layer.num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_a_buffer_that_is_no_running_statistic_is_that_of_the_first_replica(make):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("rows", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))
            self.register_buffer("later", None)

        def forward(self, x: torch.Tensor) -> None:
            self.rows += len(x)
            self.last = torch.full((1,), float(len(x)))
            self.later = torch.full((2,), float(len(x)))

    strategy = make(3)
    with strategy.scope():
        model = Counting()
    kept = model.rows
    for k in (1, 2):
        strategy.run(lambda b: model(b), args=(deal(strategy, torch.ones(7)),))
        assert (float(model.rows), float(model.last)) == (3.0 * k, 3.0)
    assert model.rows is kept
    assert model.later is not None and model.later.tolist() == [3.0, 3.0], (
        "a buffer that was None until the step set it"
    )
