"""When a loader is read, on which thread, and in which state.

Every row of it comes once and in order.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import torchstrategy
from conditions import for_changes, needs_simulated_devices
from loaders import (
    AHEAD,
    HANG,
    ON_DEMAND,
    Loader,
    Rows,
    batch_numbers,
    both_ways,
    prefetchers,
    rows_of,
)
from topologies import central, compute_devices
from torchstrategy import InputOptions, RunOptions, Strategy
from torchstrategy._data.steps import split_equally

pytestmark = pytest.mark.usefixtures("a_hang_is_a_failure", "nothing_left")


quickly = settings(max_examples=40, deadline=None, derandomize=True, database=None)


# When it is read


@both_ways
def test_nothing_begins_before_the_first_batch_is_asked_for(
    options: InputOptions,
) -> None:
    """Nothing is read, and there is no thread."""
    loader, before = Loader(), threading.enumerate()
    iterator = iter(central(2).experimental_distribute_dataset(loader, options))
    assert loader.asked == []
    assert set(threading.enumerate()) <= set(before)
    del iterator
    assert loader.asked == []


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_on_demand_a_batch_is_read_when_and_where_it_is_asked_for(
    replicas: int,
) -> None:
    """On the thread that asks."""
    threads: list[threading.Thread] = []
    loader, before = (
        Loader(before=lambda k: threads.append(threading.current_thread())),
        threading.enumerate(),
    )
    iterator = iter(central(replicas).experimental_distribute_dataset(loader))
    for k in range(loader.batches):
        next(iterator)
        assert loader.asked == list(range(k + 1))
        assert set(threading.enumerate()) <= set(before)  # others may end meanwhile
    assert list(iterator) == []
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 3])
def test_ahead_as_many_batches_are_read_as_there_is_room_for(
    replicas: int, depth: int
) -> None:
    options = InputOptions(load_ahead=True, experimental_per_replica_buffer_size=depth)
    for taken in range(1, 5):
        loader = Loader(20)
        iterator = iter(
            central(replicas).experimental_distribute_dataset(loader, options)
        )
        for _ in range(taken):
            next(iterator)
            assert loader.is_asked[loader.asked[-1]].wait(HANG)
        assert loader.is_asked[taken + depth - 1].wait(HANG), (
            "it does not read that far"
        )
        iterator.close()
        assert loader.asked == list(range(taken + depth))


def test_ahead_as_many_steps_are_read_as_there_is_room_for() -> None:
    loader = Loader(20)
    dataset = central(3).distribute_datasets_from_function(
        lambda context: loader, AHEAD
    )
    iterator = iter(dataset)
    next(iterator)
    assert loader.is_asked[8].wait(HANG)
    iterator.close()
    assert loader.asked == list(range(9))


def test_a_depth_that_no_loader_can_fill_is_as_good_as_any() -> None:
    options = InputOptions(
        load_ahead=True, experimental_per_replica_buffer_size=sys.maxsize
    )
    assert batch_numbers(
        central(2).experimental_distribute_dataset(Loader(), options)
    ) == list(range(6))


def test_loader_workers_are_read_ahead_and_others_are_not_unless_one_says_so() -> None:
    strategy = central(2)
    for workers, options, is_ahead in [
        (0, None, False),
        (0, AHEAD, True),
        (1, None, True),
        (1, ON_DEMAND, False),
    ]:
        iterator = iter(
            strategy.experimental_distribute_dataset(
                DataLoader(Rows(8), 2, num_workers=workers), options
            )
        )
        next(iterator)
        assert bool(prefetchers()) is is_ahead
        iterator.close()


# The step and the loader, in order


@pytest.mark.parametrize("depth", [1, 2])
def test_ahead_the_next_batch_is_asked_for_before_the_step_ends(depth: int) -> None:
    strategy, log = central(2), []
    loader = Loader(before=lambda k: log.append(("read", k)))
    options = InputOptions(load_ahead=True, experimental_per_replica_buffer_size=depth)

    def step(k: int) -> None:
        if k + 1 < loader.batches:
            assert loader.is_asked[k + 1].wait(HANG)
        log.append(("step", k))

    for k, _ in enumerate(strategy.experimental_distribute_dataset(loader, options)):
        step(k)
    assert [what for what in log if what[0] == "step"] == [
        ("step", k) for k in range(6)
    ]
    assert all(log.index(("read", k + 1)) < log.index(("step", k)) for k in range(5))


def test_on_demand_the_next_batch_is_asked_for_after_the_step() -> None:
    strategy, log = central(2), []
    loader = Loader(before=lambda k: log.append(("read", k)))
    for k, _ in enumerate(strategy.experimental_distribute_dataset(loader)):
        log.append(("step", k))
    assert log == [(what, k) for k in range(6) for what in ("read", "step")]


# Random numbers


class Augmented(Dataset):
    """Rows with noise of torch's own generator."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2)


def test_on_demand_random_numbers_are_drawn_as_in_plain_pytorch(
    strategy: Strategy,
) -> None:
    loader = DataLoader(Augmented(), batch_size=3, shuffle=True)

    def drawn(batches: Any) -> list[Any]:
        torch.manual_seed(5)
        numbers = []
        for _ in range(2):
            for batch in batches:
                numbers += [rows_of(batch), F.dropout(torch.ones(8)).tolist()]
        return [*numbers, torch.rand(1).item()]

    assert drawn(strategy.experimental_distribute_dataset(loader)) == drawn(loader)


def test_ahead_a_generator_of_the_loader_leaves_the_steps_numbers_alone() -> None:
    strategy = central(2)

    def drawn(options: InputOptions | None) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(
            range(9), 2, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        dataset = (
            loader
            if options is None
            else strategy.experimental_distribute_dataset(loader, options)
        )
        return [
            (rows_of(batch), F.dropout(torch.ones(8)).tolist())
            for _ in range(2)
            for batch in dataset
        ]

    assert drawn(AHEAD) == drawn(ON_DEMAND) == drawn(None)


# Every row, once and in order


SHAPES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda k: torch.tensor([k, k]),
    "number": lambda k: k,
    "dict": lambda k: {"x": torch.tensor([k]), "y": k},
    "nested": lambda k: ({"a": [torch.tensor(k)]}, (k, float(k))),
}


def leaves_of(batch: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(batch)


def check_stream(loader: Any, replicas: int, options: InputOptions | None) -> None:
    """Holds what a strategy deals out against what the loader yields."""
    strategy = central(replicas)
    expected = [leaves_of(batch) for batch in loader]
    steps = [
        leaves_of(step)
        for step in strategy.experimental_distribute_dataset(loader, options)
    ]
    assert len(steps) == len(expected)
    for step, batch in zip(steps, expected, strict=True):
        for dealt_out, whole in zip(step, batch, strict=True):
            pieces = strategy.experimental_local_results(dealt_out)
            slices = split_equally(replicas, len(whole))
            assert [piece.tolist() for piece in pieces] == [
                whole[rows].tolist() for rows in slices
            ]


@quickly
@given(
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(list(SHAPES)),
    st.booleans(),
)
def test_the_stream_of_the_loader_is_dealt_out_by_the_rule(
    rows: int, batch_size: int, replicas: int, drop_last: bool, shape: str, ahead: bool
) -> None:
    samples = [SHAPES[shape](k) for k in range(rows)]
    loader = DataLoader(samples, batch_size, drop_last=drop_last)
    check_stream(loader, replicas, AHEAD if ahead else ON_DEMAND)


@for_changes
@settings(quickly, max_examples=5)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(list(SHAPES)),
)
def test_the_stream_of_a_loader_with_workers_is_dealt_out_by_the_rule(
    rows: int, batch_size: int, replicas: int, drop_last: bool, shape: str
) -> None:
    samples = [SHAPES[shape](k) for k in range(rows)]
    check_stream(
        DataLoader(samples, batch_size, drop_last=drop_last, num_workers=2),
        replicas,
        None,
    )


@both_ways
def test_a_replica_without_rows_sits_out_the_step_or_runs_with_none(
    options: InputOptions,
) -> None:
    strategy = central(2)
    found, whole = [], []
    for batch in strategy.experimental_distribute_dataset(
        DataLoader(range(5), batch_size=2), options
    ):
        found.append(
            [
                value.tolist()
                for value in strategy.run(lambda rows: rows + 1, args=(batch,)).values
            ]
        )
        everyone = strategy.run(
            lambda rows: rows + 1,
            args=(batch,),
            options=RunOptions(run_empty_replicas=True),
        )
        whole.append([value.tolist() for value in everyone.values])
    assert found == [[[1], [2]], [[3], [4]], [[5]]]
    assert whole == [[[1], [2]], [[3], [4]], [[5], []]]


# What the reader wears


variable = contextvars.ContextVar("variable", default="what nobody set")


class Watching(TorchDispatchMode):
    """Records on which threads torch is asked for something."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.threads.add(threading.current_thread())
        return func(*args, **(kwargs or {}))


@both_ways
def test_the_loader_is_read_in_the_state_of_the_caller(options: InputOptions) -> None:
    worn: list[Any] = []
    threads: list[threading.Thread] = []

    def look(k: int) -> None:
        worn.append(
            (variable.get(), torch.get_default_device().type, torch.is_grad_enabled())
        )
        threads.append(threading.current_thread())

    token = variable.set("what the caller set")
    with Watching() as mode, torch.no_grad(), torch.device("meta"):
        iterator = iter(
            central(2).experimental_distribute_dataset(Loader(1, look), options)
        )
        next(iterator)
    variable.reset(token)
    iterator.close()
    # Where data is read, whatever the default device is.
    assert worn == [("what the caller set", "cpu", False)]
    assert (threads[0] is threading.current_thread()) is (options is ON_DEMAND)
    assert threads[0] in mode.threads


@pytest.mark.parametrize("workers", [0, 1])
@both_ways
def test_a_loader_is_read_in_host_memory_in_a_scope(
    options: InputOptions, workers: int
) -> None:
    """In the scope of a strategy on an accelerator, that is the default device.

    A loader could draw no seed there.
    """
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(8.0)),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        collate_fn=_stacked,
    )
    strategy = torchstrategy.MirroredStrategy(compute_devices(2))
    dataset = strategy.experimental_distribute_dataset(loader, options)
    for default in (strategy.scope(), torch.device("meta")):
        with default:
            seen = [strategy.gather(batch, axis=0) for batch in dataset]
        assert sorted(torch.cat(seen).tolist()) == list(range(8))
        assert not seen[0].is_meta
    with strategy.scope():
        assert dataset.element_spec.value_specs[0].dtype == torch.float32
        dataset.load_state_dict(dataset.state_dict())
        assert len(list(dataset)) == 2


@needs_simulated_devices  # on the CPU there is one kind of generators
def test_a_loader_that_draws_on_the_default_device_goes_on_doing_so() -> None:
    device = compute_devices(1)[0]
    generator = torch.Generator(device).manual_seed(0)
    loader: Any = torch.utils.data.DataLoader(
        range(8), batch_size=4, shuffle=True, generator=generator
    )  # type: ignore[arg-type]
    strategy = torchstrategy.MirroredStrategy(compute_devices(2))
    with strategy.scope():
        seen = [
            strategy.gather(batch, axis=0).cpu()
            for batch in strategy.experimental_distribute_dataset(loader)
        ]
    assert sorted(torch.cat(seen).tolist()) == list(range(8))


def _stacked(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows]) + torch.zeros(1)


def test_what_the_loader_sets_stays_with_the_reader() -> None:
    list(central(2).experimental_distribute_dataset(Loader(before=variable.set), AHEAD))
    assert variable.get() == "what nobody set"
