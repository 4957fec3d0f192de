"""The strategies of version 1: what they have besides.

They are otherwise those of version 2.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes
from topologies import TOPOLOGIES, compute_devices
from torchstrategy import InputContext, InputReplicationMode, OutOfRangeError, ReduceOp
from torchstrategy.compat import v1
from torchstrategy.testing import assert_replicas_agree, assert_same_as_plain

DEFAULT = torchstrategy.get_strategy()
MIXING = r"^Mixing different torchstrategy\.Strategy objects: "


def central(replicas: int) -> v1.Strategy:
    devices = compute_devices(replicas)
    return v1.experimental.CentralStorageStrategy(devices, devices[0])


KINDS: dict[str, Callable[[], v1.Strategy]] = {
    "one_device": lambda: v1.OneDeviceStrategy("cpu"),
    "central_1": lambda: central(1),
    "central_3": lambda: central(3),
}


@pytest.fixture(params=KINDS)
def old(request: pytest.FixtureRequest) -> v1.Strategy:
    """Every strategy of version 1."""
    return KINDS[request.param]()


@pytest.fixture(params=["default", "one_device", "central_3", "v1"])
def any_version(request: pytest.FixtureRequest) -> Any:
    """What has the methods of version 1.

    TensorFlow's later strategies have them and do not tell of them.
    """
    return central(2) if request.param == "v1" else TOPOLOGIES[request.param]()


def results(strategy: Any, value: Any) -> list[Any]:
    """What each replica has, as lists."""
    return [
        torch.as_tensor(one).tolist()
        for one in strategy.experimental_local_results(value)
    ]


# Names


def test_a_strategy_is_of_one_version(old: v1.Strategy) -> None:
    assert isinstance(old, v1.Strategy)
    assert not isinstance(old, torchstrategy.Strategy)
    assert not isinstance(torchstrategy.OneDeviceStrategy("cpu"), v1.Strategy)
    assert isinstance(old.extended, v1.StrategyExtended)


def test_what_came_later_is_not_there(old: v1.Strategy) -> None:
    later = {
        name for name in vars(torchstrategy.Strategy) if not name.startswith("_")
    } - vars(v1.Strategy).keys()
    assert {"gather", "experimental_distribute_values_from_function"} <= later
    assert [name for name in later if hasattr(old, name)] == []


def test_what_did_not_change_is_the_same_object() -> None:
    for name in set(v1.__all__) & set(torchstrategy.__all__) - {
        "experimental",
        "MirroredStrategy",
        "OneDeviceStrategy",
        "Strategy",
    }:
        assert getattr(v1, name) is getattr(torchstrategy, name)


def test_the_whole_path_of_tensorflow_works() -> None:
    assert torchstrategy.compat.v1.distribute.OneDeviceStrategy is v1.OneDeviceStrategy
    assert (
        v1.distribute.experimental.CentralStorageStrategy
        is v1.experimental.CentralStorageStrategy
    )


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (v1.OneDeviceStrategy, torchstrategy.OneDeviceStrategy),
        (v1.experimental.CentralStorageStrategy, torchstrategy.CentralStorageStrategy),
        (v1.MirroredStrategy, torchstrategy.MirroredStrategy),
    ],
)
def test_constructors_take_what_those_of_version_2_take(
    mine: type, theirs: type
) -> None:
    assert inspect.signature(mine) == inspect.signature(theirs)


def test_the_loss_is_summed_as_outside_of_estimator() -> None:
    assert v1.get_loss_reduction() is ReduceOp.SUM


# They are the strategies of version 2


def test_contexts_are_those_of_any_strategy(old: v1.Strategy) -> None:
    def step() -> bool:
        context = v1.get_replica_context()
        assert context is not None
        assert context.merge_call(
            lambda strategy: strategy is old and v1.in_cross_replica_context()
        )
        return v1.get_strategy() is context.strategy is old and v1.has_strategy()

    with old.scope() as entered:
        assert v1.get_strategy() is entered is old
        assert v1.in_cross_replica_context()
    assert old.run(step) is True
    v1.experimental_set_strategy(old)
    assert v1.get_strategy() is old
    v1.experimental_set_strategy(None)
    assert not v1.has_strategy()


def test_versions_do_not_mix(old: v1.Strategy) -> None:
    new = torchstrategy.OneDeviceStrategy("cpu")
    pairs: list[tuple[Any, Any]] = [(old, new), (new, old)]
    for inner, outer in pairs:
        with outer.scope():
            with pytest.raises(RuntimeError, match=MIXING), inner.scope():
                pass
            with pytest.raises(RuntimeError, match=MIXING):
                inner.run(lambda: None)


def test_a_module_belongs_to_the_strategy_of_version_1(old: v1.Strategy) -> None:
    with old.scope():
        model = torch.nn.Linear(2, 1)
    assert old.extended.variable_created_in_scope(model)
    assert (
        old.distribute_module(torch.nn.Linear(1, 1)).weight.device
        == model.weight.device
    )


def test_training_is_as_exact(old: v1.Strategy) -> None:
    def step(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        losses = model(batch).square().mean(1)
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    assert_same_as_plain(
        step,
        lambda: torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
        [torch.randn(rows, 4) for rows in (6, 6, 1)],
        old,
    )


def test_replicas_can_be_seen_to_agree() -> None:
    strategy = central(2)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    assert_replicas_agree(strategy, model)


def test_a_copy_is_of_version_1_too(old: v1.Strategy) -> None:
    copied = copy.deepcopy(old)
    assert type(copied) is type(old)
    assert copied.run(lambda: v1.get_strategy() is copied) is True
    with pytest.raises(RuntimeError, match=r"^Must only deepcopy a Strategy"):
        copy.copy(old)


# Methods that have other parameters


def test_reduce_is_over_the_replicas_unless_an_axis_is_given(old: v1.Strategy) -> None:
    n = old.num_replicas_in_sync
    value = old.run(lambda: torch.tensor([1.0, 2.0]))
    assert old.reduce("sum", value).tolist() == [n, 2 * n]
    assert (
        old.reduce(ReduceOp.SUM, value, 0) == old.reduce("sum", value, axis=0) == 3 * n
    )


def test_a_numpy_dataset_is_that_of_version_2(old: v1.Strategy) -> None:
    dataset = old.experimental_make_numpy_dataset(
        (np.arange(3), np.ones((3, 2))), session=None
    )
    assert [int(number) for number, _ in (dataset[i] for i in range(3))] == [0, 1, 2]
    with pytest.raises(
        ValueError,
        match=(
            r"^experimental_make_numpy_dataset\(session=3\): "
            r"there are no sessions here"
        ),
    ):
        old.experimental_make_numpy_dataset(np.arange(3), session=3)  # type: ignore[arg-type]


def test_a_configuration_is_copied(any_version: Any) -> None:
    configuration = {"gpu_options": [1]}
    updated = any_version.update_config_proto(configuration)
    assert updated == configuration
    assert updated["gpu_options"] is not configuration["gpu_options"]


def test_run_has_its_older_name(any_version: Any) -> None:
    total = any_version.experimental_run_v2(lambda x, y: x + y, (1,), {"y": 2})
    assert set(any_version.experimental_local_results(total)) == {3}


def test_local_results_have_their_older_name(old: v1.Strategy) -> None:
    """Programs of version 1 call `strategy.unwrap(value)`, which was missing."""
    value = old.experimental_run(
        lambda: torchstrategy.get_replica_context().replica_id_in_sync_group
    )
    assert (
        old.unwrap(value)
        == old.experimental_local_results(value)
        == tuple(range(old.num_replicas_in_sync))
    )
    assert old.unwrap(3) == (3,)
    assert not hasattr(torchstrategy.OneDeviceStrategy("cpu"), "unwrap")


# Iterators


@for_changes
@settings(deadline=None)
@given(rows=st.integers(0, 11), batch=st.integers(1, 4), replicas=st.integers(1, 3))
def test_a_dataset_iterator_yields_what_the_distributed_dataset_does(
    rows: int, batch: int, replicas: int
) -> None:
    strategy = central(replicas)
    loader = torch.utils.data.DataLoader(torch.arange(rows), batch_size=batch)
    iterator = strategy.make_dataset_iterator(loader)
    expected = [
        results(strategy, dealt)
        for dealt in strategy.experimental_distribute_dataset(loader)
    ]
    for _ in range(2):
        iterator.initialize()
        assert [results(strategy, dealt) for dealt in iterator] == expected


def test_an_iterator_needs_no_initializing_and_ends_again_and_again(
    any_version: Any,
) -> None:
    iterator = any_version.make_dataset_iterator([torch.arange(6)])
    assert any_version.reduce("sum", iterator.get_next(), axis=0) == 15
    for _ in range(2):
        with pytest.raises(
            OutOfRangeError, match=r"^The dataset has no more batches\."
        ):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize(
    "restart",
    [lambda iterator: iterator.initialize(), lambda iterator: iterator.initializer],
)
def test_initializing_begins_again(
    any_version: Any, restart: Callable[[Any], None]
) -> None:
    iterator = any_version.make_dataset_iterator([torch.zeros(3), torch.ones(3)])
    assert restart(iterator) is None
    seen = [iterator.get_next() for _ in range(2)]
    restart(iterator)
    assert results(any_version, iterator.get_next()) == results(any_version, seen[0])


def test_what_can_be_read_once_can_be_initialized_before_and_not_after() -> None:
    strategy = central(2)
    iterator = strategy.make_dataset_iterator(iter([torch.ones(2), torch.ones(2)]))
    iterator.initialize()
    iterator.get_next()
    iterator.initialize()
    with pytest.raises(
        RuntimeError, match=r"which can be iterated over once, and has been"
    ):
        iterator.get_next()


def test_an_iterator_that_is_begun_again_ends_the_reading_ahead(
    no_thread_left: None,
) -> None:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)

    class Endless:
        __iter__ = staticmethod(endless)
        num_workers = 1  # so that it is read ahead

    iterator = central(2).make_dataset_iterator(Endless())
    for _ in range(3):
        iterator.get_next()
        iterator.initialize()


def test_the_input_function_is_called_once_and_in_the_scope(old: v1.Strategy) -> None:
    contexts = []

    def input_fn(context: InputContext) -> list[torch.Tensor]:
        contexts.append((context, v1.get_strategy(), v1.in_cross_replica_context()))
        return [torch.tensor([i]) for i in range(6)]

    iterator = old.make_input_fn_iterator(input_fn)
    n = old.num_replicas_in_sync
    assert contexts == [(InputContext(1, 0, n), old, True)]
    iterator.initialize()
    assert [results(old, dealt) for dealt in iterator] == [
        [[i + r] for r in range(n)] for i in range(0, 6, n)
    ]
    assert len(contexts) == 1


def test_no_element_is_lost_where_the_data_runs_out_in_a_step() -> None:
    strategy = central(3)
    iterator = strategy.make_input_fn_iterator(
        lambda context: [torch.tensor([float(i)]) for i in range(4)]
    )
    totals = [
        strategy.reduce("sum", strategy.experimental_run(torch.sum, iterator))
        for _ in range(2)
    ]
    assert totals == [3, 3]


def test_an_input_function_may_return_a_function_that_is_called_for_each_replica(
    old: v1.Strategy,
) -> None:
    calls: list[int] = []

    def make() -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) % 4 == 0:
            raise KeyError(len(calls))
        return torch.tensor(len(calls) - 1)

    n = old.num_replicas_in_sync
    iterator = old.make_input_fn_iterator(lambda context: make)
    assert results(old, iterator.get_next()) == list(range(n))
    for _ in range(3 - n):
        iterator.get_next()
    with pytest.raises(KeyError):
        iterator.get_next()
    # It goes on after an error.
    assert results(old, iterator.get_next()) == list(range(4, 4 + n))


def test_a_function_that_raises_stop_iteration_ends_the_data(old: v1.Strategy) -> None:
    numbers = iter([torch.zeros(1), torch.ones(1), torch.ones(1)])
    iterator = old.make_input_fn_iterator(lambda context: numbers.__next__)
    steps = [
        old.reduce("sum", old.experimental_run(torch.sum, iterator))
        for _ in range(3 // old.num_replicas_in_sync)
    ]
    assert sum(steps) == 2
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a number": (
        lambda context: 3,
        {},
        ValueError,
        r"input_fn returns a dataset, or a function that makes an element; got an int",
    ),
    "none": (
        lambda context: None,
        {},
        ValueError,
        (
            r"input_fn returns a dataset, or a function that makes an element; got a "
            r"NoneType"
        ),
    ),
    "no function": (
        [1],
        {},
        TypeError,
        r"input_fn is called with .*, an InputContext, and \[1\] does not take it: ",
    ),
    "no context": (
        lambda: [1],
        {},
        TypeError,
        r"input_fn is called with one argument, an InputContext, and ",
    ),
    "a pipeline for each replica": (
        lambda context: [torch.ones(1)],
        {"replication_mode": InputReplicationMode.PER_REPLICA},
        ValueError,
        r"Input replication mode not supported: ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_function_is_refused(any_version: Any, case: str) -> None:
    input_fn, options, error, sentence = WRONG[case]
    with pytest.raises(error, match="^" + sentence):
        any_version.make_input_fn_iterator(input_fn, **options)
    assert not torchstrategy.has_strategy()


def test_where_the_two_kinds_of_iterators_can_be_made(old: v1.Strategy) -> None:
    """That of a dataset anywhere.

    That of a function not in a replica, nor in another strategy's scope.
    """
    other = torchstrategy.OneDeviceStrategy("cpu")
    with other.scope():
        assert len(list(old.make_dataset_iterator([torch.ones(1)]))) == 1
        with pytest.raises(
            RuntimeError,
            match=r"^Mixing different .*: Strategy\.make_input_fn_iterator of",
        ):
            old.make_input_fn_iterator(lambda context: [torch.ones(1)])
    with pytest.raises(
        RuntimeError, match=r"^Method requires being in cross-replica context: "
    ):
        old.run(lambda: old.make_input_fn_iterator(lambda context: [torch.ones(1)]))


# experimental_run


def test_a_batch_is_one_argument_also_when_it_is_a_tuple(any_version: Any) -> None:
    iterator = any_version.make_dataset_iterator([(torch.ones(3), torch.zeros(3))] * 2)
    kinds = any_version.experimental_run(lambda batch: type(batch).__name__, iterator)
    assert set(any_version.experimental_local_results(kinds)) == {"tuple"}
    with pytest.raises(TypeError, match=r"missing 1 required positional argument"):
        any_version.experimental_run(lambda inputs, targets: None, iterator)


def test_without_an_iterator_there_is_no_argument(any_version: Any) -> None:
    assert set(
        any_version.experimental_local_results(any_version.experimental_run(lambda: 3))
    ) == {3}


def test_the_iterator_of_a_distributed_dataset_will_do(any_version: Any) -> None:
    iterator = iter(central(1).experimental_distribute_dataset([torch.ones(1)]))
    assert any_version.experimental_run(lambda batch: None, iterator) is None
    with pytest.raises(OutOfRangeError):
        any_version.experimental_run(lambda batch: None, iterator)


def test_any_other_iterator_is_refused(any_version: Any) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"^An input iterator is what make_dataset_iterator, .* got a "
            r"list_iterator\."
        ),
    ):
        any_version.experimental_run(lambda batch: None, iter([torch.ones(1)]))


def test_a_run_that_is_refused_takes_no_batch(old: v1.Strategy) -> None:
    iterator = old.make_dataset_iterator([torch.ones(3)])
    with pytest.raises(
        RuntimeError,
        match=(
            r"^Method requires being in cross-replica "
            r"context: Strategy\.experimental_"
        ),
    ):
        old.run(lambda: old.experimental_run(len, iterator))
    assert old.reduce("sum", old.experimental_run(torch.sum, iterator)) == 3


def test_the_default_strategy_deals_nothing_out() -> None:
    batch = torch.ones(2)
    assert DEFAULT.make_dataset_iterator([batch]).get_next() is batch
    assert DEFAULT.make_input_fn_iterator(lambda context: [batch]).get_next() is batch


# The examples of the page of tf.compat.v1.distribute.OneDeviceStrategy


def test_the_first_example_of_the_page() -> None:
    strategy = v1.OneDeviceStrategy(device="/cpu:0")
    with strategy.scope():
        variable = torch.nn.Linear(1, 1).weight
    assert variable.device.type == "cpu"
    result = 0
    for i in range(10):
        result += strategy.run(lambda x: x * 2, args=(i,))
    assert result == 90


def test_the_example_of_an_input_function_on_the_page(old: v1.Strategy) -> None:
    def input_fn(input_context: InputContext) -> Iterator[torch.Tensor]:
        batch_size = input_context.get_per_replica_batch_size(6)
        elements = itertools.repeat(torch.ones(batch_size, 1, 1))
        return itertools.islice(
            elements,
            input_context.input_pipeline_id,
            None,
            input_context.num_input_pipelines,
        )

    with old.scope():
        iterator = old.make_input_fn_iterator(input_fn)
        replica_results = old.experimental_run(torch.sum, iterator)
    n = old.num_replicas_in_sync
    assert results(old, replica_results) == [6 // n] * n
