"""The loops around the parts of a program: plain PyTorch, a strategy, DataParallel."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn

import torchstrategy
from torchstrategy.testing import (
    assert_replicas_agree,
    assert_workers_agree,
    record_streams,
)

from .comparison import Snapshot, snapshot
from .keeping import read_of
from .modules import numbers
from .programs import Program
from .training import Batch, Hands, Training


class StepFailed(Exception):
    """What a step raises that is made to fail."""


class Trial(Training):
    """A training of a program, which knows its step."""

    def __init__(self, place: PlaceOfTrial, program: Program) -> None:
        self.program, self.taken = program, 0
        with place.scope() if program.made_in_scope else contextlib.nullcontext():
            model = _model(program)
            teacher = _model(program) if program.teacher else None
        reads = read_of(model)
        if teacher is not None:
            read_of(teacher)  # nobody reads what its hooks keep
        if not program.made_in_scope:
            model = place.adopt(model)
            teacher = teacher if teacher is None else place.adopt(teacher)
        super().__init__(place, model, program.optimizers)
        self.results_width = program.width
        self.reads = reads
        self.teacher = teacher
        if teacher is not None:
            self.others.append(teacher)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            if program.scaler
            else None
        )
        if program.made_in_scope:
            self.renew(model)
        else:
            self.forward = place.wrapped(model)
            made = [kind.build(model) for kind in self.kinds]
            self.optimizers = [place.adopt_optimizer(optimizer) for optimizer in made]
            self.schedule()

    def train(self, rows: int) -> None:
        """One step, with what comes before and after it."""
        k, batch = self.taken, batch_of(rows, self.program.width, self.taken)
        for action in self.program.before:
            action.do(self, None, k)
        dealt = self.place.deal(batch)
        for actions in (self.program.step, self.program.then):
            for result in (
                self._run(actions, dealt, k)
                if actions or actions is self.program.step
                else []
            ):
                self.results.append(self.place.gathered(result).cpu().clone())
        for action in self.program.after:
            action.do(self, None, k)
        self.taken += 1

    def _run(self, actions: Any, batch: Any, k: int) -> list[Any]:
        if self.program.reach.startswith("trainer"):
            kind = _Trainer if self.program.reach == "trainer" else _TrainerWithParts
            if self.trainer is None:
                self.trainer = kind()
            self.trainer.take(self)
            self.trainer.actions = actions
            return self.place.run(self.trainer.step, batch, k)
        forward = None if self.forward is self.model else self.forward
        hands = (
            self.model,
            self.optimizers,
            self.schedulers,
            self.scaler,
            self.teacher,
            forward,
            self.reads,
        )
        if self.program.reach == "arguments":
            return self.place.run(_step, actions, batch, k, *hands)
        model, optimizers, schedulers, scaler, teacher, forward, reads = hands

        def step(batch: Any) -> list[Any]:
            return _step(
                actions,
                batch,
                k,
                model,
                optimizers,
                schedulers,
                scaler,
                teacher,
                forward,
                reads,
            )

        return self.place.run(step, batch)

    def fail(self, late: bool, everywhere: bool) -> None:
        """A step that raises."""
        batch = self.place.deal(batch_of(3, self.program.width, 99))
        actions = self.program.step
        model, optimizers, schedulers = self.model, self.optimizers, self.schedulers
        scaler, teacher, forward = (
            self.scaler,
            self.teacher,
            None if self.forward is self.model else self.forward,
        )
        reads = self.reads

        def step(batch: Any) -> None:
            if late:
                _step(
                    actions,
                    batch,
                    0,
                    model,
                    optimizers,
                    schedulers,
                    scaler,
                    teacher,
                    forward,
                    reads,
                )
            context = torchstrategy.get_replica_context()
            if everywhere or context is None or context.replica_id_in_sync_group == 0:
                raise StepFailed("on purpose")

        with contextlib.suppress(StepFailed):
            self.place.run(step, batch)


class _Trainer:
    """An object that holds what is trained, as many programs have."""

    def __init__(self) -> None:
        self.steps, self.actions = 0, ()

    def take(self, hands: Hands) -> None:
        """It goes on with these."""
        self.model, self.optimizers, self.schedulers = (
            hands.model,
            hands.optimizers,
            hands.schedulers,
        )
        self.scaler, self.teacher, self.reads = hands.scaler, hands.teacher, hands.reads
        self.forward = None if hands.forward is hands.model else hands.forward

    def hands(self) -> list[Any]:
        """What the step works with."""
        taken = [
            self.model,
            self.optimizers,
            self.schedulers,
            self.scaler,
            self.teacher,
        ]
        return [*taken, self.forward, self.reads]

    def step(self, batch: Any, k: int) -> list[Any]:
        """The step."""
        self.steps += 1
        self.rows = len(batch[0])
        return _step(self.actions, batch, k, *self.hands())


class _TrainerWithParts(_Trainer):
    """One that has them in containers."""

    def take(self, hands: Hands) -> None:
        forward = None if hands.forward is hands.model else hands.forward
        self.parts = {
            "model": hands.model,
            "forward": forward,
            "teachers": [hands.teacher],
            "reads": hands.reads,
        }
        self.updates = (
            hands.optimizers,
            {"schedulers": hands.schedulers, "scaler": hands.scaler},
        )

    def hands(self) -> list[Any]:
        optimizers, others = self.updates
        model, forward, teachers = (
            self.parts["model"],
            self.parts["forward"],
            self.parts["teachers"],
        )
        return [
            model,
            optimizers,
            others["schedulers"],
            others["scaler"],
            teachers[0],
            forward,
            self.parts["reads"],
        ]


def _step(actions: Any, batch: Batch, k: int, *hands: Any) -> list[Any]:
    """The step as plain PyTorch; only tensors with rows are compared one by one."""
    found: list[Any] = []
    for action in actions:
        made = action.do(Hands(*hands), batch, k)
        found += made if isinstance(made, list) else [made]
    return [value for value in found if isinstance(value, torch.Tensor) and value.dim()]


def _model(program: Program) -> nn.Module:
    so_far: list[nn.Module] = []
    for layer in program.layers:
        so_far.append(layer.build(program.width, so_far))
    return nn.Sequential(*so_far)


def batch_of(rows: int, width: int, k: int) -> Batch:
    """Rows that are the same everywhere, of which no two are alike."""
    with torch.device("cpu"):
        return numbers((rows, width), k + 0.3) * 2, numbers(
            (rows, width), k + 5.7
        ) + 0.2


class PlaceOfTrial(ABC):
    """Where a program runs."""

    @abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Where models and optimizers are made."""

    @abstractmethod
    def adopt(self, model: nn.Module) -> nn.Module:
        """A model that was made elsewhere."""

    def adopt_optimizer(self, optimizer: Any) -> Any:
        """An optimizer that was made elsewhere."""
        return optimizer

    def wrapped(self, model: nn.Module) -> Any:
        """What a step calls as the model."""
        return model

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, in replicas if there are any."""
        return fn(*args)

    def gathered(self, value: Any) -> torch.Tensor:
        """A result with rows."""
        return value

    def deal(self, batch: Batch) -> Any:
        """A batch for `run`."""
        return batch

    def check(self, training: Training) -> None:  # noqa: B027
        """What else has to hold at the end: nothing, unless there are replicas."""


@final
class Plain(PlaceOfTrial):
    """Plain PyTorch on the CPU.

    `noise`: by how much its batches are others, to see how much that changes.
    """

    def __init__(self, noise: float = 0.0) -> None:
        self._noise = noise

    def deal(self, batch: Batch) -> Any:
        return (
            tuple(tensor * (1 + self._noise) for tensor in batch)
            if self._noise
            else batch
        )

    def scope(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def adopt(self, model: nn.Module) -> nn.Module:
        return model


@final
class WithDataParallel(PlaceOfTrial):
    """The same, with forwards in replicas."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._devices = list(devices)

    def scope(self) -> AbstractContextManager[Any]:
        return torch.device(self._devices[0])

    def adopt(self, model: nn.Module) -> nn.Module:
        return model.to(self._devices[0])

    def wrapped(self, model: nn.Module) -> Any:
        return torchstrategy.DataParallel(model, self._devices)


@final
class UnderStrategy(PlaceOfTrial):
    """Steps in replicas."""

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        self._strategy = strategy

    def scope(self) -> AbstractContextManager[Any]:
        return self._strategy.scope()

    def adopt(self, model: nn.Module) -> nn.Module:
        return self._strategy.distribute_module(model)

    def adopt_optimizer(self, optimizer: Any) -> Any:
        return self._strategy.distribute_optimizer(optimizer)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._strategy.run(fn, args=args)

    def gathered(self, value: Any) -> torch.Tensor:
        return self._strategy.gather(value, axis=0)

    def deal(self, batch: Batch) -> Any:
        return next(iter(self._strategy.experimental_distribute_dataset([batch])))

    def check(self, training: Training) -> None:
        things = [
            training.model,
            *(o for o in training.optimizers if vars(o).get("defaults") is not None),
        ]
        if (
            self._strategy.num_replicas_in_sync > 1
            and next(training.model.parameters(), None) is not None
        ):
            of_processes = isinstance(
                self._strategy, torchstrategy.MultiWorkerMirroredStrategy
            )
            (assert_workers_agree if of_processes else assert_replicas_agree)(
                self._strategy, *things
            )


def place_of(program: Program) -> PlaceOfTrial:
    """Where a program runs in replicas."""
    if program.topology.is_data_parallel:
        return WithDataParallel(program.topology.devices)
    return UnderStrategy(program.topology.strategy())


def executed(program: Program, place: PlaceOfTrial) -> Snapshot:
    """Runs a program from beginning to end; what it leaves behind."""
    if "OnSideStream" in repr(program.step) and not isinstance(place, Plain):
        # Which fails if a real device might have computed other numbers.
        with record_streams():
            return _executed(program, place)
    return _executed(program, place)


def _executed(program: Program, place: PlaceOfTrial) -> Snapshot:
    training = Trial(place, program)
    for k, rows in enumerate([*program.batches, 0]):
        for when, event in program.events:
            if when == k:
                event.do(training)
        if rows:
            training.train(rows)
    _look(training)
    place.check(training)
    return snapshot(training)


def _look(training: Trial) -> None:
    """What replicas compute with in the end."""
    forward, batch = (
        training.forward,
        training.place.deal(batch_of(5, training.program.width, 50)),
    )
    modes = [module.training for module in training.model.modules()]
    training.model.eval()

    def look(batch: Any) -> Any:
        with torch.no_grad():
            return forward(batch[0])

    training.results.append(
        training.place.gathered(training.place.run(look, batch)).cpu().clone()
    )
    for module, mode in zip(training.model.modules(), modes, strict=True):
        module.training = mode
