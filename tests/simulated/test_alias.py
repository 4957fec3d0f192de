"""Code that says "cuda", in every form that people write."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchstrategy
from torchstrategy.testing import cuda_alias

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


CURRENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "factory": lambda x: torch.ones(2, device="cuda"),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "as_tensor": lambda x: torch.as_tensor([1.0], device="cuda"),
    "method": lambda x: x.cuda(),
    "method_without_waiting": lambda x: x.pin_memory().cuda(non_blocking=True),
    "to": lambda x: x.to("cuda"),
    "to_dtype": lambda x: x.to("cuda", torch.float16),
    "to_device": lambda x: x.to(torch.device("cuda")),
    "like": lambda x: torch.zeros_like(x, device="cuda"),
    "new": lambda x: x.new_zeros(2, device="cuda"),
    "module": lambda x: nn.Linear(2, 2).cuda().weight,
    "module_to": lambda x: nn.Linear(2, 2).to("cuda").weight,
    "module_made": lambda x: nn.Linear(2, 2, device="cuda").weight,
    "formatted": lambda x: x.to(f"cuda:{torch.cuda.current_device()}"),
    "generator": lambda x: torch.randn(
        2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    ),
    "loaded": lambda x: torch.load(saved(x), map_location="cuda"),
    "scaled": lambda x: torch.amp.GradScaler("cuda").scale(x.cuda()),
}
FIRST: dict[str, Callable[[torch.Tensor], Any]] = {
    "factory": lambda x: torch.ones(2, device="cuda:1"),
    "method": lambda x: x.cuda(1),
    "method_named": lambda x: x.cuda(device="cuda:1"),
    "method_of_a_device": lambda x: x.cuda(torch.device("cuda:1"), non_blocking=True),
    "to": lambda x: x.to("cuda:1"),
    "to_named": lambda x: x.to(device="cuda:1"),
    "device_and_index": lambda x: x.to(torch.device("cuda", 1)),
    "device_and_named_index": lambda x: x.to(torch.device("cuda", index=1)),
    "module": lambda x: nn.Linear(2, 2).cuda(1).weight,
    "module_to": lambda x: nn.Linear(2, 2).to("cuda:1").weight,
    "module_to_a_number": lambda x: nn.Linear(2, 2).to(1).weight,
    "generator": lambda x: x.cuda(1).normal_(generator=torch.Generator("cuda:1")),
    "loaded": lambda x: torch.load(saved(x), map_location="cuda:1"),
    "loaded_where_it_was": lambda x: torch.load(saved(x.cuda(1))),
    "loaded_by_a_dict": lambda x: torch.load(
        saved(x.cuda(0)), map_location={"cuda:0": "cuda:1"}
    ),
    "loaded_by_a_function": lambda x: torch.load(
        saved(x), map_location=lambda storage, _: storage.cuda(1)
    ),
}


@pytest.mark.parametrize("make", CURRENT.values(), ids=CURRENT)
def test_cuda_is_the_current_simulated_device(
    make: Callable[[torch.Tensor], Any],
) -> None:
    with cuda_alias(), torch.cuda.device(2):
        assert make(torch.ones(2)).device == TWO


@pytest.mark.parametrize("make", FIRST.values(), ids=FIRST)
def test_cuda_with_an_index_is_the_simulated_device_of_that_index(
    make: Callable[[torch.Tensor], Any],
) -> None:
    with cuda_alias():
        assert make(torch.ones(2)).device == ONE


def test_cuda_without_an_index_is_the_device_that_is_current_when_it_is_used() -> None:
    with cuda_alias():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.cuda.device(2):
            assert (
                torch.ones(2).to(device).device
                == torch.ones(2, device=device).device
                == TWO
            )
            assert (
                nn.Linear(2, 2).to(device).weight.device
                == nn.Linear(2, 2, device=device).weight.device
                == TWO
            )
        strategy = torchstrategy.CentralStorageStrategy(["cuda:1", "cuda:2"])
        results = strategy.run(
            lambda: [
                torch.ones(2).cuda(),
                torch.ones(2).to(device),
                torch.ones(2).to("cuda"),
            ]
        )
        for found, expected in zip(
            strategy.experimental_local_results(results), (ONE, TWO), strict=True
        ):
            assert {tensor.device for tensor in found} == {expected}


def test_devices_compare_and_blocks_of_them_hold() -> None:
    with cuda_alias():
        assert torch.ones(1, device="cuda:1").device == torch.device("cuda:1")
        with torch.device("cuda:1"):
            assert torch.ones(1).device == torch.tensor([1]).device == ONE
        with torch.cuda.device_of(torch.ones(1, device="cuda:2")):
            assert torch.cuda.current_device() == 2
        assert not torch.ones(1, device="cuda").is_cuda


def test_a_step_that_says_cuda_trains() -> None:
    with cuda_alias():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 5
        device = torch.device("cuda:1" if torch.cuda.is_available() else "cpu")
        torch.cuda.manual_seed_all(0)
        model = nn.Linear(4, 1).to(device)
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.amp.GradScaler("cuda"),
        )
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(torch.ones(8, 4, device=device))
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize(device)
        assert (
            output.dtype == torch.float16
            and model.weight.grad is not None
            and model.weight.grad.device == ONE
        )
        assert torch.cuda.memory_allocated(device) > 0


def test_autocast_for_cuda_is_autocast_for_simulated_devices() -> None:
    with cuda_alias():
        x = torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda"):
            assert (
                (x @ x).dtype == torch.float16
                and torch.is_autocast_enabled("cuda")
                and torch.is_autocast_enabled()
            )
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.float32


def test_random_states_and_streams_are_those_of_the_devices() -> None:
    with cuda_alias():
        states = torch.cuda.get_rng_state_all()
        drawn = torch.randn(3, device="cuda:1")
        torch.cuda.set_rng_state_all(states)
        assert len(states) == 5 and torch.equal(torch.randn(3, device="cuda:1"), drawn)
        stream = torch.cuda.Stream(device="cuda:2")
        with torch.cuda.stream(stream):
            assert (
                torch.cuda.current_device() == 2
                and torch.cuda.current_stream() is stream
            )
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        assert event.query()


def test_a_device_has_nothing_that_newer_gpus_have() -> None:
    with cuda_alias():
        # As triton, or a choice of kernels, asks.
        assert torch.cuda.get_device_capability(1) == (0, 0)
        assert (
            torch.cuda.get_device_name("cuda:1")
            == torch.cuda.get_device_properties(1).name
        )


def test_data_parallel_finds_its_devices() -> None:
    with cuda_alias():
        model = nn.DataParallel(nn.Linear(3, 2).cuda(), device_ids=[0, 1])
        y = model(torch.ones(4, 3, device="cuda"))
        y.sum().backward()
        assert y.device == torch.device("sim:0")
        torch.testing.assert_close(y, model.module(torch.ones(4, 3, device="cuda")))


def test_it_ends_with_the_outermost_block_also_on_an_error() -> None:
    before = torch.cuda.is_available, torch.autocast.__init__, torch.is_autocast_enabled  # type: ignore[misc]
    alias = cuda_alias()
    with pytest.raises(ZeroDivisionError), alias, alias:
        with cuda_alias():
            pass
        assert (
            torch.ones(1, device="cuda").device.type == "sim"
            and torch.cuda.is_available()
        )
        _ = 1 / 0
    assert (
        torch.cuda.is_available,
        torch.autocast.__init__,
        torch.is_autocast_enabled,
    ) == before  # type: ignore[misc]


def test_a_block_of_another_thread_neither_ends_it_nor_is_ended() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def work() -> None:
        with cuda_alias():
            inside.set()
            may_leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    assert not torch.is_autocast_enabled()  # asked as outside of any block
    with cuda_alias():
        may_leave.set()
        thread.join()
        assert torch.cuda.device_count() == 5
    assert torch.cuda.device_count() == 0 or torch.version.cuda


def test_a_device_beyond_the_last_is_refused() -> None:
    with cuda_alias():
        for make in (
            lambda: torch.ones(1, device="cuda:7"),
            lambda: torch.ones(1).cuda(7),
            lambda: torch.cuda.set_device(7),
        ):
            with pytest.raises(RuntimeError, match="cuda:7: this process simulates"):
                make()


def test_a_thread_that_outlives_the_block_is_no_longer_in_it() -> None:
    inside, ended, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        seen.append(torch.ones(1, device="cuda").device.type)
        inside.set()
        ended.wait()
        seen.append(_says_cuda())

    with cuda_alias():
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
    ended.set()
    thread.join()
    assert seen == ["sim", False]


def test_a_thread_that_was_started_outside_is_not_in_the_block() -> None:
    entered, seen = threading.Event(), []

    def work() -> None:
        entered.wait()
        seen.append(_says_cuda())

    thread = threading.Thread(target=work)
    thread.start()
    with cuda_alias():
        entered.set()
        thread.join()
    assert seen == [False]


def _says_cuda() -> bool:
    return torch.device("cuda", 0).type == "sim"
