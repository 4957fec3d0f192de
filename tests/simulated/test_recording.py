"""Who waits for whom on streams, and what would be a wrong number now and then.

It would be on a real device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import torchstrategy
from problems import data, deal, mlp, mse, sgd
from torchstrategy.testing import record_streams, simulated_devices

DEVICE = simulated_devices()[1]
HOST = torch.arange(4.0)


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def main() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)


def prefetched(side: torch.Stream) -> torch.Tensor:
    """A batch on its way to the device, on a stream of its own."""
    with side:
        return HOST.pin_memory().to(DEVICE, non_blocking=True)


def races(use: Callable[[], object]) -> list[str]:
    with record_streams(check=False) as record:
        use()
    return record.races


# Races


def test_a_copy_that_the_consumer_does_not_wait_for_is_a_race() -> None:
    kept = []
    (race,) = races(lambda: kept.append(prefetched(stream())) or kept[0].sum())
    assert "aten.sum" in race and "reads a tensor that copy (test_recording.py:" in race
    assert "say stream.wait_stream(other)" in race


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: main().wait_stream(side),
        lambda side: main().wait_event(side.record_event()),
        lambda side: side.record_event().wait(main()),
        lambda side: side.synchronize(),
        lambda side: side.record_event().synchronize(),
        lambda side: torch.accelerator.synchronize(DEVICE),
    ],
    ids=[
        "wait_stream",
        "wait_event",
        "event.wait",
        "synchronize",
        "event.synchronize",
        "device",
    ],
)
def test_every_way_of_waiting_is_known(wait: Callable[[torch.Stream], None]) -> None:
    kept: list[torch.Tensor] = []

    def use() -> None:
        side = stream()
        kept.append(prefetched(side))
        wait(side)
        kept.append(kept[0] + 1)

    assert races(use) == []


def test_waiting_is_for_what_was_there_before() -> None:
    kept: list[torch.Tensor] = []

    def use() -> None:
        side = stream()
        main().wait_stream(side)
        kept.append(prefetched(side))
        kept.append(kept[0] + 1)

    assert len(races(use)) == 1


def test_waiting_is_handed_on() -> None:
    kept: list[torch.Tensor] = []

    def use() -> None:
        first, second = stream(), stream()
        kept.append(prefetched(first))
        second.wait_stream(first)
        main().wait_stream(second)
        kept.append(kept[0] + 1)

    assert races(use) == []


def test_a_tensor_that_is_freed_while_another_stream_may_read_it_is_a_race() -> None:
    def use() -> None:
        side = stream()
        batch = prefetched(side)
        main().wait_stream(side)
        batch.sum()

    (race,) = races(use)
    assert "gets back memory that aten.sum" in race and "record_stream" in race


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_a_stream_that_waits_before_it_uses_freed_memory_again_is_no_race(
    waits: bool,
) -> None:
    """As the gradients of FSDP2 are made on a stream and freed.

    The optimizer reads them on another stream.
    """

    def use() -> None:
        side = stream()
        for _ in range(2):
            torch.ones(1, device=DEVICE)
            side.wait_stream(main())
            gradient = prefetched(side)
            main().wait_stream(side)
            gradient.sum()
            del gradient
        if waits:
            side.wait_stream(main())
        prefetched(side)

    assert len(races(use)) == (not waits)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_a_storage_that_is_made_empty_gives_its_memory_back(waits: bool) -> None:
    def use() -> None:
        side = stream()
        batch = prefetched(side)
        main().wait_stream(side)
        batch.sum()
        if waits:
            side.wait_stream(main())
        batch.untyped_storage().resize_(0)

    assert len(races(use)) == (not waits)


def test_record_stream_keeps_it() -> None:
    def use() -> None:
        side = stream()
        batch = prefetched(side)
        main().wait_stream(side)
        batch.record_stream(main())
        batch.sum()

    assert races(use) == []


def test_a_tensor_that_is_freed_on_the_stream_that_used_it_is_none() -> None:
    assert races(lambda: (torch.ones(3, device=DEVICE) * 2).sum()) == []


def test_a_buffer_that_is_filled_again_before_it_was_read_is_a_race() -> None:
    buffer = torch.empty(4, device=DEVICE)

    def use() -> None:
        side = stream()
        for _ in range(2):
            with side:
                buffer.copy_(HOST.pin_memory(), non_blocking=True)
            main().wait_stream(side)
            buffer.sum()

    (race,) = races(use)
    assert (
        "copy (test_recording.py:" in race
        and "writes a tensor that aten.sum" in race
        and "reads on" in race
    )


def test_two_streams_may_read_one_tensor() -> None:
    value = torch.ones(4, device=DEVICE)

    def use() -> None:
        value.sum()
        with stream():
            value.sum()

    assert races(use) == []


def test_copies_between_devices_wait_for_both() -> None:
    def use() -> None:
        there = torch.ones(4, device=DEVICE).to(
            simulated_devices()[2], non_blocking=True
        )
        (there * 2).to(DEVICE).sum().item()

    assert races(use) == []


def test_a_number_that_the_program_has_seen_is_there() -> None:
    kept: list[torch.Tensor] = []

    def use() -> None:
        side = stream()
        with side:
            kept.append(torch.ones(4, device=DEVICE) * 2)
            kept[0].sum().item()
        kept.append(kept[0] + 1)

    assert races(use) == []


def test_a_worker_that_copies_in_a_thread_of_its_own_is_seen() -> None:
    kept: list[torch.Tensor] = []

    def use() -> None:
        worker = threading.Thread(target=lambda: kept.append(prefetched(stream())))
        worker.start()
        worker.join()
        kept.append(kept[0] + 1)

    assert len(races(use)) == 1


# The record


def test_the_block_fails_if_there_were_races_unless_it_is_told_not_to() -> None:
    kept = []
    with (
        pytest.raises(
            AssertionError, match=r"^On real devices this may go wrong:\n- aten\.sum"
        ),
        record_streams(),
    ):
        kept.append(prefetched(stream()))
        kept[0].sum()


def test_every_race_has_a_line_of_its_own() -> None:
    kept = []
    with pytest.raises(AssertionError) as caught, record_streams():
        kept += [prefetched(stream()), prefetched(stream())]
        kept[0].sum()
        kept[1].sum()
    assert [line[:10] for line in str(caught.value).splitlines()[1:]] == [
        "- aten.sum",
        "- aten.sum",
    ]


def test_an_error_of_the_block_is_not_hidden_by_a_race() -> None:
    kept = []
    with pytest.raises(KeyError), record_streams():
        kept.append(prefetched(stream()))
        kept[0].sum()
        raise KeyError


def test_what_happened_is_listed_in_order() -> None:
    side = stream()
    with record_streams() as record:
        batch = prefetched(side)
        main().wait_stream(side)
        batch.record_stream(main())
        batch + 1
    number = side.stream_id
    assert [tuple(event) for event in record.events] == [
        (1, number, "launch", "copy"),
        (1, 0, "wait", f"stream {number} of sim:1"),
        (1, 0, "use", "record_stream"),
        (1, 0, "launch", "aten.add.Tensor"),
    ]


def test_one_recorder_is_enough() -> None:
    with (
        record_streams(),
        pytest.raises(RuntimeError, match=r"^record_streams\(\) is at work already"),
        record_streams(),
    ):
        raise AssertionError("not reached")
    with record_streams() as record:
        pass
    assert record.events == []


# The library's own use of streams


@pytest.mark.parametrize(
    "owner", ["cpu", 0, 4], ids=["parameters on the cpu", "on sim:0", "on sim:4"]
)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_strategy_trains_without_a_race(owner: object, replicas: int) -> None:
    devices = simulated_devices()
    parameter_device = owner if owner == "cpu" else devices[owner]  # type: ignore[call-overload]
    strategy = torchstrategy.CentralStorageStrategy(
        devices[:replicas], parameter_device
    )
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)

    def step(batch: object) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torchstrategy.get_replica_context().all_reduce("mean", loss.detach())

    with record_streams() as record:
        for seed in range(3):
            loss = strategy.run(step, args=(deal(strategy, data(7, seed=seed)),))
        strategy.reduce("mean", loss, axis=None).item()
    assert {event.device for event in record.events} >= set(range(replicas))
