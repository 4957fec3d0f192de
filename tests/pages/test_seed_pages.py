"""Every block of code on five pages, put into torch, gives what the page says.

They are the pages that torchstrategy began with.

Their addresses are
`https://www.tensorflow.org/versions/{release}/api_docs/python/{name}`, with slashes in
the name. Where a page is wrong, the test says what TensorFlow really does.
`tf.function` is left out, a `Dataset` is a DataLoader of the same batches, and devices
that not every machine has are logical CPUs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchstrategy
from torchstrategy import InputContext, ReduceOp

TWO = ["cpu:0", "cpu:1"]
FOUR = [*TWO, "cpu:2", "cpu:3"]


class Page(NamedTuple):
    """A page: its strategy, how many devices its machine has, and its blocks.

    The blocks are from top to bottom.
    """

    release: str
    name: str
    strategy: Callable[[], Any]
    devices: list[str]
    blocks: str

    def mirrored(self) -> torchstrategy.Strategy:
        """`tf.distribute.MirroredStrategy(...)`, as the blocks have it."""
        return torchstrategy.MirroredStrategy(self.devices)


VALUES = "constant_values values_by_id values_by_number values_on_devices"
PAGES = [
    Page(
        "r2.2",
        "tf.distribute.OneDeviceStrategy",
        lambda: torchstrategy.OneDeviceStrategy(device="cpu:0"),
        TWO[:1],
        "sum_of_runs assign_to_logical_device dataset_on_one_device dataset_fn "
        f"{VALUES} numpy_dataset replicate_to_logical_devices split_to_logical_devices "
        "reduce_on_one_device",
    ),
    Page(
        "r2.2",
        "tf.compat.v1.distribute.OneDeviceStrategy",
        lambda: torchstrategy.compat.v1.OneDeviceStrategy(device="cpu:0"),
        TWO[:1],
        "sum_of_runs records records_with_spec dataset_fn iterator_with_spec "
        "numpy_dataset input_fn run_on_tensor run_on_values",
    ),
    Page(
        "r2.2",
        "tf.distribute.experimental.CentralStorageStrategy",
        lambda: torchstrategy.experimental.CentralStorageStrategy(TWO),
        TWO[:1],
        "central_storage assign_to_logical_device dataset_on_two_devices dataset_fn "
        f"{VALUES} numpy_dataset replicate_to_logical_devices split_to_logical_devices "
        "reduce_on_two_devices",
    ),
    Page(
        "r2.3",
        "tf.distribute.Strategy",
        lambda: torchstrategy.MirroredStrategy(TWO),
        TWO[:1],
        "epochs cluster_resolver assign_to_logical_device records records_with_spec "
        f"dataset_fn dataset_from_fn train_on_dataset_from_fn {VALUES} "
        "batched_numpy_dataset replicate_to_logical_devices split_to_logical_devices "
        "run_on_tensor run_on_values variable_in_scope",
    ),
    Page(
        "r2.4",
        "tf.distribute.experimental.CentralStorageStrategy",
        lambda: torchstrategy.experimental.CentralStorageStrategy(TWO),
        TWO,
        f"central_storage cluster_resolver dataset_on_two_devices {VALUES} gather "
        "gather_along_axes reduce_on_two_devices variable_in_scope",
    ),
]
TRANSLATED: set[str] = set()


def on_pages(*blocks: str) -> pytest.MarkDecorator:
    """What translates these blocks runs once for each page that has them."""
    TRANSLATED.update(blocks)
    pages = [page for page in PAGES if blocks[0] in page.blocks.split()]
    return pytest.mark.parametrize(
        "page", pages, ids=[f"{page.release}-{page.name}" for page in pages]
    )


def test_every_block_is_translated() -> None:
    assert {block for page in PAGES for block in page.blocks.split()} == TRANSLATED


# What stands for data


def batches(number: int, size: int) -> DataLoader[torch.Tensor]:
    """`tf.data.Dataset.range(number).batch(size)`"""
    return DataLoader(range(number), batch_size=size)  # type: ignore[arg-type]


class Repeated(IterableDataset[torch.Tensor]):
    """What `tf.data.Dataset.from_tensors([[1.]]).repeat()` yields.

    Of its batches it has every `num_shards`-th.
    """

    def __init__(self, num_shards: int, index: int) -> None:
        self.shard = slice(index, None, num_shards)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.islice(
            itertools.repeat(torch.tensor([[1.0]])),
            self.shard.start,
            None,
            self.shard.step,
        )


def dataset_fn(input_context: InputContext) -> DataLoader[torch.Tensor]:
    global_batch_size = 8
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    d = Repeated(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return DataLoader(d, batch_size=batch_size)


class Records(Dataset[float]):
    """`tf.data.TFRecordDataset`: a number in each file."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> float:
        return float(self.files[index].read_text())


@pytest.fixture
def records(tmp_path: Path) -> DataLoader[float]:
    files = [tmp_path / f"{number}.tfr" for number in (1, 2, 3, 4)]
    for number, file in enumerate(files, start=1):
        file.write_text(str(number))
    return DataLoader(Records(files), batch_size=2)


def components(strategy: Any, value: Any) -> list[Any]:
    """What each replica has, as numbers in lists."""
    return [
        component.tolist() for component in strategy.experimental_local_results(value)
    ]


def all_rows(strategy: Any, value: Any) -> list[Any]:
    """What all replicas have, one after the other."""
    return list(itertools.chain.from_iterable(components(strategy, value)))


# Steps


@on_pages("sum_of_runs")
def test_steps_run_on_the_device_of_the_strategy(page: Page) -> None:
    strategy = page.strategy()
    with strategy.scope():
        v = torchstrategy.Variable(1.0)
        assert v.device.type == strategy.extended.worker_devices[0].type

    def step_fn(x: int) -> int:
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90


@on_pages("central_storage")
def test_central_storage_runs_a_step_on_each_part_of_a_batch(page: Page) -> None:
    strategy = page.strategy()
    dist_dataset = strategy.experimental_distribute_dataset(batches(5, 2))
    with strategy.scope():

        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val + 1

        results = [strategy.run(train_step, args=(x,)) for x in dist_dataset]
    # The last batch has one row; in TensorFlow, the second replica runs with none.
    assert [components(strategy, result) for result in results] == [
        [[1], [2]],
        [[3], [4]],
        [[5]],
    ]


@on_pages("epochs")
@pytest.mark.parametrize("devices", [TWO[:1], TWO, FOUR], ids=len)
def test_a_custom_loop_adds_up_what_the_replicas_return(
    page: Page, devices: list[str]
) -> None:
    my_strategy = torchstrategy.MirroredStrategy(devices)
    with my_strategy.scope():

        def distribute_train_epoch(dataset: Any) -> torch.Tensor:
            def replica_fn(input: torch.Tensor) -> torch.Tensor:
                return input.sum()

            total_result = torch.tensor(0)
            for x in dataset:
                per_replica_result = my_strategy.run(replica_fn, args=(x,))
                total_result += my_strategy.reduce(
                    ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(batches(10, 4))
        for _ in range(2):
            assert distribute_train_epoch(dist_dataset) == 45


@on_pages("run_on_tensor")
def test_run_gives_a_tensor_to_every_replica(page: Page) -> None:
    tensor_input = torch.tensor(3.0)

    def replica_fn(input: torch.Tensor) -> torch.Tensor:
        return input * 2.0

    result = page.mirrored().run(replica_fn, args=(tensor_input,))
    assert isinstance(result, torch.Tensor) and result == 6.0
    two = torchstrategy.MirroredStrategy(TWO)  # the page shows what one device prints
    assert components(two, two.run(replica_fn, args=(tensor_input,))) == [6.0, 6.0]


@on_pages("run_on_values")
def test_run_gives_each_replica_its_value(page: Page) -> None:
    strategy = page.mirrored()

    def run() -> Any:
        def value_fn(value_context: torchstrategy.ValueContext) -> int:
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(
            value_fn
        )

        def replica_fn2(input: int) -> int:
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert run() == 2


# Data


@on_pages("dataset_on_one_device")
def test_one_device_gets_batches_as_they_are(page: Page) -> None:
    with pytest.raises(TypeError, match="device"):
        torchstrategy.OneDeviceStrategy()  # type: ignore[call-arg]  # as on the page
    strategy = page.strategy()
    dist_dataset = strategy.experimental_distribute_dataset(batches(10, 2))
    assert [x.tolist() for x in dist_dataset] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
    ]


@on_pages("dataset_on_two_devices")
def test_two_devices_share_each_batch(page: Page) -> None:
    strategy = torchstrategy.CentralStorageStrategy(TWO)
    dist_dataset = strategy.experimental_distribute_dataset(batches(10, 2))
    # The page says [0, 1], [2, 3], ...: that is with one accelerator, the only device
    # that replicas then run on.
    assert [components(strategy, x) for x in dist_dataset] == [
        [[i], [i + 1]] for i in range(0, 10, 2)
    ]
    one = torchstrategy.CentralStorageStrategy(TWO[:1])
    dist_dataset = one.experimental_distribute_dataset(batches(10, 2))
    assert [x.tolist() for x in dist_dataset] == [[i, i + 1] for i in range(0, 10, 2)]


@on_pages("records")
def test_records_are_read_in_steps(page: Page, records: DataLoader[float]) -> None:
    strategy = page.mirrored()
    dist_dataset = strategy.experimental_distribute_dataset(records)
    seen = [
        components(strategy, strategy.run(lambda x: x * 1, args=(x,)))
        for x in dist_dataset
    ]
    assert seen == [[[1.0, 2.0]], [[3.0, 4.0]]]


@on_pages("records_with_spec")
def test_a_dataset_says_what_its_elements_are(
    page: Page, records: DataLoader[float]
) -> None:
    strategy = page.mirrored()
    dist_dataset = strategy.experimental_distribute_dataset(records)

    def train_step(inputs: torch.Tensor) -> None:
        assert fits(inputs, dist_dataset.element_spec)

    assert [strategy.run(train_step, args=(x,)) for x in dist_dataset] == [None, None]


def fits(value: torch.Tensor, spec: torchstrategy.TensorSpec) -> bool:
    """Whether a function with this `input_signature` takes it."""
    return value.dtype == spec.dtype and all(
        known in (None, size)
        for size, known in zip(value.shape, spec.shape, strict=True)
    )


@on_pages("dataset_fn")
def test_a_dataset_function_batches_for_one_replica(page: Page) -> None:
    strategy = page.strategy()
    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    num_replicas = strategy.num_replicas_in_sync
    for batch in itertools.islice(inputs, 2):
        replica_results = strategy.run(lambda batch: batch + 1, args=(batch,))
        assert (
            components(strategy, replica_results)
            == [[[[2.0]]] * (8 // num_replicas)] * num_replicas
        )


@on_pages("dataset_from_fn", "train_on_dataset_from_fn")
def test_a_step_takes_what_a_dataset_function_makes(page: Page) -> None:
    strategy = page.mirrored()
    ds = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def train(ds: Any) -> Any:
        def step_fn(inputs: torch.Tensor) -> torch.Tensor:
            assert fits(inputs, ds.element_spec)
            return inputs

        # The page calls the step by another name, and has no end.
        for batch in itertools.islice(ds, 2):
            replica_results = strategy.run(step_fn, args=(batch,))
        return replica_results

    assert torch.equal(train(ds), torch.ones(8, 1, 1))


@on_pages("iterator_with_spec")
def test_an_iterator_says_what_its_elements_are(page: Page) -> None:
    strategy = page.strategy()
    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    shapes = []

    def replica_fn_with_signature(inputs: torch.Tensor) -> None:
        assert fits(inputs, iterator.element_spec)
        shapes.append(tuple(inputs.shape))

    for _ in range(3):
        strategy.run(replica_fn_with_signature, args=(next(iterator),))
    assert shapes == [(8, 1, 1)] * 3


@on_pages("input_fn")
def test_an_input_function_feeds_runs(page: Page) -> None:
    strategy = page.strategy()
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(dataset_fn)
        replica_results = strategy.experimental_run(lambda batch: batch + 1, iterator)
    assert torch.equal(replica_results, torch.full((8, 1, 1), 2.0))


@on_pages("numpy_dataset")
def test_an_array_is_a_dataset(page: Page) -> None:
    strategy = page.strategy()
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    if strategy.num_replicas_in_sync == 1:
        dist_dataset = strategy.experimental_distribute_dataset(dataset)
        assert [float(x) for x in dist_dataset] == [1.0] * 10
    else:  # the page forgets to batch it
        with pytest.raises(ValueError, match="batch"):
            next(iter(strategy.experimental_distribute_dataset(dataset)))


@on_pages("batched_numpy_dataset")
@pytest.mark.parametrize("devices", [TWO[:1], TWO], ids=len)
def test_an_array_is_dealt_out_in_batches(page: Page, devices: list[str]) -> None:
    strategy = torchstrategy.MirroredStrategy(devices)
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    first = torch.as_tensor(dataset[0])
    assert (tuple(first.shape), first.dtype) == ((), torch.float32)
    dist_dataset = strategy.experimental_distribute_dataset(
        DataLoader(dataset, batch_size=2)
    )
    assert [components(strategy, x) for x in dist_dataset] == [
        [[1.0] * (2 // len(devices))] * len(devices)
    ] * 5


# Values


@on_pages("constant_values")
def test_a_value_function_may_return_a_tensor(page: Page) -> None:
    strategy = page.mirrored()

    def value_fn(ctx: torchstrategy.ValueContext) -> torch.Tensor:
        return torch.tensor(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == (torch.tensor(1.0),) * len(page.devices)


@on_pages("values_by_id")
def test_a_value_function_is_told_the_replica(page: Page) -> None:
    strategy = page.mirrored()
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: torchstrategy.ValueContext) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == (3.0, 2.0)[: len(page.devices)]


@on_pages("values_by_number")
def test_a_value_function_is_told_how_many_replicas_there_are(page: Page) -> None:
    strategy = page.mirrored()

    def value_fn(ctx: torchstrategy.ValueContext) -> int:
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == ((1,) if len(page.devices) == 1 else (2, 2))


@on_pages("values_on_devices")
def test_a_value_function_may_place_values(page: Page) -> None:
    strategy = torchstrategy.MirroredStrategy(TWO)  # for a TPUStrategy
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with torch.device(worker_devices[i]):
            multiple_values.append(torch.tensor(1.0))

    def value_fn(ctx: Any) -> torch.Tensor:
        if page.release == "r2.2":
            with pytest.raises(AttributeError, match="replica_id"):  # as on the page
                ctx.replica_id  # noqa: B018
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    for local, value in zip(
        strategy.experimental_local_results(distributed_values),
        multiple_values,
        strict=True,
    ):
        assert local is value


# From values to tensors


@on_pages("reduce_on_one_device")
def test_one_device_reduces_along_an_axis_only(page: Page) -> None:
    strategy = page.strategy()
    t = torch.arange(10)
    result = strategy.reduce(ReduceOp.SUM, t, axis=None).numpy()
    assert result.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    result = strategy.reduce(ReduceOp.SUM, t, axis=0).numpy()
    assert result == 45


@on_pages("reduce_on_two_devices")
def test_two_devices_reduce_to_one_value(page: Page) -> None:
    strategy = page.strategy()

    def train_step(val: torch.Tensor) -> torch.Tensor:
        return val

    def last_result(ds: Any) -> Any:
        with strategy.scope():
            for x in strategy.experimental_distribute_dataset(ds):
                result = strategy.run(train_step, args=(x,))
        return result

    with pytest.raises(ValueError, match="batch"):
        last_result(range(10))  # the page forgets to batch it
    per_replica = last_result(batches(8, 8))  # of which the printed numbers are
    result = strategy.reduce(ReduceOp.SUM, per_replica, axis=None).numpy()
    assert result.tolist() == [4, 6, 8, 10]
    assert strategy.reduce(ReduceOp.SUM, per_replica, axis=0) == 28
    # The page reduces a second time what it has reduced, a tensor that both replicas
    # have.
    assert strategy.reduce(ReduceOp.SUM, torch.as_tensor(result), axis=0) == 56


@on_pages("gather")
def test_gather_puts_one_after_the_other(page: Page) -> None:
    strategy = torchstrategy.MirroredStrategy(TWO)
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: torch.tensor([[1], [2]])
    )
    result = strategy.gather(distributed_values, axis=0)
    assert result.tolist() == [[1], [2], [1], [2]]


@on_pages("gather_along_axes")
def test_gather_puts_one_beside_the_other(page: Page) -> None:
    strategy = torchstrategy.MirroredStrategy(FOUR)
    single_tensor = torch.arange(6).reshape(1, 2, 3)
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: single_tensor.clone()
    )

    def run(axis: int) -> Any:
        return strategy.gather(distributed_values, axis=axis).tolist()

    assert run(0) == [[[0, 1, 2], [3, 4, 5]]] * 4
    assert run(1) == [[[0, 1, 2], [3, 4, 5]] * 4]
    assert run(2) == [[[0, 1, 2] * 4, [3, 4, 5] * 4]]


# Variables


@on_pages("variable_in_scope")
def test_a_variable_of_the_scope_has_a_component_on_each_device(page: Page) -> None:
    strategy = page.mirrored()
    with strategy.scope():
        mirrored_variable = torchstrategy.Variable(1.0)
    if len(page.devices) == 1:  # what a lone replica has is plain
        assert repr(mirrored_variable) == "Variable(1.0)"
        return
    first, *lines, last = repr(mirrored_variable).splitlines()
    assert (first, last) == ("MirroredVariable:{", "}")
    assert [line.partition(": ")[0] for line in lines] == [
        f"  {i}" for i in range(len(page.devices))
    ]
    assert all("1." in line for line in lines)
    regular_variable = torchstrategy.Variable(1.0)
    assert "Mirrored" not in repr(regular_variable) and "1." in repr(regular_variable)


# Logical devices: those of TPUs are several for a replica, and here there is one


@on_pages("assign_to_logical_device")
def test_a_tensor_is_assigned_to_a_logical_device(page: Page) -> None:
    strategy = page.strategy()
    iterator = iter(
        strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0])])
    )

    def step_fn(inputs: torch.Tensor) -> torch.Tensor:
        output = torch.add(inputs, inputs)
        with pytest.raises(ValueError, match="logical device"):
            strategy.experimental_assign_to_logical_device(output, 1)
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step_fn, args=(next(iterator),))
    assert all_rows(strategy, result) == [2.0, 4.0]


def images(strategy: Any) -> Any:
    """A distributed batch of two images of 4 x 4, and their labels."""
    batch = (torch.arange(32.0).reshape(2, 4, 4, 1), torch.tensor([0, 1]))
    return next(iter(strategy.experimental_distribute_dataset([batch])))


@on_pages("replicate_to_logical_devices")
def test_a_tensor_is_replicated_to_logical_devices(page: Page) -> None:
    strategy = page.strategy()
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

    def step_fn(inputs: Any) -> torch.Tensor:
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 1, 1, 1])
        output = model(images)
        replicated_labels = strategy.experimental_replicate_to_logical_devices(labels)
        replicated_output = strategy.experimental_replicate_to_logical_devices(output)
        assert torch.equal(replicated_labels, labels) and torch.equal(
            replicated_output, output
        )
        return nn.functional.cross_entropy(
            replicated_output, replicated_labels, reduction="none"
        )

    losses = strategy.run(step_fn, args=(images(strategy),))
    assert len(all_rows(strategy, losses)) == 2


@on_pages("split_to_logical_devices")
def test_a_tensor_is_split_to_logical_devices(page: Page) -> None:
    strategy = page.strategy()

    def step_fn(inputs: Any) -> torch.Tensor:
        with pytest.raises(ValueError, match="logical device"):
            strategy.experimental_split_to_logical_devices(inputs[0], [1, 2, 4, 1])
        split = strategy.experimental_split_to_logical_devices(inputs[0], [1, 1, 1, 1])
        assert torch.equal(split, inputs[0])
        return split.sum()

    result = strategy.run(step_fn, args=(images(strategy),))
    assert sum(components(strategy, result)) == sum(range(32))


# Clusters


@on_pages("cluster_resolver")
def test_a_resolver_says_which_task_this_is(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {
        "worker": ["localhost:12345", "localhost:23456"],
        "ps": ["localhost:34567"],
    }
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    # It is the resolver of a MultiWorkerMirroredStrategy; strategies of one machine
    # have none.
    assert page.strategy().cluster_resolver is None
    resolver = torchstrategy.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cluster_spec().as_dict() == cluster
