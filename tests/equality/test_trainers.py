"""Objects of the user's that hold models.

What a step writes on them, each replica has for itself.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import pickle
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchstrategy
from conditions import for_changes, only_in_turns, only_with_copies
from problems import context, data, deal, mlp, mse, replica_id, sgd
from topologies import SEVERAL, TOPOLOGIES, central_in_one_place
from torchstrategy._turns.switch import IN_TURNS

Values = torchstrategy.DistributedValues


class Trainer:
    """What its step does, each test says."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = sgd(self.model)
        self.steps = 0
        self.losses: list[float] = []

    def update(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = mse(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def made(strategy: torchstrategy.Strategy, cls: Callable[[], Any] = Trainer) -> Any:
    with strategy.scope():
        return cls()


def meet() -> None:
    """Gives all other replicas of the device their turn."""
    context().merge_call(lambda strategy: None)


def components(strategy: torchstrategy.Strategy, value: Any) -> tuple[Any, ...]:
    return strategy.experimental_local_results(value)


# ---- what is written


def test_what_a_replica_writes_another_does_not_read(
    several: torchstrategy.Strategy,
) -> None:
    """It read what the last replica before the meeting wrote.

    That was `self.fake` of another one's rows, without a word.
    """

    class Gan(Trainer):
        def step(self) -> int:
            self.fake = replica_id()
            meet()
            return self.fake

    trainer = made(several, Gan)
    expected = tuple(range(several.num_replicas_in_sync))
    assert components(several, several.run(trainer.step)) == expected
    assert (
        isinstance(trainer.fake, Values)
        and components(several, trainer.fake) == expected
    )


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3),
        datetime.date(2026, 1, 2),
        PurePath("a"),
        (1, np.int64(2)),
        torch.float32,
    ],
)
def test_a_plain_value_that_is_equal_in_all_replicas_is_one_value(
    several: torchstrategy.Strategy, value: Any
) -> None:
    """Each replica makes its own, as a step that computes it does.

    A NumPy number became one of each replica.
    """

    class Keeping(Trainer):
        def step(self) -> None:
            self.kept = copy.deepcopy(value)

    trainer = made(several, Keeping)
    several.run(trainer.step)
    assert type(trainer.kept) is type(value) and trainer.kept == value


def test_a_trainer_trains_as_in_plain_torch_with_what_it_keeps_between_two_updates(
    strategy: torchstrategy.Strategy,
) -> None:
    class TwoUpdates(Trainer):
        def step(self, batch: Any) -> None:
            self.inputs, self.targets = batch
            self.target = self.model(self.inputs).detach().tanh()
            self.update(batch)
            self.update((self.inputs, self.target))
            self.steps += 1
            if self.steps % 2:  # a decision that all replicas have to make alike
                self.update((self.inputs, -self.target))

    torch.manual_seed(0)
    plain = TwoUpdates()
    torch.manual_seed(0)
    trainer = made(strategy, TwoUpdates)
    for k, rows in enumerate((7, 5, 2, 6)):
        batch = data(rows, seed=k)
        plain.step(batch)
        strategy.run(trainer.step, args=(deal(strategy, batch),))
        assert trainer.steps == plain.steps == k + 1
    for wanted, parameter in zip(
        plain.model.parameters(), trainer.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter.detach().cpu(), wanted.detach(), rtol=1e-12, atol=1e-12
        )


def test_what_is_equal_in_all_replicas_is_one_afterwards(
    strategy: torchstrategy.Strategy,
) -> None:
    dtype, thing = torch.float64, object()

    class Counting(Trainer):
        epoch = 0  # of the class, until a step writes it

        def step(self) -> None:
            self.steps += 1
            self.epoch += 1
            self.phase, self.shape, self.dtype, self.rate = (
                "warm" + "up",
                torch.Size([2, 3]),
                dtype,
                0.1 + 0.2,
            )
            self.thing, self.nothing, self.pair = thing, None, (1, ("a", 2.0))

    trainer = made(strategy, Counting)
    for count in (1, 2, 3):
        strategy.run(trainer.step)
        assert (trainer.steps, trainer.epoch, Counting.epoch) == (count, count, 0)
    assert (trainer.phase, trainer.shape, trainer.dtype, trainer.rate) == (
        "warmup",
        (2, 3),
        dtype,
        0.1 + 0.2,
    )
    assert (
        trainer.thing is thing
        and trainer.nothing is None
        and trainer.pair == (1, ("a", 2.0))
    )


def test_each_replica_goes_on_with_its_own_value_in_the_next_run(
    several: torchstrategy.Strategy,
) -> None:
    class Summing(Trainer):
        total = 0.0

        def step(self, rows: torch.Tensor) -> None:
            self.total += float(rows.sum())

    trainer = made(several, Summing)
    seen = 0.0
    # Of some, some replicas get nothing: they keep what they had.
    for rows in (8, 7, 2, 8):
        batch = torch.randn(rows, 3, dtype=torch.float64)
        seen += float(batch.sum())
        several.run(trainer.step, args=(deal(several, batch),))
        assert sum(components(several, trainer.total)) == pytest.approx(seen)


def test_a_value_that_only_some_replicas_wrote_is_theirs(
    several: torchstrategy.Strategy,
) -> None:
    class Some(Trainer):
        best: Any = None

        def step(self) -> tuple[Any, bool]:
            before = self.best, hasattr(self, "mine")
            if replica_id() == 1:
                self.best, self.mine = "found", "mine"
            return before

    trainer, count = made(several, Some), several.num_replicas_in_sync
    several.run(trainer.step)
    best, has_mine = several.run(trainer.step)
    if IN_TURNS:
        # An attribute that only some have is that of all.
        assert set(components(several, best)) == {"found"}
        assert set(components(several, has_mine)) == {True}
        return
    assert components(several, best) == tuple(
        "found" if r == 1 else None for r in range(count)
    )
    assert components(several, has_mine) == tuple(r == 1 for r in range(count))


@only_in_turns
def test_tensors_that_are_equal_in_all_replicas_are_one_afterwards(
    several: torchstrategy.Strategy,
) -> None:
    class Norm(Trainer):
        def step(self) -> None:
            self.norm = torch.ones(())
            self.state = (torch.zeros(2), {"c": torch.ones(1)})
            self.own = torch.ones(()) * replica_id()

    trainer = made(several, Norm)
    several.run(trainer.step)
    assert torch.equal(trainer.norm, torch.ones(()))
    assert torch.equal(trainer.state[0], torch.zeros(2))
    assert torch.equal(trainer.state[1]["c"], torch.ones(1))
    assert [float(one) for one in components(several, trainer.own)] == list(
        range(several.num_replicas_in_sync)
    )


@only_with_copies
def test_tensors_are_one_for_each_replica_and_never_asked_whether_they_are_equal(
    several: torchstrategy.Strategy,
) -> None:
    class Norm(Trainer):
        def step(self) -> None:
            self.norm = torch.ones(())
            self.state = (torch.zeros(2), {"c": torch.ones(1)})

    trainer = made(several, Norm)
    several.run(trainer.step)
    count = several.num_replicas_in_sync
    assert isinstance(trainer.norm, Values) and len(trainer.norm.values) == count
    assert isinstance(trainer.state, Values) and set(trainer.state.values[0][1]) == {
        "c"
    }
    assert several.reduce("sum", trainer.norm, axis=None) == count


def test_what_all_replicas_delete_is_gone_and_what_some_delete_stays_the_others(
    several: torchstrategy.Strategy,
) -> None:
    class Deleting(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.cache, self.other = "full", "old"

        def step(self) -> bool:
            del self.cache
            if replica_id() == 0:
                del self.other
            return hasattr(self, "other")

    trainer = made(several, Deleting)
    assert components(several, several.run(trainer.step))[0] is False
    assert not hasattr(trainer, "cache")
    assert components(several, trainer.other) == ("old",) * (
        several.num_replicas_in_sync - 1
    )


def test_lists_and_dicts_that_a_trainer_holds_are_one_for_all_replicas(
    in_one_place: torchstrategy.Strategy,
) -> None:
    class Appending(Trainer):
        def step(self) -> None:
            self.losses.append(replica_id())

    trainer = made(in_one_place, Appending)
    losses = trainer.losses
    in_one_place.run(trainer.step)
    expected = list(range(in_one_place.num_replicas_in_sync))
    assert trainer.losses is losses
    if IN_TURNS:  # as long as in plain PyTorch
        (item,) = losses
        losses = list(components(in_one_place, item))
    assert losses == expected


def test_a_meter_holds_no_model_and_adds_up_what_all_replicas_tell_it(
    in_one_place: torchstrategy.Strategy,
) -> None:
    class Meter:
        total, count = 0.0, 0

        def update(self, value: torch.Tensor) -> None:
            self.total += float(value.sum())
            self.count += len(value)

    class Metered(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.meter = Meter()

        def step(self, rows: torch.Tensor) -> None:
            self.meter.update(rows)

    trainer, batch = made(in_one_place, Metered), torch.randn(7, dtype=torch.float64)
    in_one_place.run(trainer.step, args=(deal(in_one_place, batch),))
    count, total = trainer.meter.count, trainer.meter.total
    if IN_TURNS:  # each replica has its own
        count, total = (
            in_one_place.reduce("sum", value, axis=None) for value in (count, total)
        )
    assert count == 7 and float(total) == pytest.approx(float(batch.sum()))


def test_a_loss_that_a_step_keeps_may_be_differentiated_after_the_run(
    several: torchstrategy.Strategy,
) -> None:
    class Keeping(Trainer):
        def step(self, batch: Any) -> None:
            self.loss = mse(self.model, batch)

    trainer, batch = made(several, Keeping), data(7)
    several.run(trainer.step, args=(deal(several, batch),))
    losses, rows = (
        trainer.loss.values,
        [len(part) for part in components(several, deal(several, batch)[0])],
    )
    sum(
        loss.cpu() * part / 7 for loss, part in zip(losses, rows, strict=True)
    ).backward()
    gradients = [parameter.grad.cpu() for parameter in trainer.model.parameters()]
    plain = copy.deepcopy(trainer.model).to("cpu")
    plain.zero_grad()
    mse(plain, batch).backward()
    for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


# ---- ways to come to a trainer


class Noting(Trainer):
    def note(self) -> int:
        self.noted = replica_id()
        meet()
        return self.noted

    def __call__(self) -> int:
        return self.note()


def _through_a_callback(trainer: Noting) -> Any:
    callback = types.SimpleNamespace()
    callback.trainer = trainer
    return lambda: callback.trainer.note()


WAYS: dict[str, Callable[[Noting], Any]] = {
    "a bound method": lambda trainer: trainer.note,
    "the object itself": lambda trainer: trainer,
    "a closure": lambda trainer: lambda: trainer.note(),
    "a partial": lambda trainer: functools.partial(Noting.note, trainer),
    "a default argument": lambda trainer: lambda one=trainer: one.note(),
    "a function that a function calls": lambda trainer: (lambda inner: lambda: inner())(
        lambda: trainer.note()
    ),
    "an attribute of an object": _through_a_callback,
    "a stored method": lambda trainer: (lambda note: lambda: note())(trainer.note),
    "a list": lambda trainer: functools.partial(lambda them: them[0].note(), [trainer]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_may_be_come_to_in_any_way(way: str) -> None:
    strategy = central_in_one_place(3)
    trainer = made(strategy, Noting)
    assert components(strategy, strategy.run(WAYS[way](trainer))) == (0, 1, 2)
    assert components(strategy, trainer.noted) == (0, 1, 2)


def test_a_trainer_may_be_an_argument(several: torchstrategy.Strategy) -> None:
    trainer = made(several, Noting)
    several.run(
        lambda one, more: one.note() + more["it"].note(),
        args=(trainer, {"it": trainer}),
    )
    assert components(several, trainer.noted) == tuple(
        range(several.num_replicas_in_sync)
    )


def test_trainers_in_a_trainer_are_looked_for(several: torchstrategy.Strategy) -> None:
    """As in reinforcement learning.

    The agent has the network and writes on itself, the loop has the agent.
    """

    class Loop:
        def __init__(self) -> None:
            self.agent = Noting()
            self.agent.loop = self

        def step(self) -> tuple[int, int]:
            self.turn = replica_id()
            noted = self.agent.note()
            return noted, self.agent.loop.turn

    loop = made(several, Loop)
    noted, turns = several.run(loop.step)
    expected = tuple(range(several.num_replicas_in_sync))
    assert components(several, noted) == components(several, turns) == expected
    assert (
        components(several, loop.agent.noted)
        == components(several, loop.turn)
        == expected
    )


def test_a_module_from_outside_of_the_scope_may_be_the_trainer(
    several: torchstrategy.Strategy,
) -> None:
    """Made around a model of the scope, as a module of PyTorch Lightning may be.

    There were no copies of it.
    """

    class Learner(nn.Module):
        def __init__(self, model: nn.Module, optimizer: Any) -> None:
            super().__init__()
            self.model, self.optimizer, self.steps = model, optimizer, 0

        def forward(self, batch: Any) -> int:
            self.steps += 1
            self.rows = len(batch[0])
            self.optimizer.zero_grad()
            mse(self.model, batch).backward()
            self.optimizer.step()
            return self.rows

    inner = made(several)
    learner = Learner(inner.model, inner.optimizer)
    before = inner.model[0].weight.detach().clone()
    with pytest.warns(
        torchstrategy.ReplicaBufferWarning,
        match=r"The (attribute )?Learner\.rows has other numbers",
    ):
        rows = several.run(learner, args=(deal(several, data(7)),))
    assert sum(components(several, rows)) == 7
    assert learner.steps == 1 and not torch.equal(inner.model[0].weight, before)


# ---- classes of all sorts


T = TypeVar("T")


class _Base(ABC):
    @abstractmethod
    def step(self) -> int: ...


class _Abstract(Trainer, _Base, Generic[T]):
    def step(self) -> int:
        self.mine = replica_id()
        meet()
        return self.mine


class _WithProperty(Trainer):
    @property
    def mine(self) -> int:
        return self._mine

    @mine.setter
    def mine(self, value: int) -> None:
        self._mine = value

    def step(self) -> int:
        self.mine = replica_id()
        meet()
        return self.mine


class _WithHooks(Trainer):
    """As many a base class of a framework: attributes go through methods of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[f"_{name}"] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[f"_{name}"]
        except KeyError:
            raise AttributeError(name) from None

    def step(self) -> int:
        self.mine = replica_id()
        meet()
        return self.mine


class _WithDict(Trainer):
    def step(self) -> int:
        vars(self)["mine"] = replica_id()
        self.__dict__.update(other=replica_id())
        meet()
        assert self.mine == self.other
        return self.mine


@dataclasses.dataclass
class _Dataclass:
    model: Any = dataclasses.field(default_factory=mlp)
    mine: int = -1

    def step(self) -> int:
        self.mine = replica_id()
        meet()
        return self.mine


@pytest.mark.parametrize(
    "cls", [_Abstract, _WithProperty, _WithHooks, _WithDict, _Dataclass]
)
def test_a_trainer_may_be_of_any_class_of_the_users(cls: Callable[[], Any]) -> None:
    strategy = central_in_one_place(3)
    trainer = made(strategy, cls)
    assert components(strategy, strategy.run(trainer.step)) == (0, 1, 2)
    assert components(strategy, trainer.mine) == (0, 1, 2)
    assert type(trainer) is cls


def test_a_trainer_that_ends_ends_once(several: torchstrategy.Strategy) -> None:
    """Many close a file or a writer then.

    The copies of a run end after every run, and close nothing.
    """
    ended = []

    class Closing(Trainer):
        def step(self) -> None:
            self.steps += 1

        def __del__(self) -> None:
            ended.append(self.steps)

    trainer = made(several, Closing)
    several.run(trainer.step)
    several.run(trainer.step)
    assert ended == []
    del trainer
    assert ended == [2]


def test_a_trainer_is_copied_and_pickled_in_a_step_as_the_replica_has_it(
    several: torchstrategy.Strategy,
) -> None:
    trainer = made(several, Noting)

    def step() -> tuple[bool, int, int]:
        trainer.noted = replica_id()
        copied, loaded = copy.copy(trainer), pickle.loads(pickle.dumps(trainer))
        return type(copied) is type(loaded) is Noting, copied.noted, loaded.noted

    alike, *noted = several.run(step)
    assert all(components(several, alike))
    assert {components(several, value) for value in noted} == {
        tuple(range(several.num_replicas_in_sync))
    }


# ---- what there can be no copies of


class _Slots:
    __slots__ = ("loss", "model")

    def __init__(self) -> None:
        self.model = mlp()


class _Mapping(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__(model=mlp())


def _write_loss(thing: Any) -> None:
    thing.loss = replica_id()


def _write_item(thing: Any) -> None:
    thing["loss"] = replica_id()


SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "a namespace": (
        lambda: types.SimpleNamespace(model=mlp()),
        _write_loss,
        r"holder\.loss.*SimpleNamespace",
    ),
    "slots": (_Slots, _write_loss, r"holder\.loss.*_Slots"),
    "a dict": (lambda: {"model": mlp()}, _write_item, r"holder\['loss'\].*this dict"),
    "a dict of a class": (_Mapping, _write_item, r"holder\['loss'\].*this _Mapping"),
}


@only_in_turns
@pytest.mark.parametrize("kind", SHARED)
def test_what_each_replica_writes_on_any_object_is_its_own(kind: str) -> None:
    strategy = central_in_one_place(2)
    new, write, _ = SHARED[kind]
    torch.manual_seed(0)
    trainer, holder = made(strategy), made(strategy, new)
    torch.manual_seed(0)
    plain = Trainer()

    def step(batch: Any) -> int:
        write(holder)
        trainer.update(batch)
        meet()
        loss: int = holder["loss"] if isinstance(holder, dict) else holder.loss
        return loss

    for k in range(2):
        batch = data(5, seed=k)
        seen = strategy.run(step, args=(deal(strategy, batch),))
        assert components(strategy, seen) == (0, 1)
        left = holder["loss"] if isinstance(holder, dict) else holder.loss
        assert components(strategy, left) == (0, 1)
        plain.update(batch)
    for mine, theirs in zip(
        trainer.model.parameters(), plain.model.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, check_device=False)


@only_with_copies
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("before_an_update", [True, False])
def test_what_cannot_be_copied_may_not_be_written_and_nothing_is_done(
    kind: str, before_an_update: bool
) -> None:
    strategy = central_in_one_place(2)
    new, write, match = SHARED[kind]
    trainer, holder = made(strategy), made(strategy, new)
    before = copy.deepcopy(trainer.model.state_dict())

    def step(batch: Any) -> None:
        write(holder)
        if before_an_update:
            trainer.update(batch)

    with pytest.raises(RuntimeError, match=f"The step wrote {match}.*Return the value"):
        strategy.run(step, args=(deal(strategy, data(5)),))
    assert (
        "loss" not in holder
        if isinstance(holder, dict)
        else not hasattr(holder, "loss")
    )
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", SHARED)
def test_what_cannot_be_copied_may_be_read_and_written_for_all_replicas_at_once(
    kind: str,
) -> None:
    strategy = central_in_one_place(2)
    new, *_ = SHARED[kind]
    holder = made(strategy, new)

    def step() -> None:
        context().merge_call(lambda strategy: write_once())

    def write_once() -> None:
        setattr(holder, "loss", 5) if hasattr(holder, "model") else holder.update(
            loss=5
        )

    strategy.run(step)
    assert (holder["loss"] if isinstance(holder, dict) else holder.loss) == 5


# ---- merge functions, failures, runs in runs


def test_what_a_merge_function_writes_all_replicas_read(
    several: torchstrategy.Strategy,
) -> None:
    class Merging(Trainer):
        level = 1

        def step(self, value: torch.Tensor) -> tuple[float, bool]:
            self.mine = replica_id()
            context().merge_call(self.note, args=(value,))
            return self.mean, hasattr(self, "gone")

        def note(self, strategy: Any, value: Any) -> None:
            self.mean = float(strategy.reduce("mean", value, axis=None))
            self.level += 1
            vars(self).pop("gone", None)

    trainer = made(several, Merging)
    trainer.gone = "soon"
    means, has_gone = several.run(
        trainer.step, args=(several.run(lambda: torch.tensor(float(replica_id()))),)
    )
    count = several.num_replicas_in_sync
    assert several.experimental_local_results(means) == ((count - 1) / 2,) * count
    assert trainer.mean == (count - 1) / 2
    assert trainer.level == 2 and has_gone is False and not hasattr(trainer, "gone")
    assert components(several, trainer.mine) == tuple(range(count))


def test_a_step_that_fails_has_written_nothing(several: torchstrategy.Strategy) -> None:
    class Failing(Trainer):
        def step(self) -> None:
            self.steps += 1
            self.mine = replica_id()
            meet()
            if replica_id() == 1:
                raise KeyError("mine")

    trainer = made(several, Failing)
    before = dict(vars(trainer))
    with pytest.raises(KeyError, match="mine"):
        several.run(trainer.step)
    assert vars(trainer) == before and type(trainer) is Failing


def test_a_run_in_a_merge_function_has_copies_of_its_own(
    several: torchstrategy.Strategy,
) -> None:
    class Nested(Trainer):
        def outer(self) -> tuple[int, int]:
            self.outside = replica_id()
            context().merge_call(lambda strategy: strategy.run(self.inner))
            return self.outside, self.inside

        def inner(self) -> None:
            self.steps += 1
            self.inside = replica_id() + 10

    trainer = made(several, Nested)
    outside, inside = several.run(trainer.outer)
    count = several.num_replicas_in_sync
    assert components(several, outside) == tuple(range(count))
    assert components(several, inside) == tuple(range(10, 10 + count))
    assert trainer.steps == 1


def test_other_threads_and_a_lone_replica_have_the_object_itself(
    strategy: torchstrategy.Strategy,
) -> None:
    trainer = made(strategy, Noting)
    outside = trainer.losses
    assert all(components(strategy, strategy.run(lambda: trainer.losses is outside)))
    if strategy.num_replicas_in_sync == 1:
        assert strategy.run(lambda: trainer) is trainer


def test_a_value_of_a_strategy_with_another_number_of_replicas_is_left_as_it_is() -> (
    None
):
    small, large = central_in_one_place(2), central_in_one_place(3)
    trainer = made(large, Noting)
    large.run(trainer.note)
    assert all(
        components(
            small, small.run(lambda: components(large, trainer.noted) == (0, 1, 2))
        )
    )


# ---- any program


NAMES = ("a", "b", "c")
WRITES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from(["same", "own", "delete", "add"])
)
PROGRAMS = st.lists(
    st.lists(st.one_of(WRITES, st.just("meet")), max_size=5), min_size=1, max_size=3
)


class _Model:
    """What a trainer is to each of the replicas.

    It is as if each had an object of its own, from the first run on.
    """

    def __init__(self, replicas: int) -> None:
        self.each: list[dict[str, Any]] = [{"a": 0} for _ in range(replicas)]


def _perform(
    attributes: dict[str, Any], writes: Any, replica: int, meet: Callable[[], None]
) -> None:
    for write in writes:
        if write == "meet":
            meet()
            continue
        name, what = write
        if what == "same":
            attributes[name] = 5
        elif what == "own":
            attributes[name] = replica
        elif what == "delete":
            attributes.pop(name, None)
        elif name in attributes:
            attributes[name] = attributes[name] + 1


@contextmanager
def _attributes_of(trainer: Any) -> Iterator[dict[str, Any]]:
    yield vars(trainer)


@for_changes
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(program=PROGRAMS, topology=st.sampled_from(SEVERAL))
def test_each_replica_finds_what_it_wrote_whatever_the_program(
    program: Any, topology: str
) -> None:
    strategy = TOPOLOGIES[topology]()
    count = strategy.num_replicas_in_sync
    trainer, model = made(strategy), _Model(count)
    trainer.a = 0
    for writes in program:
        for r in range(count):
            _perform(model.each[r], writes, r, lambda: None)

        def step(writes: Any = writes) -> dict[str, Any]:
            with _attributes_of(trainer) as attributes:
                _perform(attributes, writes, replica_id(), meet)
                return types.MappingProxyType(
                    {name: attributes[name] for name in NAMES if name in attributes}
                )

        assert [
            dict(result) for result in components(strategy, strategy.run(step))
        ] == model.each
    for name in NAMES:
        values = [each[name] for each in model.each if name in each]
        if not values:
            assert not hasattr(trainer, name)
        elif len(values) == count and len(set(values)) == 1:
            assert getattr(trainer, name) == values[0]
        else:
            assert components(strategy, getattr(trainer, name)) == tuple(values)
