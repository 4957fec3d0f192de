"""What a replica's thread wears: all that the caller of `run` has on.

It wears nothing from an earlier run.
"""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchstrategy
from conditions import without_simulated_devices
from problems import in_pieces
from topologies import ALONE, compute_devices
from torchstrategy._base.context import using_device
from torchstrategy._base.devices import memory_device

Log = list[tuple[int, str]]
"""Who saw something, as (replica, name)."""

DEFAULT = torchstrategy.get_strategy()
SETTING: contextvars.ContextVar[str] = contextvars.ContextVar(
    "SETTING", default="default"
)


@pytest.fixture(
    params=[compute_devices(3), ["cpu:1", "cpu:2"]],
    ids=["three replicas", "two logical devices"],
)
def several(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    """Several replicas.

    Where their parameters live makes no difference to what their threads wear.
    """
    return torchstrategy.CentralStorageStrategy(request.param)


class RecordsFunctions(TorchFunctionMode):
    """Writes down the replica and its name whenever torch.sin is called."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.sin:
            self.log.append((replica(), self.name))
        return func(*args, **(kwargs or {}))


class RecordsDispatch(TorchDispatchMode):
    """Writes down the replica and its name whenever torch.sin is dispatched."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.name, self.log = name, log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.sin.default:
            self.log.append((replica(), self.name))
        return func(*args, **(kwargs or {}))


def replica() -> int:
    return torchstrategy.get_replica_context().replica_id_in_sync_group


def results(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica; of one object, one for each."""
    found: dict[int, Any] = {}

    def step() -> None:
        found[replica()] = fn()

    strategy.run(step)
    return [found[r] for r in range(strategy.num_replicas_in_sync)]


def worn() -> dict[str, Any]:
    """The state of this thread, as far as torch and Python let it be asked for."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast to": torch.get_autocast_dtype("cpu"),
        "autocast caches": torch.is_autocast_cache_enabled(),
        "autocast of another device": torch.is_autocast_enabled("cuda"),
        "a matrix product is of": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        "default device": torch.get_default_device(),
        "tensors land on": torch.empty(1).device,
        "default dtype": torch.get_default_dtype(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "dispatch modes": len(
            torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "context variable": SETTING.get(),
    }


def worn_in(strategy: torchstrategy.Strategy) -> list[dict[str, Any]]:
    """What this thread wears where the device of each replica is in use.

    Each replica should wear the same.
    """
    is_default = strategy is DEFAULT  # its replica is wherever its caller is
    expected = []
    for device in [None] if is_default else strategy.extended.worker_devices:
        with using_device(device):
            expected.append(worn())
    return expected


@contextmanager
def context_variable(value: str) -> Iterator[None]:
    token = SETTING.set(value)
    try:
        yield
    finally:
        SETTING.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def autocast_of_another_device() -> Iterator[None]:
    # torch.autocast("cuda") switches itself off where there is none.
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def same(value: Any) -> Any:
    return value


SETTINGS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "grad_in_inference_mode": lambda: both(torch.inference_mode(), torch.enable_grad()),
    "no_inference_in_inference_mode": lambda: both(
        torch.inference_mode(), torch.inference_mode(False)
    ),
    "autocast_bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast_without_cache": lambda: torch.autocast(
        "cpu", torch.bfloat16, cache_enabled=False
    ),
    "autocast_off_in_autocast": lambda: both(
        torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False)
    ),
    "autocast_of_another_device": autocast_of_another_device,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(same, same),
    "function_mode": lambda: RecordsFunctions("", []),
    "dispatch_mode": lambda: RecordsDispatch("", []),
    "device_meta": lambda: torch.device("meta"),
    "device_cpu": lambda: torch.device("cpu"),
    "dtype": lambda: default_dtype(torch.float64),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "threads": lambda: threads(1 if torch.get_num_threads() > 1 else 2),
    "context_variable": lambda: context_variable("the caller's"),
    "everything": lambda: both(
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(same, same),
        torch.device("meta"),
        RecordsFunctions("", []),
        RecordsDispatch("", []),
        context_variable("the caller's"),
    ),
}


@contextmanager
def both(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Something that a caller may have on."""
    return request.param


# What a replica inherits


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_replica_wears_what_its_caller_wears(
    strategy: torchstrategy.Strategy, setting: Callable[[], Any]
) -> None:
    # Its threads are there already, and have seen other settings.
    results(strategy, worn)
    with setting():
        expected = worn()
        assert results(strategy, worn) == worn_in(strategy)
        assert worn() == expected


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_is_left_for_the_next_run(
    several: torchstrategy.Strategy, setting: Callable[[], Any]
) -> None:
    expected = worn_in(several)
    with setting():
        results(several, worn)
    assert results(several, worn) == expected


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_is_left_for_the_next_run_after_a_failure(
    several: torchstrategy.Strategy, setting: Callable[[], Any]
) -> None:
    def fails() -> None:
        torchstrategy.get_replica_context().merge_call(lambda strategy: None)
        if replica() == several.num_replicas_in_sync - 1:
            raise ValueError("bad")
        torchstrategy.get_replica_context().merge_call(lambda strategy: None)

    before, expected = worn(), worn_in(several)
    with setting(), pytest.raises(ValueError, match="bad"):
        several.run(fails)
    assert worn() == before
    assert results(several, worn) == expected


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_meetings_change_nothing_about_it(
    several: torchstrategy.Strategy, setting: Callable[[], Any]
) -> None:
    def step() -> list[dict[str, Any]]:
        before = worn()
        torchstrategy.get_replica_context().merge_call(
            lambda strategy: merged.append(worn())
        )
        return [before, worn()]

    merged: list[dict[str, Any]] = []
    with setting():
        expected = worn()
        assert results(several, step) == [[each, each] for each in worn_in(several)]
    assert merged == [expected]


def test_a_run_of_another_thread_wears_what_that_thread_wears(
    several: torchstrategy.Strategy,
) -> None:
    found = []

    def elsewhere() -> None:
        with torch.autocast("cpu", torch.float16), context_variable("elsewhere"):
            found.append(results(several, worn) == worn_in(several))

    with torch.no_grad():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(timeout=30)
    assert found == [True]


def test_a_run_inside_a_merge_function_wears_what_that_wears(
    several: torchstrategy.Strategy,
) -> None:
    found = []

    def merged(strategy: torchstrategy.Strategy) -> None:
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.float16),
            context_variable("merged"),
        ):
            found.append(results(strategy, worn) == worn_in(strategy))

    def step() -> list[dict[str, Any]]:
        before = worn()
        torchstrategy.get_replica_context().merge_call(merged)
        return [before, worn()]

    with torch.autocast("cpu", torch.bfloat16):
        assert results(several, step) == [[each, each] for each in worn_in(several)]
    assert found == [True]


# Modes, hooks and variables are the caller's own objects


@pytest.mark.parametrize("mode", [RecordsFunctions, RecordsDispatch])
def test_modes_see_every_replica_the_inner_one_first(
    strategy: torchstrategy.Strategy, mode: Any
) -> None:
    log: Log = []  # replicas on devices of their own write in any order
    with mode("outer", log), mode("inner", log):
        strategy.run(lambda: torch.sin(torch.ones(1)))
    for r in range(strategy.num_replicas_in_sync):
        assert [name for at, name in log if at == r] == ["inner", "outer"]
    strategy.run(lambda: torch.sin(torch.ones(1)))
    assert len(log) == 2 * strategy.num_replicas_in_sync


def test_a_flop_counter_counts_what_the_step_on_the_whole_batch_costs(
    strategy: torchstrategy.Strategy,
) -> None:
    inputs = torch.randn(12, 8)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = copy.deepcopy(model).cpu()
    with FlopCounterMode(display=False) as expected:
        plain(inputs).square().mean().backward()

    pieces = in_pieces(strategy, inputs)
    with FlopCounterMode(display=False) as counted:
        strategy.run(
            lambda piece: model(piece).square().mean().backward(), args=(pieces,)
        )
    assert counted.get_total_flops() == expected.get_total_flops() > 0


def test_saved_tensor_hooks_see_what_every_replica_saves(
    strategy: torchstrategy.Strategy,
) -> None:
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    def step() -> None:
        torch.ones(1, requires_grad=True).exp().sum().backward()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        strategy.run(step)
    assert len(packed) == len(unpacked) == strategy.num_replicas_in_sync
    strategy.run(step)
    assert len(packed) == strategy.num_replicas_in_sync


def test_what_a_replica_writes_on_a_context_variable_stays_inside(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> list[str]:
        seen = [SETTING.get()]
        SETTING.set(f"of replica {replica()}")
        torchstrategy.get_replica_context().merge_call(
            lambda strategy: seen.append(SETTING.get())
        )
        return [*seen, SETTING.get()]

    with context_variable("the caller's"):
        found = results(several, step)
        assert SETTING.get() == "the caller's"
    assert [own for *_, own in found] == [
        f"of replica {r}" for r in range(several.num_replicas_in_sync)
    ]
    assert found[0][:2] == ["the caller's", "the caller's"]
    assert all(seen == "the caller's" for seen, *_ in found)
    assert results(several, SETTING.get) == ["default"] * several.num_replicas_in_sync


def test_tensors_that_inference_mode_makes_are_inference_tensors(
    strategy: torchstrategy.Strategy,
) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    with torch.inference_mode():
        found = results(strategy, lambda: model(torch.ones(1, 2)).is_inference())
    assert found == [True] * strategy.num_replicas_in_sync

    def trains() -> None:
        model(torch.ones(1, 2)).sum().backward()

    strategy.run(trains)
    assert model.weight.grad is not None
    assert not model.weight.grad.is_inference()


# A step that changes the state of its thread


def leaves_grad_off() -> None:
    torch.set_grad_enabled(False)


def leaves_autocast_on() -> None:
    torch.autocast("cpu", torch.float16).__enter__()


def leaves_autocast_settings() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)


def leaves_autocast_of_another_device_on() -> None:
    torch.set_autocast_enabled("cuda", True)


def leaves_a_function_mode_on() -> None:
    RecordsFunctions("", []).__enter__()


def leaves_a_dispatch_mode_on() -> None:
    RecordsDispatch("", []).__enter__()


def leaves_saved_tensors_hooks_on() -> None:
    torch.autograd.graph.saved_tensors_hooks(same, same).__enter__()


def leaves_a_default_device() -> None:
    torch.set_default_device("meta")


def leaves_a_context_variable() -> None:
    SETTING.set("the step's")


def leaves_more_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


LEAVES = [
    leaves_grad_off,
    leaves_autocast_on,
    leaves_autocast_settings,
    leaves_autocast_of_another_device_on,
    leaves_a_function_mode_on,
    leaves_a_dispatch_mode_on,
    leaves_saved_tensors_hooks_on,
    leaves_a_default_device,
    leaves_a_context_variable,
    leaves_more_threads,
]


def test_a_stream_that_a_step_leaves_on_is_taken_off(
    several: torchstrategy.Strategy,
) -> None:
    devices = {
        device
        for device in several.extended.worker_devices
        if torch.device(device).type != "cpu"
    }
    if not devices:
        pytest.skip("needs simulated devices: run pytest with --simulate-devices=4")
    here = torch.accelerator.current_device_index()
    before = {device: torch.accelerator.current_stream(device) for device in devices}

    def step() -> None:
        torch.accelerator.set_stream(
            torch.Stream(torch.accelerator.current_accelerator())
        )

    several.run(step)
    assert {
        device: torch.accelerator.current_stream(device) for device in devices
    } == before
    assert torch.accelerator.current_device_index() == here


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("fails", [False, True], ids=["and returns", "and fails"])
def test_what_a_step_leaves_on_reaches_neither_the_caller_nor_the_next_run(
    several: torchstrategy.Strategy, leaves: Callable[[], None], fails: bool
) -> None:
    expected = worn()

    def step() -> None:
        leaves()
        assert worn() != expected
        if fails:
            raise ValueError("bad")

    if fails:
        with pytest.raises(ValueError, match="bad"):
            several.run(step)
    else:
        several.run(step)
    assert worn() == expected
    assert results(several, worn) == worn_in(several)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        RecordsFunctions("", []),
        torch.device("cpu"),
    ):
        assert results(several, worn) == worn_in(several)


@pytest.mark.parametrize("leaves", LEAVES)
def test_what_a_step_leaves_on_does_not_pull_off_what_its_caller_wears(
    several: torchstrategy.Strategy, leaves: Callable[[], None]
) -> None:
    expected = worn_in(several)
    log: Log = []
    hooks = torch.autograd.graph.saved_tensors_hooks(same, same)
    with (
        RecordsFunctions("", log),
        RecordsDispatch("", log),
        hooks,
        torch.autocast("cpu", torch.bfloat16),
    ):
        inside = worn()
        several.run(leaves)
        assert worn() == inside
        assert results(several, worn) == worn_in(several)
    assert results(several, worn) == expected


def test_an_autocast_that_was_left_on_does_not_make_later_runs_use_old_weights(
    several: torchstrategy.Strategy,
) -> None:
    # Autocast keeps the casted weights until the outermost autocast of a thread is
    # left. If a thread counts one that was never left, it keeps them for ever.
    with several.scope():
        model = nn.Linear(2, 1, bias=False)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(1, 2)).detach().float()

    several.run(leaves_autocast_on)
    several.run(step)
    with torch.no_grad():
        model.weight.fill_(3.0)
    for output in several.experimental_local_results(several.run(step)):
        assert output.item() == 6.0


# Training under autocast


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def trained_by_hand(
    model: nn.Module, inputs: torch.Tensor, count: int, context: Callable[[], Any]
) -> None:
    """Three steps on the pieces that the replicas would have, one after the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for piece in inputs.chunk(count):
            with context():
                gradients = torch.autograd.grad(
                    model(piece).square().mean(), list(model.parameters())
                )
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                shared = gradient / count
                parameter.grad = (
                    shared if parameter.grad is None else parameter.grad + shared
                )
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast_is_what_it_is_by_hand(
    several: torchstrategy.Strategy, dtype: torch.dtype
) -> None:
    inputs = torch.randn(12, 16)
    with several.scope():
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    count, device = (
        several.num_replicas_in_sync,
        memory_device(several.extended.worker_devices[0]),
    )
    by_hand, in_full = copy.deepcopy(model).to(device), copy.deepcopy(model).to(device)
    pieces = in_pieces(several, inputs)

    def step(piece: torch.Tensor) -> torch.dtype:
        optimizer.zero_grad()
        outputs = model(piece)
        outputs.square().mean().backward()
        optimizer.step()
        return outputs.dtype

    for _ in range(3):
        with torch.autocast(device.type, dtype):
            dtypes = several.experimental_local_results(
                several.run(step, args=(pieces,))
            )
        assert set(dtypes) == {dtype}
    inputs = inputs.to(device)
    trained_by_hand(by_hand, inputs, count, lambda: torch.autocast(device.type, dtype))
    trained_by_hand(in_full, inputs, count, nullcontext)

    def distance(other: nn.Module) -> float:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(
            (ours.cpu() - theirs.cpu()).abs().max().item() for ours, theirs in pairs
        )

    assert distance(by_hand) < 1e-6
    assert distance(in_full) > 1e-5, "this test cannot tell the two apart"


# Who runs where


@pytest.mark.parametrize("strategy", ALONE, indirect=True)
def test_one_replica_runs_on_the_callers_thread(
    strategy: torchstrategy.Strategy,
) -> None:
    assert results(strategy, threading.get_ident) == [threading.get_ident()]
    before = set(threading.enumerate())
    strategy.run(
        lambda: torchstrategy.get_replica_context().merge_call(lambda strategy: None)
    )
    assert not set(threading.enumerate()) - before


def test_replicas_on_one_device_run_one_at_a_time_and_in_order(
    in_one_place: torchstrategy.Strategy,
) -> None:
    log: list[Any] = []
    inside: list[int] = []

    def part(name: str) -> None:
        inside.append(replica())
        # Long enough for Python to switch threads if another one could run.
        for _ in range(200):
            assert inside == [replica()]
            torch.ones(10).sum()
        inside.pop()
        log.append((name, replica()))

    def step() -> None:
        context = torchstrategy.get_replica_context()
        part("before")
        context.merge_call(lambda strategy: log.append("merge"))
        part("between")
        context.all_reduce("sum", torch.ones(()))
        part("after")

    in_one_place.run(step)
    ids = range(in_one_place.num_replicas_in_sync)
    expected = (
        [("before", r) for r in ids],
        ["merge"],
        [("between", r) for r in ids],
        [("after", r) for r in ids],
    )
    assert log == [entry for part_of_log in expected for entry in part_of_log]


# Replicas on a device that is not the caller's need such a mode.
@without_simulated_devices
def test_on_the_cpu_no_replica_pays_for_a_function_mode(
    strategy: torchstrategy.Strategy,
) -> None:
    def modes() -> int:
        return len(torch.overrides._get_current_function_mode_stack())

    assert results(strategy, modes) == [0] * strategy.num_replicas_in_sync
    with strategy.scope():
        assert modes() == 0
        nn.Linear(2, 2)


@pytest.mark.parametrize(
    "make", [torchstrategy.get_strategy, lambda: torchstrategy.OneDeviceStrategy("cpu")]
)
def test_with_one_device_a_step_is_called_as_it_is(
    make: Callable[[], torchstrategy.Strategy],
) -> None:
    strategy = make()
    arguments, calls = (object(), [1], {"a": torch.ones(1)}), []
    result = object()

    def step(*args: Any, **kwargs: Any) -> object:
        calls.append((args, kwargs))
        return result

    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert strategy.run(step, args=arguments, kwargs={"key": model}) is result
    ((args, kwargs),) = calls
    assert all(
        given is received for given, received in zip(arguments, args, strict=True)
    )
    assert kwargs["key"] is model
    assert strategy.run(lambda: (type(model), type(optimizer))) == (
        nn.Linear,
        torch.optim.SGD,
    )
