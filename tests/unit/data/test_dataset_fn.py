"""distribute_datasets_from_function: what its function is told about.

It also says which replica gets which element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from problems import (
    assert_close,
    built,
    data,
    gradients,
    mlp,
    mse,
    parameters,
    sgd,
    shown,
)
from topologies import TOPOLOGIES, central
from torchstrategy import (
    DistributedDataset,
    DistributedValues,
    InputContext,
    InputOptions,
    InputReplicationMode,
    OneDeviceStrategy,
    OutOfRangeError,
    RunOptions,
    Strategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

DEFAULT = get_strategy()
CHOSEN = [name for name in TOPOLOGIES if name != "default"]
ALONE = ["one_device", "central_1", "copies_1"]
TWO, THREE = central(2), central(3)
PER_REPLICA = InputOptions(
    experimental_replication_mode=InputReplicationMode.PER_REPLICA
)
quickly = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def elements(*sizes: int) -> list[torch.Tensor]:
    """Elements of so many rows, which count on."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def from_(
    strategy: Strategy, dataset: Any, options: InputOptions | None = None
) -> DistributedDataset:
    return strategy.distribute_datasets_from_function(lambda _: dataset, options)


def rows(strategy: Strategy, value: Any) -> list[Any]:
    """What each replica is given, as lists."""
    return [piece.tolist() for piece in strategy.experimental_local_results(value)]


def steps(
    strategy: Strategy, dataset: Any, options: InputOptions | None = None
) -> list[list[Any]]:
    return [rows(strategy, value) for value in from_(strategy, dataset, options)]


class Squares(Dataset):
    """A map-style dataset of single elements."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


# The function


@pytest.mark.parametrize(
    "name",
    [
        "distribute_datasets_from_function",
        "experimental_distribute_datasets_from_function",
    ],
)
def test_the_function_is_called_once_and_at_once(strategy: Strategy, name: str) -> None:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> list[torch.Tensor]:
        contexts.append(context)
        return elements(2, 2)

    dataset = getattr(strategy, name)(dataset_fn)
    replicas = strategy.num_replicas_in_sync
    assert contexts == [InputContext(1, 0, replicas)]
    assert len(list(dataset)) == len(list(dataset)) == -(-2 // replicas)
    assert len(contexts) == 1


def test_the_default_strategy_returns_what_the_function_returned() -> None:
    for anything in (elements(2), 5, None, "text", object()):
        assert (
            DEFAULT.distribute_datasets_from_function(
                lambda _, returned=anything: returned
            )
            is anything
        )


@pytest.mark.parametrize("topology", CHOSEN)
def test_the_function_sees_what_its_caller_sees(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    seen: list[Any] = []

    def dataset_fn(_: InputContext) -> list[torch.Tensor]:
        seen.append(
            (
                has_strategy(),
                in_cross_replica_context(),
                get_replica_context() is None,
                get_strategy(),
            )
        )
        return elements(2)

    strategy.distribute_datasets_from_function(dataset_fn)
    with strategy.scope():
        strategy.distribute_datasets_from_function(dataset_fn)
    with TWO.scope():  # another one's
        strategy.distribute_datasets_from_function(dataset_fn)
    strategy.run(
        lambda: strategy.distribute_datasets_from_function(dataset_fn) and None
    )
    assert seen[:3] == [
        (False, False, False, DEFAULT),
        (True, True, True, strategy),
        (True, True, True, TWO),
    ]
    assert seen[3:] == [(True, False, False, strategy)] * strategy.num_replicas_in_sync


def test_the_function_sees_a_strategy_that_was_set() -> None:
    seen = []
    experimental_set_strategy(THREE)
    try:
        TWO.distribute_datasets_from_function(
            lambda _: seen.append(get_strategy()) or elements(1)
        )
    finally:
        experimental_set_strategy(None)
    assert seen == [THREE]


@pytest.mark.parametrize(("replicas", "size"), [(1, 7), (2, 6), (4, 8)])
def test_the_batch_size_of_a_replica_is_found_from_the_context(
    replicas: int, size: int
) -> None:
    strategy = central(replicas)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: DataLoader(
            range(3 * size), context.get_per_replica_batch_size(size)
        )  # type: ignore[arg-type]
    )
    assert [list(itertools.chain(*rows(strategy, value))) for value in dataset] == [
        list(range(k * size, k * size + size)) for k in range(3)
    ]


def test_an_error_of_the_function_comes_out_of_the_call(strategy: Strategy) -> None:
    def dataset_fn(context: InputContext) -> Any:
        raise LookupError(f"no data for {context.input_pipeline_id}")

    with pytest.raises(LookupError, match="no data for 0"):
        strategy.distribute_datasets_from_function(dataset_fn)


class Pipeline:
    """A function with a state of its own."""

    def __call__(self, context: InputContext) -> list[torch.Tensor]:
        return elements(1, 1)

    def method(self, context: InputContext, size: int = 1) -> list[torch.Tensor]:
        return elements(size, size)


@pytest.mark.parametrize(
    "dataset_fn",
    [
        Pipeline(),
        Pipeline().method,
        lambda *args: elements(1, 1),
        lambda context, *, size=1: elements(size, size),
        functools.partial(lambda size, context: elements(size, size), 1),
        iter,
    ],
    ids=shown,
)
def test_the_function_is_whatever_can_be_called_with_a_context(
    dataset_fn: Callable[[Any], Any],
) -> None:
    if dataset_fn is iter:
        with pytest.raises(TypeError, match="'InputContext' object is not iterable"):
            TWO.distribute_datasets_from_function(dataset_fn)
    else:
        assert [
            rows(TWO, value)
            for value in TWO.distribute_datasets_from_function(dataset_fn)
        ] == [[[0], [1]]]


@pytest.mark.parametrize(
    "dataset_fn",
    [lambda: elements(1), lambda a, b: elements(1), lambda *, context: elements(1)],
    ids=["0", "2", "*"],
)
def test_a_function_without_a_context_is_refused_uncalled(
    strategy: Strategy, dataset_fn: Any
) -> None:
    sentence = (
        r"^dataset_fn is called with one argument, an InputContext, and .* does not "
        r"take it: .*\. Write `def"
    )
    with pytest.raises(TypeError, match=sentence):
        strategy.distribute_datasets_from_function(dataset_fn)


@pytest.mark.parametrize(
    "junk",
    [None, 5, elements(2), DataLoader(Squares(), 2)],
    ids=lambda j: type(j).__name__,
)
def test_what_is_no_function_is_refused_with_what_to_call(
    strategy: Strategy, junk: Any
) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"not a callable object\..*; to split a dataset "
            r".*experimental_distribute_dataset\.$"
        ),
    ):
        strategy.distribute_datasets_from_function(junk)


@pytest.mark.parametrize("junk", [5, None, "text", b"bytes", len, object()], ids=shown)
@pytest.mark.parametrize("topology", CHOSEN)
def test_a_function_that_returns_no_dataset_is_refused(
    topology: str, junk: Any
) -> None:
    sentence = (
        r"^What dataset_fn returns is a torch\.utils\.data\.DataLoader, or another "
        r"iterable of batches; got an? "
    )
    with pytest.raises(TypeError, match=sentence):
        from_(TOPOLOGIES[topology](), junk)


@pytest.mark.parametrize("topology", CHOSEN)
def test_what_is_distributed_already_is_not_distributed_again(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    dataset = strategy.experimental_distribute_dataset(elements(2))
    for distributed in (dataset, iter(dataset), from_(TWO, elements(2))):
        with pytest.raises(
            TypeError,
            match=(
                r"^This dataset is distributed already: .* "
                r"Give the loader that it was"
            ),
        ):
            from_(strategy, distributed)
        with pytest.raises(TypeError, match=r"^This dataset is distributed already: "):
            strategy.experimental_distribute_dataset(distributed)


# Which replica gets which element


@quickly
@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=11))
def test_each_step_takes_the_next_elements_one_for_each_replica_as_they_are(
    replicas: int, sizes: list[int]
) -> None:
    strategy, source = central(replicas), elements(*sizes)
    dealt = steps(strategy, source)
    in_order = list(itertools.chain(*dealt))
    assert in_order[: len(source)] == [element.tolist() for element in source]
    assert in_order[len(source) :] == [[]] * (len(dealt) * replicas - len(source))
    assert len(dealt) == -(-len(source) // replicas)
    assert all(len(step) == replicas for step in dealt)


def test_where_the_data_runs_out_in_a_step_the_others_get_no_rows(
    several: Strategy,
) -> None:
    replicas = several.num_replicas_in_sync
    source = [
        {"x": torch.ones(2, 3, dtype=torch.float16), "y": torch.tensor([True, False])}
    ] * (replicas + 1)
    whole, partial = list(from_(several, source))
    assert [len(piece) for piece in whole["x"].values] == [2] * replicas
    assert [piece.shape for piece in partial["x"].values] == [(2, 3)] + [(0, 3)] * (
        replicas - 1
    )
    assert [piece.shape for piece in partial["y"].values] == [(2,)] + [(0,)] * (
        replicas - 1
    )
    assert {piece.dtype for piece in partial["x"].values} == {torch.float16}
    assert {piece.dtype for piece in partial["y"].values} == {torch.bool}
    assert partial["x"].rows == partial["y"].rows == (2,) + (0,) * (replicas - 1)


@pytest.mark.parametrize("how", ["next", "get_next", "get_next_as_optional"])
def test_the_last_elements_are_lost_in_no_way_of_asking(how: str) -> None:
    iterator = iter(from_(TWO, elements(1, 1, 1)))

    def ask() -> Any:
        if how == "get_next_as_optional":
            return iterator.get_next_as_optional().get_value()
        return next(iterator) if how == "next" else iterator.get_next()

    assert rows(TWO, ask()) == [[0], [1]]
    assert rows(TWO, ask()) == [[2], []]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()


def test_elements_of_other_shapes_are_given_as_they_are() -> None:
    source = [torch.ones(2, 3), torch.zeros(4, 5, 2), torch.tensor(7.0)]
    one, two = from_(TWO, source)
    assert [piece.shape for piece in one.values] == [(2, 3), (4, 5, 2)]
    assert [piece.shape for piece in two.values] == [(), (0,)]


def test_single_numbers_are_given_as_they_are(several: Strategy) -> None:
    replicas = several.num_replicas_in_sync
    values = list(from_(several, DataLoader(Squares(), batch_size=None)))
    in_order = list(itertools.chain(*(rows(several, value) for value in values)))
    assert in_order[:5] == [0, 1, 4, 9, 16]
    assert in_order[5:] == [[]] * (len(in_order) - 5)
    assert all(value.rows == (1,) * replicas for value in values[:-1])


def test_a_map_style_dataset_is_given_by_element(several: Strategy) -> None:
    in_order = list(itertools.chain(*steps(several, Squares())))
    assert in_order[:5] == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("topology", ALONE)
def test_a_lone_replica_gets_plain_elements(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    source = [{"x": torch.arange(3), "names": ["a", "b"], "k": 2, "none": None}]
    (element,) = from_(strategy, source)
    assert not any(isinstance(leaf, DistributedValues) for leaf in element.values())
    assert element["x"].tolist() == [0, 1, 2]
    assert (element["names"], element["k"], element["none"]) == (["a", "b"], 2, None)


def test_what_is_no_tensor_differs_by_replica_too() -> None:
    source = [
        {
            "x": torch.ones(k + 1),
            "name": f"file {k}",
            "k": k,
            "none": None,
            "words": ["a"] * (k + 1),
        }
        for k in range(3)
    ]
    whole, partial = from_(TWO, source)
    assert whole["name"].values == ("file 0", "file 1")
    assert whole["k"].values == (0, 1)
    assert whole["none"].values == (None, None)
    assert whole["words"].values == (["a"], ["a", "a"])
    assert partial["words"].values == (["a"] * 3, [])
    seen = TWO.run(
        lambda batch: (batch["name"], len(batch["words"]), batch["none"]), args=(whole,)
    )
    assert TWO.experimental_local_results(seen[0]) == ("file 0", "file 1")
    assert TWO.experimental_local_results(seen[1]) == (1, 2)
    assert seen[2] is None
    last = TWO.run(lambda batch: batch["name"], args=(partial,))
    assert TWO.experimental_local_results(last) == ("file 2",)


def test_arrays_arrive_as_tensors() -> None:
    (value,) = from_(TWO, [np.arange(2.0), np.arange(3.0)])
    assert [piece.tolist() for piece in value.values] == [[0, 1], [0, 1, 2]]
    assert all(isinstance(piece, torch.Tensor) for piece in value.values)


def test_elements_in_dicts_of_another_order_are_alike() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    (value,) = from_(TWO, [{"a": one, "b": other}, {"b": one, "a": other}])
    assert [piece.tolist() for piece in value["a"].values] == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("second", "where"),
    [
        ({"x": torch.ones(1)}, r"\['x'\]: a list of 1 and a Tensor"),
        ({"x": [torch.ones(1)] * 2}, r"\['x'\]: a list of 1 and a list of 2"),
        ({"y": [torch.ones(1)]}, r"keys \['x'\] and keys \['y'\]"),
        ([torch.ones(1)], r"a dict of 1 and a list of 1"),
    ],
    ids=["a leaf", "a length", "a key", "a type"],
)
def test_elements_that_differ_in_structure_are_refused_with_where(
    second: Any, where: str
) -> None:
    first = {"x": [torch.ones(1)]}
    iterator = iter(from_(THREE, [first, first, second, first, first, first]))
    sentence = (
        r"^The elements that replicas 0 and 2 are given in one step differ in "
        rf"structure: .*{where}"
    )
    with pytest.raises(ValueError, match=sentence):
        next(iterator)
    assert len(list(iterator)) == 1  # and goes on with the next step


def test_an_element_with_leaves_of_unlike_numbers_of_rows_is_refused_by_name() -> None:
    good = {"x": torch.ones(2), "y": torch.ones(2)}
    iterator = iter(from_(TWO, [good, {"x": torch.ones(2), "y": torch.ones(3)}]))
    with pytest.raises(
        ValueError,
        match=r"different numbers of rows: batch\['x'\] has 2 and batch\['y'\] has 3\.",
    ):
        next(iterator)


def test_data_that_never_ends_is_dealt_out_for_ever() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return map(torch.tensor, itertools.count())

    for dataset in (Endless(), DataLoader(Endless(), batch_size=None)):
        distributed = from_(TWO, dataset)
        for _ in range(2):
            found = [rows(TWO, value) for value in itertools.islice(distributed, 3)]
            assert found == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(distributed)


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_its_length_is_in_steps(count: int, replicas: int) -> None:
    dataset = from_(central(replicas), elements(*[1] * count))
    assert len(dataset) == len(list(dataset)) == -(-count // replicas)


def test_it_starts_afresh_as_the_loader_does() -> None:
    dataset = from_(TWO, DataLoader(Squares(), batch_size=2, shuffle=True))
    epochs = [
        list(
            itertools.chain(*(itertools.chain(*rows(TWO, value)) for value in dataset))
        )
        for _ in range(4)
    ]
    assert all(sorted(epoch) == [0, 1, 4, 9, 16] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_iterator_can_be_read_once() -> None:
    dataset = from_(TWO, iter(elements(1, 1, 1)))
    assert [rows(TWO, value) for value in dataset] == [[[0], [1]], [[2], []]]
    with pytest.raises(
        RuntimeError,
        match=r"^The dataset is a list_iterator, which can be iterated over once",
    ):
        iter(dataset)


def test_a_source_that_would_go_on_after_its_end_is_not_asked_again() -> None:
    class Restarts:
        """Breaks the rule that an iterator that has ended stays ended."""

        k = -1

        def __iter__(self) -> Restarts:
            return self

        def __next__(self) -> torch.Tensor:
            self.k += 1
            if self.k % 4 == 3:
                raise StopIteration
            return torch.tensor([self.k])

    found = [rows(TWO, value) for value in itertools.islice(from_(TWO, Restarts()), 9)]
    assert found == [[[0], [1]], [[2], []]]


# Gradients


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_elements_weigh_their_rows(
    make: Callable[[int], Strategy], replicas: int
) -> None:
    """Of 1, 4, 2, 0, 3, 1, 5 rows: three elements are the rows of a batch."""
    strategy = make(replicas)
    (model, ours), (twin, plain) = built(strategy, mlp, sgd)
    x, y = data(16)
    source = list(
        zip(*(leaf.split([1, 4, 2, 0, 3, 1, 5]) for leaf in (x, y)), strict=True)
    )

    def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    dataset = strategy.distribute_datasets_from_function(lambda _: source)
    for k, batch in enumerate(dataset):
        group = source[k * replicas : (k + 1) * replicas]
        whole = [torch.cat(leaves) for leaves in zip(*group, strict=True)]
        if not len(whole[0]):
            continue  # of no rows there is no gradient
        strategy.run(step, args=(model, ours, batch))
        step(twin, plain, whole)
        assert_close(
            gradients(model),
            gradients(twin),
            f"{replicas} replicas, step {k}, gradient",
            1e-10,
            1e-12,
        )
        assert_close(
            parameters(model),
            parameters(twin),
            f"{replicas} replicas, step {k}, parameter",
            1e-10,
            1e-12,
        )


# A pipeline for each replica


def test_the_function_is_called_for_each_replica(several: Strategy) -> None:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> list[torch.Tensor]:
        contexts.append(context)
        return [torch.tensor([10 * context.input_pipeline_id + k]) for k in range(2)]

    replicas = several.num_replicas_in_sync
    dataset = several.distribute_datasets_from_function(dataset_fn, PER_REPLICA)
    assert contexts == [InputContext(replicas, r, replicas) for r in range(replicas)]
    for _ in range(2):
        assert [rows(several, value) for value in dataset] == [
            [[10 * r + k] for r in range(replicas)] for k in range(2)
        ]
    assert len(contexts) == replicas


def test_a_mode_holds_for_one_dataset_only() -> None:
    calls: list[int] = []

    def dataset_fn(context: InputContext) -> list[torch.Tensor]:
        calls.append(context.num_input_pipelines)
        return elements(1)

    for options in (PER_REPLICA, None, PER_REPLICA):
        TWO.distribute_datasets_from_function(dataset_fn, options)
    assert calls == [2, 2, 1, 2, 2]


@pytest.mark.parametrize(
    "lengths", [(3, 1, 2), (0, 2, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)]
)
def test_a_replica_whose_pipeline_has_run_out_gets_no_rows(
    lengths: tuple[int, ...],
) -> None:
    def dataset_fn(context: InputContext) -> list[torch.Tensor]:
        r = context.input_pipeline_id
        return [torch.tensor([10 * r + k]) for k in range(lengths[r])]

    dataset = THREE.distribute_datasets_from_function(dataset_fn, PER_REPLICA)
    found = [rows(THREE, value) for value in dataset]
    assert len(dataset) == len(found) == max(lengths)
    for k, step in enumerate(found):
        assert step == [[10 * r + k] if k < lengths[r] else [] for r in range(3)]


def test_an_error_of_one_pipeline_shifts_no_other() -> None:
    def load(r: int) -> Iterator[torch.Tensor]:
        for k in range(3):
            yield torch.tensor([10 * r + k])

    class Flaky:
        """Fails once, before its second element, and goes on."""

        def __init__(self, r: int) -> None:
            self.source = load(r)
            self.asked = 0

        def __iter__(self) -> Flaky:
            return self

        def __next__(self) -> torch.Tensor:
            self.asked += 1
            if self.asked == 2:
                raise OSError("once")
            return next(self.source)

    pipelines = [load(0), Flaky(1), load(2)]
    dataset = THREE.distribute_datasets_from_function(
        lambda context: pipelines[context.input_pipeline_id], PER_REPLICA
    )
    iterator = iter(dataset)
    assert rows(THREE, next(iterator)) == [[0], [10], [20]]
    with pytest.raises(OSError, match="once"):
        next(iterator)
    assert [rows(THREE, value) for value in iterator] == [
        [[1], [11], [21]],
        [[2], [12], [22]],
    ]


def test_one_replica_among_devices_may_have_a_pipeline_for_each() -> None:
    contexts = []
    strategy = central(1)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: contexts.append(context) or elements(2), PER_REPLICA
    )
    assert contexts == [InputContext(1, 0, 1)]
    assert [value.tolist() for value in dataset] == [[0, 1]]


def test_one_device_has_no_replicas_to_make_pipelines_for() -> None:
    calls: list[Any] = []
    with pytest.raises(
        NotImplementedError, match=r"leave out InputReplicationMode\.PER_REPLICA"
    ):
        OneDeviceStrategy("cpu").distribute_datasets_from_function(
            calls.append, PER_REPLICA
        )
    assert calls == []


@pytest.mark.parametrize("topology", CHOSEN)
def test_one_dataset_is_no_pipeline_for_each_replica(topology: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"PER_REPLICA\) asks for one for each replica\. Give distribute_data",
    ):
        TOPOLOGIES[topology]().experimental_distribute_dataset(elements(2), PER_REPLICA)


# Other options


@pytest.mark.parametrize(
    "options",
    [
        PER_REPLICA,
        InputOptions(experimental_fetch_to_device=False),
        InputOptions(experimental_prefetch_to_device=False),
        InputOptions(experimental_per_replica_buffer_size=3),
        InputOptions(load_ahead=True),
        InputOptions(load_ahead=False),
        InputOptions(row_shares=[1]),
    ],
    ids=shown,
)
def test_the_default_strategy_refuses_options_that_it_would_ignore(
    options: InputOptions,
) -> None:
    calls: list[Any] = []
    with pytest.raises(
        ValueError,
        match=(
            r"^The default strategy returns the dataset itself, so options=.* Leave "
            r"them"
        ),
    ):
        DEFAULT.distribute_datasets_from_function(calls.append, options)
    with pytest.raises(
        ValueError,
        match=r"^The default strategy returns the dataset itself, so options=",
    ):
        DEFAULT.experimental_distribute_dataset(elements(2), options)
    assert calls == []


def test_options_that_say_nothing_are_fine(strategy: Strategy) -> None:
    for options in (
        None,
        InputOptions(),
        InputOptions(experimental_fetch_to_device=True),
    ):
        assert len(list(from_(strategy, elements(1), options))) == 1


@pytest.mark.parametrize(
    "junk",
    [{}, "PER_REPLICA", InputReplicationMode.PER_REPLICA, RunOptions(), 0],
    ids=shown,
)
def test_options_are_input_options(strategy: Strategy, junk: Any) -> None:
    calls: list[Any] = []
    with pytest.raises(
        TypeError, match=r"^options is a torchstrategy\.InputOptions; got .*, an? "
    ):
        strategy.distribute_datasets_from_function(calls.append, junk)
    with pytest.raises(
        TypeError, match=r"^options is a torchstrategy\.InputOptions; got .*, an? "
    ):
        strategy.experimental_distribute_dataset(elements(2), junk)
    assert calls == []


def test_elements_that_are_given_whole_have_no_shares(several: Strategy) -> None:
    shares = InputOptions(row_shares=[1] * several.num_replicas_in_sync)
    with pytest.raises(
        ValueError,
        match=(
            r"^InputOptions\(row_shares=\.\.\.\) says how a global batch is cut, and "
            r"what"
        ),
    ):
        from_(several, elements(2), shares)


@pytest.mark.parametrize("topology", CHOSEN)
def test_elements_are_where_the_replica_is_unless_they_stay_in_host_memory(
    topology: str,
) -> None:
    strategy = TOPOLOGIES[topology]()
    devices = [torch.device(device) for device in strategy.extended.worker_devices]
    for options, wanted in (
        (None, devices),
        (InputOptions(False), [torch.device("cpu")] * len(devices)),
    ):
        for value in from_(strategy, elements(*[2] * (len(devices) + 1)), options):
            found = [
                piece.device for piece in strategy.experimental_local_results(value)
            ]
            assert [device.type for device in found] == [
                device.type for device in wanted
            ]


@pytest.mark.parametrize(
    "options",
    [
        InputOptions(load_ahead=True),
        InputOptions(load_ahead=True, **{"experimental_per_replica_buffer_size": 1}),
    ],
)
def test_reading_ahead_deals_out_the_same(
    several: Strategy, options: InputOptions
) -> None:
    source = elements(2, 1, 3, 1, 1, 2, 1)
    assert steps(several, source, options) == steps(several, source)
