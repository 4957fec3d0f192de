"""A step may work on a stream of its own, as in plain PyTorch, in all replicas.

It may wherever the replicas run.

A step ran forward, backward and `optimizer.step()` on a side stream, as programs do
that overlap their work. In plain PyTorch nothing was wrong. In replicas, gradients were
added up, and parameters written, on the stream that was current where `run` was called:
neither stream waited for the other, and on a GPU the numbers were wrong now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from problems import assert_close, data, deal, mlp, mse, parameters, replica_id, sgd
from torchstrategy.testing import record_streams, simulated_devices

SIM = simulated_devices()

Make = Callable[[], torchstrategy.Strategy]
KINDS: dict[str, Make] = {
    "one device": lambda: torchstrategy.OneDeviceStrategy(SIM[0]),
    "central, one replica": lambda: torchstrategy.CentralStorageStrategy(
        [SIM[0]], "cpu"
    ),
    "central, one device twice": lambda: torchstrategy.CentralStorageStrategy(
        [SIM[0]] * 2, SIM[0]
    ),
    "central, one device twice, parameters on the CPU": lambda: (
        torchstrategy.CentralStorageStrategy([SIM[0]] * 2, "cpu")
    ),
    "central": lambda: torchstrategy.CentralStorageStrategy(SIM[:2], SIM[0]),
    "central, parameters elsewhere": lambda: torchstrategy.CentralStorageStrategy(
        SIM[:3], SIM[4]
    ),
    "central, parameters on the CPU": lambda: torchstrategy.CentralStorageStrategy(
        SIM[:2], "cpu"
    ),
    "mirrored": lambda: torchstrategy.MirroredStrategy(SIM[:2]),
    "mirrored by copies": lambda: torchstrategy.MirroredStrategy(
        SIM[:3], cross_device_ops=torchstrategy.HierarchicalCopyAllReduce()
    ),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


class Net(nn.Module):
    """A model with statistics, which the end of a run averages.

    It has a buffer that each step writes, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.norm(self.first(x)))


class Sides:
    """A side stream for each device, or for each replica."""

    def __init__(self, is_for_each_replica: bool = False) -> None:
        self.is_for_each_replica = is_for_each_replica
        self.streams: dict[Any, torch.Stream] = {}

    def get(self) -> torch.Stream:
        device = torch.accelerator.current_device_index()
        key = (device, replica_id() if self.is_for_each_replica else 0)
        if key not in self.streams:
            self.streams[key] = torch.Stream(device=device)
        return self.streams[key]

    @contextmanager
    def block(self, *batch: torch.Tensor) -> Iterator[None]:
        """As programs write it: the side stream waits for the batch.

        The current one waits for the block.
        """
        side, main = self.get(), torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            yield
        main.wait_stream(side)
        for tensor in batch:
            tensor.record_stream(side)


def trained(
    make: Make,
    build: Callable[[], nn.Module],
    step_of: Callable[..., Any],
    runs: int = 3,
) -> Any:
    """Runs a step, and looks for races from the first run on. Returns the weights."""
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = build()
        optimizer = sgd(model)
    step = step_of(model, optimizer)
    batches = [deal(strategy, data(6, torch.float32, seed)) for seed in range(runs)]
    with record_streams():
        for batch in batches:
            result = strategy.run(step, args=(batch,))
            for value in strategy.experimental_local_results(result):
                if isinstance(value, torch.Tensor):
                    float(value.sum())
        values = [float(value.sum()) for value in model.state_dict().values()]
    return strategy, model, values


def whole(sides: Sides, records: bool = True) -> Callable[..., Any]:
    def step_of(model: nn.Module, optimizer: Any) -> Any:
        def step(batch: Any) -> torch.Tensor:
            with sides.block(*(batch if records else ())):
                optimizer.zero_grad()
                loss = mse(model, batch)
                loss.backward()
                optimizer.step()
            return loss.detach()

        return step

    return step_of


@every_kind
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    "each", [False, True], ids=["a stream for each device", "for each replica"]
)
def test_a_whole_step_may_be_on_a_side_stream(
    make: Make, each: bool, records: bool
) -> None:
    trained(make, Net, whole(Sides(each), records))


@every_kind
def test_the_numbers_are_those_of_the_callers_stream(make: Make) -> None:
    def plain(model: nn.Module, optimizer: Any) -> Any:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

        return step

    _, model, _ = trained(make, lambda: mlp(torch.float32), whole(Sides()))
    _, twin, _ = trained(make, lambda: mlp(torch.float32), plain)
    assert_close(parameters(model), parameters(twin), "side stream")


@every_kind
def test_forward_alone_may_be_on_a_side_stream(make: Make) -> None:
    sides = Sides()

    def step_of(model: nn.Module, optimizer: Any) -> Any:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            with sides.block(*batch):
                loss = mse(model, batch)
            loss.backward()
            optimizer.step()

        return step

    trained(make, Net, step_of)


@every_kind
@pytest.mark.parametrize(
    "each", [False, True], ids=["a stream for each device", "for each replica"]
)
def test_all_work_may_be_on_a_side_stream_for_which_nobody_waits(
    make: Make, each: bool
) -> None:
    """The program makes its own rows there, and looks at numbers there.

    So the default stream has nothing to do.
    """
    sides, losses = Sides(each), []

    def step_of(model: nn.Module, optimizer: Any) -> Any:
        def step(batch: Any) -> None:
            with sides.get():
                x, y = torch.ones(4, 3), torch.zeros(4, 2)
                optimizer.zero_grad()
                loss = mse(model, (x, y))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        return step

    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)
    step = step_of(model, optimizer)
    strategy.run(step, args=(None,))
    with record_streams():
        for _ in range(3):
            strategy.run(step, args=(None,))
    assert losses


@every_kind
def test_what_the_user_writes_between_runs_comes_to_the_side_stream(make: Make) -> None:
    """The program lets the side stream wait where it has written, not in the step."""
    sides = Sides()
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)

    def step() -> None:
        with sides.get():
            x, y = torch.ones(4, 3), torch.zeros(4, 2)
            optimizer.zero_grad()
            mse(model, (x, y)).backward()
            optimizer.step()

    strategy.run(step)
    with record_streams():
        for _ in range(3):
            for side in sides.streams.values():
                torch.accelerator.current_stream(side.device).wait_stream(side)
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.mul_(0.5) if tensor.is_floating_point() else None
            for side in sides.streams.values():
                side.wait_stream(torch.accelerator.current_stream(side.device))
            strategy.run(step)


@every_kind
@pytest.mark.parametrize(
    "each", [False, True], ids=["a stream for each device", "for each replica"]
)
def test_collectives_and_merge_functions_may_be_called_on_a_side_stream(
    make: Make, each: bool
) -> None:
    sides = Sides(each)

    def step_of(model: nn.Module, optimizer: Any) -> Any:
        def merged(strategy: torchstrategy.Strategy, value: Any) -> Any:
            return strategy.reduce("sum", value, axis=None)

        def step(batch: Any) -> torch.Tensor:
            context = torchstrategy.get_replica_context()
            assert context is not None
            with sides.block():
                optimizer.zero_grad()
                outputs = model(batch[0])
                mean = context.all_reduce("mean", outputs.mean(0))
                rows = context.all_gather(outputs.detach(), 0)
                loss = (outputs - mean).square().mean() + rows.sum() * 0
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norms = sum(
                    p.grad.sum() for p in model.parameters() if p.grad is not None
                )
                total = context.merge_call(merged, args=(loss.detach(),))
                optimizer.step()
                kept = total.to(loss.device) * 2 + norms
                del total, rows, mean
                again = context.all_reduce("sum", kept)
            return again

        return step

    trained(make, Net, step_of)


@every_kind
def test_a_step_may_leave_its_stream_current(make: Make) -> None:
    sides = Sides()

    def step_of(model: nn.Module, optimizer: Any) -> Any:
        def step(batch: Any) -> torch.Tensor:
            side, main = sides.get(), torch.accelerator.current_stream()
            if side != main:
                side.wait_stream(main)
            torch.accelerator.set_stream(side)
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    before = torch.accelerator.current_stream(SIM[0])
    try:
        trained(make, Net, step_of)
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(0)


@every_kind
def test_an_optimizer_with_a_closure_may_be_called_on_a_side_stream(make: Make) -> None:
    sides = Sides()
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = mlp(torch.float32)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(batch: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            return loss

        with sides.block(*batch):
            optimizer.step(closure)

    batch = deal(strategy, data(6, torch.float32))
    with record_streams():
        for _ in range(2):
            strategy.run(step, args=(batch,))


@every_kind
def test_the_state_of_an_optimizer_may_be_read_on_a_side_stream(make: Make) -> None:
    """The first replica that asks for it brings it to all replicas."""
    sides, strategy = Sides(is_for_each_replica=True), make()
    with strategy.scope():
        model = mlp(torch.float32)
        optimizer = torch.optim.Adagrad(model.parameters())

    def step(batch: Any, writes: bool) -> float:
        with sides.block(*batch):
            mse(model, batch).backward()
            total = sum(float(state["sum"].sum()) for state in optimizer.state.values())
            if writes:
                optimizer.step()
        return total

    batch = deal(strategy, data(6, torch.float32))
    with record_streams():
        for writes in (False, True, False):
            strategy.run(step, args=(batch, writes))
            with torch.no_grad():
                for state in optimizer.state.values():
                    state["sum"].add_(1)


@every_kind
def test_a_caller_may_be_on_a_side_stream_and_the_step_on_another(make: Make) -> None:
    sides, step_of = Sides(), whole
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)
    step = step_of(sides)(model, optimizer)
    outer = [torch.Stream(device=device) for device in (SIM[0], SIM[4], SIM[0])]
    with record_streams():
        for stream in outer:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            with stream:
                for batch in strategy.experimental_distribute_dataset(
                    [data(6, torch.float32)] * 2
                ):
                    strategy.run(step, args=(batch,))
                [float(value.sum()) for value in model.state_dict().values()]
            torch.accelerator.current_stream(stream.device).wait_stream(stream)


@every_kind
@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
def test_batches_may_be_used_on_a_side_stream(make: Make, ahead: bool) -> None:
    torch.manual_seed(0)
    strategy = make()
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)
    step = whole(Sides(), records=False)(model, optimizer)
    options = torchstrategy.InputOptions(load_ahead=ahead)
    dataset = strategy.experimental_distribute_dataset(
        [data(6, torch.float32, seed) for seed in range(5)], options
    )
    with record_streams():
        for batch in dataset:
            strategy.run(step, args=(batch,))


@every_kind
def test_variables_may_be_written_on_a_side_stream(make: Make) -> None:
    sides, strategy = Sides(), make()
    aggregations = torchstrategy.VariableAggregation
    with strategy.scope():
        shared = torchstrategy.Variable(torch.zeros(2), aggregation=aggregations.MEAN)
        own = torchstrategy.Variable(
            torch.zeros(2),
            synchronization=torchstrategy.VariableSynchronization.ON_READ,
            aggregation=aggregations.SUM,
        )

    def step(x: torch.Tensor) -> None:
        with sides.block(x):
            shared.assign(shared + x.mean(0))
            own.assign_add(x.sum(0))
            shared.assign_add(own * 0.5)

    batch = deal(strategy, torch.ones(6, 2))
    with record_streams():
        for _ in range(3):
            strategy.run(step, args=(batch,))
            float((shared + own).detach().sum())


def test_threads_may_have_a_stream_and_a_strategy_each() -> None:
    errors: list[BaseException] = []

    def life(device: torch.device) -> None:
        try:
            strategy = torchstrategy.CentralStorageStrategy([device] * 2, device)
            with strategy.scope():
                model = Net()
                optimizer = sgd(model)
            step = whole(Sides(True), records=False)(model, optimizer)
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for batch in strategy.experimental_distribute_dataset(
                    [data(6, torch.float32)] * 3
                ):
                    strategy.run(step, args=(batch,))
                [float(value.sum()) for value in model.state_dict().values()]
        except BaseException as error:
            errors.append(error)

    with record_streams():
        threads = [threading.Thread(target=life, args=(device,)) for device in SIM[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("inside", [True, False], ids=["in forward", "around the call"])
def test_a_data_parallel_module_may_be_on_a_side_stream(inside: bool) -> None:
    sides = Sides()

    class Sideways(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not inside:
                return super().forward(x)
            with sides.block(x):
                result = super().forward(x)
            return result

    torch.manual_seed(0)
    model = Sideways().to(SIM[0])
    parallel = torchstrategy.DataParallel(model, SIM[:2])
    optimizer = sgd(model)
    x, y = (tensor.to(SIM[0]) for tensor in data(6, torch.float32))

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), y).backward()
        optimizer.step()

    with record_streams():
        for _ in range(3):
            if inside:
                train()
            else:
                with sides.block():
                    train()
        [float(value.sum()) for value in model.state_dict().values()]


@every_kind
def test_streams_are_as_before_where_a_step_fails_on_a_side_stream(make: Make) -> None:
    sides, strategy = Sides(), make()
    with strategy.scope():
        model = Net()
        optimizer = sgd(model)

    def step(batch: Any, fails: bool) -> None:
        with sides.block():
            optimizer.zero_grad()
            mse(model, batch).backward()
            if fails and replica_id() == 0:
                raise KeyError("this one")
            optimizer.step()

    batch = deal(strategy, data(6, torch.float32))
    with record_streams():
        for fails in (False, True, False):
            with pytest.raises(KeyError) if fails else nullcontext():
                strategy.run(step, args=(batch, fails))


# What it costs


@pytest.mark.parametrize(
    ("kind", "waits"),
    [("central", 6), ("mirrored", 4), ("central, one device twice", 0)],
)
def test_a_step_on_the_callers_stream_waits_for_copies_only(
    kind: str, waits: int
) -> None:
    """Streams wait for each other where a value goes from device to device.

    The program waits for nothing.
    """
    strategy = KINDS[kind]()
    with strategy.scope():
        model = mlp(torch.float32)
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    batch = deal(strategy, data(6, torch.float32))
    for _ in range(2):
        strategy.run(step, args=(batch,))
    with record_streams() as record:
        strategy.run(step, args=(batch,))
    found = [event.what for event in record.events if event.what != "launch"]
    assert found == ["wait"] * waits
