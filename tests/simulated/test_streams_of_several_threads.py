"""Several threads copy to one device at once, on one stream.

torch keeps what was current before `with stream:` in the stream object. The library had
one object for the copies to each device, and its threads entered it: the thread that
loads the next batch, and the one that brings the parameters. The first that left got
the stream and the device of the other, so that its next tensors were on another device;
torch 2.10 raised an error. Simulated streams kept it by thread, which hid it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from torchstrategy.testing import simulated_devices
from torchstrategy.testing._simulation import streams as simulation

SIM = simulated_devices()


def where() -> tuple[int, list[torch.Stream]]:
    """The current device of this thread, and its current streams."""
    return torch.accelerator.current_device_index(), [
        torch.accelerator.current_stream(device) for device in SIM
    ]


def in_turns(first: Any, second: Any) -> list[Any]:
    """Lets two threads go through two blocks: first, second in; first, second out.

    Returns where each is then.
    """
    found: list[Any] = [None, None]
    is_in, is_out = [threading.Event() for _ in range(2)], threading.Event()

    def life(index: int, block: Any) -> None:
        torch.accelerator.set_device_index(3 + index)
        if index:
            is_in[0].wait(60)
        with block:
            is_in[index].set()
            (is_out if index else is_in[1]).wait(60)
        found[index] = where()
        is_out.set()

    threads = [
        threading.Thread(target=life, args=pair) for pair in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_a_simulated_stream_keeps_what_was_before_as_torch_does() -> None:
    """The object has a list, as in torch 2.11 and later.

    Who leaves first gets what the last that entered had.
    """
    stream: Any = torch.Stream(device=SIM[1])
    assert [device for device, _ in in_turns(stream, stream)] == [4, 3]


def test_the_blocks_of_the_device_module_are_of_one_thread() -> None:
    """`torch.cuda.stream(stream)` keeps what was before in the block."""
    stream: Any = torch.Stream(device=SIM[1])
    assert [
        device
        for device, _ in in_turns(simulation.stream(stream), simulation.stream(stream))
    ] == [3, 4]
    default = simulation.default_stream(SIM[1])
    assert in_turns(default, _DefaultStream())[0][0] == 3


class _DefaultStream:
    """A block in sim:1's default stream, which it asks for on the entering thread."""

    def __enter__(self) -> None:
        self.stream: Any = simulation.default_stream(SIM[1])
        self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)


def test_setting_a_stream_makes_its_device_the_current_one() -> None:
    """As `torch.accelerator.set_stream` and that of the device's module do."""
    before = where()
    module: Any = torch.get_device_module("sim")
    for index, set_stream in enumerate(
        (torch.accelerator.set_stream, module.set_stream), 1
    ):
        set_stream(module.default_stream(index))
        assert torch.accelerator.current_device_index() == index
    torch.accelerator.set_device_index(before[0])
    assert where() == before


@pytest.mark.parametrize(
    "devices", [[SIM[0]] * 2, SIM[:2]], ids=["one device", "two devices"]
)
@pytest.mark.parametrize("owner", ["cpu", SIM[0]])
def test_a_training_that_loads_ahead_enters_no_stream_object(
    devices: list[torch.device], owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread it is on.

    A stream that only one thread enters today may have two of them tomorrow.
    """
    entered: list[str] = []

    def enter(stream: torch.Stream) -> None:
        entered.append(threading.current_thread().name)
        raise AssertionError("a stream object was entered")

    monkeypatch.setattr(simulation.Stream, "__enter__", enter)
    strategy = torchstrategy.CentralStorageStrategy(devices, owner)
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if owner == "cpu":
            parameter.data = parameter.data.pin_memory()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    options = torchstrategy.InputOptions(load_ahead=True)
    before = where()
    for batch in strategy.experimental_distribute_dataset(
        [torch.randn(8, 300) for _ in range(4)], options
    ):
        strategy.run(step, args=(batch,))
    assert not entered and where() == before


def test_a_replicas_thread_makes_its_device_current_also_where_it_is_device_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread had no CUDA context, since device 0 is current on it anyway.

    Torch warned of that on an H100.
    """
    used: set[tuple[threading.Thread, int]] = set()
    module = torch.get_device_module("sim")
    plain = module.set_device

    def set_device(device: Any) -> None:
        used.add((threading.current_thread(), torch.device(device).index))
        plain(device)

    monkeypatch.setattr(module, "set_device", set_device)
    strategy = torchstrategy.MirroredStrategy(SIM[:2])
    threads = strategy.run(threading.current_thread)
    assert used >= set(
        zip(strategy.experimental_local_results(threads), (0, 1), strict=True)
    )
