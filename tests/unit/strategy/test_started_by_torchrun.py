"""A MirroredStrategy in a process that torchrun started beside others.

Each would train the whole job alone.
"""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

import torchstrategy

OF_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def told(*args: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchstrategy.MirroredStrategy(*args)  # type: ignore[arg-type]
    return [
        str(warning.message) for warning in caught if warning.category is UserWarning
    ]


def test_it_is_told_that_each_process_trains_alone(
    two_processes: pytest.MonkeyPatch,
) -> None:
    """torchrun started two processes of a script with `MirroredStrategy()`.

    The same job ran twice.
    """
    (message,) = told()
    assert message.startswith(
        "MirroredStrategy() was made in process 1 of 2 that torchrun or another "
        "launcher started"
    )
    assert "torchstrategy.MultiWorkerMirroredStrategy()" in message
    assert "MirroredStrategy(devices)" in message


def test_the_warning_has_the_line_of_the_user(
    two_processes: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="trains alone") as caught:
        torchstrategy.MirroredStrategy()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("without", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_process_that_cannot_join_others_hears_nothing(
    two_processes: pytest.MonkeyPatch, without: str
) -> None:
    two_processes.delenv(without)
    assert told() == []


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_hears_nothing(
    two_processes: pytest.MonkeyPatch, size: str
) -> None:
    two_processes.setenv("WORLD_SIZE", size)
    assert told() == []


def test_whoever_names_the_devices_means_it(two_processes: pytest.MonkeyPatch) -> None:
    """Each process may try other settings on a device of its own."""
    assert told(["cpu"]) == []


def test_a_process_that_has_joined_the_others_hears_nothing(
    two_processes: pytest.MonkeyPatch,
) -> None:
    """It may evaluate in one process while the others wait."""
    two_processes.setattr(dist, "is_initialized", lambda: True)
    assert told() == []


def test_the_other_strategies_say_nothing(two_processes: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchstrategy.OneDeviceStrategy("cpu")
        torchstrategy.CentralStorageStrategy(["cpu"])
