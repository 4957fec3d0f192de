"""Values of several parts that workers have in another order, or not alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import torchstrategy
from workers.trainings import strategy_of


@dataclass
class Metrics:
    """What an evaluation returns."""

    loss: torch.Tensor
    by_name: dict[str, torch.Tensor]


def in_another_order(replicas: int) -> list[Any]:
    """What is put together of dicts whose items each worker has in another order."""
    strategy = strategy_of(replicas)
    is_first = strategy.extended.should_checkpoint

    def metrics() -> dict[str, torch.Tensor]:
        items = [
            ("loss", torch.ones(1)),
            ("accuracy", torch.full((1,), 100.0)),
            ("rows", torch.full((1,), 7.0)),
        ]
        return dict(items if is_first else items[::-1])

    def of_step() -> Any:
        context = torchstrategy.get_replica_context()
        return context.all_reduce("sum", metrics()), context.all_gather(
            metrics(), axis=0
        )

    found: list[Any] = [
        strategy.reduce(op, strategy.run(metrics), axis=None) for op in ("sum", "mean")
    ]
    found += [
        strategy.reduce("sum", strategy.run(metrics), axis=0),
        strategy.gather(strategy.run(metrics), axis=0),
    ]
    found.append(strategy.extended.reduce_to("sum", strategy.run(metrics), "cpu"))
    record = strategy.reduce(
        "sum", strategy.run(lambda: Metrics(torch.ones(1), metrics())), axis=None
    )
    found.append({"loss": record.loss, **record.by_name})
    found += [{k: v.values[0] for k, v in one.items()} for one in strategy.run(of_step)]
    return [
        {name: value.tolist() for name, value in sorted(one.items())} for one in found
    ]


def of_other_parts(call: str) -> list[str]:
    """Calls with parts that only one worker has: the error, and the next sum."""
    strategy = strategy_of(1)
    is_first = strategy.extended.should_checkpoint

    def one_has_more() -> dict[str, torch.Tensor]:
        return (
            {"a": torch.ones(1)}
            if is_first
            else {"a": torch.ones(1), "b": torch.ones(1)}
        )

    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: strategy.reduce("sum", strategy.run(one_has_more), axis=None),
        "reduce over rows": lambda: strategy.reduce(
            "mean", strategy.run(one_has_more), axis=0
        ),
        "gather": lambda: strategy.gather(strategy.run(one_has_more), axis=0),
        "gather of lists": lambda: strategy.gather(
            strategy.run(lambda: [torch.ones(1) for _ in range(1 if is_first else 2)]),
            axis=0,
        ),
    }
    try:
        return [str(calls[call]())]
    except ValueError as error:
        total = strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)
        return [str(error), str(total.item())]


def of_other_keys_in_the_step() -> Any:
    strategy = strategy_of(1)
    key = "a" if strategy.extended.should_checkpoint else "b"
    return strategy.run(
        lambda: torchstrategy.get_replica_context().all_reduce(
            "sum", {key: torch.ones(1)}
        )
    )


def of_a_refusal_that_is_caught() -> Any:
    """One worker's first collective refuses its argument.

    The step goes on, and the sums must not shift.
    """
    strategy = strategy_of(1)
    is_first = strategy.extended.should_checkpoint
    sums = []

    def step() -> None:
        context = torchstrategy.get_replica_context()
        for number in (1.0, 10.0):
            try:
                value = "text" if is_first and number == 1 else torch.full((1,), number)
                sums.append(context.all_reduce("sum", value).item())
            except TypeError:
                sums.append(None)

    try:
        strategy.run(step)
    except torchstrategy.WorkerError as error:
        return sums, str(error)
    return sums, ""
