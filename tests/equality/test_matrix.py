"""Every feature x every topology x where the update is made.

Each is compared with plain PyTorch step by step.

The batches are uneven, and of some of them some replicas get no row. In one process the
replicas share the CPU and its memory; where devices are simulated each has one of its
own, and the parameters are on yet another.

What cannot be equal has tests of its own, which say what holds in its place:
    dropout           each replica draws masks of its own; the same seed gives the same
                      numbers again
    noise             drawn in the step, each replica adds its own, and the gradient has
                      the mean of them
    batch norm        each replica normalises its own rows; running means are those of
                      the whole batch
    moving averages   that the step writes are refused, with `merge_call` as the way
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import torchstrategy
from conditions import (
    for_releases,
    only_in_turns,
    only_with_copies,
    without_simulated_devices,
)
from features.compilation import COMPILED, Compiled, Uncompiled
from features.layers import linear
from features.losses import LossOutside
from features.mixed_precision import Everything
from features.optimizers import WithOptimizer
from features.schedulers import SCHEDULERS
from features.training import ALIKE, F64, FEATURES, SLOW, STATEFUL, Training, tensors_of
from problems import built, data, deal, mlp, mse, replica_id
from topologies import SIMULATED, central, mirrored
from torchstrategy._base.devices import memory_device


def on_devices(replicas: int) -> torchstrategy.Strategy:
    """Replicas on devices of their own, with the parameters on another one."""
    return torchstrategy.CentralStorageStrategy(SIMULATED[:replicas], SIMULATED[4])


TOPOLOGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    **{
        f"aliased_{n}": functools.partial(central, n)
        for n in (1, 2, 3)
        if not SIMULATED
    },
    # On devices, one number of replicas for each way of keeping parameters: other
    # numbers bring no other transfers.
    **{
        f"mirrored_{n}": functools.partial(mirrored, n)
        for n in ((2,) if SIMULATED else (1, 2, 4))
    },
    **{f"devices_{n}": functools.partial(on_devices, n) for n in (3,) if SIMULATED},
}


def assert_alike(
    actual: dict[str, Any], expected: dict[str, Any], tolerance: float, case: str
) -> None:
    """The same things, and equal numbers."""
    assert actual.keys() == expected.keys(), case
    for path, wanted in expected.items():
        got = actual[path]
        if isinstance(wanted, torch.Tensor):
            assert isinstance(got, torch.Tensor) and (got.dtype, got.shape) == (
                wanted.dtype,
                wanted.shape,
            ), path
            if not torch.equal(got, wanted):
                options: dict[str, Any] = {
                    "rtol": tolerance,
                    "atol": tolerance,
                    "equal_nan": True,
                }
                where = f"{case}, {path}"
                torch.testing.assert_close(
                    got, wanted, msg=lambda m, where=where: f"{where}: {m}", **options
                )
        elif isinstance(wanted, float):
            assert got == pytest.approx(wanted, rel=tolerance, nan_ok=True), (
                f"{case}, {path}"
            )
        else:
            assert got == wanted, f"{case}, {path}"


# ---- the matrix


def _cases() -> Iterator[Any]:
    turns = itertools.count()
    for name, new in FEATURES.items():
        marks = [pytest.mark.slow] if name in SLOW else []
        cases = list(
            itertools.product(
                TOPOLOGIES,
                ("outside",) if new is LossOutside else ("inside", "outside"),
            )
        )
        if name in ALIKE:
            # What differs little from another feature has little more to say to
            # devices, or to copies of parameters.
            aliased = [case for case in cases if case[0].startswith("aliased")]
            others = [case for case in cases if case not in aliased]
            cases = [*aliased, others[next(turns) % len(others)]]
        for topology, where in cases:
            yield pytest.param(
                name, topology, where, id=f"{name}-{topology}-{where}", marks=marks
            )


@functools.cache
def plain(name: str) -> list[dict[str, Any]]:
    """The state of a training after each of its steps in plain PyTorch."""
    torch.manual_seed(0)
    return states_of(FEATURES[name]())


def states_of(training: Training) -> list[dict[str, Any]]:
    states = []
    for k, batch in enumerate(training.batches()):
        training.between(k)
        with training.around():
            training.step(batch, k)
        states.append(training.state())
    return states


# Torch's own, in its forward mode.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(("name", "topology", "where"), list(_cases()))
def test_a_feature_does_what_it_does_in_plain_torch(
    name: str, topology: str, where: str
) -> None:
    strategy, expected = TOPOLOGIES[topology](), plain(name)
    torch.manual_seed(0)
    with strategy.scope():
        training = FEATURES[name]()
    training.scope = strategy.scope
    for k, batch in enumerate(training.batches()):
        training.between(k)
        dealt = deal(strategy, batch)
        with training.around():
            if where == "inside":
                strategy.run(training.step, args=(dealt, k), options=training.options)
            else:
                training.outside(strategy, dealt, k)
        assert_alike(training.state(), expected[k], training.tolerance, f"step {k}")


# ---- how a step is given


def _whole_step(
    batch: Any, k: int, model: Any, optimizer: Any, scaler: Any, scheduler: Any
) -> None:
    optimizer.zero_grad()
    scaler.scale(mse(model, batch)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


class _Callable:
    def __init__(self, training: Everything) -> None:
        self.training, self.scaler, self.scheduler = (
            training,
            training.scaler,
            training.scheduler,
        )

    def __call__(self, batch: Any, k: int) -> None:
        self.training.backward(batch, k)
        self.training.update(k)


class _Module(nn.Module):
    """A model with its own optimizer, as in programs for reinforcement learning."""

    def __init__(self, model: Any, optimizer: Any, scaler: Any, scheduler: Any) -> None:
        super().__init__()
        self.model, self.optimizer, self.counters = (
            model,
            optimizer,
            [scaler, scheduler],
        )

    def forward(self, batch: Any, k: int) -> None:
        _whole_step(batch, k, self.model, self.optimizer, *self.counters)


def _in_a_function(training: Everything) -> Any:
    model, optimizer, scaler, schedulers = (
        training.model,
        training.optimizer,
        training.scaler,
        [training.scheduler],
    )

    def update() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        [scheduler.step() for scheduler in schedulers]

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        scaler.scale(mse(model, batch)).backward()
        update()

    return step


def _by_default_arguments(training: Everything) -> Any:
    parts = training.parts()

    def step(
        batch: Any, k: int, model: Any = parts["model"], *, others: Any = parts
    ) -> None:
        _whole_step(batch, k, **others)

    return step


def _decorated(training: Everything) -> Any:
    @torch.enable_grad()
    def step(batch: Any, k: int) -> None:
        training.step(batch, k)

    return step


def _in_a_class(training: Everything) -> Any:
    class Steps:
        @staticmethod
        def step(batch: Any, k: int) -> None:
            training.step(batch, k)

    return Steps.step


WAYS: dict[str, Callable[[Everything], Any]] = {
    "a bound method": lambda training: training.step,
    "a lambda": lambda training: lambda batch, k: training.step(batch, k),
    "a function in a function": _in_a_function,
    "a function with defaults": _by_default_arguments,
    "a decorated function": _decorated,
    "a static method": _in_a_class,
    "a partial": lambda training: functools.partial(_whole_step, **training.parts()),
    "a partial of a method": lambda training: functools.partial(
        Everything.step, training
    ),
    "an object that can be called": _Callable,
    "a partial of such an object": lambda training: functools.partial(
        _Callable(training)
    ),
    "a module": lambda training: _Module(**training.parts()),
    "a module's method": lambda training: _Module(**training.parts()).forward,
}


def several_replicas() -> torchstrategy.Strategy:
    return TOPOLOGIES["devices_3" if SIMULATED else "aliased_3"]()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_may_be_given_in_any_way(way: str) -> None:
    strategy = several_replicas()
    expected = plain("everything")
    torch.manual_seed(0)
    with strategy.scope():
        training = Everything()
        step = WAYS[way](training)
    for k, batch in enumerate(training.batches()):
        strategy.run(step, args=(deal(strategy, batch), k))
        assert_alike(
            {**training.state(), "noted": 0},
            {**expected[k], "noted": 0},
            1e-10,
            f"step {k}",
        )


ARGUMENTS: dict[
    str, Callable[[Everything], tuple[Any, tuple[Any, ...], dict[str, Any]]]
] = {
    "its parts": lambda training: (_whole_step, (), training.parts()),
    "its parts in a dict": lambda training: (
        lambda b, k, parts: _whole_step(b, k, **parts),
        (training.parts(),),
        {},
    ),
    "the object itself": lambda training: (
        lambda b, k, t: t.step(b, k),
        (training,),
        {},
    ),
}


@pytest.mark.parametrize("how", ARGUMENTS)
def test_a_step_may_be_given_what_it_steps_as_arguments(how: str) -> None:
    strategy = several_replicas()
    expected = plain("everything")
    torch.manual_seed(0)
    with strategy.scope():
        training = Everything()
    step, args, kwargs = ARGUMENTS[how](training)
    for k, batch in enumerate(training.batches()):
        strategy.run(step, args=(deal(strategy, batch), k, *args), kwargs=kwargs)
        assert_alike(
            {**training.state(), "noted": 0},
            {**expected[k], "noted": 0},
            1e-10,
            f"step {k}",
        )


# ---- what a run cannot see, and where replicas differ

several = pytest.mark.parametrize(
    "topology", [name for name in TOPOLOGIES if not name.endswith("_1")]
)


def begun(
    topology: str, new: Callable[[], Any] = Everything
) -> tuple[torchstrategy.Strategy, Any, Any]:
    """A strategy, a training after its first step, and the next batch."""
    strategy = TOPOLOGIES[topology]()
    with strategy.scope():
        training = new()
    first, second, _ = Training.batches(training)
    strategy.run(training.step, args=(deal(strategy, first), 0))
    return strategy, training, deal(strategy, second)


def refused(
    training: Any, error: type[Exception], match: str, call: Callable[[], Any]
) -> None:
    """Nothing of it is done."""
    before = training.state()
    with pytest.raises(error, match=match):
        call()
    assert_alike(training.state(), before, 0.0, "after the refusal")


class hidden:
    """Gives the parts of a training to those who ask.

    It has no attribute with them: a run does not find them.
    """

    def __init__(self, training: Training) -> None:
        parts = {
            name: value
            for name, value in vars(training).items()
            if isinstance(value, STATEFUL)
        }
        inside = types.SimpleNamespace(**parts)
        self._inside = lambda: inside

    @property
    def inside(self) -> types.SimpleNamespace:
        return self._inside()


@several
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_scaler_that_a_run_cannot_see_is_refused_and_nothing_is_done(
    topology: str, call: str
) -> None:
    strategy, training, batch = begun(topology)
    # Outside of the scope.
    training.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    holder = hidden(training)

    def step(batch: Any) -> None:
        holder.inside.optimizer.zero_grad()
        holder.inside.scaler.scale(mse(holder.inside.model, batch)).backward()
        getattr(holder.inside.scaler, call)(holder.inside.optimizer)

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"GradScaler was stepped in a replica[\s\S]*scaler\.step\(optimizer\)",
        run,
    )
    strategy.run(training.step, args=(batch, 1))  # seen, it works
    assert training.scaler.get_scale() == 128


@several
@pytest.mark.parametrize("name", [*SCHEDULERS, "plateau"])
def test_a_scheduler_that_a_run_cannot_see_is_refused_before_it_counts(
    topology: str, name: str
) -> None:
    """It counted first, and was refused when it came to the optimizer.

    It had one step too many after the refusal.
    """
    strategy, training, batch = begun(topology, Training)
    args = () if name in SCHEDULERS else (1.0,)
    scheduler = (
        SCHEDULERS[name](training.optimizer)
        if name in SCHEDULERS
        else _plateau(training.optimizer)
    )
    training.optimizer.step()
    training.optimizer.zero_grad()
    holder = hidden(training)
    holder.inside.scheduler = scheduler
    before = str(scheduler.state_dict())

    def step(batch: Any) -> None:
        mse(holder.inside.model, batch).backward()
        holder.inside.scheduler.step(*args)

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"was stepped in a replica[\s\S]*strategy\.run\(step, \.\.\.\)\n "
        r"+scheduler\.step",
        run,
    )
    assert str(scheduler.state_dict()) == before


@several
def test_a_method_that_a_run_cannot_see_is_refused_and_its_object_may_be_read(
    topology: str,
) -> None:
    """The run knows the scheduler and the scaler.

    The step has their methods from where the run does not look.
    """
    strategy, training, batch = begun(topology, Training)
    scheduler = lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    training.optimizer.step()
    training.optimizer.zero_grad()
    scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    methods = {"step": scheduler.step, "unscale_": scaler.unscale_}
    hidden_methods = types.SimpleNamespace(get=lambda: methods)
    counts = str((scheduler.state_dict(), scaler.state_dict()))

    def step(batch: Any, method: str, args: tuple[Any, ...]) -> float:
        scaler.scale(mse(training.model, batch)).backward()
        if method:
            hidden_methods.get()[method](*args)
        return scheduler.optimizer.param_groups[0]["lr"] * scheduler.last_epoch

    for method, args in {"step": (), "unscale_": (training.optimizer,)}.items():
        run = functools.partial(strategy.run, step, args=(batch, method, args))
        refused(training, RuntimeError, "was stepped in a replica", run)
    strategy.run(step, args=(batch, "", ()))
    assert str((scheduler.state_dict(), scaler.state_dict())) == counts
    scheduler.step()
    assert scheduler.last_epoch == 2


@only_with_copies
def test_the_classes_of_schedulers_and_scalers_are_torchs_own_between_runs() -> None:
    classes = lr_scheduler.LRScheduler, torch.amp.GradScaler
    before = [dict(vars(cls)) for cls in classes]
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    during = strategy.run(lambda: [dict(vars(cls)) for cls in classes])
    assert before not in strategy.experimental_local_results(during)
    assert [dict(vars(cls)) for cls in classes] == before


def _plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@several
def test_a_method_taken_from_a_scheduler_before_a_run_is_refused_with_nothing_done(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology)
    take_step = training.scheduler.step

    def step(batch: Any) -> None:
        training.backward(batch, 1)
        take_step()

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"The step holds StepLR\.step, a method that was taken from its object",
        run,
    )


@several
def test_replicas_that_do_not_all_step_a_scheduler_are_an_error_and_it_has_not_stepped(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology)
    training.optimizer.zero_grad()

    def step(batch: Any) -> None:
        training.optimizer.zero_grad()
        if len(batch[0]) and replica_id() == 0:  # such as: if loss < best
            training.scheduler.step()

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"synchronized a different number of times.*replica 0 is at StepLR\.step\(\)",
        run,
    )


@several
def test_replicas_that_step_different_things_are_an_error_and_none_has_stepped(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology)

    def step(batch: Any) -> None:
        if replica_id() == 0:
            training.scheduler.step()
        else:
            training.scaler.update()

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"replica 0 is at StepLR\.step\(\), replica 1 is at GradScaler\.update\(\)",
        run,
    )


@several
def test_a_scheduler_that_is_told_each_replicas_loss_is_refused_before_it_steps(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology, FEATURES["scheduler_on_a_plateau"])

    def step(batch: Any) -> None:
        training.scheduler.step(float(training.loss(batch).detach()))

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        ValueError,
        r"ReduceLROnPlateau\.step\(\) acts once for all replicas.*all_reduce",
        run,
    )


@several
def test_an_infinity_in_any_one_replica_skips_the_update_of_all(topology: str) -> None:
    strategy, training, batch = begun(topology)
    rows = strategy.experimental_local_results(batch[0])
    for bad in range(sum(len(part) > 0 for part in rows)):
        before, scale = training.state(), training.scaler.get_scale()

        def step(batch: Any, bad: int = bad) -> None:
            training.optimizer.zero_grad()
            factor = math.inf if replica_id() == bad else 1.0
            training.scaler.scale(training.loss(batch) * factor).backward()
            training.scaler.step(training.optimizer)
            training.scaler.update()

        strategy.run(step, args=(batch,))
        after = training.state()
        assert training.scaler.get_scale() == scale / 2
        assert all(
            torch.equal(after[path], before[path])
            for path in before
            if path.endswith("weight")
        )


class _WatchedScaler(torch.amp.GradScaler):
    def __init__(self) -> None:
        super().__init__("cpu")
        self.made: list[tuple[torch.device, threading.Thread]] = []

    def _lazy_init_scale_growth_tracker(self, device: torch.device) -> None:
        self.made.append((device, threading.current_thread()))
        super()._lazy_init_scale_growth_tracker(device)


@several
def test_replicas_do_not_make_the_scale_of_a_scaler_all_at_once(topology: str) -> None:
    """Its first loss tells a scaler where to make it.

    Of two replicas at a time, it kept a half of each.
    """
    strategy, scaler = TOPOLOGIES[topology](), _WatchedScaler()
    strategy.run(lambda: scaler.scale(torch.ones(())).detach())
    assert scaler.made == [
        (
            memory_device(strategy.extended.parameter_devices[0]),
            threading.current_thread(),
        )
    ]


@only_with_copies
@several
def test_a_moving_average_that_the_step_writes_is_refused_with_the_way_that_works(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology, FEATURES["averaged_ema"])

    def step(batch: Any) -> None:
        training.average.update_parameters(training.model)

    run = functools.partial(strategy.run, step, args=(batch,))
    refused(
        training,
        RuntimeError,
        r"AveragedModel\..* was written in place in a replica.*merge_call",
        run,
    )


@only_in_turns
@several
def test_a_moving_average_that_the_step_writes_is_that_of_plain_torch(
    topology: str,
) -> None:
    """All replicas write it alike, so it is written once."""

    def states(strategy: torchstrategy.Strategy) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        with strategy.scope():
            training = FEATURES["averaged_ema"]()

        def step(batch: Any) -> None:
            Training.step(training, batch, 0)
            training.average.update_parameters(training.model)

        found = []
        for batch in Training.batches(training):
            strategy.run(step, args=(deal(strategy, batch),))
            found.append(tensors_of(training.average))
        return found

    ours, plain = (
        states(one) for one in (TOPOLOGIES[topology](), torchstrategy.get_strategy())
    )
    for mine, theirs in zip(ours, plain, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                mine[name], tensor, check_device=False, rtol=1e-10, atol=1e-12
            )


@several
# By which torch warns of cycles.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_that_replicas_made_together_cannot_be_differentiated_silently(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology, Training)

    def step(batch: Any, factor: float) -> None:
        training.optimizer.zero_grad()
        training.loss(batch).backward(create_graph=True)
        parameters = list(training.model.parameters())
        nn.utils.clip_grad_norm_(parameters, 0.1)  # which is not differentiated
        if factor:
            (
                training.loss(batch)
                + factor * sum(p.grad.square().sum() for p in parameters)
            ).backward()
        training.optimizer.step()

    run = functools.partial(strategy.run, step)
    message = r"goes through .*\.grad, which replicas .*autograd\.grad"
    refused(training, RuntimeError, message, lambda: run((batch, 0.1)))
    before = tensors_of(training.model)
    run((batch, 0.0))
    assert all(
        not torch.equal(tensor, before[path])
        for path, tensor in tensors_of(training.model).items()
    )


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
}
if not SIMULATED:  # accelerators can do it
    OPTIONS["capturable"] = lambda p: torch.optim.Adam(
        p, lr=0.1, capturable=True, foreach=False
    )


@several
@pytest.mark.parametrize("option", OPTIONS)
def test_what_torch_refuses_of_an_optimizer_it_refuses_in_replicas(
    topology: str, option: str
) -> None:
    with pytest.raises((RuntimeError, AssertionError)) as theirs:
        states_of(WithOptimizer(OPTIONS[option]))
    strategy = TOPOLOGIES[topology]()
    with strategy.scope():
        training = WithOptimizer(OPTIONS[option])
    before = tensors_of(training.model)
    with pytest.raises(theirs.type) as ours:
        strategy.run(training.step, args=(deal(strategy, data(7)), 0))
    assert str(ours.value).split("\n")[0] == str(theirs.value).split("\n")[0]
    assert_alike(tensors_of(training.model), before, 0.0, "after the refusal")


# ---- what cannot be equal, and what holds


@several
def test_each_replica_drops_out_what_its_recomputation_drops_out_again(
    topology: str,
) -> None:
    """Masks differ from those of plain PyTorch and between replicas.

    A seed gives the same ones again.
    """

    def gradients(recompute: bool) -> dict[str, Any]:
        strategy = TOPOLOGIES[topology]()
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(4, 2, **F64))
        masks: dict[int, torch.Tensor] = {}

        def step(batch: Any) -> None:
            forward = (
                functools.partial(checkpoint, model, use_reentrant=False)
                if recompute
                else model
            )
            F.mse_loss(forward(batch[0]), batch[1]).backward()
            masks[replica_id()] = F.dropout(
                torch.ones(50, device=batch[0].device)
            ).cpu()

        strategy.run(step, args=(deal(strategy, data(7)),))
        assert not torch.equal(masks[0], masks[1])
        return {name: p.grad.cpu() for name, p in model.named_parameters()}

    assert_alike(
        gradients(recompute=False), gradients(recompute=False), 0.0, "the same seed"
    )
    assert_alike(
        gradients(recompute=True), gradients(recompute=False), 0.0, "recomputed"
    )


@several
def test_noise_that_each_replica_adds_to_its_gradient_is_averaged(
    topology: str,
) -> None:
    strategy, training, batch = begun(topology, Training)
    drawn: dict[int, torch.Tensor] = {}

    def step(batch: Any, noisy: bool) -> None:
        training.backward(batch, 1)
        weight = training.model[0].weight
        if noisy:
            noise = torch.randn_like(weight)
            drawn[replica_id()] = noise.cpu()
            weight.grad.add_(noise)

    strategy.run(step, args=(batch, False))
    exact = training.model[0].weight.grad.cpu()
    strategy.run(step, args=(batch, True))
    noise = torch.stack([drawn[r] for r in sorted(drawn)])
    # Four rows: two replicas have two each.
    assert len(noise) in (2, 4) and not torch.equal(noise[0], noise[1])
    torch.testing.assert_close(
        training.model[0].weight.grad.cpu(), exact + noise.mean(0)
    )


@several
def test_batch_norm_is_that_of_the_rows_of_each_replica(topology: str) -> None:
    """Gradients are those of the pieces, each normalised by itself; so are variances.

    Means are those of all rows.
    """

    def build() -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm1d(3, **F64),
            linear(),
            nn.Tanh(),
            nn.BatchNorm1d(4, **F64),
            mlp()[2],
        )

    strategy = TOPOLOGIES[topology]()
    (model, _), (twin, _) = built(strategy, build, None)
    whole, pieces = (
        data(8),
        [part.split(-(-8 // int(topology[-1]))) for part in data(8)],
    )
    strategy.run(
        lambda batch: mse(model, batch).backward(), args=(deal(strategy, whole),)
    )
    sum(
        mse(twin, piece) * len(piece[0]) / 8 for piece in zip(*pieces, strict=True)
    ).backward()
    for (name, mine), theirs in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, msg=name)
    torch.testing.assert_close(model[0].running_mean.cpu(), 0.1 * whole[0].mean(0))
    variances = sum(piece.var(0) * len(piece) / 8 for piece in pieces[0])
    torch.testing.assert_close(model[0].running_var.cpu(), 0.9 + 0.1 * variances)
    assert int(model[0].num_batches_tracked) == 1


# ---- torch.compile


def compiled(how: str, rows: Sequence[int]) -> tuple[Compiled, list[int]]:
    """A training on three replicas after a step for each number of rows.

    It returns how many graphs there were after each.
    """
    graphs: list[Any] = []

    def counted(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    strategy, counts = several_replicas(), []
    torch.compiler.reset()
    torch.manual_seed(0)
    with strategy.scope():
        training = Compiled(how, counted)
    for k, count in enumerate(rows):
        strategy.run(training.step, args=(deal(strategy, data(count, seed=k)), k))
        counts.append(len(graphs))
    return training, counts


@for_releases
@pytest.mark.slow
# torch warns of a compiled step with an update, in plain PyTorch too.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ("model",) if SIMULATED else COMPILED)
def test_replicas_share_graphs_and_none_is_compiled_after_the_first_step(
    how: str,
) -> None:
    ours, counts = compiled(how, (9, 9, 9, 9))
    assert counts == [3 if SIMULATED else 1] * 4  # devices need graphs of their own
    torch.manual_seed(0)
    theirs = Uncompiled()
    for k in range(4):
        theirs.step(data(9, seed=k), k)
    assert_alike(
        tensors_of(ours.model), tensors_of(theirs.model), 1e-10, "in plain PyTorch"
    )


@for_releases
@pytest.mark.slow
def test_sizes_that_vary_are_compiled_for_once() -> None:
    """One graph for the first size, one for all.

    On the CPU there is one for all that begin in the middle of a batch.
    """
    _, counts = compiled("model", (9, 8, 12, 11, 15, 10))
    assert counts[2] == counts[-1] <= (6 if SIMULATED else 3)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is"
)  # torch's own, in its compiler
@for_releases
@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="compiles C++, and there is no compiler: install g++",
)
@without_simulated_devices
def test_the_kernels_of_inductor_train_replicas_as_they_train_plain_torch() -> None:
    expected = plain("compiled_model")
    torch.manual_seed(0)
    with (strategy := several_replicas()).scope():
        training = Compiled("model", "inductor")
    for k, batch in enumerate(training.batches()):
        strategy.run(training.step, args=(deal(strategy, batch), k))
        assert_alike(training.state(), expected[k], 1e-10, f"step {k}")
