"""Batches on their way to devices: everything arrives, and is copied once.

No stream is ahead of another.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, TensorDataset

from batches import (
    CONTAINERS,
    KINDS,
    Plain,
    as_rows,
    dealt,
    in_the_steps,
    inside,
    jagged,
    table,
)
from problems import assert_close, built, data, mlp, mse, parameters, sgd
from torchstrategy import (
    CentralStorageStrategy,
    InputOptions,
    OneDeviceStrategy,
    Strategy,
    register_batch_type,
)
from torchstrategy._base.torch_internals import (
    TorchDispatchMode,
    sparse_indices,
    sparse_values,
)
from torchstrategy._data.batch_types import tensors_within
from torchstrategy.testing import count_traffic, record_streams, simulated_devices

SIM = simulated_devices()
CPU = torch.device("cpu")
AHEAD = InputOptions(load_ahead=True)
ON_DEMAND = InputOptions(load_ahead=False)
PLACES = [[SIM[0], SIM[1]], [SIM[1], SIM[1]], [SIM[3], CPU], [SIM[2]]]
both_ways = pytest.mark.parametrize(
    "options", [ON_DEMAND, AHEAD], ids=["on demand", "ahead"]
)
everywhere = pytest.mark.parametrize("devices", PLACES, ids=str)


def central(*devices: torch.device, parameters: torch.device = SIM[4]) -> Strategy:
    return CentralStorageStrategy(devices, parameters)


def places_of(value: Any) -> set[torch.device]:
    """Where the tensors in a leaf are."""
    return {tensor.device for tensor in tensors_within(value)}


def operations(work: Callable[[], object]) -> Counter[str]:
    """What torch is asked to do, on all threads."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    counts: Counter[str] = Counter()
    with Counting():  # type: ignore[no-untyped-call]
        work()
    return counts


# Where they arrive


@both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_on_its_replicas_device(
    kind: str, options: InputOptions
) -> None:
    expected = as_rows(KINDS[kind](5))
    for devices in PLACES:
        strategy = central(*devices)
        replicas = len(devices)
        value, _ = next(
            iter(
                strategy.experimental_distribute_dataset(
                    [(KINDS[kind](5), table(5))], options
                )
            )
        )
        parts = strategy.experimental_local_results(value)
        size = -(-5 // replicas)
        assert [as_rows(part) for part in parts] == [
            expected[r * size : (r + 1) * size] for r in range(replicas)
        ]
        for part, device in zip(parts, devices, strict=True):
            assert places_of(part) <= {device}
            assert bool(places_of(part)) == bool(tensors_within(KINDS[kind](5)))


def test_a_jagged_tensor_arrives_with_its_shape() -> None:
    strategy = central(SIM[0], SIM[1])
    for options in (ON_DEMAND, AHEAD):
        whole = jagged(5)
        for value in strategy.experimental_distribute_dataset(
            [{"x": whole, "y": whole + 1}], options
        ):
            seen = in_the_steps(
                strategy, value, lambda part: (part["y"] - part["x"]).values().tolist()
            )
            assert [{number for row in rows for number in row} for rows in seen] == [
                {1},
                {1},
            ]
            assert [piece.values().device for piece in value["x"].values] == [
                SIM[0],
                SIM[1],
            ]
            assert [piece.offsets().device for piece in value["x"].values] == [
                SIM[0],
                SIM[1],
            ]


@both_ways
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_has_no_rows_arrives_too_in_every_container(
    name: str, options: InputOptions
) -> None:
    whole = CONTAINERS[name](x=table(3), y=torch.tensor(7.0), note="whole")
    for devices in PLACES:
        strategy = central(*devices)
        (value,) = strategy.experimental_distribute_dataset(
            [[whole, table(3)]], options
        )
        seen = in_the_steps(
            strategy, value[0], lambda held: (type(held), *inside(held))
        )
        for (cls, x, y, note), device in zip(seen, devices, strict=True):
            assert (cls, note, y.item()) == (type(whole), "whole", 7)
            assert x.device == y.device == device
    assert inside(whole)[1].device == CPU


class Shared:
    """Registered below: one thing, with a tensor in it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


register_batch_type(
    Shared, rows=None, apply=lambda shared, fn: Shared(fn(shared.tensor))
)


def test_things_that_hold_a_tensor_and_have_no_rows_arrive_on_every_device() -> None:
    strategy = central(SIM[0], SIM[1])
    batch = {
        "x": table(3),
        "shared": Shared(torch.arange(7)),
        "held": Plain(torch.tensor(1.0), "note", None),
        "list": [Shared(torch.arange(7)), torch.tensor(2.0), "text"],
    }
    value = dealt(strategy, batch)

    def read(part: Any) -> Any:
        in_list = [
            item.tensor if isinstance(item, Shared) else item for item in part["list"]
        ]
        tensors = [part["shared"].tensor, part["held"].x, *in_list]
        return {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}

    assert in_the_steps(strategy, value, read) == [{SIM[0]}, {SIM[1]}]


@both_ways
def test_a_lone_replica_gets_all_of_it_on_its_device(options: InputOptions) -> None:
    for strategy in (OneDeviceStrategy(SIM[2]), central(SIM[2])):
        batch = {
            "x": table(3),
            "one": torch.tensor(1.0),
            "held": Plain(table(2), torch.tensor(2.0), "note"),
            "n": 3,
        }
        (value,) = strategy.experimental_distribute_dataset([batch], options)
        assert [places_of(leaf) for leaf in value.values()] == [
            {SIM[2]},
            {SIM[2]},
            {SIM[2]},
            set(),
        ]
        assert places_of(batch["held"]) == {CPU}


@both_ways
def test_a_datasets_function_gives_each_replica_its_element_on_its_device(
    options: InputOptions,
) -> None:
    strategy = central(SIM[0], SIM[1])
    elements = [
        {"x": table(rows), "one": torch.tensor(1.0), "s": ["a", "b"][:rows]}
        for rows in (2, 1, 2)
    ]
    steps = list(
        strategy.distribute_datasets_from_function(lambda context: elements, options)
    )
    for step in steps:
        seen = in_the_steps(
            strategy, step, lambda part: [part["x"].device, part["one"].device]
        )
        assert seen == [[SIM[0]] * 2, [SIM[1]] * 2]
    assert in_the_steps(
        strategy, steps[1], lambda part: (len(part["x"]), part["s"])
    ) == [(2, ["a", "b"]), (0, [])]


# Torch's own, of itself.
@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")
def test_a_loader_with_workers_that_pins_is_read_as_any_other() -> None:
    strategy = central(SIM[0], SIM[1])
    loader = DataLoader(
        TensorDataset(torch.arange(10)), batch_size=4, num_workers=1, pin_memory=True
    )
    seen = [
        (part.tolist(), part.device)
        for (value,) in strategy.experimental_distribute_dataset(loader)
        for part in value.values
    ]
    assert [rows for rows, _ in seen] == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert [device for _, device in seen] == [SIM[0], SIM[1]] * 3


# What is copied


@both_ways
@everywhere
def test_each_piece_is_copied_once_to_the_byte(
    devices: list[torch.device], options: InputOptions
) -> None:
    batch = {
        "x": table(8),
        "more": [
            torch.ones(8, 5, dtype=torch.float64),
            Plain(torch.ones(8), "note", 7),
        ],
    }
    strategy = central(*devices)
    with count_traffic() as traffic:
        (value,) = strategy.experimental_distribute_dataset([batch], options)
    share = 8 // len(devices)
    moved = [device for device in devices if device != CPU]
    assert traffic.copies_by_route == Counter(
        {(CPU, device): 3 * moved.count(device) for device in moved}
    )
    size = share * (3 * 4 + 5 * 8 + 4)
    assert traffic.bytes_by_route == Counter(
        {(CPU, device): size * moved.count(device) for device in moved}
    )
    assert places_of(value["x"].values[0] if len(devices) > 1 else value["x"]) == {
        devices[0]
    }


def test_what_has_no_rows_is_copied_once_to_each_replica() -> None:
    with count_traffic() as traffic:
        dealt(
            central(SIM[0], SIM[1]),
            {
                "x": table(4),
                "one": torch.tensor(1.0),
                "two": Plain(torch.ones(()), 1, []),
            },
        )
    assert traffic.copies_by_route == {(CPU, SIM[0]): 3, (CPU, SIM[1]): 3}
    assert traffic.bytes_by_route == {
        (CPU, SIM[0]): 24 + 4 + 4,
        (CPU, SIM[1]): 24 + 4 + 4,
    }


def test_the_sizes_of_packed_sequences_stay_on_the_cpu_as_torch_wants_them() -> None:
    with count_traffic() as traffic:
        value = dealt(central(SIM[0], SIM[1]), KINDS["packed"](4))
    assert traffic.copies_by_route == {(CPU, SIM[0]): 3, (CPU, SIM[1]): 3}, (
        "the data, their order, and the way back"
    )
    assert all(
        piece.batch_sizes.device == CPU and piece.is_cuda is False
        for piece in value.values
    )


@both_ways
def test_what_the_loader_has_pinned_is_not_pinned_again_and_all_else_is_once(
    options: InputOptions,
) -> None:
    strategy = central(SIM[0], SIM[1])
    plain, pinned = (
        [table(4), torch.ones(4)],
        [table(4).pin_memory(), torch.ones(4).pin_memory()],
    )
    for source, count in ((plain, 4), (pinned, 0)):
        counts = operations(
            lambda source=source: list(
                strategy.experimental_distribute_dataset([source], options)
            )
        )
        assert counts["aten::_pin_memory"] == count


def test_what_is_pinned_has_each_of_its_elements_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real pinned memory is made with the strides of the tensor.

    Torch refuses to fill it where they are 0.
    """
    pin, strides = torch.Tensor.pin_memory, []
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: strides.append(tensor.stride()) or pin(tensor),
    )
    expanded = dealt(central(SIM[0]), KINDS["expanded"](4))
    channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert dealt(central(SIM[0]), channels_last).is_contiguous(
        memory_format=torch.channels_last
    )
    assert strides == [(3, 1), channels_last.stride()]
    assert expanded.tolist() == [[0, 1, 2]] * 4


def test_on_the_cpu_nothing_is_pinned_copied_or_moved() -> None:
    batch = [table(4), {"one": torch.tensor(1.0)}]
    counts = operations(lambda: dealt(central(CPU, CPU), batch))
    assert counts == {"aten::slice.Tensor": 2}
    assert not operations(lambda: dealt(OneDeviceStrategy("cpu"), batch))


@both_ways
@everywhere
def test_values_that_are_not_fetched_stay_on_the_cpu(
    devices: list[torch.device], options: InputOptions
) -> None:
    strategy = central(*devices)
    apart = InputOptions(
        experimental_fetch_to_device=False, load_ahead=options.load_ahead
    )
    batch = {
        "x": table(4),
        "one": torch.tensor(1.0),
        "held": Plain(KINDS["array"](4), torch.tensor(2.0), "note"),
    }
    with count_traffic() as traffic:
        (value,) = strategy.experimental_distribute_dataset([batch], apart)
    assert traffic.copies == 0
    for leaf in value.values():
        assert {
            place
            for part in strategy.experimental_local_results(leaf)
            for place in places_of(part)
        } == {CPU}
    assert isinstance(
        strategy.experimental_local_results(value["held"])[0].x, torch.Tensor
    )
    assert value["one"] is batch["one"]


# Loaders that yield what is on a device


@both_ways
@pytest.mark.parametrize("source", [SIM[0], SIM[2]], ids=str)
@pytest.mark.parametrize("devices", [*PLACES, [CPU, CPU]], ids=str)
def test_what_a_loader_yields_on_a_device_is_moved_only_where_it_is_not(
    devices: list[torch.device], source: torch.device, options: InputOptions
) -> None:
    strategy = central(*devices)
    batch = {"x": table(4).to(source), "one": torch.tensor(1.0, device=source), "n": 3}
    with count_traffic() as traffic:
        (value,) = strategy.experimental_distribute_dataset([batch], options)
    away = [device for device in devices if device != source]
    assert traffic.copies_by_route == Counter(
        {(source, device): 2 * away.count(device) for device in away}
    )
    for r, device in enumerate(devices):
        x, one = (
            strategy.experimental_local_results(value[name])[r] for name in ("x", "one")
        )
        assert x.device == one.device == device
        assert (x.tolist(), one.item()) == (table(4).chunk(len(devices))[r].tolist(), 1)


def test_what_is_there_already_is_the_loaders_own_memory() -> None:
    whole = table(4).to(SIM[1])
    pieces = dealt(central(SIM[1], SIM[1]), whole).values
    assert [piece.untyped_storage().data_ptr() for piece in pieces] == [
        whole.untyped_storage().data_ptr()
    ] * 2


def test_a_batch_may_be_in_parts_on_different_devices() -> None:
    batch = Plain(table(4).to(SIM[0]), table(4), table(4).to(SIM[3]))
    for part, device in zip(
        dealt(central(SIM[0], SIM[1]), batch).values, SIM, strict=False
    ):
        assert places_of(part) == {device}


# Streams


def on_the_host() -> Iterator[Any]:
    for k in range(6):
        yield data(6, torch.float32, seed=k)


def on_a_device() -> Iterator[Any]:
    """Made on the current stream of the thread that reads."""
    for k in range(6):
        yield [tensor.to(SIM[1]) * 1 for tensor in data(6, torch.float32, seed=k)]


LOADERS: dict[str, Callable[[], Iterator[Any]]] = {
    "host": on_the_host,
    "device": on_a_device,
}


def train(
    strategy: Strategy, dataset: Any, on_streams: Sequence[torch.Stream] = ()
) -> Any:
    """A training loop on the default streams, or on others.

    The first batch is asked for on the default ones: there the loader of a reader that
    is ahead puts what it makes.
    """
    batches = iter(dataset)
    first = next(batches)
    with ExitStack() as stack:
        for stream in on_streams:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            stack.enter_context(stream)
        (model, optimizer), _ = built(strategy, lambda: mlp(torch.float32), sgd)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

        for batch in itertools.chain([first], batches):
            strategy.run(step, args=(batch,))
    # Which has to outlive what uses it on other streams than it came on.
    return (model, optimizer, first)


@both_ways
@pytest.mark.parametrize("side", [False, True], ids=["default streams", "side streams"])
@pytest.mark.parametrize("loader", LOADERS)
@everywhere
def test_a_training_loop_has_no_race(
    devices: Any, loader: str, side: bool, options: InputOptions
) -> None:
    strategy = central(*devices, parameters=devices[0])
    streams = [torch.Stream(device) for device in SIM] if side else []
    with record_streams() as record:
        trained = train(
            strategy,
            strategy.experimental_distribute_dataset(LOADERS[loader](), options),
            streams,
        )
    (plain, optimizer) = built(strategy, lambda: mlp(torch.float32), sgd)[1]
    for batch in on_the_host():
        optimizer.zero_grad()
        mse(plain, batch).backward()
        optimizer.step()
    assert_close(
        parameters(trained[0]), parameters(plain), f"{loader} on {devices}", 1e-5
    )
    assert any(event.what == "use" for event in record.events)


@both_ways
@pytest.mark.parametrize("loader", LOADERS)
def test_what_the_consumer_holds_stays_valid_while_it_goes_on(
    loader: str, options: InputOptions
) -> None:
    strategy = central(SIM[0], SIM[1])
    with record_streams():
        held = list(
            strategy.experimental_distribute_dataset(LOADERS[loader](), options)
        )
        for value, whole in zip(held, on_the_host(), strict=True):
            rows = in_the_steps(strategy, value, lambda part: part[0].tolist())
            assert rows == [part.tolist() for part in whole[0].chunk(2)]


def parts_of(value: Any) -> list[torch.Tensor]:
    """The plain tensors that a tensor, or packed sequences, are made of."""
    if isinstance(value, rnn.PackedSequence):
        return [part for part in value if part is not None and part.device != CPU]
    if value.is_nested:
        return [value.values(), value.offsets()]
    return [sparse_indices(value), sparse_values(value)]


@both_ways
@pytest.mark.parametrize("side", [False, True], ids=["default streams", "side streams"])
def test_what_is_made_of_several_tensors_has_no_race_in_any_of_them(
    side: bool, options: InputOptions
) -> None:
    strategy = central(SIM[1], SIM[2])
    dataset = strategy.experimental_distribute_dataset(
        (
            [KINDS["packed"](4), KINDS["sparse"](4), KINDS["hybrid"](4), jagged(4)]
            for _ in range(3)
        ),
        options,
    )
    with ExitStack() as stack:
        stack.enter_context(record_streams())
        for device in SIM[1:3] if side else ():
            stack.enter_context(torch.Stream(device))
        for batch in dataset:
            strategy.run(
                lambda values: [
                    (part + part).cpu() for value in values for part in parts_of(value)
                ],
                (batch,),
            )


def test_a_batch_waits_on_the_stream_that_is_current_where_it_is_asked_for() -> None:
    dataset = iter(
        central(SIM[0], SIM[1]).experimental_distribute_dataset(
            on_the_host(), ON_DEMAND
        )
    )
    mine = torch.Stream(SIM[1])
    with record_streams() as record, mine:
        next(dataset)
    waits = {event[:2] for event in record.events if event.what == "wait"}
    assert waits == {(0, 0), (1, mine.stream_id)}


# Threads


def test_without_reading_ahead_there_is_no_other_thread() -> None:
    before = threading.active_count()
    for _ in central(*SIM[:4]).experimental_distribute_dataset(
        on_the_host(), ON_DEMAND
    ):
        # Threads of other tests may end meanwhile.
        assert threading.active_count() <= before


@pytest.mark.usefixtures("no_thread_left")
def test_each_accelerator_replica_has_a_worker_which_ends_with_the_iteration() -> None:
    before = set(threading.enumerate())
    for _ in central(SIM[0], CPU, SIM[1], SIM[1]).experimental_distribute_dataset(
        on_the_host(), AHEAD
    ):
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert names <= {
            "torchstrategy-reader",
            *(f"torchstrategy-prefetch-{r}" for r in (0, 2, 3)),
        }
    steps = iter(
        central(SIM[0]).experimental_distribute_dataset(
            itertools.repeat(table(2)), AHEAD
        )
    )
    next(steps)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {
        "torchstrategy-reader",
        "torchstrategy-prefetch-0",
    }


@both_ways
def test_the_loader_finds_the_current_device_and_streams_where_it_is_iterated_over(
    options: InputOptions,
) -> None:
    seen: list[Any] = []

    def load() -> Iterator[torch.Tensor]:
        for _ in range(2):
            accelerator = torch.accelerator
            seen.append(
                (
                    accelerator.current_device_index(),
                    *map(accelerator.current_stream, SIM[1:4]),
                )
            )
            yield torch.ones(2)

    with ExitStack() as stack:
        streams = [
            stack.enter_context(torch.Stream(device))
            for device in (SIM[1], SIM[2], SIM[3])
        ]
        list(central(SIM[1], SIM[2]).experimental_distribute_dataset(load(), options))
    assert seen == [(3, *streams)] * 2


class Fragile(torch.Tensor):
    """A tensor that cannot be moved if it holds a 3."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if (self.as_subclass(torch.Tensor) == 3).any():
            raise OSError(f"cannot move {self.tolist()}")
        return super().to(*args, **kwargs)


@both_ways
@pytest.mark.parametrize("devices", PLACES[:3], ids=str)
def test_an_error_on_the_way_to_a_device_comes_out_at_its_batch(
    devices: Any, options: InputOptions
) -> None:
    batches = [torch.tensor([k, k + 1]).as_subclass(Fragile) for k in (0, 2, 4, 3, 6)]
    steps = iter(central(*devices).experimental_distribute_dataset(batches, options))
    seen = []
    while True:
        try:
            seen.append([part.item() for part in next(steps).values])
        except StopIteration:
            break
        except OSError as error:
            seen.append(str(error))
    fails_in_the_last = "cannot move [3]" if devices[1] != CPU else [2, 3]
    assert seen == [[0, 1], fails_in_the_last, [4, 5], "cannot move [3]", [6, 7]]
