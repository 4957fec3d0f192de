"""What a step keeps in Python: counters, lists and dicts, and what it decides by them.

The loop of PyTorch's tutorials, moved into a step, counted once for each replica: it
printed four times the loss and four times the steps.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_in_turns
from problems import close, data, mlp, mse

pytestmark = only_in_turns

BATCHES = [data(rows, seed=seed) for seed, rows in enumerate((7, 4, 6, 1))]
counted_globally = 0

# A function that returns how often it was called before, and notes this call.
Count = Callable[[], float]


def in_a_dict() -> Count:
    state = {"steps": 0}

    def count() -> float:
        state["steps"] += 1
        return state["steps"] - 1

    return count


def in_a_list() -> Count:
    steps = [0]

    def count() -> float:
        steps[0] += 1
        return steps[0] - 1

    return count


def in_a_nested_container() -> Count:
    state: dict[str, Any] = {"of": [{"steps": (0,)}]}

    def count() -> float:
        (before,) = state["of"][0]["steps"]
        state["of"][0]["steps"] = (before + 1,)
        return before

    return count


def in_a_closure() -> Count:
    steps = 0

    def count() -> float:
        nonlocal steps
        steps += 1
        return steps - 1

    return count


def in_a_global() -> Count:
    global counted_globally
    counted_globally = 0

    def count() -> float:
        global counted_globally
        counted_globally += 1
        return counted_globally - 1

    return count


def in_a_function() -> Count:
    def count() -> float:
        count.steps += 1  # type: ignore[attr-defined]
        return count.steps - 1  # type: ignore[attr-defined]

    count.steps = 0  # type: ignore[attr-defined]
    return count


def in_an_attribute() -> Count:
    state = types.SimpleNamespace(steps=0)

    def count() -> float:
        state.steps += 1
        return state.steps - 1

    return count


def in_a_slot() -> Count:
    class State:
        __slots__ = ("steps",)

    state = State()
    state.steps = 0

    def count() -> float:
        state.steps += 1
        return state.steps - 1

    return count


def in_a_class() -> Count:
    class State:
        steps = 0

    def count() -> float:
        State.steps += 1
        return State.steps - 1

    return count


def in_a_dataclass() -> Count:
    @dataclass
    class State:
        steps: int = 0
        seen: dict[int, int] = field(default_factory=dict)

        def note(self) -> int:
            self.seen[self.steps] = self.steps
            self.steps += 1
            return len(self.seen) - 1

    return State().note


def in_a_module() -> Count:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self) -> int:
            self.steps += 1
            return self.steps - 1

    return Counts()


def in_a_partial() -> Count:
    def note(state: list[int]) -> int:
        state[0] += 1
        return state[0] - 1

    return functools.partial(note, [0])


def in_a_default() -> Count:
    def count(state: list[int] = [0]) -> int:  # noqa: B006  as people do it
        state[0] += 1
        return state[0] - 1

    return count


def in_a_counter() -> Count:
    state: Counter[str] = Counter()

    def count() -> float:
        state["steps"] += 1
        return state["steps"] - 1

    return count


def in_a_defaultdict() -> Count:
    state: defaultdict[str, list[int]] = defaultdict(list)

    def count() -> float:
        state["steps"] = [*state["steps"], 1]
        return len(state["steps"]) - 1

    return count


def in_an_ordered_dict() -> Count:
    state: OrderedDict[int, int] = OrderedDict()

    def count() -> float:
        state[len(state)] = 1
        state.move_to_end(0)
        return len(state) - 1

    return count


def in_a_queue() -> Count:
    state = deque([0], maxlen=1)

    def count() -> float:
        state.append(state[-1] + 1)
        return state[-1] - 1

    return count


def in_a_queue_of_a_class_of_its_own() -> Count:
    """A walk took it for a queue, and the exchange between turns for none."""

    class Recent(deque[int]):
        def last(self) -> int:
            return self[-1]

    state = Recent([0], maxlen=1)

    def count() -> float:
        state.append(state.last() + 1)
        return state.last() - 1

    return count


def in_a_set() -> Count:
    state: set[int] = set()

    def count() -> float:
        state.add(len(state))
        return len(state) - 1

    return count


def in_a_tensor_that_is_replaced() -> Count:
    state = {"steps": torch.zeros((), device="cpu")}

    def count() -> float:
        state["steps"] = state["steps"] + 1
        return float(state["steps"]) - 1

    return count


def in_a_tensor_that_is_written() -> Count:
    steps = torch.zeros((), device="cpu")

    def count() -> float:
        steps.add_(1)
        return float(steps) - 1

    return count


def in_an_array() -> Count:
    steps = np.zeros(3)

    def count() -> float:
        steps[1] += 1
        return float(steps[1]) - 1

    return count


def in_a_bound_method() -> Count:
    class Trainer:
        def __init__(self) -> None:
            self.steps = 0

        def count(self) -> int:
            self.steps += 1
            return self.steps - 1

    return Trainer().count


COUNTS = {
    make.__name__: make
    for make in (
        in_a_dict,
        in_a_list,
        in_a_nested_container,
        in_a_closure,
        in_a_global,
        in_a_function,
        in_an_attribute,
        in_a_slot,
        in_a_class,
        in_a_dataclass,
        in_a_module,
        in_a_partial,
        in_a_default,
        in_a_counter,
        in_a_defaultdict,
        in_an_ordered_dict,
        in_a_queue,
        in_a_queue_of_a_class_of_its_own,
        in_a_set,
        in_a_tensor_that_is_replaced,
        in_a_tensor_that_is_written,
        in_an_array,
        in_a_bound_method,
    )
}


def trained(
    strategy: torchstrategy.Strategy, make: Callable[[], Count]
) -> tuple[dict[str, torch.Tensor], float]:
    """A model whose loss is annealed by a counter, and what the counter says."""
    torch.manual_seed(0)
    with strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = make()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = mse(model, batch) * (1 + count())
        loss.backward()
        if count() % 2:
            optimizer.step()

    for batch in strategy.experimental_distribute_dataset(BATCHES):
        strategy.run(step, args=(batch,))
    return model.state_dict(), count()


@pytest.mark.parametrize("kind", COUNTS)
def test_a_counter_counts_as_on_one_device(
    several: torchstrategy.Strategy, kind: str
) -> None:
    expected, steps = trained(torchstrategy.get_strategy(), COUNTS[kind])
    state, counted = trained(several, COUNTS[kind])
    assert counted == steps == 2 * len(BATCHES)
    close(state, expected)


running_loss, global_step = 0.0, 0


def test_the_loop_of_the_tutorials_counts_steps(
    several: torchstrategy.Strategy,
) -> None:
    global running_loss, global_step
    running_loss, global_step = 0.0, 0
    rows = torch.randn(10, 8, 3, dtype=torch.float64)
    with several.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> None:
        global running_loss, global_step
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        global_step += 1

    counted = []
    for batch in several.experimental_distribute_dataset(list(rows)):
        several.run(train_step, args=(batch,))
        if global_step % 5 == 0:
            counted.append(global_step)
            with pytest.raises(TypeError, match=r"strategy\.reduce"):
                running_loss / 5  # type: ignore[unused-ignore]
            total = several.reduce("mean", running_loss, axis=None)
            assert float(total) > 0
            running_loss = 0.0
    assert counted == [5, 10]


def test_numbers_of_each_replica_go_on_in_the_next_run(
    several: torchstrategy.Strategy,
) -> None:
    state: dict[str, Any] = {"rows": 0}

    def step(batch: Any) -> None:
        state["rows"] += len(batch[0])

    for batch in several.experimental_distribute_dataset(BATCHES):
        several.run(step, args=(batch,))
    found = state["rows"]
    assert isinstance(found, torchstrategy.PerReplica)
    assert sum(found.values) == sum(len(batch[0]) for batch in BATCHES)


def test_what_is_appended_to_a_list_is_that_of_all_replicas(
    several: torchstrategy.Strategy,
) -> None:
    rows = []

    def step(batch: Any) -> None:
        rows.append(len(batch[0]))

    for batch in several.experimental_distribute_dataset(BATCHES[:2]):
        several.run(step, args=(batch,))
    assert sum(rows) == 7 + 4


def test_keys_that_only_some_replicas_set_are_there(
    several: torchstrategy.Strategy,
) -> None:
    of_replica: dict[int, str] = {}
    members: set[int] = set()

    def step() -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None
        r = context.replica_id_in_sync_group
        of_replica[r] = f"replica {r}"
        members.add(r)

    several.run(step)
    count = several.num_replicas_in_sync
    assert of_replica == {r: f"replica {r}" for r in range(count)}
    assert members == set(range(count))


def test_rows_of_each_replicas_own_in_a_bank_are_those_of_all(
    several: torchstrategy.Strategy,
) -> None:
    bank = torch.zeros(7, 3, dtype=torch.float64, device="cpu")
    inputs, _ = BATCHES[0]

    def step(batch: Any) -> None:
        rows, indices = batch
        bank[indices.cpu()] = rows.cpu()

    batches = [(inputs, torch.arange(7))]
    for batch in several.experimental_distribute_dataset(batches):
        several.run(step, args=(batch,))
    close(bank, inputs)


@pytest.mark.parametrize("kind", ["generator", "list", "count", "enumerate"])
def test_an_iterator_that_a_step_draws_from_is_refused(
    several: torchstrategy.Strategy, kind: str
) -> None:
    """Each replica got another item, without a word."""

    def items() -> Iterator[int]:
        yield from range(100)

    made: Any = {
        "generator": items,
        "list": lambda: iter([*range(100)]),
        "count": itertools.count,
        "enumerate": lambda: enumerate([*range(100)]),
    }[kind]()

    with pytest.raises(RuntimeError, match=r"took items of .*args=\(next"):
        several.run(lambda: [next(made), None][1])


def test_an_iterator_that_a_step_holds_and_leaves_alone_is_not_refused(
    several: torchstrategy.Strategy,
) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.batches = iter([1, 2, 3])
            self.steps = 0

        def step(self) -> None:
            self.steps += 1

    trainer = Trainer()
    for _ in trainer.batches:
        several.run(trainer.step)
    assert trainer.steps == 3


def test_a_teacher_that_all_replicas_load_alike_is_loaded(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        model, teacher = mlp(), mlp()
    teacher.requires_grad_(False)

    def step(batch: Any) -> None:
        mse(model, batch).backward()
        with torch.no_grad():
            for slow, fast in zip(
                teacher.parameters(), model.parameters(), strict=True
            ):
                slow.mul_(0.9).add_(fast, alpha=0.1)

    before = [one.clone() for one in teacher.parameters()]
    for batch in several.experimental_distribute_dataset(BATCHES[:1]):
        several.run(step, args=(batch,))
    for slow, old, fast in zip(
        teacher.parameters(), before, model.parameters(), strict=True
    ):
        close(slow, old * 0.9 + fast.detach() * 0.1)


def test_a_model_that_overrides_parameters_trains(
    several: torchstrategy.Strategy,
) -> None:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vars = nn.ParameterList(
                [nn.Parameter(torch.ones(3, 2, dtype=torch.float64))]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.vars[0]

        def parameters(self) -> Any:  # type: ignore[override]
            return self.vars

    def of(strategy: torchstrategy.Strategy) -> torch.Tensor:
        model = strategy.distribute_module(Learner())
        optimizer = strategy.distribute_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1)
        )

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

        for batch in strategy.experimental_distribute_dataset(BATCHES):
            strategy.run(step, args=(batch,))
        weight: torch.Tensor = model.vars[0].detach()
        return weight

    close(of(several), of(torchstrategy.get_strategy()))
