"""Trainers, modules and optimizers may have any base classes, in any order.

They may have a metaclass of the user's.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import torchstrategy
from conditions import only_in_turns, only_with_copies
from problems import compare, data, deal, mse, parameters
from topologies import central_in_one_place
from torchstrategy._turns.switch import IN_TURNS

T = TypeVar("T")


class Slotted:
    __slots__ = ()


class NamedSlot:
    __slots__ = ("noted",)


class Protocolled(Protocol):
    def note(self) -> None: ...


class Registered(type):
    """A metaclass that refuses a second class of a name, as registries of models do."""

    names: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if name in cls.names:
            raise TypeError(f"there is a class {name} already")
        cls.names.append(name)
        return super().__new__(cls, name, bases, body)


class InRegistry(metaclass=Registered):
    pass


class Watching:
    """It counts its subclasses, of which a stand-in is none."""

    subclasses: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.subclasses.append(cls.__name__)


BASES: dict[str, tuple[Any, ...]] = {
    "ABC": (abc.ABC,),
    "Generic": (Generic[T],),
    "ABC, Generic": (abc.ABC, Generic[T]),
    "empty slots": (Slotted,),
    "slots": (NamedSlot,),
    "Dataset": (Dataset,),
    "Protocol": (Protocolled,),
    "a metaclass": (InRegistry,),
    "__init_subclass__": (Watching,),
}


@pytest.fixture(params=BASES)
def bases(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    Registered.names.clear()
    return BASES[request.param]


def test_a_trainer_has_attributes_of_its_own_in_each_replica(
    several: torchstrategy.Strategy, bases: tuple[Any, ...]
) -> None:
    """Where the first base had empty slots, the run ended in "object layout differs".

    ABC and Generic have such slots.
    """

    class Trainer(*bases):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = nn.Linear(3, 2, dtype=torch.float64)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.steps = 0

        def step(self, batch: Any) -> None:
            self.steps += 1
            self.optimizer.zero_grad()
            mse(self.model, batch).backward()
            self.optimizer.step()

    with several.scope():
        trainer = Trainer()
    before = list(Watching.subclasses)
    if NamedSlot in bases and not IN_TURNS:
        with pytest.raises(RuntimeError, match=r"wrote self\.steps in a replica"):
            several.run(trainer.step, args=(deal(several, data(7)),))
        return
    for _ in range(2):
        several.run(trainer.step, args=(deal(several, data(7)),))
    assert (
        trainer.steps == 2
        and type(trainer) is Trainer
        and Watching.subclasses == before
    )


@pytest.mark.parametrize(
    ("bases", "is_first"),
    # The `__init__` of a protocol calls no other one, so that it cannot come before
    # that of a module.
    [
        (name, is_first)
        for name in BASES
        for is_first in (True, False)
        if (name, is_first) != ("Protocol", True)
    ],
    indirect=["bases"],
)
def test_a_module_has_its_bases_in_any_order(
    bases: tuple[Any, ...], is_first: bool, make: Any
) -> None:
    class Net(*(*bases, nn.Module) if is_first else (nn.Module, *bases)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

    before = list(Watching.subclasses)
    compare(make, 3, train, build=Net)
    assert Watching.subclasses == before


def test_an_optimizer_has_its_bases_in_any_order(
    bases: tuple[Any, ...], make: Any
) -> None:
    """All of a package whose base class is of `ABC` first were refused."""

    class Descent(*bases, torch.optim.SGD):  # type: ignore[misc]
        pass

    compare(
        make,
        3,
        train,
        optimizer=lambda model: Descent(model.parameters(), lr=0.1, momentum=0.9),
    )


@only_with_copies
def test_a_dataclass_of_fields_with_slots_is_shared_by_all_replicas() -> None:
    """There is no room for attributes of each replica.

    What is written there is refused by name.
    """

    @dataclasses.dataclass(slots=True)
    class Trainer:
        model: nn.Module
        steps: int = 0

    strategy = central_in_one_place(2)
    with strategy.scope():
        trainer = Trainer(nn.Linear(3, 2))

    def step() -> None:
        trainer.steps += 1

    with pytest.raises(RuntimeError, match=r"wrote trainer\.steps in a replica"):
        strategy.run(step)
    assert trainer.steps == 0


@only_in_turns
def test_a_dataclass_with_slots_counts_steps(several: torchstrategy.Strategy) -> None:
    @dataclasses.dataclass(slots=True)
    class Trainer:
        model: nn.Module
        steps: int = 0

    with several.scope():
        trainer = Trainer(nn.Linear(3, 2))

    def step() -> int:
        trainer.steps += 1
        return trainer.steps

    for k in (1, 2):
        seen = several.experimental_local_results(several.run(step))
        assert set(seen) == {trainer.steps} == {k}


# What it observes depends on the rows.
@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_quantization_aware_training_runs() -> None:
    """`FakeQuantize` has `ABC` as its first base."""
    from torch.ao.quantization import FakeQuantize

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), FakeQuantize(), nn.Linear(4, 2))

    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    with strategy.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = build()
    for _ in range(2):
        strategy.run(
            lambda batch: train(model, optimizer, batch),
            args=(deal(strategy, data(7, torch.float32)),),
        )
    before = parameters(plain)
    assert all(
        not torch.equal(value, before[name])
        for name, value in parameters(model).items()
    )


def train(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = mse(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()
