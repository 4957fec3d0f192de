"""A step that returns several things.

Nobody can say the type of a container with per-replica values in it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import reveal_type

import torchstrategy


class Output(NamedTuple):
    """What the step computes."""

    loss: torch.Tensor
    scores: torch.Tensor


@dataclass
class Statistics:
    """What the step counts."""

    correct: torch.Tensor
    rows: torch.Tensor


strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(()), torch.ones(3)


def named() -> Output:
    return Output(*pair())


def by_name() -> dict[str, torch.Tensor]:
    return {"loss": torch.ones(())}


def counted() -> Statistics:
    return Statistics(torch.ones(()), torch.ones(()))


loss, scores = strategy.run(pair)
reveal_type(loss)  # Any
reveal_type(strategy.run(named).loss)  # Any
reveal_type(strategy.run(by_name)["loss"])  # Any
statistics = strategy.run(counted)
reveal_type(statistics)  # Statistics | PerReplica[Statistics]
reveal_type(strategy.experimental_local_results(statistics))  # tuple[Statistics, ...]


def texts(results: torchstrategy.PerReplica[list[str]]) -> None:
    """A list with a text for each row."""
    reveal_type(strategy.gather(results, axis=0))  # list[str]
