"""The memory of a finished model is free at once.

Nothing of it waits for the collector of cycles.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, prune

import torchstrategy
from problems import data, deal, mlp, mse
from topologies import compute_devices


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def _train(strategy: Any, model: Any, optimizer: Any) -> None:
    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        strategy.run(step, args=(deal(strategy, data(5)),))


def _clip(strategy: Any, model: Any, optimizer: Any) -> None:
    def step(batch: Any) -> None:
        for _ in range(2):
            mse(model, batch).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            [p.grad.mul_(2) for p in model.parameters()]
            optimizer.step()

    strategy.run(step, args=(deal(strategy, data(5)),))


def _fail(strategy: Any, model: Any, optimizer: Any) -> None:
    def step(batch: Any) -> None:
        mse(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        raise ValueError("of the step")

    _train(strategy, model, optimizer)
    with contextlib.suppress(ValueError):
        strategy.run(step, args=(deal(strategy, data(5)),))
    with contextlib.suppress(RuntimeError):
        strategy.run(lambda: [p.mul_(2) for p in model.parameters()])


def _evaluate(strategy: Any, model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        strategy.gather(
            strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(5)),)), axis=0
        )
    with torch.inference_mode():
        strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(5)),))


def _results_that_require_grad(strategy: Any, model: Any, optimizer: Any) -> None:
    for _ in range(2):
        losses = strategy.run(lambda b: mse(model, b), args=(deal(strategy, data(5)),))
        strategy.reduce("mean", losses, axis=None).backward()
        optimizer.step()
    strategy.run(lambda b: mse(model, b), args=(deal(strategy, data(5)),))


def _look_at(p: Any) -> None:
    assert p.grad.isfinite().all()


def _hooks(strategy: Any, model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g.clone())
        p.register_post_accumulate_grad_hook(_look_at)
    _train(strategy, model, optimizer)
    _results_that_require_grad(strategy, model, optimizer)


def _groups(strategy: Any, model: Any, optimizer: Any) -> None:
    _train(strategy, model, optimizer)
    with strategy.scope():
        head = nn.Linear(2, 2).double()
    optimizer.add_param_group({"params": list(head.parameters())})
    _train(strategy, model, optimizer)


LIVES = [_train, _clip, _fail, _evaluate, _results_that_require_grad, _hooks, _groups]


def _kept(references: list[weakref.ref[Any]]) -> list[Any]:
    """What is still alive.

    The collector is off, so a cycle stays; a replica's thread may let go a moment
    later.
    """
    for _ in range(1000):
        if all(reference() is None for reference in references):
            break
        threading.Event().wait(0.01)
    return [thing for reference in references if (thing := reference()) is not None]


@pytest.mark.parametrize(
    "life", LIVES, ids=[life.__name__.strip("_") for life in LIVES]
)
@pytest.mark.parametrize("keeps_strategy", [True, False])
def test_the_memory_of_a_model_is_free_at_its_end(make, life, keeps_strategy):
    """All replicas' gradients and each one's parameters held one another.

    The user's were held with them.
    """
    strategy = make(2)

    def trial() -> list[weakref.ref[Any]]:
        one = strategy if keeps_strategy else make(2)
        with one.scope():
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        life(one, model, optimizer)
        return [weakref.ref(thing) for thing in (*model.parameters(), model, optimizer)]

    trial()  # what torch keeps of a first time
    for _ in range(2):
        assert _kept(trial()) == []


@pytest.mark.parametrize("has_hooks", [False, True])
def test_the_memory_of_a_data_parallel_is_free_at_its_end(has_hooks):
    def trial() -> list[weakref.ref[Any]]:
        devices = compute_devices(2)
        model = torchstrategy.DataParallel(mlp().to(devices[0]), devices)
        if has_hooks:
            model.module[0].weight.register_hook(lambda g: g * 2)
        for _ in range(2):
            model(data(5)[0].to(devices[0])).sum().backward()
        with torch.no_grad():
            model(data(5)[0].to(devices[0]))
        return [
            weakref.ref(thing) for thing in (*model.parameters(), model.module, model)
        ]

    trial()
    assert _kept(trial()) == []


def _left_behind(call: Callable[[], Any]) -> list[str]:
    """What a few calls leave for the collector of cycles."""
    for _ in range(3):
        call()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(3):
        call()
    gc.collect()
    return [repr(thing)[:200] for thing in gc.garbage]


@pytest.mark.parametrize(
    "life", [_train, _clip, _evaluate, _hooks], ids=lambda life: life.__name__
)
def test_a_step_leaves_no_cycle_behind(make, life):
    """Containers were walked by functions that refer to themselves."""
    strategy = make(2)
    with strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if life is _hooks:
        for p in model.parameters():
            p.register_hook(lambda g: g.clone())
        life = _train
    assert _left_behind(lambda: life(strategy, model, optimizer)) == []


def test_the_values_of_a_step_leave_no_cycle_behind(make):
    strategy = make(2)

    def values() -> None:
        context = torchstrategy.get_replica_context
        batch = deal(strategy, {"x": data(5)[0], "y": [data(5)[1], (data(5)[1], 3)]})
        results = strategy.run(
            lambda b: {"x": b["x"], "sum": context().all_reduce("sum", b["x"].sum())},
            args=(batch,),
        )
        strategy.gather(results["x"], axis=0)
        strategy.reduce("sum", results["sum"], axis=None)
        strategy.experimental_local_results(results)

    assert _left_behind(values) == []


def test_a_forward_of_data_parallel_leaves_no_cycle_behind():
    devices = compute_devices(2)
    model = torchstrategy.DataParallel(mlp().to(devices[0]), devices)

    def forward() -> None:
        model(data(5)[0].to(devices[0])).sum().backward()

    assert _left_behind(forward) == []


def test_an_output_that_a_module_no_longer_keeps_is_not_held(make):
    """A random program: pruning keeps a product in `weight`.

    Its graph held the parameter that was to be swapped.
    """
    strategy = make(2)
    with strategy.scope():
        layer = nn.Linear(2, 2)
        prune.l1_unstructured(layer, "weight", 0.5)
        layer.requires_grad_(False)
    dropped = weakref.ref(layer.weight)
    strategy.run(lambda: layer(torch.ones(1, 2)).sum())
    assert dropped() is None
    torch.utils.swap_tensors(
        layer.weight_orig, nn.Parameter(torch.ones(2, 2), requires_grad=False)
    )
    assert layer.weight_orig.sum() == 4
