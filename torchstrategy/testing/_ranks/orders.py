"""The order in which ranks or replicas go on: as listed, reversed or random.

A seed draws a random order.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from torchstrategy._base.errors import plural


class Order(ABC):
    """Who goes on, of those that can."""

    is_drawn = False  # then ranks also hand over where they need not wait

    @abstractmethod
    def choose(self, able: Sequence[int]) -> int:
        """One of some ranks, at least one, which are given from the lowest up."""

    @abstractmethod
    def __str__(self) -> str:
        """What makes the same order again."""


@final
class Listed(Order):
    """The first of a list."""

    def __init__(self, ranks: Sequence[int], name: str = "") -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._name = name or str(list(ranks))

    def choose(self, able: Sequence[int]) -> int:
        return min(able, key=self._places.__getitem__)

    def __str__(self) -> str:
        return self._name


@final
class Drawn(Order):
    """One that is drawn, each time anew."""

    is_drawn = True

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    def choose(self, able: Sequence[int]) -> int:
        return able[self._random.randrange(len(able))]

    def __str__(self) -> str:
        return f"random:{self._seed}"


def with_a_seed(name: str) -> str:
    """The name of an order that is the same each time.

    `random` gets a seed, while `random:7` and `reversed` stay as they are.

    Raises:
        ValueError: If there is no such order.
    """
    kind, colon, seed = name.partition(":")
    if name == "reversed" or (kind == "random" and seed.isdecimal()):
        return name
    if kind == "random" and not colon:
        return f"random:{random.SystemRandom().randrange(10_000)}"
    raise ValueError(
        f"{name!r} is no order: write 'reversed', 'random', or 'random:7' for what the "
        "seed 7 draws."
    )


def order_of_ranks(order: Sequence[int] | str | None, n: int) -> Order:
    """What `run_ranks` is told, as an order.

    Raises:
        ValueError: If there is no such order, or if it does not list each rank once.
    """
    if order is None:
        return Listed(range(n))
    if isinstance(order, str):
        name = with_a_seed(order)
        return (
            Listed(range(n)[::-1], name) if name == "reversed" else Drawn(seed_of(name))
        )
    if sorted(order) != list(range(n)):
        raise ValueError(
            f"run_ranks: `order` lists each of the {plural(n, 'rank')}, 0 to {n - 1}, "
            f"once; got {order!r}."
        )
    return Listed(order)


def seed_of(name: str) -> int:
    """7, for `random:7`."""
    return int(name.partition(":")[2])
