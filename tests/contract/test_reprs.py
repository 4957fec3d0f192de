"""What the objects of the library print says in a line or two what they are."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy
from conditions import needs_simulated_devices


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            lambda: torchstrategy.OneDeviceStrategy("cpu"),
            "OneDeviceStrategy(1 replica on cpu:0, parameters on cpu:0)",
        ),
        (
            lambda: torchstrategy.CentralStorageStrategy(["cpu"] * 4),
            "CentralStorageStrategy(4 replicas on cpu:0, parameters on cpu:0)",
        ),
        (
            lambda: torchstrategy.MirroredStrategy(["cpu"] * 2),
            "MirroredStrategy(2 replicas on cpu:0, parameters on cpu:0)",
        ),
        (torchstrategy.get_strategy, "DefaultStrategy(1 replica)"),
        (
            lambda: torchstrategy.compat.v1.OneDeviceStrategy("cpu"),
            "OneDeviceStrategy(1 replica on cpu:0, parameters on cpu:0)",
        ),
    ],
    ids=["one device", "central", "mirrored", "default", "version 1"],
)
def test_a_strategy_says_its_replicas_and_devices(strategy, text) -> None:
    assert repr(strategy()) == text


@needs_simulated_devices
def test_a_strategy_names_each_device_once() -> None:
    central = torchstrategy.CentralStorageStrategy(["sim:0", "sim:1", "sim:1"], "sim:2")
    assert (
        repr(central)
        == "CentralStorageStrategy(3 replicas on sim:0, sim:1, parameters on sim:2)"
    )
    mirrored = torchstrategy.MirroredStrategy(["sim:0", "sim:1"])
    assert (
        repr(mirrored)
        == "MirroredStrategy(2 replicas on sim:0, sim:1, parameters on sim:0, sim:1)"
    )


def test_a_strategy_of_ones_own_without_devices_says_its_name() -> None:
    class Own(torchstrategy.Strategy):
        def __init__(self) -> None:
            super().__init__(torchstrategy.StrategyExtended(None))

    assert repr(Own()) == "Own()"


def test_datasets_and_iterators_say_what_they_read_and_for_whom() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4)
    dataset = strategy.experimental_distribute_dataset(loader)
    assert repr(dataset) == (
        "DistributedDataset(DataLoader of a TensorDataset, batch_size=4, for 2 "
        "replicas)"
    )
    assert repr(iter(dataset)) == (
        "DistributedIterator(DataLoader of a TensorDataset, batch_size=4, for 2 "
        "replicas)"
    )
    assert (
        repr(strategy.experimental_distribute_dataset([torch.ones(2)]))
        == "DistributedDataset(list, for 2 replicas)"
    )
    of_function = strategy.distribute_datasets_from_function(lambda context: loader)
    assert repr(of_function) == (
        "DistributedDataset(DataLoader of a TensorDataset, batch_size=4, for 2 "
        "replicas)"
    )


def test_a_distributed_dataset_shows_what_its_loader_has() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    assert dataset.dataset is loader.dataset and len(dataset.dataset) == 6
    assert dataset.batch_size == 4
    assert dataset.sampler is loader.sampler


@pytest.mark.parametrize("name", ["dataset", "batch_size", "sampler"])
def test_a_list_of_batches_says_that_it_is_no_loader(name: str) -> None:
    dataset = torchstrategy.CentralStorageStrategy(
        ["cpu"] * 2
    ).experimental_distribute_dataset([torch.ones(4)])
    with pytest.raises(
        AttributeError,
        match=rf"the {name} of the loader that it splits, and the list that was given",
    ):
        getattr(dataset, name)
    assert not hasattr(dataset, name)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_batch_of_images_prints_in_a_few_lines(replicas: int) -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * replicas)
    loader = [{"images": torch.ones(512, 3, 64, 64), "labels": torch.arange(512)}]
    (batch,) = strategy.experimental_distribute_dataset(loader)
    if replicas > 1:
        assert len(repr(batch)) < 2000
        rows = 512 // replicas
        assert (
            f"  0: tensor(shape=({rows}, 3, 64, 64), dtype=torch.float32, device='cpu')"
            in repr(batch["images"])
        )
        assert f"  1: tensor(shape=({rows},), dtype=torch.int64, device='cpu')" in repr(
            batch["labels"]
        )


def test_small_tensors_are_printed_whole_and_long_texts_are_cut() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    small = strategy.run(
        lambda: (
            torch.arange(3)
            + torchstrategy.get_replica_context().replica_id_in_sync_group
        )
    )
    assert (
        repr(small)
        == "PerReplica:{\n  0: tensor([0, 1, 2]),\n  1: tensor([1, 2, 3])\n}"
    )
    long = strategy.run(
        lambda: {
            1,
            "x" * 5000,
            torchstrategy.get_replica_context().replica_id_in_sync_group + 2,
        }
    )
    assert len(repr(long)) < 500 and "..." in repr(long)


def test_a_big_variable_prints_its_shape() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    with strategy.scope():
        small = torchstrategy.Variable(torch.zeros(()), name="steps")
        big = torchstrategy.Variable(torch.zeros(100, 100), name="queue")
    assert "0x" not in repr(small) and "0." in repr(small)
    assert len(repr(big)) < 300 and "(100, 100)" in repr(big)
