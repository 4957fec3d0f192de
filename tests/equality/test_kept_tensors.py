"""Tensors and numbers that a step keeps in plain attributes.

The user does things with them between runs.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy._turns.switch import IN_TURNS

F64: dict[str, Any] = {"dtype": torch.float64}
X = torch.arange(15.0, **F64).reshape(5, 3).sin()
ROWS = torch.arange(30.0, **F64).reshape(10, 3).cos()


class Remembering(nn.Module):
    """Goes on from what the last step left in an attribute and three containers.

    They are a list, a dict and a tuple.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3, **F64)
        self.hidden: Any = None
        self.seen: list[Any] = []
        self.total: Any = 0
        self.cache: Any = None
        self.pair: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(x, self.hidden)
        if self.cache is None:
            self.cache = {}
        for held in (*self.pair, *self.cache.values()):
            hidden = hidden + held.detach() / 4
        self.hidden = hidden.detach()
        self.pair = (hidden, hidden * 2)
        self.cache[f"step {len(self.cache)}"] = hidden
        self.seen.append(self.hidden)
        self.total = self.total + torch.ones((), **F64, device=x.device)
        return hidden * len(self.seen) * self.total


def nothing(model: Any) -> None:
    pass


def hidden(model: Any) -> None:
    model.hidden = None


def total(model: Any) -> None:
    model.total = 0


def seen(model: Any) -> None:
    model.seen.clear()


def first_seen(model: Any) -> None:
    model.seen.pop(0)
    model.seen.append("a mark")


def cache(model: Any) -> None:
    model.cache = None


def pair(model: Any) -> None:
    model.pair = ()


def hook(model: Any) -> None:
    model.register_forward_hook(lambda *_: None)


def layer(model: Any) -> None:
    model.extra = nn.Linear(1, 1, **F64, device=model.cell.bias_hh.device)


RESETS = [nothing, hidden, total, seen, first_seen, cache, pair, hook, layer]


def trained(
    strategy: torchstrategy.Strategy | None, reset: Callable[[Any], None]
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Remembering()
    if strategy is not None:
        model = strategy.distribute_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy is not None:
        strategy.distribute_optimizer(optimizer)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        if strategy is None:
            step(X)
        else:
            (batch,) = strategy.experimental_distribute_dataset([X])
            strategy.run(step, args=(batch,))
        reset(model)
    return [parameter.detach().cpu() for parameter in model.cell.parameters()]


@pytest.mark.parametrize("reset", RESETS, ids=lambda reset: reset.__name__)
def test_what_the_user_resets_is_reset_in_every_replica(
    strategy: torchstrategy.Strategy, reset: Callable[[Any], None]
) -> None:
    """`m.hidden = None` and `m.seen.clear()` changed nothing that could be seen.

    New copies began with nothing.
    """
    for one, other in zip(trained(strategy, reset), trained(None, reset), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_user_sees_what_replicas_keep(several: torchstrategy.Strategy) -> None:
    """It stands for tensors of replicas' rows, with history, as in plain PyTorch."""
    model: Any = several.distribute_module(Remembering())
    (batch,) = several.experimental_distribute_dataset([ROWS])
    results = several.run(lambda x: model(x).detach() / len(model.seen), args=(batch,))
    whole = several.gather(results, axis=0)
    history = (*model.pair, *model.cache.values())
    assert len(history) == 3 and all(
        held.requires_grad for value in history for held in value.values
    )
    model.pair = model.cache = ()
    for value in (
        model.hidden,
        model.seen[0],
        *copy.deepcopy(model).seen,
        *pickle.loads(pickle.dumps(model)).seen,
    ):
        torch.testing.assert_close(several.gather(value, axis=0), whole)


def test_what_only_the_last_replica_keeps_is_reset_there(
    several: torchstrategy.Strategy,
) -> None:
    """The first replica's attributes had not changed: the user's looked unchanged."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1, **F64)
            self.last: Any = None
            self.rows: list[Any] = []

        def forward(self, x: torch.Tensor) -> int:
            before = len(self.rows) + (self.last is not None)
            if torchstrategy.get_replica_context().replica_id_in_sync_group:
                self.last = x.detach().clone()
                self.rows.append(self.last)
            return before

    model: Any = several.distribute_module(Some())
    for _ in range(2):
        (batch,) = several.experimental_distribute_dataset([X])
        assert set(several.run(model, args=(batch,)).values) == {0}
        # Copies leave one item, with a part for each replica.
        parts = [p for p in several.experimental_local_results(batch) if len(p)]
        assert len(model.rows) == (len(parts) - 1 if IN_TURNS else 1)
        model.last = None
        model.rows.clear()


class Caching(nn.Module):
    """Makes a mask when it first needs one, for as many columns as it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3, **F64))
        self.mask: Any = None
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.shape[1]
        if self.mask is None or len(self.mask) < columns:
            self.mask = torch.ones(columns, columns, **F64, device=x.device).tril()
        if columns not in self.masks:
            self.masks[columns] = torch.full((columns,), 0.5, **F64, device=x.device)
        return (
            x
            @ (self.weight[:columns, :columns] * self.mask[:columns, :columns])
            * self.masks[columns]
        )


def test_what_all_replicas_cache_alike_is_the_users(
    strategy: torchstrategy.Strategy,
) -> None:
    """The module works outside of a run, in other runs and in copies.

    It works with the mask that the replicas made.
    """
    model: Any = strategy.distribute_module(Caching())
    for columns in (2, 2, 3, 2):
        (batch,) = strategy.experimental_distribute_dataset([ROWS[:, :columns]])
        seen = strategy.gather(
            strategy.run(lambda x: model(x).detach(), args=(batch,)), axis=0
        )
        whole = ROWS[:, :columns].to(model.weight.device)
        for one in (model, copy.deepcopy(model), Caching().to(model.weight.device)):
            torch.testing.assert_close(seen.cpu(), one(whole).detach().cpu())
    assert type(model.mask) is torch.Tensor and set(
        map(type, model.masks.values())
    ) == {torch.Tensor}
    model.mask = torch.zeros_like(model.mask)
    seen = strategy.gather(
        strategy.run(lambda x: model(x).detach(), args=(batch,)), axis=0
    )
    assert not seen.any()


class Centred(nn.Module):
    """A moving average of what it sees, kept in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, **F64))
        self.way = way
        self.center, self.number = torch.zeros(3, **F64), 0.0
        self.table = {"center": torch.zeros(3, **F64), "number": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.mean(0)
        if self.way == "replaced":
            self.center = self.center.to(x.device) * 0.9 + now * 0.1
        elif self.way == "in place":
            self.center.mul_(0.9).add_(now, alpha=0.1)
        elif self.way == "a number":
            self.number = self.number * 0.9 + 0.1 * float(now.mean())
        elif self.way == "replaced in a dict":
            self.table["center"] = self.table["center"] * 0.9 + now * 0.1
        elif self.way == "in place in a dict":
            self.table["center"].mul_(0.9).add_(now, alpha=0.1)
        elif self.way == "a number in a dict":
            self.table["number"] = self.table["number"] * 0.9 + 0.1 * float(now.mean())
        return x * self.weight


WAYS = [
    "replaced",
    "in place",
    "a number",
    "replaced in a dict",
    "in place in a dict",
    "a number in a dict",
]


@pytest.mark.parametrize("way", WAYS)
def test_a_statistic_of_which_the_first_replicas_is_kept_is_warned_of(
    several: torchstrategy.Strategy, way: str
) -> None:
    """Only buffers were warned of.

    A moving average in a plain attribute was the first replica's, and nobody knew.
    """
    with several.scope():
        model = Centred(way)
    (batch, again) = several.experimental_distribute_dataset([X, X])
    with pytest.warns(
        torchstrategy.ReplicaBufferWarning,
        match=r"The attribute Centred\.\S+ has other numbers",
    ) as caught:
        several.run(lambda x: model(x).detach(), args=(batch,))
    assert len(caught) == 1
    seen = several.run(
        lambda x: (model(x).detach(), float(model.center.sum()), model.table["number"]),
        args=(again,),
    )
    assert seen is not None, "the second run warns no more"


@pytest.mark.parametrize("way", WAYS)
def test_a_statistic_that_is_the_same_in_all_replicas_is_not_warned_of(
    strategy: torchstrategy.Strategy, way: str
) -> None:
    with strategy.scope():
        model = Centred(way)
    for _ in range(2):
        (batch,) = strategy.experimental_distribute_dataset([torch.ones(8, 3, **F64)])
        strategy.run(lambda x: model(x).detach(), args=(batch,))
    kept = [
        float(model.center.sum()),
        model.number * 3,
        float(model.table["center"].sum()),
        model.table["number"] * 3,
    ]
    assert max(kept) == pytest.approx(0.57) and sorted(kept)[:3] == [0, 0, 0]


def ran(
    strategy: torchstrategy.Strategy | None, step: Callable[[Any], Any], x: torch.Tensor
) -> Any:
    """What a step returns for rows; the results of all replicas together."""
    if strategy is None:
        return step(x)
    (batch,) = strategy.experimental_distribute_dataset([x])
    return strategy.gather(strategy.run(step, args=(batch,)), axis=0).cpu()


class Keeping(nn.Module):
    """Keeps things in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3, **F64))
        self.bias = nn.Parameter(torch.zeros(3, **F64))
        self.register_buffer("count", torch.zeros(4, **F64))
        self.way = way
        self.kept: Any = None
        self.other: Any = None
        self.lists: list[Any] = [[1.0], [2.0]]
        self.info: dict[str, Any] = {"calls": 0}
        self.rows = [np.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.way.replace(" ", "_"))(x) + self.bias

    def a_view_of_a_parameter(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.t() if self.kept is None else self.kept
        return x @ self.kept

    def a_detached_view_of_a_parameter(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.detach().view(-1) if self.kept is None else self.kept
        return x @ self.weight * self.kept.sum()

    def a_view_of_a_buffer(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.count[:2] if self.kept is None else self.kept
        self.kept += 1
        return x @ self.weight * self.count.sum()

    def one_thing_under_two_names(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.other = {}
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        return x @ self.weight * self.other["calls"]

    def a_second_name(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.lists[1]
        self.kept.append(1.0)
        return x @ self.weight * sum(map(sum, self.lists))

    def a_distribution_beside_a_count(self, x: torch.Tensor) -> torch.Tensor:
        self.info["calls"] += 1
        self.info["of"] = torch.distributions.Normal(x @ self.weight, 1.0)
        return self.info["of"].mean * self.info["calls"]

    def an_array_in_a_list(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(np.ones(2))
        return x @ self.weight * sum(float(row.sum()) for row in self.rows)

    def a_mask(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = (
            torch.ones(3, **F64, device=x.device).cumsum(0)
            if self.kept is None
            else self.kept
        )
        return x @ self.weight * self.kept

    def a_list_of_rows(self, x: torch.Tensor) -> torch.Tensor:
        result = x @ self.weight + sum(row.sum() for row in self.lists[2:])
        self.lists.append(x.new_zeros(x.shape))
        return result

    def a_function(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = lambda rows: self.product(rows) * self.weight[0, 0]
        return self.kept(x)

    def a_bound_method(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = {"call": self.product} if self.kept is None else self.kept
        return self.kept["call"](x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def two_outputs_of_one_memory(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) != len(x):
            self.kept = torch.tanh(x @ self.weight)
            self.other = self.kept.detach()
        self.other.add_(0.5)
        return x @ self.weight + self.kept.detach()

    def two_constants_of_one_memory(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = x.new_ones(3, 3)
            self.other = self.kept[0]
        self.kept[0] += 1
        return x @ self.weight * self.other

    def tuples_that_are_empty_in_some(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2 if self.other else 1
        self.kept = tuple(row for row in x.detach() if row[0] > 0)
        self.other = tuple(row for row in x.detach() if row[0] > 5)
        return x @ self.weight * factor

    def a_sparse_tensor(self, x: torch.Tensor) -> torch.Tensor:
        result = x @ self.weight
        if self.kept is not None and self.kept.shape[0] == len(x):
            result = result + self.kept.to_dense()
        self.kept = torch.relu(result).detach().to_sparse()
        return result

    def a_table_with_nan(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.new_full((3,), float("nan")) if self.kept is None else self.kept
        return x @ self.weight + torch.nan_to_num(self.kept)

    def a_hidden_state_of_a_batch_size(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) != len(x):
            self.kept = x.new_zeros(len(x), 3)
        self.kept = (x @ self.weight + self.kept).detach()
        return self.kept + x @ self.weight


KEPT = [
    n.replace("_", " ")
    for n in vars(Keeping)
    if not n.startswith("_") and n not in ("forward", "product")
]
# New copies have other memory.
NEEDS_OLD_COPIES = ("a view", "a detached view", "of one memory")


@pytest.mark.parametrize("rebuilds", [False, True], ids=["", "with new copies"])
@pytest.mark.parametrize("way", KEPT)
def test_what_a_step_keeps_is_kept_as_on_one_device(
    strategy: torchstrategy.Strategy, way: str, rebuilds: bool
) -> None:
    """Views became constants, and two names two things.

    Counts in a dict began anew, and rows of absent replicas stayed.
    """
    if rebuilds and any(words in way for words in NEEDS_OLD_COPIES):
        pytest.skip(
            "new copies have other parameters and buffers, of which an old view is none"
        )
    seen = []
    for of in (None, strategy):
        model: Any = Keeping(way) if of is None else of.distribute_module(Keeping(way))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if of is not None:
            of.distribute_optimizer(optimizer)

        def step(
            x: torch.Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
            return output.detach()

        mine = model.rows[0]
        outputs = []
        for count in (8, 8, 1, 8, 8):
            outputs.append(ran(of, step, ROWS[:count]))
            mine += 0.5
            model.lists[1].append(0.25)
            if rebuilds and count == 1:
                model.register_forward_hook(lambda *_: None)
        assert model.rows[0] is mine and (
            way != "one thing under two names" or model.kept is model.other
        )
        seen.append(
            [*outputs, *(p.detach().cpu() for p in (*model.parameters(), model.count))]
        )
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_run_that_fails_leaves_what_it_wrote_on_kept_tensors_undone(
    several: torchstrategy.Strategy,
) -> None:
    """Some replicas' tensors had changed and others' had not.

    Nobody could tell.
    """

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.hidden: Any = None

        def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
            self.hidden = x.clone() if self.hidden is None else self.hidden.add_(x)
            if (
                fails
                and torchstrategy.get_replica_context().replica_id_in_sync_group == 1
            ):
                raise ValueError("bad rows")
            return x * self.weight

    model: Any = several.distribute_module(Adding())
    for fails in (False, True, False):
        (batch,) = several.experimental_distribute_dataset([ROWS])
        with pytest.raises(ValueError, match="bad rows") if fails else nullcontext():
            several.run(lambda x, fails=fails: model(x, fails).detach(), args=(batch,))
    torch.testing.assert_close(several.gather(model.hidden, axis=0).cpu(), ROWS * 2)


def test_a_trainable_tensor_that_a_step_makes_is_refused_by_name(
    several: torchstrategy.Strategy,
) -> None:
    """Each replica trained its own.

    One that each replica makes of its own rows, for a penalty, is nothing unusual.
    """

    class Perturbed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.delta: Any = None

        def forward(self, x: torch.Tensor, is_of_rows: bool) -> torch.Tensor:
            self.delta = (x.clone() if is_of_rows else x.new_zeros(3)).requires_grad_()
            return (x + self.delta) * self.weight

    model: Any = several.distribute_module(Perturbed())
    (batch,) = several.experimental_distribute_dataset([ROWS])
    several.run(lambda x: model(x, True).sum().backward(), args=(batch,))
    with pytest.raises(
        RuntimeError,
        match=(
            r"made attribute Perturbed\.delta in each replica, a tensor that requires "
            r"grad"
        ),
    ):
        several.run(lambda x: model(x, False).sum().backward(), args=(batch,))


def test_an_output_that_the_user_drops_is_free(several: torchstrategy.Strategy) -> None:
    """The replicas held it, with its graph, until the next run."""
    model: Any = several.distribute_module(Keeping("a hidden state of a batch size"))
    references: list[weakref.ref[torch.Tensor]] = []

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        model.kept = x * model.weight.sum()
        references.append(weakref.ref(model.kept))

    (batch,) = several.experimental_distribute_dataset([ROWS])
    gc.disable()
    try:
        several.run(step, args=(batch,))
        assert references and all(reference() is not None for reference in references)
        model.kept = None
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_a_number_that_only_the_first_replica_writes_is_warned_of(
    several: torchstrategy.Strategy,
) -> None:
    """Replicas that had not written were not compared.

    So a best loss was that of the first replica's rows.
    """

    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.best = 1.0
            self.least = torch.ones((), **F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torchstrategy.get_replica_context().replica_id_in_sync_group == 0:
                self.best = 0.5
                self.least.fill_(0.5)
            return x * self.weight

    model: Any = several.distribute_module(Best())
    (batch,) = several.experimental_distribute_dataset([ROWS])
    with pytest.warns(torchstrategy.ReplicaBufferWarning) as caught:
        several.run(lambda x: model(x).detach(), args=(batch,))
    assert {str(warning.message).split()[2] for warning in caught} == {
        "Best.best",
        "Best.least",
    }


def test_a_constant_number_in_a_tensor_is_a_statistic(
    several: torchstrategy.Strategy,
) -> None:
    """It has no rows.

    A replica without rows had none, and then none to begin the next run with.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.scale: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = (
                x * self.weight if self.scale is None else x * self.weight / self.scale
            )
            self.scale = 1 + x.square().mean()
            return result

    model: Any = several.distribute_module(Scaled())
    with pytest.warns(
        torchstrategy.ReplicaBufferWarning, match=r"Scaled\.scale has other numbers"
    ):
        for count in (1, 10):
            (batch,) = several.experimental_distribute_dataset([ROWS[:count]])
            several.run(lambda x: model(x).detach(), args=(batch,))
    assert type(model.scale) is torch.Tensor


def test_a_tensor_that_the_user_puts_back_has_its_numbers_of_now(
    strategy: torchstrategy.Strategy,
) -> None:
    """While no attribute held it, writes on it were not seen.

    Replicas still had their first copy.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, **F64))
            self.scale: Any = torch.ones(3, **F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                x * self.weight * (1 if self.scale is None else self.scale.to(x.device))
            )

    model: Any = strategy.distribute_module(Scaled())
    scale = model.scale
    for held, factor in ((scale, 1), (None, 1), (scale, 3)):
        model.scale = held
        scale.fill_(factor)
        torch.testing.assert_close(
            ran(strategy, lambda x: model(x).detach(), ROWS), ROWS * factor
        )
