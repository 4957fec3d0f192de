"""Streams, events, the current device, and torch.accelerator. Work is done at once; they only say who they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn as nn

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")
sim: Any = torch.get_device_module("sim")


def test_the_accelerator_is_the_simulated_one() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == sim.device_count() == 5
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(ONE)


def test_a_block_makes_a_device_current_and_goes_back() -> None:
    for block in (torch.accelerator.device_index(2), sim.device("sim:2"), sim.device_of(torch.ones(1, device=TWO))):
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


@pytest.mark.parametrize("wrong", [5, -1, "sim:7", "cpu", torch.device("cpu")], ids=str)
def test_a_device_that_is_not_there_does_not_become_current(wrong: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match="sim"):
        sim.set_device(wrong)
    assert sim.current_device() == 0


def test_a_stream_makes_its_device_current_in_its_block() -> None:
    outer, inner = sim.Stream(1), sim.Stream("sim:2")
    with outer:
        with sim.stream(inner):
            assert sim.current_stream() is inner and torch.ones(1, device="sim").device == TWO
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
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(sim.Stream(1))
    end.wait()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing"):
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
    chunks = [(chunk.to(torch.device("sim", index)),) for index, chunk in enumerate(x.chunk(4))]
    outputs = nn.parallel.parallel_apply(replicas, chunks, devices=list(range(4)))
    assert [output.device.index for output in outputs] == [0, 1, 2, 3]
    torch.testing.assert_close(torch.cat([output.cpu() for output in outputs]), module(x))
