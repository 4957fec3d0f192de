"""Streams, events, the current device, and torch.accelerator.

Work is done at once; they only say who they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from torchstrategy.testing import cuda_alias

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")
sim: Any = torch.get_device_module("sim")


def test_the_accelerator_is_the_simulated_one() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == sim.device_count() == 5
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(ONE)


def test_a_block_makes_a_device_current_and_goes_back() -> None:
    for block in (
        torch.accelerator.device_index(2),
        sim.device("sim:2"),
        sim.device_of(torch.ones(1, device=TWO)),
    ):
        with pytest.raises(KeyError), block:
            assert torch.ones(1, device="sim").device == TWO
            raise KeyError
        assert sim.current_device() == torch.accelerator.current_device_index() == 0
    with sim.device(None), sim.device(-1), sim.device_of(torch.ones(1)):
        assert sim.current_device() == 0


def test_setting_the_device_holds_for_the_thread() -> None:
    seen = []

    def work() -> None:
        torch.accelerator.set_device_index(3)
        seen.append(torch.ones(1, device="sim").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, sim.current_device()) == ([3], 0)


@pytest.mark.parametrize("wrong", [5, "sim:7", "cpu", torch.device("cpu")], ids=str)
def test_a_device_that_is_not_there_does_not_become_current(wrong: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match="sim"):
        sim.set_device(wrong)
    assert sim.current_device() == 0


def test_a_stream_makes_its_device_current_in_its_block() -> None:
    outer, inner = sim.Stream(1), sim.Stream("sim:2")
    with outer:
        with sim.stream(inner):
            assert (
                sim.current_stream() is inner
                and torch.ones(1, device="sim").device == TWO
            )
        assert sim.current_stream() is outer and sim.current_device() == 1
        with sim.stream(None):
            assert sim.current_stream() is outer
    assert sim.current_stream() == sim.default_stream()


def test_streams_of_one_device_are_different_and_wait_for_nobody() -> None:
    stream, other = sim.Stream(ONE), sim.Stream(ONE)
    assert stream != other and stream.device == ONE and isinstance(stream, torch.Stream)
    stream.wait_stream(other)
    stream.wait_event(other.record_event())
    stream.synchronize()
    assert stream.query()
    torch.ones(2, device=ONE).record_stream(stream)


def test_events_measure_time_once_recorded() -> None:
    start, end = (sim.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(
        ValueError, match="Both events must be recorded before calculating elapsed time"
    ):
        start.elapsed_time(end)
    start.record()
    end.record(sim.Stream(1))
    end.wait()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0
    with pytest.raises(
        ValueError,
        match="Both events must be created with argument 'enable_timing=True'",
    ):
        sim.Event().elapsed_time(end)


def test_the_accelerators_stream_is_the_current_one() -> None:
    stream = sim.Stream(1)
    with sim.device(1):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        assert torch.accelerator.current_stream() is stream
        torch.accelerator.set_stream(before)


def test_results_are_there_without_waiting() -> None:
    x = torch.ones(1000, 1000)
    with sim.stream(sim.Stream(1)):
        moved = x.pin_memory().to("sim", non_blocking=True)
        back = moved.sum().to("cpu", non_blocking=True)
    assert moved.device == ONE and back.item() == 1_000_000


def test_parallel_apply_runs_a_module_on_each_device() -> None:
    module, x = nn.Linear(3, 2), torch.randn(8, 3)
    replicas = [nn.Linear(3, 2).to(torch.device("sim", index)) for index in range(4)]
    for replica in replicas:
        replica.load_state_dict(module.state_dict())
    chunks = [
        (chunk.to(torch.device("sim", index)),)
        for index, chunk in enumerate(x.chunk(4))
    ]
    outputs = nn.parallel.parallel_apply(replicas, chunks, devices=list(range(4)))
    assert [output.device.index for output in outputs] == [0, 1, 2, 3]
    torch.testing.assert_close(
        torch.cat([output.cpu() for output in outputs]), module(x)
    )


def test_an_event_knows_the_device_on_which_it_was_recorded() -> None:
    event = sim.Event()
    assert event.device is None and repr(event) == "<torch.sim.Event uninitialized>"
    event.record(sim.Stream(1))
    assert (
        event.device == ONE
        and isinstance(event.cuda_event, int)
        and "uninitialized" not in repr(event)
    )
    with pytest.raises(RuntimeError, match=r"expected stream to be a torch.Stream"):
        event.record("x")


def test_no_stream_and_a_negative_device_change_nothing() -> None:
    before = sim.current_stream()
    sim.set_stream(None)
    sim.set_device(-1)
    sim.synchronize(-1)
    assert sim.current_stream() == before and sim.current_device() == 0


def test_what_is_no_device_is_refused_in_torchs_words() -> None:
    absent: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    with cuda_alias():
        for use in (
            lambda: torch.cuda.set_device(7),
            lambda: torch.zeros(2, device="cuda:7"),
            lambda: torch.zeros(2).cuda(7),
            lambda: torch.cuda.device(7).__enter__(),
            lambda: torch.cuda.Stream(7),
            lambda: torch.cuda.synchronize(7),
            lambda: torch.cuda.mem_get_info(7),
        ):
            with pytest.raises(
                absent, match=r"^CUDA error: invalid device ordinal\n"
            ) as raised:
                use()
            assert isinstance(raised.value, RuntimeError)
        for use in (
            lambda: torch.cuda.set_device("cpu"),
            lambda: torch.cuda.device("cpu"),
            lambda: torch.cuda.Stream("cpu"),
            lambda: torch.cuda.synchronize("cpu"),
        ):
            with pytest.raises(
                ValueError, match=r"^Expected a cuda device, but got: cpu$"
            ):
                use()
        for device in ("cuda", torch.device("cuda")):
            with pytest.raises(
                ValueError, match=r"with a specified index or an integer, but got:cuda$"
            ):
                torch.cuda.set_device(device)
        with pytest.raises(AssertionError, match=r"^Invalid device id$"):
            torch.cuda.get_device_properties(7)
        with pytest.raises(AssertionError, match=r"^Invalid peer device id$"):
            torch.cuda.can_device_access_peer(0, 7)
        with pytest.raises(torch.cuda.CudaError, match="out of memory"):
            torch.cuda.check_error(2)


MASK = torch.tensor([True, False, True, True], device=ONE)
WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_of_the_cpu": lambda x: x[torch.tensor([0, 1])],
    "mask": lambda x: x[MASK],
    "put_by_a_mask": lambda x: x.__setitem__(MASK, torch.zeros(3, 4, device=ONE)),
    "histc_without_limits": lambda x: x.histc(4),
    "svd": lambda x: torch.linalg.svdvals(x),
    "stream": lambda x: sim.current_stream(1).synchronize(),
    "equal": lambda x: torch.equal(x, x + 1),
}
NO_WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_of_the_device": lambda x: x[torch.arange(2, device=ONE)],
    "put_a_number_by_a_mask": lambda x: x.__setitem__(MASK, 0.0),
    "put_a_tensor_of_the_cpu_by_a_mask": lambda x: x.index_put_(
        (MASK,), torch.tensor(0.0)
    ),
    "histc": lambda x: x.histc(4, 0, 1),
    "equal_to_itself": lambda x: torch.equal(x, x),
    "device": lambda x: sim.synchronize(1),
}


@pytest.mark.parametrize(
    ("use", "waits"),
    [(use, use in WAITS.values()) for use in (WAITS | NO_WAITS).values()],
)
def test_debugging_tells_what_waits_on_gpus(use: Any, waits: bool) -> None:
    x = torch.rand(4, 4, device=ONE)
    with cuda_alias():
        torch.cuda.set_sync_debug_mode("error")
        try:
            if waits:
                with pytest.raises(
                    RuntimeError, match="called a synchronizing CUDA operation"
                ):
                    use(x)
            else:
                use(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
