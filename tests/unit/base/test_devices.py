"""Which device a name means, and whether it is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import torchstrategy
from conditions import without_accelerators
from problems import shown
from topologies import central
from torchstrategy import CentralStorageStrategy, OneDeviceStrategy
from torchstrategy._base import devices


def cpu(index: int) -> torch.device:
    return torch.device("cpu", index)


def device_of(name: Any) -> torch.device:
    """The device that a strategy makes of a name."""
    return OneDeviceStrategy(name).extended.worker_devices[0]


@pytest.fixture
def two_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has two CUDA devices, as far as names are concerned."""
    monkeypatch.setattr(
        devices, "device_count", lambda kind: {"cpu": None, "cuda": 2}.get(kind, 0)
    )
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device("cuda"),
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


# Spellings

SPELLINGS: dict[Any, int] = {
    "cpu": 0,
    "cpu:0": 0,
    "CPU": 0,
    "CPU:0": 0,
    "Cpu:1": 1,
    "/cpu:0": 0,
    "/CPU:1": 1,
    "device:cpu:0": 0,
    "device:CPU:2": 2,
    "/device:CPU:2": 2,
    "/DEVICE:cpu:2": 2,
    "/job:localhost/replica:0/task:0/device:CPU:3": 3,
    "/replica:0/task:0/device:CPU:3": 3,
    "/job:localhost/cpu:3": 3,
    "//cpu:1/": 1,
    "cpu:*": 0,
    "/device:CPU:*": 0,
    "": 0,
    "/": 0,
    None: 0,
    torch.device("cpu"): 0,
    torch.device("cpu", 5): 5,
}


@pytest.mark.parametrize("name", SPELLINGS, ids=shown)
def test_every_spelling_means_one_canonical_device(name: Any) -> None:
    device = device_of(name)
    assert device == cpu(SPELLINGS[name])
    assert device.index == SPELLINGS[name]


@pytest.mark.parametrize("index", [0, 1, 7, 63])
def test_all_logical_cpus_exist(index: int) -> None:
    assert device_of(f"cpu:{index}") == cpu(index)


def test_tensors_of_a_logical_cpu_live_in_ordinary_memory() -> None:
    strategy = CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:3")
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    assert model.weight.device == torch.device("cpu")
    assert (
        strategy.run(lambda: model(torch.ones(1)).device == torch.device("cpu")) is True
    )
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(2, 1)])
    assert [component.device for component in batch.values] == [torch.device("cpu")] * 2


def test_no_name_is_the_default_device_of_the_caller() -> None:
    with torch.device("cpu:2"):
        assert device_of("") == device_of(None) == cpu(2)
    assert device_of("") == cpu(0)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("cuda:1", 1),
        ("CUDA:0", 0),
        ("gpu:1", 1),
        ("GPU:0", 0),
        ("/gpu:1", 1),
        ("/device:GPU:1", 1),
        ("device:gpu:0", 0),
        ("/job:localhost/replica:0/task:0/device:GPU:1", 1),
        (0, 0),
        (1, 1),
        (torch.device("cuda", 1), 1),
    ],
    ids=shown,
)
def test_a_gpu_is_the_accelerator_of_this_machine(
    two_cuda: None, name: Any, index: int
) -> None:
    assert devices.canonical_device(name) == torch.device("cuda", index)


# What is no device

NO_DEVICE = [
    "foo",
    "foo:0",
    "cpu:a",
    "cpu:1.5",
    "cpu:0:1",
    "cpu:-1",
    "/cpu:0/gpu:0",
    "/cpu:0/cpu:0",
    "device:foo:0",
    "/job:worker/task:0/device:CPU:0",
    "/replica:1/cpu:0",
    "/task:1/cpu:0",
    "cpu 0",
    "cpu,cpu",
    "meta",
    "meta:0",
    torch.device("meta"),
    -1,
]


@pytest.mark.parametrize("name", NO_DEVICE, ids=shown)
def test_what_is_no_device_is_refused_with_how_to_write_one(name: Any) -> None:
    sentences = (
        rf"^{re.escape(repr(name))} is not a device: .+\. Devices are written like "
        r"'cpu:0', 'cuda:1' or '/gpu:1'\.$"
    )
    with pytest.raises(ValueError, match=sentences):
        OneDeviceStrategy(name)
    with pytest.raises(ValueError, match=sentences):
        CentralStorageStrategy(["cpu", name])
    with pytest.raises(ValueError, match=sentences):
        CentralStorageStrategy(["cpu", "cpu"], name)


def test_a_type_without_an_index_after_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^'/device:CPU' is not a device: "):
        OneDeviceStrategy("/device:CPU")


@pytest.mark.parametrize("index", [128, 256, 1000, 10**30])
def test_an_index_that_torch_cannot_hold_is_refused_and_not_wrapped(index: int) -> None:
    with pytest.raises(ValueError, match=rf"'cpu:{index}'"):
        OneDeviceStrategy(f"cpu:{index}")


@pytest.mark.parametrize("name", ["cuda:256", "/gpu:256", 256, 10**30], ids=shown)
def test_an_accelerator_index_that_torch_cannot_hold_is_not_there(
    two_cuda: None, name: Any
) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b.* is not on this machine"):
        OneDeviceStrategy(name)


@pytest.mark.parametrize(
    "name", [1.5, True, b"cpu", ["cpu"], ("cpu",), object, {"cpu"}], ids=shown
)
def test_a_device_of_another_type_is_refused(name: Any) -> None:
    kind = type(name).__name__
    sentence = (
        r"^A device is a string, a torch\.device or an index; got "
        rf"{re.escape(repr(name))}, an? {kind}\."
    )
    with pytest.raises(TypeError, match=sentence):
        OneDeviceStrategy(name)
    with pytest.raises(TypeError, match=sentence):
        CentralStorageStrategy([name])
    with pytest.raises(TypeError, match=sentence):
        CentralStorageStrategy(["cpu"], name)


def test_one_device_has_to_be_named() -> None:
    with pytest.raises(TypeError, match=r"device"):
        OneDeviceStrategy()


# What is not there

ABSENT = [
    "cuda:0",
    "cuda",
    "GPU:0",
    "/gpu:0",
    "/device:GPU:7",
    "xpu:0",
    "mps",
    torch.device("cuda"),
    7,
]
ABSENT = [name for name in ABSENT if not torch.accelerator.is_available()]


@pytest.mark.parametrize("name", ABSENT, ids=shown)
def test_a_device_that_is_not_there_names_what_tests_the_same_program(
    name: Any,
) -> None:
    with pytest.raises(
        ValueError,
        match=r'write \["cpu"\] \* 2 .*torchstrategy\.testing\.simulate_devices\(2\)',
    ):
        CentralStorageStrategy([name, name])


@pytest.mark.parametrize("name", ABSENT, ids=shown)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: Any) -> None:
    sentence = (
        rf"^The device .*{re.escape(str(name))}.* is not on this machine, which has "
        r"cpu:0, cpu:1, \.\.\. "
    )
    with pytest.raises(ValueError, match=sentence):
        OneDeviceStrategy(name)
    with pytest.raises(ValueError, match=sentence):
        CentralStorageStrategy(["cpu", name])
    with pytest.raises(ValueError, match=sentence):
        CentralStorageStrategy(["cpu", "cpu"], name)


@pytest.mark.parametrize("name", ["cuda:2", "/gpu:2", 2, "xpu:0", "mps:0"], ids=shown)
def test_the_accelerators_that_are_there_are_listed(two_cuda: None, name: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            rf"^The device .*{name}.* is not on this machine, which has cuda:0, "
            r"cuda:1, cpu:0, "
        ),
    ):
        devices.canonical_device(name)


# CentralStorageStrategy: a list of them


@without_accelerators
def test_without_devices_it_is_one_cpu_where_there_is_no_accelerator() -> None:
    extended = CentralStorageStrategy().extended
    assert extended.worker_devices == extended.parameter_devices == (cpu(0),)


def test_where_the_cpu_keeps_parameters_by_default_a_warning_says_what_to_write(
    two_cuda: None,
) -> None:
    """Once by Python's own filter: this is given for the line of the user."""
    chosen = devices.canonical_device("cuda:0"), devices.canonical_device("cuda:1")
    with pytest.warns(
        UserWarning, match=r"parameters and the optimizer's state on the CPU by default"
    ) as told:
        CentralStorageStrategy(chosen)
    assert len(told) == 1 and told[0].filename == __file__
    for line in (
        'MirroredStrategy(["cuda:0", "cuda:1"])',
        'CentralStorageStrategy(["cuda:0", "cuda:1"], "cuda:0")',
        'CentralStorageStrategy(["cuda:0", "cuda:1"], "cpu")',
    ):
        assert line in str(told[0].message)


def test_a_parameter_device_that_somebody_named_needs_no_words(
    two_cuda: None, recwarn: pytest.WarningsRecorder
) -> None:
    for parameter_device in ("cpu", "cuda:1"):
        CentralStorageStrategy(["cuda:0", "cuda:1"], parameter_device)
    CentralStorageStrategy(["cuda:0"])
    CentralStorageStrategy(["cpu"] * 4)
    assert not recwarn.list


def test_without_devices_it_is_every_accelerator(two_cuda: None) -> None:
    assert devices.local_accelerators() == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]


@pytest.mark.parametrize(
    ("compute", "parameter", "expected"),
    [
        (["cpu:1"], None, cpu(1)),
        (["cpu:1"], "cpu:0", cpu(0)),
        (["cpu:1", "cpu:2"], None, cpu(0)),
        (["cpu:1", "cpu:2"], "/cpu:3", cpu(3)),
        (None, "cpu:7", cpu(7)),
    ],
    ids=shown,
)
def test_parameters_live_where_one_says_or_on_the_lone_device_or_on_the_cpu(
    compute: Any, parameter: Any, expected: torch.device
) -> None:
    assert CentralStorageStrategy(compute, parameter).extended.parameter_devices == (
        expected,
    )


def test_devices_can_be_given_by_name_and_by_position() -> None:
    strategy = CentralStorageStrategy(
        compute_devices=["cpu:1"], parameter_device="cpu:2"
    )
    assert strategy.extended.worker_devices == (cpu(1),)
    assert strategy.extended.parameter_devices == (cpu(2),)
    assert OneDeviceStrategy(device="cpu:1").extended.worker_devices == (cpu(1),)


@pytest.mark.parametrize(
    "several",
    [("cpu", "cpu:1"), iter(["cpu", "cpu:1"]), [torch.device("cpu"), "/cpu:1"]],
    ids=shown,
)
def test_devices_may_be_any_sequence(several: Any) -> None:
    assert CentralStorageStrategy(several).extended.worker_devices == (cpu(0), cpu(1))


@pytest.mark.parametrize("bare", ["cpu", "cpu:0", "cuda:0,cuda:1", ""])
def test_a_bare_string_is_refused_with_the_list_to_write(bare: str) -> None:
    sentence = (
        r"^compute_devices is a list of devices, one for each replica: write "
        rf"\[{re.escape(repr(bare))}\]\."
    )
    with pytest.raises(ValueError, match=sentence):
        CentralStorageStrategy(bare)


@pytest.mark.parametrize(
    "bare", [torch.device("cpu"), 2, b"cpu", 1.5, {"cpu"}], ids=shown
)
def test_what_is_no_list_of_devices_is_refused(bare: Any) -> None:
    with pytest.raises(TypeError, match=r"compute_devices"):
        CentralStorageStrategy(bare)


def test_the_parameter_device_0_is_the_first_accelerator(two_cuda: None) -> None:
    assert CentralStorageStrategy(["cpu", "cpu"], 0).extended.parameter_devices == (
        torch.device("cuda", 0),
    )


@without_accelerators
def test_the_parameter_device_0_is_refused_where_there_is_no_accelerator() -> None:
    with pytest.raises(ValueError, match=r"is not on this machine"):
        CentralStorageStrategy(["cpu", "cpu"], 0)


def test_no_empty_or_named_parameter_device_is_the_one_that_is_not_said() -> None:
    for nothing in (None, ""):
        assert CentralStorageStrategy(
            ["cpu:1"], nothing
        ).extended.parameter_devices == (cpu(1),)


@pytest.mark.parametrize("home", [torchstrategy, torchstrategy.experimental])
def test_the_strategy_stands_at_both_paths_that_are_written_of(home: Any) -> None:
    assert home.CentralStorageStrategy is CentralStorageStrategy
    assert isinstance(central(2), home.CentralStorageStrategy)
    assert torchstrategy.ValueContext is torchstrategy.experimental.ValueContext
