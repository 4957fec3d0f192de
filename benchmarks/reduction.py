"""What it costs to add up what replicas have: 100 MB in each of 4.

It is compared with `torch._foreach_add_` by hand.

python benchmarks/reduction.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import torchstrategy
from contest import Contender, Measure, Row, compared, hold, timed
from torchstrategy import ReduceOp
from torchstrategy._base.options import NO_OPTIONS
from torchstrategy._copies.gradients.gradient_reducer import GradientReducer
from torchstrategy._copies.gradients.replica_gradients import (
    ReplicaParameter,
    make_local,
)
from torchstrategy._group.group import InlineReplica
from torchstrategy._group.participants import Participants

REPLICAS, WEIGHT, BAR = 4, 0.25, 1.1
LAYOUTS = {
    "10 of 10 MB": (10, 2_500_000),
    "1,000 of 100 kB": (1_000, 25_000),
    "10,000 of 10 kB": (10_000, 2_500),
}

Tensors = list[torch.Tensor]


def in_replicas(layout: str) -> list[Tensors]:
    """What each replica has."""
    torch.manual_seed(0)
    count, size = LAYOUTS[layout]
    return [[torch.rand(size) for _ in range(count)] for _ in range(REPLICAS)]


class Model(NamedTuple):
    """The user's parameters, and those of each replica."""

    owners: list[nn.Parameter]
    local: list[list[Any]]

    @classmethod
    def of(cls, layout: str, make: Callable[[torch.Tensor], Any]) -> Model:
        """A model whose replicas share the memory of its parameters."""
        count, size = LAYOUTS[layout]
        owners = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
        return cls(
            owners,
            [[make(owner.detach()) for owner in owners] for _ in range(REPLICAS)],
        )

    def take(self, gradients: list[Tensors]) -> None:
        """The replicas have run backward, and the owners have no gradients."""
        for owner in self.owners:
            owner.grad = None
        for parameters, tensors in zip(self.local, gradients, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor

    def combined(self) -> Tensors:
        """The gradients of the owners, which have none afterwards."""
        found = [owner.grad for owner in self.owners if owner.grad is not None]
        for owner in self.owners:
            owner.grad = None
        return found


class Way(NamedTuple):
    """How the gradients of replicas become those of the owners."""

    model: Model
    combine: Callable[[], None]

    def measure(self, gradients: list[Tensors]) -> Measure:
        """The seconds of it."""

        def measure() -> float:
            self.model.take(gradients)
            seconds = timed(self.combine, 1)()
            self.model.combined()
            return seconds

        return measure


def by_hand(layout: str, is_new: bool = False) -> Way:
    """Plain PyTorch: the total is written over the first replica's gradients.

    It may have memory of its own instead.
    """
    model = Model.of(layout, nn.Parameter)

    def combine() -> None:
        total: Any = None
        for parameters in model.local:
            gradients = [parameter.grad for parameter in parameters]
            if total is not None:
                torch._foreach_add_(total, gradients, alpha=WEIGHT)
            elif is_new:
                total = torch._foreach_mul(gradients, WEIGHT)
            else:
                torch._foreach_mul_(gradients, WEIGHT)
                total = gradients
            for parameter in parameters:
                parameter.grad = None
        for owner, gradient in zip(model.owners, total, strict=True):
            owner.grad = gradient

    return Way(model, combine)


def reduced(layout: str) -> Way:
    """As in a run under CentralStorageStrategy."""
    model = Model.of(
        layout, lambda data: make_local(ReplicaParameter, data, requires_grad=True)
    )
    together = GradientReducer(
        model.owners, [""] * len(model.owners), model.local, take_turns=True
    )
    participants = Participants.of((), REPLICAS, NO_OPTIONS, ReduceOp.MEAN)
    replicas = [InlineReplica(index, torch.device("cpu")) for index in range(REPLICAS)]

    def combine() -> None:
        together.begin(participants, (), lambda update: update())
        for replica in participants.present:
            together.of_replicas[replica].enter(replicas[replica])
            together.accumulate(replica)
        together.reduce()
        together.end()

    return Way(model, combine)


def gradients(rounds: int) -> Iterator[Row]:
    """From gradients of each replica's parameters to those of the owners.

    These lie where the first replica's lay.
    """
    for layout in LAYOUTS:
        ways = {
            "by hand": by_hand(layout),
            "by hand, in new memory": by_hand(layout, is_new=True),
            "Central": reduced(layout),
        }
        check_equal(layout, list(ways.values()))
        brought = in_replicas(layout)
        contenders = {
            name: Contender(way.measure(brought), ("by hand",))
            for name, way in ways.items()
        }
        contenders["by hand"] = contenders["by hand"]._replace(against=())
        contenders["Central"] = contenders["Central"]._replace(bar=BAR)
        yield from compared(f"gradients, {layout}", contenders, rounds)


def check_equal(layout: str, ways: list[Way]) -> None:
    """All ways come to the same gradients."""
    found = []
    for way in ways:
        way.model.take(in_replicas(layout))
        way.combine()
        found.append(way.model.combined())
    assert all(
        torch.equal(first, other)
        for first, *others in zip(*found, strict=True)
        for other in others
    )


def values(rounds: int) -> Iterator[Row]:
    """From a value of each replica to their sum."""
    for layout in ("10 of 10 MB", "1,000 of 100 kB"):
        brought = in_replicas(layout)
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * REPLICAS)
        value, to_one = (
            distributed(strategy, brought),
            torchstrategy.ReductionToOneDevice(),
        )
        pairs = [(v, torch.device("cpu")) for v in value]
        ways: dict[str, Callable[[], list[Tensors]]] = {
            "by hand": lambda brought=brought: [summed(brought)],
            "strategy.reduce": lambda strategy=strategy, value=value: [
                strategy.reduce("sum", value, axis=None)
            ],
            "ReductionToOneDevice": lambda ops=to_one, pairs=pairs: [
                ops.batch_reduce(ReduceOp.SUM, pairs)
            ],
        }
        yield from against_hand(f"a sum, {layout}", ways, rounds)


def all_reductions(rounds: int) -> Iterator[Row]:
    """From each replica's value to their sum in each replica, in memory of its own."""
    for layout in ("10 of 10 MB", "1,000 of 100 kB"):
        brought = in_replicas(layout)
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * REPLICAS)
        value = distributed(strategy, brought)
        ways: dict[str, Callable[[], list[Tensors]]] = {
            "by hand": lambda brought=brought: everywhere(brought),
            "all_reduce in the step": lambda strategy=strategy, value=value: components(
                strategy.run(summed_in_replica, args=(value,))
            ),
        }
        for ops in (
            torchstrategy.ReductionToOneDevice(),
            torchstrategy.HierarchicalCopyAllReduce(),
        ):
            ways[type(ops).__name__] = lambda ops=ops, value=value: components(
                ops.batch_reduce(ReduceOp.SUM, [(v, v) for v in value])
            )
        yield from against_hand(f"a sum in each replica, {layout}", ways, rounds)


def distributed(strategy: torchstrategy.Strategy, brought: list[Tensors]) -> list[Any]:
    """A distributed value for each tensor."""
    own = lambda context: brought[context.replica_id_in_sync_group]  # noqa: E731
    return strategy.experimental_distribute_values_from_function(own)


def components(values: list[Any]) -> list[Tensors]:
    """What each replica has of distributed values."""
    return [
        list(tensors)
        for tensors in zip(*(value.values for value in values), strict=True)
    ]


def summed_in_replica(tensors: Tensors) -> Any:
    """A step that adds up what the replicas have."""
    return torchstrategy.get_replica_context().all_reduce("sum", tensors)


def summed(brought: list[Tensors]) -> Tensors:
    """By hand: the sums."""
    total = list(torch._foreach_add(brought[0], brought[1]))
    for tensors in brought[2:]:
        torch._foreach_add_(total, tensors)
    return total


def everywhere(brought: list[Tensors]) -> list[Tensors]:
    """By hand: the sums, and a copy of them for each other replica."""
    total = summed(brought)
    return [total, *([tensor.clone() for tensor in total] for _ in brought[1:])]


def against_hand(
    contest: str, ways: dict[str, Callable[[], list[Tensors]]], rounds: int
) -> list[Row]:
    """All ways against the one by hand, in each replica or in one.

    All ways have the same results as the one by hand.
    """
    for way in ways.values():
        for found, expected in zip(way(), ways["by hand"](), strict=True):
            assert torch.allclose(torch.cat(list(found)), torch.cat(list(expected)))
    contenders = {}
    for name, way in ways.items():
        against, bar = ((), None) if name == "by hand" else (("by hand",), BAR)
        contenders[name] = Contender(timed(way, 1, time.process_time), against, bar)
    return compared(contest, contenders, rounds)


CONTESTS = (gradients, values, all_reductions)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
