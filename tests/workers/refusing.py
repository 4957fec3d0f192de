"""Calls that refuse their arguments, in all workers or in one of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

import torchstrategy
from torchstrategy import InputContext, RunOptions, get_replica_context
from torchstrategy.testing import assert_workers_agree
from workers.reading import Numbers
from workers.trainings import strategy_of

Strategy = torchstrategy.MultiWorkerMirroredStrategy


class Call(NamedTuple):
    """A call of the public API that exchanges values."""

    make: Callable[[Strategy, Any], Any]
    good: Any
    bad: Any


class Untold:
    """Nothing that can be added or sent."""

    def __repr__(self) -> str:
        return "untold"


class Pair(NamedTuple):
    rows: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass
class Held:
    rows: torch.Tensor


def value(strategy: Strategy, made: Any) -> Any:
    """What each replica makes anew: an object that all return is no value of each."""
    return strategy.run(
        lambda: copy.deepcopy(made) if type(made) is not str else "".join(list(made))
    )


def in_step(call: Callable[[Any, Any], Any]) -> Callable[[Strategy, Any], Any]:
    return lambda strategy, given: strategy.run(
        lambda: call(get_replica_context(), given)
    )


def in_merge(
    call: Callable[[Strategy, Any, Any], Any],
) -> Callable[[Strategy, Any], Any]:
    def make(strategy: Strategy, given: Any) -> Any:
        def step() -> Any:
            context: Any = get_replica_context()
            return context.merge_call(
                lambda s, one: call(s, one, given), args=(torch.ones(2) * 1,)
            )

        return strategy.run(step)

    return make


def first_batch(strategy: Strategy, batches: Any, options: Any = None) -> Any:
    batch = next(iter(strategy.experimental_distribute_dataset(batches, options)))
    return strategy.run(lambda given: len(given), args=(batch,))


def weighted(strategy: Strategy, weights: Any) -> Any:
    return strategy.reduce(
        "mean", value(strategy, torch.ones(2)), axis=None, weights=weights
    )


def of_two_leaves(strategy: Strategy, second: Any) -> Any:
    return strategy.reduce(
        "sum", value(strategy, {"a": torch.ones(2), "b": second}), axis=None
    )


def mismatched(strategy: Strategy, sizes: Any) -> Any:
    batches = [
        next(iter(strategy.experimental_distribute_dataset([torch.ones(size)])))
        for size in sizes
    ]
    return strategy.run(lambda *given: None, args=tuple(batches))


TWO = torch.ones(2)
CALLS: dict[str, Call] = {
    "run args": Call(lambda s, given: s.run(lambda *rows: None, args=given), (), TWO),
    "run kwargs": Call(lambda s, given: s.run(lambda: None, kwargs=given), {}, 3),
    "run options": Call(
        lambda s, given: s.run(lambda: None, options=given), None, "none"
    ),
    "run fn": Call(lambda s, given: s.run(given), lambda: None, 3),
    "run examples": Call(
        lambda s, given: s.run(lambda: None, options=RunOptions(examples=given)),
        [1.0] * 2,
        [1.0, 2.0, 3.0],
    ),
    "run rows": Call(mismatched, (6, 6), (6, 12)),
    "call_for_each_replica": Call(
        lambda s, given: s.extended.call_for_each_replica(lambda *_: 1, given), (), 3
    ),
    "reduce op": Call(
        lambda s, given: s.reduce(given, value(s, TWO), axis=None), "sum", "median"
    ),
    "reduce axis": Call(
        lambda s, given: s.reduce("sum", value(s, TWO), axis=given), 0, 3
    ),
    "reduce axes": Call(
        lambda s, given: s.reduce("sum", value(s, TWO), axis=given), (0,), "rows"
    ),
    "reduce value": Call(
        lambda s, given: s.reduce("sum", value(s, given), axis=None), TWO, "text"
    ),
    "reduce plain": Call(lambda s, given: s.reduce("sum", given, axis=None), 0, 3.0),
    "reduce second leaf": Call(of_two_leaves, TWO, "text"),
    "reduce weights": Call(weighted, [1.0, 2.0], Untold()),
    "reduce too many weights": Call(weighted, [1.0, 2.0], [1.0, 2.0, 3.0]),
    "reduce weights that are no numbers": Call(weighted, [1.0, 2.0], ["a", "b"]),
    "gather text": Call(
        lambda s, given: s.gather(value(s, given), axis=0), TWO, "text"
    ),
    "gather thing": Call(
        lambda s, given: s.gather(value(s, given), axis=0), TWO, Untold()
    ),
    "gather scalar": Call(
        lambda s, given: s.gather(value(s, given), axis=0), TWO, torch.ones(())
    ),
    "gather axis": Call(lambda s, given: s.gather(value(s, TWO), axis=given), 0, 1),
    "gather no axis": Call(
        lambda s, given: s.gather(value(s, TWO), axis=given), 0, None
    ),
    "gather axis of text": Call(
        lambda s, given: s.gather(value(s, TWO), axis=given), 0, "rows"
    ),
    "reduce_to": Call(
        lambda s, given: s.extended.reduce_to("sum", value(s, TWO), given),
        "cpu",
        ["cpu"],
    ),
    "reduce_to options": Call(
        lambda s, given: s.extended.reduce_to(
            "sum", value(s, TWO), "cpu", options=given
        ),
        None,
        "fast",
    ),
    "batch_reduce_to": Call(
        lambda s, given: s.extended.batch_reduce_to("sum", [given(value(s, TWO))]),
        lambda v: (v, "cpu"),
        lambda v: v,
    ),
    "all_reduce op": Call(
        in_step(lambda c, given: c.all_reduce(given, TWO)), "sum", "median"
    ),
    "all_reduce value": Call(
        in_step(lambda c, given: c.all_reduce("sum", given)), TWO, "text"
    ),
    "all_reduce options": Call(
        in_step(lambda c, given: c.all_reduce("sum", TWO, given)), None, "fast"
    ),
    "all_gather scalar": Call(
        in_step(lambda c, given: c.all_gather(given, axis=0)), TWO, torch.ones(())
    ),
    "all_gather axis": Call(
        in_step(lambda c, given: c.all_gather(TWO, axis=given)), 0, 3
    ),
    "all_gather no axis": Call(
        in_step(lambda c, given: c.all_gather(TWO, axis=given)), 0, None
    ),
    "merge_call args": Call(
        in_step(lambda c, given: c.merge_call(lambda s, *_: None, args=given)), (), 3
    ),
    "reduce in merge_call": Call(
        in_merge(lambda s, one, op: s.reduce(op, one, axis=None)), "sum", "median"
    ),
    "batch without rows": Call(first_batch, [torch.ones(4)], [torch.ones(())]),
    "batch of other rows": Call(
        first_batch, [(torch.ones(4), torch.ones(4))], [(torch.ones(4), torch.ones(3))]
    ),
    "batch of a class": Call(first_batch, [torch.ones(4)], [Untold()]),
    "batch ahead": Call(
        lambda s, given: first_batch(
            s, given, torchstrategy.InputOptions(load_ahead=True)
        ),
        [torch.ones(4)],
        [(torch.ones(4), torch.ones(3))],
    ),
    "assert_workers_agree": Call(
        lambda s, given: assert_workers_agree(s, given), torch.nn.Linear(1, 1), 3
    ),
}


def refused(
    names: list[str], replicas: int, one_only: bool
) -> list[tuple[str, Any, float]]:
    """What each worker hears of each call, and if the strategy still works after it."""
    strategy = strategy_of(replicas)
    rank = strategy.extended._workers.index
    heard = []
    for name in names:
        call = CALLS[name]
        bad = not one_only or rank == 1
        try:
            call.make(strategy, call.bad if bad else call.good)
            told = "nothing"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        try:
            total = strategy.reduce(
                "sum", strategy.run(lambda: torch.ones(()) * 1), axis=None
            ).item()
        except (TypeError, ValueError) as error:
            # A run of one replica has no exchange of its own: the others hear of a
            # refusal where they come next.
            assert replicas == 1 and told == "nothing"
            told = f"{type(error).__name__}: {error}"
            total = strategy.reduce(
                "sum", strategy.run(lambda: torch.ones(()) * 1), axis=None
            ).item()
        heard.append((name, told, total))
    return [*heard, ("training", trained(strategy), total)]


def trained(strategy: Strategy) -> list[float]:
    """The weights after a step of a new model, which are the same in all workers."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.fill_(1.0)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(DataLoader(Numbers(6), 3)):
        strategy.run(lambda rows: step(rows.float().expand(-1, 2)), args=(batch,))
    return [round(number, 6) for number in model.weight.flatten().tolist()]


def lent(kind: str) -> list[str]:
    """The first worker has no batch, and those of the second cannot be sent to it."""
    strategy = strategy_of(1)
    batches = (
        [Held(torch.ones(2))]
        if kind == "dataclass"
        else [Pair(torch.ones(2), torch.ones(2))]
    )

    def dataset_fn(context: InputContext) -> Any:
        return batches if context.input_pipeline_id else []

    heard = []
    try:
        for batch in strategy.distribute_datasets_from_function(dataset_fn):
            strategy.run(lambda given: None, args=(batch,))
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
    total = strategy.reduce("sum", strategy.run(lambda: torch.ones(()) * 1), axis=None)
    return [*heard, str(total.item())]
