"""What a program does with pinned memory during a copy that does not block."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import pytest
import torch

from torchstrategy.testing import record_streams, simulated_devices

DEVICE = simulated_devices()[1]


class Tensors:
    """A tensor of the device, a pinned one to copy from, and one to copy to."""

    def __init__(self) -> None:
        self.device = torch.zeros(8, device=DEVICE)
        self.source = torch.ones(8).pin_memory()
        self.target = torch.empty(8).pin_memory()

    def comes(self) -> torch.Tensor:
        return self.target.copy_(self.device + 1, non_blocking=True)

    def goes(self) -> None:
        self.device.copy_(self.source, non_blocking=True)


def races(use: Callable[[Tensors], object]) -> list[str]:
    tensors = Tensors()
    with record_streams(check=False) as record:
        use(tensors)
    return record.races


READS = {
    "an operator": lambda t: t.target.sum(),
    "a part of it": lambda t: t.target[2:4].sum(),
    "item": lambda t: t.target[0].item(),
    "numpy": lambda t: t.target.numpy(),
    "tolist": lambda t: t.target.tolist(),
    "dlpack": lambda t: torch.from_dlpack(t.target),
    "save": lambda t: torch.save(t.target, io.BytesIO()),
    "pickle": lambda t: pickle.dumps(t.target),
    "clone": lambda t: t.target.clone(),
    "a write": lambda t: t.target.fill_(3),
    "out": lambda t: torch.add(torch.ones(8), 1, out=t.target),
    "a list": lambda t: torch._foreach_mul_([torch.ones(8), t.target], 2),
}


@pytest.mark.parametrize("how", READS)
def test_a_result_that_is_used_before_it_has_come_is_a_race(how: str) -> None:
    def use(tensors: Tensors) -> None:
        tensors.comes()
        READS[how](tensors)

    assert len(races(use)) == 1


def test_the_race_names_both_lines_and_what_to_say() -> None:
    def use(tensors: Tensors) -> None:
        tensors.comes()
        tensors.target.sum()

    (race,) = races(use)
    assert race.startswith("aten.sum (test_races_with_the_program.py:")
    assert (
        "on the CPU, reads pinned memory that copy (test_races_with_the_program.py:"
        in race
    )
    assert (
        "on the default stream of sim:1, writes, and does not wait for it: say "
        "stream.synchronize()" in race
    )


def test_a_copy_to_the_cpu_that_does_not_block_is_pinned_and_read_too_early() -> None:
    def use(tensors: Tensors) -> None:
        here = (tensors.device + 1).to("cpu", non_blocking=True)
        assert here.is_pinned()
        here.sum()

    assert len(races(use)) == 1


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last]
)
def test_a_copy_to_the_cpu_that_does_not_block_is_like_one_that_does(
    memory_format: torch.memory_format,
) -> None:
    value = torch.randn(2, 3, 4, 5, device=DEVICE).to(memory_format=memory_format)
    for options in (
        {},
        {"dtype": torch.float64},
        {"memory_format": torch.channels_last},
    ):
        one, other = (
            value.to("cpu", non_blocking=flag, **options) for flag in (True, False)
        )
        assert torch.equal(one, other)
        assert (one.stride(), one.dtype) == (other.stride(), other.dtype)


def test_a_staging_buffer_that_is_filled_again_at_once_is_a_race() -> None:
    def use(tensors: Tensors) -> None:
        tensors.goes()
        tensors.source.fill_(7)

    (race,) = races(use)
    assert (
        "aten.fill_" in race
        and "writes pinned memory that copy" in race
        and "reads, and" in race
    )


def test_a_staging_buffer_may_be_read_while_it_is_sent() -> None:
    def use(tensors: Tensors) -> None:
        tensors.goes()
        tensors.source.sum()

    assert races(use) == []


def test_copies_of_lists_keep_what_they_were_told() -> None:
    def use(tensors: Tensors) -> None:
        torch._foreach_copy_([tensors.device], [tensors.source], non_blocking=True)
        tensors.source.fill_(7)

    assert len(races(use)) == 1


def test_two_streams_that_fill_one_buffer_of_the_cpu_race() -> None:
    def use(tensors: Tensors) -> None:
        tensors.comes()
        with torch.Stream(device=DEVICE):
            tensors.target.copy_(torch.ones(8, device=DEVICE), non_blocking=True)

    (race,) = races(use)
    assert "copy" in race and "writes a tensor that copy" in race


WAITS: dict[str, Callable[[], object]] = {
    "device": lambda: torch.accelerator.synchronize(DEVICE),
    "stream": lambda: torch.accelerator.current_stream(DEVICE).synchronize(),
    "event": lambda: (
        torch.accelerator.current_stream(DEVICE).record_event().synchronize()
    ),
    "a number": lambda: torch.ones(1, device=DEVICE).item(),
    "a copy that blocks": lambda: torch.ones(1, device=DEVICE).cpu(),
}


@pytest.mark.parametrize("how", WAITS)
def test_no_race_where_the_program_waits(how: str) -> None:
    def use(tensors: Tensors) -> None:
        tensors.comes()
        tensors.goes()
        WAITS[how]()
        tensors.target.sum()
        tensors.source.fill_(7)

    assert races(use) == []


def test_an_event_from_before_the_copy_is_not_enough() -> None:
    def use(tensors: Tensors) -> None:
        event = torch.accelerator.current_stream(DEVICE).record_event()
        tensors.comes()
        event.synchronize()
        tensors.target.sum()

    assert len(races(use)) == 1


NO_USES: dict[str, Callable[[Tensors], object]] = {
    "a copy that blocks": lambda t: (t.target.copy_(t.device), t.target.sum()),
    "memory that is not pinned": lambda t: (
        torch.empty(8).copy_(t.device, non_blocking=True).sum()
    ),
    "a view": lambda t: (
        t.comes(),
        t.target.view(2, 4),
        t.target[0],
        t.target.detach(),
    ),
    "its sizes": lambda t: (
        t.comes(),
        torch.empty_like(t.target),
        t.target.new_zeros(3),
        t.target.is_pinned(),
    ),
    "another tensor": lambda t: (t.comes(), t.source.sum()),
    "sent again on its stream": lambda t: (
        t.comes(),
        t.device.copy_(t.target, non_blocking=True),
    ),
    "freed": lambda t: (
        (t.device + 1).to("cpu", non_blocking=True),
        torch.ones(8).pin_memory().sum(),
    ),
}


@pytest.mark.parametrize("how", NO_USES)
def test_no_race_where_nothing_is_used(how: str) -> None:
    assert races(NO_USES[how]) == []


def test_memory_that_is_free_is_forgotten() -> None:
    with record_streams() as record:
        for _ in range(20):
            (torch.ones(8, device=DEVICE) + 1).to("cpu", non_blocking=True)
    assert record._of_cpu == {}


def test_methods_of_tensors_are_put_back() -> None:
    names = ("numpy", "tolist", "__dlpack__", "__reduce_ex__")
    before = [vars(torch.Tensor).get(name) for name in names]
    with record_streams():
        assert [vars(torch.Tensor).get(name) for name in names] != before
    assert [vars(torch.Tensor).get(name) for name in names] == before


# What torch does not see


def _write_and(wait: bool, part: slice = slice(None)) -> Callable[[Tensors], object]:
    def use(tensors: Tensors) -> None:
        seen = tensors.source.numpy()
        tensors.device[part].copy_(tensors.source[part], non_blocking=True)
        if wait:
            torch.accelerator.synchronize(DEVICE)
        seen[:4] = 7
        torch.accelerator.synchronize(DEVICE)
        seen[:] = 8  # nothing is under way

    return use


def test_a_write_of_numpy_on_a_buffer_that_is_copied_is_a_race() -> None:
    (race,) = races(_write_and(wait=False))
    assert (
        "Pinned memory that a copy (test_races_with_the_program.py:" in race
        and " reads was written on the CPU" in race
    )
    assert races(_write_and(wait=False, part=slice(0, 8, 2))) != []
    assert races(_write_and(wait=False, part=slice(4, 8))) == []  # another part
    assert races(_write_and(wait=True)) == []


def test_a_write_of_numpy_on_what_a_copy_writes_is_a_race() -> None:
    def use(tensors: Tensors, waits: bool) -> None:
        seen = tensors.target.numpy()
        tensors.comes()
        if waits:
            tensors.device.sum().item()
        seen[0] = 7

    (race,) = races(lambda tensors: use(tensors, waits=False))
    assert " writes was written on the CPU" in race
    assert races(lambda tensors: use(tensors, waits=True)) == []


def test_a_write_that_torch_sees_is_told_once_and_one_of_the_device_is_none() -> None:
    def write(tensors: Tensors) -> None:
        tensors.goes()
        tensors.source.fill_(3)
        torch.accelerator.synchronize(DEVICE)

    def write_back(tensors: Tensors) -> None:
        tensors.goes()
        # On the same stream, and so later.
        tensors.source.copy_(tensors.device + 1, non_blocking=True)
        torch.accelerator.synchronize(DEVICE)

    assert len(races(write)) == 1
    assert races(write_back) == []


def test_buffers_in_turns_are_no_race() -> None:
    def use(tensors: Tensors) -> None:
        buffers = [torch.empty(8).pin_memory() for _ in range(2)]
        events = [torch.get_device_module(DEVICE).Event() for _ in buffers]
        for step in range(6):
            events[step % 2].synchronize()
            buffers[step % 2].numpy()[:] = step
            tensors.device.copy_(buffers[step % 2], non_blocking=True)
            events[step % 2].record(
                torch.get_device_module(DEVICE).current_stream(DEVICE)
            )

    assert races(use) == []


# Parts of one buffer

CURRENT = torch.accelerator.current_stream


def read_slots(of_step: Callable[[int], int]) -> list[str]:
    """Each step copies its number into a slot of one pinned buffer.

    The next step waits for that, and reads a slot.
    """

    def use(tensors: Tensors) -> None:
        slots, events = (
            torch.zeros(6).pin_memory(),
            [torch.get_device_module(DEVICE).Event() for _ in range(6)],
        )
        for step in range(6):
            slots[step].copy_(tensors.device.sum(), non_blocking=True)
            events[step].record(CURRENT(DEVICE))
            if step:
                events[step - 1].synchronize()
                slots[of_step(step)].item()

    return races(use)


def test_a_slot_of_a_buffer_is_read_while_another_one_is_written() -> None:
    """A loss that a loop looks at one step later was called a race.

    The whole buffer counted as written.
    """
    assert read_slots(lambda step: step - 1) == []
    assert len(read_slots(lambda step: step)) == 1


def test_parts_that_overlap_in_one_element_are_a_race() -> None:
    def use(begin: int) -> Callable[[Tensors], None]:
        def fill_again(tensors: Tensors) -> None:
            tensors.device[:4].copy_(tensors.source[:4], non_blocking=True)
            tensors.source[begin:].fill_(7)

        return fill_again

    assert races(use(4)) == []
    assert len(races(use(3))) == 1


def test_an_expanded_slot_is_that_slot() -> None:
    """It has as many elements as the buffer, all of them at one place."""

    def use(slot: int) -> Callable[[Tensors], None]:
        def read(tensors: Tensors) -> None:
            tensors.target[0].copy_(tensors.device.sum(), non_blocking=True)
            tensors.target[slot].expand(8).clone()

        return read

    assert races(use(1)) == []
    assert len(races(use(0))) == 1


@pytest.mark.parametrize("columns", [slice(0, 1), slice(0, 2)])
def test_gaps_between_the_elements_count_as_used(columns: slice) -> None:
    def use(tensors: Tensors) -> None:
        rows = torch.zeros(3, 3).pin_memory()
        rows[:, columns].copy_(
            torch.ones(rows[:, columns].shape, device=DEVICE), non_blocking=True
        )
        rows[1, 2].item()

    assert len(races(use)) == 1


@pytest.mark.parametrize(
    ("second", "is_race"),
    [(slice(4, 8), False), (slice(3, 8), True), (slice(0, 8), True)],
)
def test_two_streams_write_parts_of_one_tensor_of_the_device(
    second: slice, is_race: bool
) -> None:
    def use(tensors: Tensors) -> None:
        tensors.device[:4].fill_(1)
        with torch.Stream(device=DEVICE):
            tensors.device[second].fill_(2)

    assert bool(races(use)) is is_race


def test_many_parts_are_forgotten_once_all_is_written() -> None:
    with record_streams() as record:
        big = torch.zeros(1000, device=DEVICE)
        for i in range(1000):
            big[i].fill_(i)
            if not i % 50:
                torch.accelerator.synchronize(DEVICE)
        big.zero_()
        assert max(len(memory.all()) for memory in record._memory.values()) < 10
