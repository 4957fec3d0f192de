"""A model holds a vocabulary, an index or records: large, and nothing but data.

The first run copied them for each replica, walked through each several times and took
50 times as long as `copy.deepcopy`. Each later run walked through all of them again.
Plain PyTorch never looks at them.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import for_changes, only_in_turns, only_with_copies
from topologies import central, central_in_one_place, mirrored, mirrored_with_copies
from torchstrategy._base.objects import attribute_contents
from torchstrategy._copies.attributes import late_attributes
from torchstrategy._turns.switch import IN_TURNS
from torchstrategy.testing import assert_replicas_agree

F64 = {"dtype": torch.float64}
COUNT = 40

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(2),
    "in one place": lambda: central_in_one_place(3),
    "mirrored": lambda: mirrored(3),
    "mirrored with copies": lambda: mirrored_with_copies(2),
}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_attributes, "LARGE", COUNT)
    monkeypatch.setattr(attribute_contents, "_MANY", COUNT // 2)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


class Row(NamedTuple):
    name: str
    numbers: list[int]


@dataclass
class Entry:
    name: str
    parts: list[int] = field(default_factory=lambda: [0])


class Vocabulary:
    """As users write it, with two tables."""

    def __init__(self) -> None:
        self.index = {f"w{i}": i for i in range(COUNT)}
        self.words = list(self.index)
        self.unknown = 0


class Thing(NamedTuple):
    """A kind of large attribute, how it is written at some depth, and a number.

    The number is read from the attribute.
    """

    make: Callable[[], Any]
    write: Callable[[Any, int], object]
    read: Callable[[Any], float]


THINGS: dict[str, Thing] = {
    "words": Thing(
        lambda: {f"w{i}": i for i in range(COUNT)},
        lambda t, k: t.update({"w7": k, f"new{k}": k}),
        lambda t: t["w7"],
    ),
    "a dict of dicts": Thing(
        lambda: {f"k{i}": {"a": [i], "b": "x"} for i in range(COUNT)},
        lambda t, k: (t["k7"]["a"].append(k), t["k8"].update(b=str(k))),
        lambda t: sum(t["k7"]["a"]) + int(t["k8"]["b"] != "x"),
    ),
    "a list of tuples": Thing(
        lambda: [(i, f"n{i}") for i in range(COUNT)],
        lambda t, k: t.__setitem__(7, (k, "new")),
        lambda t: t[7][0],
    ),
    "a tuple of lists": Thing(
        lambda: tuple([i] for i in range(COUNT)),
        lambda t, k: t[7].append(k),
        lambda t: sum(t[7]),
    ),
    "named tuples": Thing(
        lambda: [Row(f"n{i}", [i]) for i in range(COUNT)],
        lambda t, k: t[7].numbers.append(k),
        lambda t: sum(t[7].numbers),
    ),
    "objects": Thing(
        lambda: [Entry(f"n{i}") for i in range(COUNT)],
        lambda t, k: (t[7].parts.append(k), setattr(t[8], "parts", [k])),
        lambda t: sum(t[7].parts) + t[8].parts[0],
    ),
    "an object": Thing(
        Vocabulary,
        lambda t, k: (t.index.update(w7=k), setattr(t, "unknown", k)),
        lambda t: t.index["w7"] + t.unknown,
    ),
    "a dict in an object in a dict": Thing(
        lambda: {"in": SimpleNamespace(index={i: [i] for i in range(COUNT)})},
        lambda t, k: t["in"].index[7].append(k),
        lambda t: sum(t["in"].index[7]),
    ),
    "a default dict": Thing(
        lambda: defaultdict(list, {i: [i] for i in range(COUNT)}),
        lambda t, k: t[-k].append(k),
        lambda t: sum(t[-1]),
    ),
    "a counter": Thing(
        lambda: Counter(range(COUNT)), lambda t, k: t.update([7, k]), lambda t: t[7]
    ),
    "an ordered dict": Thing(
        lambda: OrderedDict((i, [i]) for i in range(COUNT)),
        lambda t, k: (t.move_to_end(k % COUNT), t[7].append(k)),
        lambda t: sum(t[7]) + next(reversed(t)),
    ),
    "a deque": Thing(
        lambda: deque(range(COUNT), COUNT),
        lambda t, k: t.append(k),
        lambda t: t[0] + t[-1],
    ),
    "a set": Thing(lambda: set(range(COUNT)), lambda t, k: t.add(-k), len),
}


def contents(thing: Any) -> Any:
    """All that is in a thing, for a comparison: an object's attributes, too."""
    if isinstance(thing, dict):
        return [
            type(thing).__name__,
            [(key, contents(value)) for key, value in thing.items()],
        ]
    if isinstance(thing, (list, tuple, deque)):
        return [type(thing).__name__, *map(contents, thing)]
    if hasattr(thing, "__dict__"):
        return [type(thing).__name__, contents(vars(thing))]
    return thing


class Holder(nn.Module):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False, **F64)
        nn.init.ones_(self.inner.weight)
        self.thing = thing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.ones(count, 6, 1, **F64))


Act = Callable[[Any, Thing, int], float]

# What a step does, by the number of the run; it returns a number.
STEPS: dict[str, Act] = {
    "never reads it": lambda m, thing, k: 0.0,
    "reads it": lambda m, thing, k: thing.read(m.thing),
    "reads it later": lambda m, thing, k: thing.read(m.thing) if k > 1 else 0.0,
    "writes it": lambda m, thing, k: (
        thing.write(m.thing, k + 100),
        thing.read(m.thing),
    )[1],
    "writes it later": lambda m, thing, k: (
        (thing.write(m.thing, k + 100), thing.read(m.thing))[1] if k > 1 else 0.0
    ),
    "replaces it": lambda m, thing, k: (
        (setattr(m, "thing", thing.make()), 0.0)[1] if k == 1 else 0.0
    ),
    "replaces it by a small one": lambda m, thing, k: (
        (setattr(m, "thing", [k]), 0.0)[1] if k == 3 else 0.0
    ),
    "deletes it": lambda m, thing, k: (delattr(m, "thing"), 0.0)[1] if k == 3 else 0.0,
}
BETWEEN: dict[str, Callable[[Any, Thing, int], object]] = {
    "nothing": lambda m, thing, k: None,
    "writes": lambda m, thing, k: thing.write(m.thing, k),
    "replaces": lambda m, thing, k: (
        setattr(m, "thing", thing.make()),
        thing.write(m.thing, k),
    ),
}


@for_changes
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("act", STEPS)
def test_what_is_written_anywhere_in_it_is_there_everywhere(
    strategy: torchstrategy.Strategy, act: str, between: str
) -> None:
    for name in THINGS:
        check(strategy, act, between, name)


def check(strategy: torchstrategy.Strategy, act: str, between: str, name: str) -> None:
    """Trains in replicas and plainly, and compares what steps read.

    What the model holds after each is the same, too.
    """
    thing = THINGS[name]
    plain = Holder(thing.make())
    with strategy.scope():
        model = Holder(thing.make())

    def step(one: Any, x: torch.Tensor, k: int) -> torch.Tensor:
        one.zero_grad()
        one(x).mean().backward()
        return one(x).detach() + STEPS[act](one, thing, k)

    for k, batch in enumerate(strategy.experimental_distribute_dataset(batches(5))):
        if (
            k
            and hasattr(plain, "thing")
            and not (type(plain.thing) is list and len(plain.thing) == 1)
        ):
            BETWEEN[between](plain, thing, k)
            BETWEEN[between](model, thing, k)
        expected = step(plain, batches(1)[0], k)
        seen = strategy.gather(
            strategy.run(lambda x, k=k: step(model, x, k), args=(batch,)), axis=0
        )
        torch.testing.assert_close(
            seen.cpu(), expected, msg=lambda m, k=k: f"{name}, run {k}: {m}"
        )
        assert contents(vars(model).get("thing")) == contents(
            vars(plain).get("thing")
        ), f"{name}, run {k}"
    assert_replicas_agree(strategy, model)


def run(strategy: torchstrategy.Strategy, step: Callable[[], Any]) -> Any:
    return strategy.experimental_local_results(strategy.run(step))


def waits(strategy: torchstrategy.Strategy, model: Any) -> bool:
    """Whether replicas have no copy of the large attribute. In turns none has."""
    if IN_TURNS:
        return True
    storage: Any = strategy.extended._storage
    replica = storage._idle[-1].replicated.replicas[0]
    return (
        type(vars(replica.local_objects[id(model)])["thing"]) is late_attributes.Later
    )


def test_a_part_that_two_attributes_hold_is_one_thing_in_replicas(
    strategy: torchstrategy.Strategy,
) -> None:
    """A part that another attribute begins to hold between runs, too."""
    with strategy.scope():
        model: Any = Holder({i: [i] for i in range(COUNT)})
    run(strategy, lambda: None)
    assert waits(strategy, model)
    model.part = model.thing[7]

    def step() -> int:
        model.part.append(1)
        return len(model.thing[7])

    assert run(strategy, step)[0] == 2
    assert model.part is model.thing[7] and model.part == [7, 1]
    model.part.append(2)
    assert set(run(strategy, lambda: sum(model.thing[7]))) == {10}


@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_assigned_between_runs_waits_as_well(
    strategy: torchstrategy.Strategy, is_first: bool
) -> None:
    with strategy.scope():
        model: Any = Holder(None if is_first else list(range(COUNT)))
    run(strategy, lambda: None)
    for k in range(3):
        model.thing = [k] * COUNT
        run(strategy, lambda: None)
        assert waits(strategy, model)
        model.thing.append(k)
    assert set(run(strategy, lambda: sum(model.thing))) == {2 * COUNT + 2}
    assert not waits(strategy, model) or IN_TURNS


@only_with_copies
def test_a_tensor_that_is_put_into_it_later_is_refused_by_name(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model: Any = Holder({i: [i] for i in range(COUNT)})
    run(strategy, lambda: None)
    model.thing[7].append(nn.Linear(1, 1))
    with pytest.raises(
        RuntimeError,
        match=r"Holder.thing was nothing but data .* Assign the attribute anew",
    ):
        run(strategy, lambda: len(model.thing))
    model.thing = dict(model.thing)
    assert run(strategy, lambda: len(model.thing))[0] == COUNT


@only_in_turns
def test_a_layer_that_is_put_into_it_later_learns(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model: Any = Holder({i: [i] for i in range(COUNT)})
    run(strategy, lambda: None)
    plain = nn.Linear(1, 1, **F64)
    layer = copy.deepcopy(plain).to(model.inner.weight.device)
    model.thing[7].append(layer)

    def step(x: torch.Tensor) -> None:
        model.thing[7][1](x).square().mean().backward()

    rows = torch.arange(6.0, **F64).reshape(6, 1)
    (batch,) = strategy.experimental_distribute_dataset([rows])
    strategy.run(step, args=(batch,))
    plain(rows).square().mean().backward()
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, check_device=False)


def test_a_copy_of_a_module_that_a_step_makes_has_it(
    strategy: torchstrategy.Strategy,
) -> None:
    class Copying(Holder):
        def forward(self, x: torch.Tensor) -> Any:
            return len(copy.deepcopy(self).thing)

    with strategy.scope():
        model: Any = Copying(list(range(COUNT)))
    assert run(strategy, lambda: model(torch.ones(1, 1)))[0] == COUNT


def test_a_step_sees_no_other_class_than_the_users(
    strategy: torchstrategy.Strategy,
) -> None:
    class Named(Holder):
        def forward(self, x: torch.Tensor) -> Any:
            return (
                self.__class__ is Named and type(self).__name__,
                hasattr(self, "thing"),
                hasattr(self, "other"),
            )

    with strategy.scope():
        model: Any = Named(list(range(COUNT)))
    assert run(strategy, lambda: model(torch.ones(1, 1)))[0] == ("Named", True, False)


def test_what_no_step_reads_is_not_looked_at_in_a_run(
    strategy: torchstrategy.Strategy,
) -> None:
    """Not one of its entries: a run took as much longer as there were."""
    seen: list[str] = []

    class Table(dict[Any, Any]):
        def __len__(self) -> int:
            seen.append("len")
            return super().__len__()

    with strategy.scope():
        model: Any = Holder({"table": {i: Table(a=i) for i in range(COUNT)}})
    run(strategy, lambda: None)
    assert waits(strategy, model)
    seen.clear()
    for _ in range(3):
        run(strategy, lambda: float(model.inner.weight.detach()))
    assert not seen
