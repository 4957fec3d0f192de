"""What modules keep in plain attributes.

The user's changes reach every replica, and a step's come back.
"""

from __future__ import annotations

import copy
import enum
import functools
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchstrategy
from conditions import only_with_copies
from topologies import central, mirrored, mirrored_with_copies
from torchstrategy._turns.switch import IN_TURNS

F64 = {"dtype": torch.float64}
ROWS = 5

STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(2),
    "mirrored": lambda: mirrored(3),
    "copies in one memory": lambda: mirrored_with_copies(2),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


def batches(count: int) -> list[torch.Tensor]:
    return list(
        torch.randn(count, ROWS, 3, generator=torch.Generator().manual_seed(1), **F64)
    )


@dataclass
class Config:
    scale: float = 1.0
    parts: dict[str, Any] = field(default_factory=lambda: {"scale": 1.0})


class Louder(Config):
    scale: Any = property(lambda self: 2.0)


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Mode(enum.Enum):
    ON = 1


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2, **F64)
        self.config = {"deep": {"scale": 1.0}}
        self.items = [1.0, [1.0]]
        self.pair = ({"scale": 1.0}, [1.0])
        self.record = Config()
        self.space = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.slotted = Slotted()
        self.queue = deque([[1.0]])
        self.ordered = OrderedDict(scale=[1.0])
        self.steps = OrderedDict(double=2.0, add=1.0)
        self.names = {"one"}
        self.array = np.ones(2)
        self.arrays = [np.ones(())]
        self.constant = torch.ones(2, **F64)
        self.constants = {"deep": [torch.ones((), **F64)]}
        self.inner.shared = self.record  # one object in two modules
        self.functions = [lambda: self.inner.weight.sum() * 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (
            self.config["deep"]["scale"]
            * self.items[1][0]
            * self.pair[0]["scale"]
            * self.pair[1][-1]
        )
        scale *= (
            self.record.scale
            * self.inner.shared.parts["scale"]
            * self.space.inner.scale
            * self.slotted.scale
        )
        scale *= (
            self.queue[0][0]
            * self.ordered["scale"][-1]
            * len(self.names)
            * float(self.arrays[0])
        )
        for name, value in self.steps.items():
            scale = scale * value if name == "double" else scale + value
        made = torch.from_numpy(self.array.copy()).to(x.device) * self.constants[
            "deep"
        ][0].to(x.device)
        return (
            self.inner(x) * scale * self.constant.to(x.device) * made
            + self.functions[0]()
        )


CHANGES: dict[str, Callable[[Any], object]] = {
    "a dict in a dict": lambda m: m.config["deep"].update(scale=2.0),
    "a new dict in a dict": lambda m: m.config.update(deep={"scale": 2.0}),
    "a list in a list": lambda m: m.items[1].__setitem__(0, 2.0),
    "a dict in a tuple": lambda m: m.pair[0].update(scale=2.0),
    "a longer list in a tuple": lambda m: m.pair[1].append(2.0),
    "an attribute of an object": lambda m: setattr(m.record, "scale", 2.0),
    "a dict of an object of two modules": lambda m: m.inner.shared.parts.update(
        scale=2.0
    ),
    "an object in an object": lambda m: setattr(m.space.inner, "scale", 2.0),
    "a slot": lambda m: setattr(m.slotted, "scale", 2.0),
    "a queue": lambda m: m.queue.appendleft([2.0]),
    "a list in an ordered dict": lambda m: m.ordered["scale"].append(2.0),
    "an entry of an ordered dict": lambda m: m.steps.update(more=3.0),
    "the order of an ordered dict": lambda m: m.steps.move_to_end("double"),
    "a set": lambda m: m.names.add("two"),
    "an array": lambda m: m.array.__imul__(2.0),
    "an array in a list": lambda m: m.arrays[0].fill(2.0),
    "a tensor": lambda m: m.constant.fill_(2.0),
    "the data of a tensor in containers": lambda m: m.constants["deep"][0].data.mul_(
        2.0
    ),
    "something at the first level, too": lambda m: (
        m.eval(),
        m.config["deep"].update(scale=2.0),
    ),
    "the class of an object": lambda m: setattr(m.record, "__class__", Louder),
    "the class of a layer": lambda m: setattr(m.inner, "__class__", Doubling),
    "a configuration that is another": lambda m: setattr(
        m, "record", Config(scale=2.0)
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_settings_that_are_changed_between_runs_hold_in_every_replica(
    strategy: torchstrategy.Strategy, what: str
) -> None:
    """Only changes of what an attribute itself holds were seen.

    Replicas computed with old settings.
    """
    plain = Settings()
    with strategy.scope():
        model = Settings()
    made = model
    for k, batch in enumerate(strategy.experimental_distribute_dataset(batches(3))):
        if k:
            CHANGES[what](plain)
            CHANGES[what](model)
        with torch.no_grad():
            seen = strategy.gather(
                strategy.run(lambda x: model(x), args=(batch,)), axis=0
            )
            torch.testing.assert_close(
                seen.cpu(), plain(batches(3)[k]), rtol=1e-10, atol=1e-12
            )
    assert model is made


class Stats:
    def __init__(self) -> None:
        self.calls, self.by_kind = 0, Counter()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, **F64))
        self.calls, self.pair, self.shape, self.kinds, self.gone = (
            0,
            (0, ("none",)),
            None,
            frozenset(),
            "here",
        )
        self.history: list[Any] = []
        self.table = {"calls": [0]}
        self.seen = {0}
        self.last = deque([0], maxlen=2)
        self.stats = Stats()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.ordered: OrderedDict[str, int] = OrderedDict(call=0)
        self.mode: Any = None
        self.total = torch.zeros(1, **F64)
        self.level = torch.zeros(1, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.pair = (self.calls, ("seen",))
        self.shape = torch.Size((3, self.calls))
        self.kinds = frozenset({self.calls})
        self.history.append({"call": [self.calls]})
        self.table["calls"].append(self.calls)
        self.seen.add(self.calls)
        self.last.append(self.calls)
        self.stats.calls += 1
        self.stats.by_kind["forward"] += 1
        self.counts["forward"] += 1
        self.ordered[f"call {self.calls}"] = self.calls
        self.ordered.move_to_end("call")
        self.mode = Mode.ON
        self.made = {"at": [self.calls]}
        self.total.add_(1)
        self.level = self.level + 2
        if hasattr(self, "gone"):
            del self.gone
        return x * self.weight


def facts(m: Any) -> dict[str, Any]:
    found = {
        name: value
        for name, value in vars(m).items()
        if not name.startswith("_") and name != "stats"
    }
    return copy.deepcopy({**found, "stats": vars(m.stats)})


def test_what_forward_writes_on_attributes_is_there_after_the_run(
    strategy: torchstrategy.Strategy,
) -> None:
    """What forward changed in place stayed old outside of the replicas.

    That was tuples, sets, containers and objects.
    """
    plain = Remembers()
    with strategy.scope():
        model = Remembers()
    kept = model.history, model.table, model.stats
    for batch in strategy.experimental_distribute_dataset(batches(3)):
        plain(batches(1)[0])
        strategy.run(lambda x: model(x).detach(), args=(batch,))
        assert str(facts(model)).replace(", device='sim:0'", "") == str(facts(plain))
        model(batches(1)[0].to(model.weight.device))  # the user's own calls count on
        plain(batches(1)[0])
    assert kept == (model.history, model.table, model.stats)
    assert (
        kept[0] is model.history and kept[1] is model.table and kept[2] is model.stats
    )
    pickle.dumps(model.__dict__["history"])


def test_what_is_no_data_stays_with_the_replica(
    strategy: torchstrategy.Strategy,
) -> None:
    """An output has one replica's rows: the whole model has one per replica."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2, **F64)
            self.attention = None
            self.outputs: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = None if self.attention is None else len(self.attention)
            self.attention = self.inner(x).softmax(-1)
            self.outputs = [self.attention]
            return self.attention if before is None else self.attention + 0

    with strategy.scope():
        model = Keeps()
    x = batches(1)[0].to(model.inner.weight.device)
    model(x)  # keeps an output with a history, which was refused
    for batch in strategy.experimental_distribute_dataset(batches(2)):
        strategy.run(lambda x: model(x).sum().backward(), args=(batch,))
        if strategy.num_replicas_in_sync > 1:
            assert all(
                map(torch.equal, model.attention.values, model.outputs[0].values)
            )


def test_a_backward_through_a_kept_output_says_what_it_went_through(
    strategy: torchstrategy.Strategy,
) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.double = self.weight * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.double

    with strategy.scope():
        model = Constant()
    assert (
        float(
            strategy.gather(
                strategy.run(lambda: model(torch.ones(1, **F64)).detach()), axis=0
            )[0]
        )
        == 2
    )
    with pytest.raises(
        RuntimeError,
        match=(
            r"goes through Constant\.double, which was computed outside of "
            r"strategy\.run"
        ),
    ):
        strategy.run(lambda: model(torch.ones(1, **F64)).sum().backward())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils:FutureWarning")
def test_weights_that_hooks_compute_are_those_of_the_last_forward(
    strategy: torchstrategy.Strategy,
) -> None:
    """They were those of the first: pruning again chose by old weights."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3, **F64) for _ in range(3)]
        nn.utils.weight_norm(layers[0])
        prune.l1_unstructured(layers[1], "weight", 0.25)
        nn.utils.spectral_norm(layers[2])
        return nn.Sequential(*layers).eval()  # in training spectral_norm draws on

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    plain = make()
    updates = torch.optim.SGD(plain.parameters(), lr=0.1)
    with strategy.scope():
        model = make()
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, batch in zip(
        batches(3), strategy.experimental_distribute_dataset(batches(3)), strict=True
    ):
        step(plain, updates, x)
        strategy.run(lambda x: step(model, ours, x), args=(batch,))
        for one, other in zip(model, plain, strict=True):
            torch.testing.assert_close(
                one.weight.detach().cpu(), other.weight.detach(), rtol=1e-10, atol=1e-12
            )
    for m in (model, plain):
        prune.l1_unstructured(m[1], "weight", 0.5)
    torch.testing.assert_close(model[1].weight_mask.cpu(), plain[1].weight_mask)


def test_a_buffer_may_be_replaced_in_inference_mode(
    strategy: torchstrategy.Strategy,
) -> None:
    """A cache that evaluation fills.

    Torch counts no writes on such a tensor, and asking for their number raised.
    """

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.register_buffer("scale", torch.ones(2, 1, **F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.scale[0]

    with strategy.scope():
        model = Buffered()
    (batch,) = strategy.experimental_distribute_dataset(batches(1))
    for _ in range(2):
        with torch.inference_mode():
            model.scale = model.scale * 2
            model.scale.mul_(1.5)
        with torch.no_grad():
            for _ in range(2):
                seen = strategy.gather(
                    strategy.run(lambda x: model(x), args=(batch,)), axis=0
                )
                torch.testing.assert_close(
                    seen.cpu(), model(batches(1)[0].to(model.weight.device)).cpu()
                )
    model.scale = torch.ones_like(model.scale)
    strategy.run(lambda x: model(x).sum().backward(), args=(batch,))
    assert model.weight.grad is not None


@only_with_copies
def test_a_module_whose_deep_copy_is_another_is_named(
    strategy: torchstrategy.Strategy,
) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def __deepcopy__(self, memo: Any) -> nn.Module:
            return copy.deepcopy(self.inner, memo)

    with strategy.scope():
        model = Wrapper()
    with pytest.raises(
        TypeError, match=r"Wrapper cannot be copied for the replicas.*gives Linear"
    ):
        strategy.run(lambda: model.inner(torch.ones(1, 1)))


@pytest.mark.parametrize("evaluates", [True, False])
def test_an_attribute_that_is_set_back_is_back_in_every_replica(
    strategy: torchstrategy.Strategy, evaluates: bool
) -> None:
    """A run's beginning was taken for its end: replicas went on counting.

    What it began with was taken for what it had left.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.cache: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.cache = self.cache or [self.calls]
            return x * self.calls

    with strategy.scope():
        model = Counting()
    (batch,) = strategy.experimental_distribute_dataset(batches(1))
    for _ in range(2):
        for k in (1, 2):
            seen = strategy.gather(
                strategy.run(lambda x: model(x), args=(batch,)), axis=0
            )
            torch.testing.assert_close(seen.cpu(), batches(1)[0] * k)
            assert (model.calls, model.cache) == (k, [1])
        model.calls, model.cache = 0, None
        if evaluates:
            model.train(not model.training)


def test_the_arguments_of_a_partial_are_each_replicas_own(
    strategy: torchstrategy.Strategy,
) -> None:
    """A random program: they were copied without a look at them.

    So they stayed on one device and as they once were.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = functools.partial(torch.mul, other=torch.ones(3, **F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x)

    with strategy.scope():
        model = Scaled()
    for factor in (1.0, 2.0, 3.0):
        model.call.keywords["other"].fill_(factor)
        rows = batches(1)[0]
        (batch,) = strategy.experimental_distribute_dataset([rows])
        results = strategy.gather(
            strategy.run(lambda x: model(x), args=(batch,)), axis=0
        )
        torch.testing.assert_close(results.cpu(), rows * factor)


class Best(nn.Module):
    """Notes, in attributes of all kinds, that it has seen large rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, **F64)
        self.best = 1.0
        self.table = {"best": [1.0]}
        self.seen = torch.ones((), **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 5).any()):
            self.best, self.table["best"][0] = 7.0, 7.0
            self.seen.fill_(7.0)
            self.inner.eval()
        return (
            self.inner(x) * self.best * self.table["best"][0] * self.seen.to(x.device)
        )


@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_what_only_another_replica_than_the_first_writes_does_not_stay_there(
    strategy: torchstrategy.Strategy,
) -> None:
    """The last replica alone saw large rows.

    From then on it computed with settings that nobody else had.
    """
    torch.manual_seed(0)
    model = strategy.distribute_module(Best())
    large = torch.ones(ROWS, 3, **F64)
    large[-1] = 10

    def step(x: torch.Tensor) -> tuple[float, float, float, float]:
        model(x.to(model.inner.weight.device)).square().mean().backward()
        return (
            model.best,
            model.table["best"][0],
            float(model.seen),
            float(model.inner.training),
        )

    for x in (large, torch.ones(ROWS, 3, **F64)):
        model.zero_grad()
        (batch,) = strategy.experimental_distribute_dataset([x])
        results = strategy.run(step, args=(batch,))
        if IN_TURNS:
            continue
        assert (
            model.best,
            model.table["best"][0],
            float(model.seen),
            model.inner.training,
        ) == (1.0, 1.0, 1.0, True)
    if IN_TURNS:
        # What only one replica has written on a tensor is there. In a container, each
        # has its own. For attributes, what the first has holds for all.
        assert (model.best, float(model.seen), model.inner.training) == (1, 7, True)
        own = strategy.experimental_local_results(model.table["best"][0])
        assert own == (*[1.0] * (strategy.num_replicas_in_sync - 1), 7.0)
        assert set(results[2].values) == {7.0}
        return
    assert all(set(result.values) == {1.0} for result in results), (
        "all replicas compute with what the module holds"
    )
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x.to(twin.inner.weight.device)).square().mean().backward()
    torch.testing.assert_close(model.inner.weight.grad, twin.inner.weight.grad)


@dataclass(slots=True)
class Total:
    rows: float = 0.0


NEW: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a number of numpy": (np.int64(0), lambda n: n + np.int64(1)),
    "a counter": (Counter(), lambda n: n + Counter("a")),
    "an ordered dict": (OrderedDict(), lambda n: OrderedDict(n, more=len(n))),
    "a default dict in a list": ([], lambda n: [*n, defaultdict(int, one=1)]),
    "an object": (Config(), lambda n: Config(n.scale + 1, {"of": n})),
    "an object with slots": (Total(), lambda n: Total(n.rows + 1)),
    "an object of objects": (
        SimpleNamespace(n=0, of=Total()),
        lambda n: SimpleNamespace(n=n.n + 1, of=[Total(n.n)]),
    ),
    "a day": (date(2020, 1, 1), lambda n: n + timedelta(days=1)),
}


@pytest.mark.parametrize("what", NEW)
@pytest.mark.parametrize("where", ["an attribute", "a list", "a dict"])
def test_data_that_forward_makes_is_there_after_the_run(
    strategy: torchstrategy.Strategy, what: str, where: str
) -> None:
    """The user's module kept what it had, while the replicas went on counting.

    Forward made a new `Counter`, a new dataclass or a number of numpy. Only lists,
    dicts and the like were data.
    """
    first, more = NEW[what]

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noted, self.items, self.table = (
                copy.deepcopy(first),
                [copy.deepcopy(first)],
                {"it": copy.deepcopy(first)},
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "an attribute":
                self.noted = more(self.noted)
            elif where == "a list":
                self.items.append(more(self.items[-1]))
            else:
                self.table["it"] = more(self.table["it"])
            return x

    model, twin = strategy.distribute_module(Noting()), Noting()
    for x in batches(3):
        strategy.run(lambda: model(x))  # noqa: B023  run at once
        twin(x)
        assert repr((model.noted, model.items, model.table)) == repr(
            (twin.noted, twin.items, twin.table)
        )


class Aliases(nn.Module):
    """Writes on what one attribute holds, and computes with what another one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, **F64)
        self.one: Any = {"scale": 1.0}
        self.table: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.one, dict):
            self.one["scale"] += 1
        else:
            self.one.add_(1)
        other = self.table.get("alias", getattr(self, "other", self.one))
        return self.inner(x) * (
            other["scale"] if isinstance(other, dict) else other.to(x.device, copy=True)
        )


def in_two_attributes(m: Any) -> None:
    m.one = m.other = {"scale": 3.0}


def in_an_attribute_and_a_container(m: Any) -> None:
    m.one = torch.ones((), **F64)
    m.table["alias"] = m.one


ALIASES: dict[str, Callable[[Any], object]] = {
    "another name for what is there": lambda m: setattr(m, "other", m.one),
    "in a container": lambda m: m.table.update(alias=m.one),
    "something new in two attributes": in_two_attributes,
    "a new tensor in an attribute and in a container": in_an_attribute_and_a_container,
}


@pytest.mark.parametrize("what", ALIASES)
def test_what_has_two_names_from_between_two_runs_is_one_thing_in_replicas(
    strategy: torchstrategy.Strategy, what: str
) -> None:
    """After `model.other = model.config`, each replica had two dicts.

    What forward wrote on one was not in the other, and did not come back to the user's
    module.
    """
    torch.manual_seed(0)
    twin = Aliases()
    model = strategy.distribute_module(copy.deepcopy(twin))

    def step(m: Any, x: torch.Tensor) -> None:
        m(x.to(m.inner.weight.device)).square().mean().backward()

    for x in batches(3):
        (batch,) = strategy.experimental_distribute_dataset([x])
        strategy.run(step, args=(model, batch))
        step(twin, x)
        torch.testing.assert_close(
            model.inner.weight.grad, twin.inner.weight.grad, check_device=False
        )
        assert (model.one, model.table, vars(model).get("other")) == (
            twin.one,
            twin.table,
            vars(twin).get("other"),
        )
        for m in (model, twin):
            ALIASES[what](m)


@pytest.mark.parametrize("where", ["a list", "another attribute", "a tensor"])
def test_layers_that_are_put_into_plain_containers_between_runs_learn_or_are_refused(
    strategy: torchstrategy.Strategy, where: str
) -> None:
    """A replica computed with a deep copy of the layer, with an unseen gradient."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2, **F64)
            self.more: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.to(self.inner.weight.device)
            return self.inner(x) + sum(
                more(x) if isinstance(more, nn.Module) else more for more in self.more
            )

    torch.manual_seed(0)
    twin = Branches()
    model = strategy.distribute_module(copy.deepcopy(twin))
    x, further = (
        batches(1)[0],
        nn.Linear(3, 2, **F64)
        if where != "a tensor"
        else torch.ones(2, **F64, requires_grad=True),
    )

    def step(m: Any, x: torch.Tensor) -> None:
        m(x).square().mean().backward()

    (batch,) = strategy.experimental_distribute_dataset([x])
    for more in (None, further):
        if more is not None:
            for m in (model, twin):
                placed = (
                    copy.deepcopy(more).to(m.inner.weight.device)
                    if isinstance(more, nn.Module)
                    else more.detach().clone().requires_grad_()
                )
                m.more = [placed] if where == "another attribute" else m.more
                m.more[:] = [placed]
        if more is not None and where == "a tensor" and not IN_TURNS:
            with pytest.raises(
                TypeError,
                match=r"more\[0\] is a tensor that requires grad in a plain attribute",
            ):
                strategy.run(step, args=(model, batch))
            return
        strategy.run(step, args=(model, batch))
        step(twin, x)
    ours, plain = (
        m.more[0] if where == "a tensor" else m.more[0].weight for m in (model, twin)
    )
    torch.testing.assert_close(ours.grad, plain.grad, check_device=False)


def test_two_models_of_one_class_have_attributes_of_their_own(
    several: torchstrategy.Strategy,
) -> None:
    """What a step wrote in a container of one model was lost.

    It was if another one of its class had such a container, too.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.counts: dict[str, int] = {}

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            self.counts[name] = self.counts.get(name, 0) + 1
            return self.layer(x)

    with several.scope():
        first, second = Counting(), Counting()

    def step() -> None:
        first(torch.ones(1, 2), "a")
        second(torch.ones(1, 2), "b")

    for _ in range(3):
        several.run(step)
    assert (first.counts, second.counts) == ({"a": 3}, {"b": 3})
