"""torch.nn.DataParallel runs on simulated devices, and shows its faults there.

The faults are those of torch 2.13. Each is a test `test_data_parallel_...`; the tests
`test_a_strategy_...` below it say what the same module does in the replicas of a
strategy on the same devices.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy
from data_parallel import Calls
from problems import assert_close, data, deal, gradients, mlp, parameters, sgd

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or torch.xpu.is_available()
    or torch.backends.mps.is_available(),
    reason=(
        "torch's own DataParallel takes the real accelerators, and this machine has "
        "some: hide them"
    ),
)

ROWS = torch.arange(8.0).view(4, 2)  # one row for each of four replicas


def parallel(module: nn.Module, devices: int = 4) -> Callable[..., Any]:
    """The module in a DataParallel."""
    return nn.DataParallel(module.to("sim:0"), list(range(devices)))


def central(devices: int = 4) -> torchstrategy.Strategy:
    """A strategy with a replica on each device, and DataParallel's parameters.

    They are where DataParallel wants them.
    """
    return torchstrategy.CentralStorageStrategy(
        [f"sim:{index}" for index in range(devices)], "sim:0"
    )


def replicated(
    strategy: torchstrategy.Strategy, module: nn.Module
) -> Callable[..., tuple[Any, ...]]:
    """Calls the module in replicas, each with its rows; returns each one's result."""
    strategy.distribute_module(module)
    return lambda *inputs: strategy.experimental_local_results(
        strategy.run(module, args=deal(strategy, inputs))
    )


# What it is right about


@pytest.mark.parametrize("device_ids", [[0], [0, 1], [0, 1, 2, 3], [3, 1, 2]])
def test_data_parallel_trains_like_plain_pytorch_if_the_loss_is_that_of_its_output(
    device_ids: list[int],
) -> None:
    torch.manual_seed(0)
    plain = mlp()
    model = mlp().to(f"sim:{device_ids[0]}")
    model.load_state_dict(plain.state_dict())
    wrapped, optimizers = nn.DataParallel(model, device_ids), [sgd(plain), sgd(model)]
    for step in range(3):
        x, y = data(7, seed=step)
        for forward, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            output = forward(x)
            F.mse_loss(output, y.to(output.device)).backward()
            optimizer.step()
        assert all(
            p.grad is not None and p.grad.device == model[0].weight.device
            for p in model.parameters()
        )
        assert_close(gradients(model), gradients(plain), f"gradient, step {step}")
        assert_close(parameters(model), parameters(plain), f"parameter, step {step}")


@pytest.mark.parametrize(
    ("output_device", "device"), [(None, "sim:1"), (3, "sim:3"), ("sim:0", "sim:0")]
)
def test_data_parallel_gathers_its_output_where_it_is_told(
    output_device: Any, device: str
) -> None:
    model = mlp().to("sim:1")
    x, _ = data(7)
    output = nn.parallel.data_parallel(model, x, [1, 2, 3], output_device)
    assert output.device == torch.device(device)
    assert_close(
        {"output": output.detach().cpu()}, {"output": model.cpu()(x).detach()}, device
    )


# Its replicas are built at every forward.


def remembering(seen: list[nn.Module]) -> nn.Module:
    """A module that puts itself, whichever copy it is, into a list."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(module)
        return x + 0

    return Calls(forward)


def test_data_parallel_builds_its_replicas_anew_at_every_forward() -> None:
    seen: list[nn.Module] = []
    model = parallel(remembering(seen))
    for _ in range(3):
        model(ROWS)
    assert len(set(seen)) == len(seen) == 3 * 4


def test_a_strategy_builds_its_replicas_once() -> None:
    seen: list[nn.Module] = []
    model = replicated(central(), remembering(seen))
    for _ in range(3):
        model(ROWS)
    assert len(seen) == 3 * 4
    assert len(set(seen)) == 4


# Output and loss are on the first device.


def peaks(step: Callable[[], object]) -> list[int]:
    """How many bytes each device holds at most in a step, beyond those before."""
    before = []
    for index in range(4):
        torch.sim.reset_peak_memory_stats(index)
        before.append(torch.sim.memory_allocated(index))
    step()
    return [
        torch.sim.max_memory_allocated(index) - held
        for index, held in enumerate(before)
    ]


def wide_problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A classifier whose outputs take more memory than its parameters and inputs.

    They take far more.
    """
    return nn.Linear(2, 500), torch.ones(400, 2), torch.zeros(400, dtype=torch.int64)


def test_data_parallel_fills_the_memory_of_the_first_device() -> None:
    module, x, y = wide_problem()
    model, y = parallel(module), y.to("sim:0")
    first, *others = peaks(lambda: F.cross_entropy(model(x), y).backward())
    assert first > 3 * max(others)


def test_a_strategy_fills_the_memory_of_all_devices_alike() -> None:
    module, x, y = wide_problem()
    strategy = central()
    strategy.distribute_module(module)
    batch = deal(strategy, (x, y))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(module(x), y).backward()

    strategy.run(step, args=batch)  # makes the copies of the parameters
    used = peaks(lambda: strategy.run(step, args=batch))
    assert max(used) < 1.2 * min(used)


# The mean of the replicas' means is not the mean.

UNEVEN = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]])  # 2 rows, 2 rows, 1 row


def mean_loss() -> nn.Module:
    """A module that computes its own loss, a mean over rows."""
    return Calls(lambda module, x: (module.weight * x).mean().view(1))


def test_data_parallel_takes_an_uneven_batch_for_an_even_one() -> None:
    module = mean_loss()
    loss = parallel(module)(UNEVEN).mean()
    loss.backward()
    wrong = (0.5 + 2.5 + 100.0) / 3
    assert loss.item() == pytest.approx(wrong)
    assert module.weight.grad.item() == pytest.approx(wrong)
    assert UNEVEN.mean().item() == pytest.approx(21.2)


# Batches that do not fill all devices


def counting_rows() -> nn.Module:
    return Calls(lambda module, x, scale=1: torch.full((1,), len(x), device=x.device))


def test_data_parallel_leaves_a_device_idle_and_does_not_say_so() -> None:
    assert parallel(counting_rows())(torch.ones(9, 1)).tolist() == [3, 3, 3]


def test_data_parallel_calls_idle_replicas_without_inputs_if_given_a_keyword() -> None:
    model = parallel(counting_rows())
    assert model(torch.ones(2, 1)).tolist() == [1, 1]
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        model(torch.ones(2, 1), scale=3)


@given(rows=st.integers(1, 40), devices=st.integers(2, 4))
def test_a_strategy_deals_each_device_the_rows_that_data_parallel_would(
    rows: int, devices: int
) -> None:
    batch, strategy = torch.arange(rows), central(devices)
    scattered = nn.parallel.scatter(batch, list(range(devices)))
    dealt = [
        piece
        for piece in strategy.experimental_local_results(deal(strategy, batch))
        if len(piece)
    ]
    assert [(piece.device, piece.tolist()) for piece in dealt] == [
        (piece.device, piece.tolist()) for piece in scattered
    ]


def test_data_parallel_drops_rows_if_its_inputs_have_different_numbers_of_them() -> (
    None
):
    model = parallel(Calls(lambda module, x, mask: x * mask))
    assert model(ROWS, torch.ones(1, 2)).shape == (1, 2)
    assert (ROWS * torch.ones(1, 2)).shape == (4, 2)


# What a replica may return


@dataclasses.dataclass(frozen=True)
class Output:
    device: torch.device


def on_first(x: torch.Tensor, there: Any, elsewhere: Any) -> Any:
    return there if x.device.index == 0 else elsewhere


RESULTS = {
    "a string": lambda module, x: "done",
    "a number": lambda module, x: 1,
    "a dataclass": lambda module, x: Output(x.device),
    "None from the first": lambda module, x: on_first(x, None, x),
    "None from all but the first": lambda module, x: on_first(x, x, None),
}


@pytest.mark.parametrize(
    "name", ["a number", "a dataclass", "None from all but the first"]
)
def test_data_parallel_raises_if_a_replica_returns(name: str) -> None:
    with pytest.raises(
        (TypeError, AttributeError), match=r"not iterable|no attribute 'device'"
    ):
        parallel(Calls(RESULTS[name]))(ROWS)


def test_data_parallel_returns_another_string_than_its_replicas() -> None:
    assert parallel(Calls(RESULTS["a string"]))(ROWS).startswith("<map object at ")


def test_data_parallel_drops_what_replicas_return_if_the_first_returns_none() -> None:
    assert parallel(Calls(RESULTS["None from the first"]))(ROWS) is None


# What a replica's module is


def listing(seen: list[list[str]]) -> nn.Module:
    """A module that lists its own parameters and its own state."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append([*dict(module.named_parameters()), *module.state_dict()])
        return x + 0

    return Calls(forward)


def test_data_parallel_has_no_parameters_in_its_replicas() -> None:
    seen: list[list[str]] = []
    parallel(listing(seen))(ROWS)
    assert seen == [[]] * 4


class Indirect(nn.Module):
    """Calls its layer by one of the ways that people have to get at it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layers = [self.layer]
        self.method = self.decode
        self.way = way
        if way == "forward":
            self.layer.forward = self.layer.forward  # type: ignore[method-assign]

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {
            "bound method": self.method,
            "list": self.layers[0],
            "forward": self.layer,
        }[self.way](x)


WAYS = ["bound method", "list", "forward"]


@pytest.mark.parametrize("way", WAYS)
def test_data_parallel_reaches_the_original_on_another_device_by_a(way: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"Caught RuntimeError in replica 1(.|\n)*on the same device"
    ):
        parallel(Indirect(way), devices=2)(ROWS)


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(2, 2), backend="eager")


def test_data_parallel_destroys_a_compiled_model() -> None:
    module = compiled()
    with pytest.raises(
        AttributeError, match="'Linear' object has no attribute 'weight'"
    ):
        parallel(module, devices=2)(ROWS)
    assert list(module.parameters()) == []


def caching(misses: list[nn.Module]) -> nn.Module:
    """A module that counts its calls, and keeps what it has computed once.

    It keeps it in an attribute.
    """

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        if module.cache is None:
            misses.append(module)
            module.cache = {"scale": 2}
        return x * module.cache["scale"]

    module: Any = Calls(forward)
    module.calls, module.cache = 0, None
    return module


def test_data_parallel_loses_what_forward_writes_on_the_module() -> None:
    misses: list[nn.Module] = []
    module: Any = caching(misses)
    model = parallel(module)
    for _ in range(3):
        model(ROWS)
    assert module.calls == 0
    assert len(misses) == 3 * 4


def running_mean_of(rows: torch.Tensor) -> list[float]:
    """That of a batch normalisation that has seen these rows once."""
    return pytest.approx((0.1 * rows.mean(0)).tolist())


def test_data_parallel_takes_batch_statistics_from_the_first_device_only() -> None:
    module, rows = nn.BatchNorm1d(2), torch.arange(32.0).view(16, 2)
    parallel(module)(rows)
    assert module.running_mean.tolist() == running_mean_of(rows[:4])


def test_data_parallel_writes_its_name_into_every_checkpoint() -> None:
    assert set(nn.DataParallel(nn.Linear(2, 2).to("sim:0"), [0, 1]).state_dict()) == {
        "module.weight",
        "module.bias",
    }


# What of the caller's state a replica has

tenant = contextvars.ContextVar("tenant", default="nobody")


@contextmanager
def inference() -> Iterator[Callable[[], bool]]:
    with torch.inference_mode():
        yield torch.is_inference_mode_enabled


@contextmanager
def variable() -> Iterator[Callable[[], bool]]:
    token = tenant.set("somebody")
    yield lambda: tenant.get() == "somebody"
    tenant.reset(token)


@contextmanager
def saved_tensor_hooks() -> Iterator[Callable[[], bool]]:
    threads, note = noting_threads()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield (
            lambda: (
                torch.ones(1, requires_grad=True).exp() is not None
                and threading.get_ident() in threads
            )
        )


@contextmanager
def function_mode() -> Iterator[Callable[[], bool]]:
    threads, note = noting_threads()

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return note(func(*args, **(kwargs or {})))

    with Noting():
        yield lambda: torch.ones(1) is not None and threading.get_ident() in threads


@contextmanager
def dispatch_mode() -> Iterator[Callable[[], bool]]:
    threads, note = noting_threads()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return note(func(*args, **(kwargs or {})))

    with Noting():
        yield lambda: torch.ones(1) is not None and threading.get_ident() in threads


def noting_threads() -> tuple[set[int], Callable[[Any], Any]]:
    """A set, and a function that puts into it which thread has called it.

    The function returns what it is given.
    """
    threads: set[int] = set()

    def note(value: Any) -> Any:
        threads.add(threading.get_ident())
        return value

    return threads, note


STATES: list[Callable[[], AbstractContextManager[Callable[[], bool]]]] = [
    inference,
    variable,
    saved_tensor_hooks,
    function_mode,
    dispatch_mode,
]


def asking(has_it: Callable[[], bool], answers: list[Any]) -> nn.Module:
    """A module that puts down, in each replica, what a question is answered there."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        answers.append(has_it())
        return x + 0

    return Calls(forward)


@pytest.mark.parametrize("state", STATES)
def test_data_parallel_loses_the_callers(state: Any) -> None:
    answers: list[bool] = []
    model = parallel(asking(lambda: has_it(), answers))
    with state() as has_it:
        assert has_it()
        model(ROWS)
    assert answers == [False] * 4


def autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("sim") if torch.is_autocast_enabled("sim") else None


def test_data_parallel_makes_float16_of_bfloat16_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It asks whether autocast is on for CUDA, whichever devices it runs on; let it be
    # asked about these.
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda device_type="sim": is_enabled(device_type)
    )
    answers: list[torch.dtype | None] = []
    with torch.autocast("sim", torch.bfloat16):
        parallel(asking(autocast_dtype, answers))(ROWS)
    assert answers == [torch.float16] * 4


# What becomes of an exception


class RefusedError(Exception):
    """An exception with two arguments, as those of many libraries."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)


FAILURES = [KeyError("label"), RefusedError("the batch", "its labels"), SystemExit(3)]


def failing(error: BaseException) -> nn.Module:
    """A module that fails on the second device."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.device.index == 1:
            raise error
        return x + 0

    return Calls(forward)


@pytest.mark.parametrize(
    ("error", "becomes", "arguments"),
    [
        (FAILURES[0], KeyError, r"^Caught KeyError in replica 1"),
        (FAILURES[1], RuntimeError, r"^Caught RefusedError in replica 1"),
        (FAILURES[2], KeyError, r"^1$"),  # which replica had no result
    ],
)
def test_data_parallel_makes_another_exception_of_a_replicas(
    error: BaseException,
    becomes: type[Exception],
    arguments: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where the original ends up, if anywhere.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(becomes, match=arguments) as raised:
        parallel(failing(error))(ROWS)
    assert type(raised.value) is becomes
    assert raised.value.args != error.args


# Which devices there may be

one_at_a_time = threading.Lock()


class Batches(nn.Module):
    """Counts the batches that it has seen, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with one_at_a_time:
            self.batches += 1
        return x + 0


def test_data_parallel_counts_a_batch_twice_on_a_device_that_is_listed_twice() -> None:
    module = Batches().to("sim:0")
    nn.DataParallel(module, [0, 1])(ROWS)
    assert module.batches.item() == 1
    # Both replicas have the memory of the original.
    nn.DataParallel(module, [0, 0])(ROWS)
    assert module.batches.item() == 1 + 2


def test_data_parallel_refuses_the_cpu() -> None:
    with pytest.raises(ValueError, match="Expected a non cpu device"):
        nn.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])  # type: ignore[list-item]


@pytest.mark.parametrize("has_mps", [False, True])
def test_data_parallel_is_the_bare_module_on_a_cpu_and_on_mps(
    has_mps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.sim, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    seen: list[nn.Module] = []
    module = remembering(seen)
    nn.DataParallel(module, [0, 1, 2, 3])(ROWS)
    # One forward of four rows: whatever breaks with replicas does not break here.
    assert seen == [module]


# Random numbers


def dropping() -> nn.Module:
    return nn.Dropout(0.5)


def test_data_parallel_draws_the_same_dropout_mask_on_every_device() -> None:
    masks = parallel(dropping())(torch.ones(4, 64))
    assert torch.equal(masks, masks[:1].expand(4, 64))


def drawing(draws: dict[int, float], order: Sequence[int] = ()) -> nn.Module:
    """A module that draws from the generator of the CPU.

    Replicas wait, if they are told to, until it is their turn.
    """
    has_drawn = [threading.Event() for _ in range(2)]

    def forward(
        module: nn.Module, x: torch.Tensor, replica: torch.Tensor
    ) -> torch.Tensor:
        index = int(replica)
        for earlier in order[: order.index(index)] if order else ():
            assert has_drawn[earlier].wait(timeout=30)
        draws[index] = torch.rand(()).item()
        has_drawn[index].set()
        return x + 0

    return Calls(forward)


def test_data_parallel_lets_chance_say_which_replica_draws_first() -> None:
    outcomes = []
    for order in ([0, 1], [1, 0]):  # neither of which it rules out
        draws: dict[int, float] = {}
        torch.manual_seed(1)
        parallel(drawing(draws, order), devices=2)(ROWS[:2], torch.arange(2))
        outcomes.append((draws[0], draws[1]))
    assert outcomes[0] == outcomes[1][::-1]
    assert outcomes[0] != outcomes[1]


def test_a_strategy_of_replicas_on_one_device_lets_them_draw_in_order() -> None:
    draws: dict[int, float] = {}
    torch.manual_seed(1)
    expected = torch.rand(()).item()
    outcomes = []
    for _ in range(2):
        torch.manual_seed(1)
        strategy = torchstrategy.CentralStorageStrategy(["sim:0", "sim:0"], "sim:0")
        replicated(strategy, drawing(draws))(ROWS[:2], torch.arange(2))
        outcomes.append(list(draws.items()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == (0, expected)  # replica 0 draws what plain PyTorch draws
    assert draws[1] != draws[0]
