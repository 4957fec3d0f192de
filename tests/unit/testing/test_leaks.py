"""What a block leaves behind is found and named; what it had and gave back is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy
from conditions import for_changes
from problems import data, deal, mlp, mse, sgd
from torchstrategy._base.context import Frame
from torchstrategy._group.replica_threads import ReplicaThreads
from torchstrategy.testing._leaks import (
    no_leaks,
    no_scope_leaks,
    no_thread_leaks,
    no_torch_state_leaks,
)

CHECKS = [no_leaks, no_scope_leaks, no_thread_leaks, no_torch_state_leaks]


def train(strategy: torchstrategy.Strategy) -> None:
    """One step that uses what there is to use.

    A scope, a team of threads, an optimizer, randomness.
    """
    with strategy.scope():
        model = torch.nn.Sequential(mlp(), torch.nn.Dropout())
        optimizer = sgd(model)

    def step(batch: Any) -> None:
        mse(model, batch).backward()
        optimizer.step()

    strategy.run(step, args=(deal(strategy, data(7)),))


@pytest.mark.parametrize("check", CHECKS)
def test_training_leaves_nothing_behind(
    strategy: torchstrategy.Strategy, check: Callable[[], AbstractContextManager[None]]
) -> None:
    with check():
        train(strategy)


@pytest.mark.parametrize("check", CHECKS)
def test_the_error_of_the_block_is_the_one_that_is_raised(
    check: Callable[[], AbstractContextManager[None]],
) -> None:
    error = ValueError("of the block")
    with pytest.raises(ValueError) as caught, check():
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")


# Threads


@contextmanager
def thread(name: str) -> Iterator[threading.Event]:
    """A thread that runs until the event is set, or until the block is left."""
    end = threading.Event()
    running = threading.Thread(target=end.wait, name=name, daemon=True)
    running.start()
    try:
        yield end
    finally:
        end.set()
        running.join()


@for_changes
def test_a_thread_that_goes_on_is_named_with_the_line_that_it_is_at() -> None:
    with (
        ExitStack() as later,
        pytest.raises(
            AssertionError,
            match=(
                r"^The thread 'prefetch' is still running, in .*threading\.py, line "
                r"\d+\.$"
            ),
        ),
        no_thread_leaks(timeout=0),
    ):
        later.enter_context(thread("prefetch"))


@for_changes
def test_all_threads_that_go_on_are_named() -> None:
    with (
        ExitStack() as later,
        pytest.raises(AssertionError) as caught,
        no_thread_leaks(timeout=0),
    ):
        for name in ("second", "first"):
            later.enter_context(thread(name))
    first, second = str(caught.value).splitlines()
    assert "'first'" in first and "'second'" in second


@for_changes
def test_a_thread_that_was_told_to_end_is_waited_for() -> None:
    with ExitStack() as later, no_thread_leaks():
        later.enter_context(thread("prefetch")).set()


def test_a_thread_that_was_there_before_is_not_looked_at() -> None:
    with thread("older"), no_thread_leaks(timeout=0):
        pass


def test_the_threads_of_a_strategy_in_use_are_no_leak() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    with no_thread_leaks(timeout=0):
        strategy.run(lambda: None)
        strategy.run(lambda: None)


def test_a_strategy_in_a_cycle_ends_its_threads_in_time() -> None:
    with no_thread_leaks():
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
        strategy.run(lambda: None)
        cycle: list[object] = [strategy]
        cycle.append(cycle)
        del strategy, cycle


@for_changes
def test_a_replicas_thread_that_outlives_its_strategy_is_a_leak() -> None:
    team = ReplicaThreads([torch.device("cpu", 0)] * 2)
    with (
        pytest.raises(
            AssertionError, match="'torchstrategy-replica-0' is still running"
        ),
        no_thread_leaks(timeout=0),
    ):
        team = ReplicaThreads([torch.device("cpu", 0)] * 2)
        team._finalizer.detach()  # nothing will tell its threads to end any more
    for replica in (0, 1):
        team.inboxes[replica].put(None)


@for_changes
def test_the_error_of_the_block_notes_the_threads_that_go_on() -> None:
    with (
        ExitStack() as later,
        pytest.raises(ValueError) as caught,
        no_thread_leaks(timeout=0),
    ):
        later.enter_context(thread("prefetch"))
        raise ValueError
    assert "'prefetch' is still running" in caught.value.__notes__[0]


# Scopes


def one() -> torchstrategy.Strategy:
    return torchstrategy.OneDeviceStrategy("cpu")


def test_a_scope_that_is_left_open_is_found() -> None:
    strategy = one()
    with (
        ExitStack() as later,
        pytest.raises(AssertionError) as caught,
        no_scope_leaks(),
    ):
        later.enter_context(strategy.scope())
    assert str(caught.value) == (
        f"This thread was outside of every scope, and is in the scope of {strategy!r}."
    )


def test_a_scope_of_the_same_strategy_that_is_left_open_is_found() -> None:
    strategy = one()
    with (
        strategy.scope(),
        ExitStack() as later,
        pytest.raises(
            AssertionError, match=r"was in the scope of .* and is in the scope of"
        ),
        no_scope_leaks(),
    ):
        later.enter_context(strategy.scope())


def test_a_scope_that_is_left_too_early_is_found() -> None:
    with ExitStack() as scope:
        scope.enter_context(one().scope())
        with (
            pytest.raises(
                AssertionError,
                match=r"was in the scope of .* and is outside of every scope",
            ),
            no_scope_leaks(),
        ):
            scope.close()


def test_a_strategy_that_was_set_for_the_thread_is_found() -> None:
    with pytest.raises(AssertionError, match="is in the scope of"), no_scope_leaks():
        torchstrategy.experimental_set_strategy(one())
    torchstrategy.experimental_set_strategy(None)


def test_a_replica_that_ends_in_the_scope_of_another_strategy_is_found() -> None:
    other_strategy = one()

    def step() -> None:
        with (
            ExitStack() as later,
            pytest.raises(
                AssertionError,
                match=(
                    r"was in replica [01] of .*Central.*, and "
                    r"is in the scope of .*One"
                ),
            ),
            no_scope_leaks(),
        ):
            later.enter_context(Frame(other_strategy))

    torchstrategy.CentralStorageStrategy(["cpu"] * 2).run(step)


def test_a_scope_that_was_open_before_and_still_is_is_no_leak() -> None:
    strategy = one()
    with strategy.scope(), no_scope_leaks(), strategy.scope():
        pass


# Torch's state


class Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def other(
    read: Callable[[], Any], write: Callable[[Any], Any], value: Any
) -> Iterator[None]:
    """A block in which a setting has another value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def setting(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return other(
        lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value
    )


@contextmanager
def hooked(register: Callable[[Callable[..., None]], Any]) -> Iterator[None]:
    handle = register(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def scope_of_another_thread() -> Iterator[None]:
    opened, end = threading.Event(), threading.Event()

    def open_it() -> None:
        with one().scope():
            opened.set()
            end.wait()

    running = threading.Thread(target=open_it, daemon=True)
    running.start()
    opened.wait()
    try:
        yield
    finally:
        end.set()
        running.join()


# What may be left on, and the settings that it changes.
CHANGES: dict[Callable[[], AbstractContextManager[Any]], set[str]] = {
    torch.no_grad: {"grad"},
    torch.inference_mode: {"grad", "inference", "backward on several threads"},
    lambda: torch.autocast("cpu", torch.bfloat16): {"autocast on cpu"},
    lambda: other(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False
    ): {"autocast cache"},
    lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone): {
        "saved tensors"
    },
    Mode: {"function modes"},
    DispatchMode: {"dispatch modes"},
    lambda: other(
        torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1
    ): {"num threads"},
    lambda: torch.device("meta"): {"function modes", "the default device"},
    lambda: other(torch.get_default_dtype, torch.set_default_dtype, torch.float64): {
        "the default dtype"
    },
    lambda: other(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn"
    ): {"determinism"},
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=False): {
        "anomaly detection"
    },
    lambda: other(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ): {"the precision of float32 products"},
    lambda: setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"): {
        "the precision of float32 products"
    },
    lambda: torch.autograd.set_multithreading_enabled(False): {
        "backward on several threads"
    },
    lambda: setting(torch.backends.cudnn, "benchmark", True): {
        "cuDNN's choice of algorithms"
    },
    lambda: hooked(register_module_forward_hook): {"global forward hooks"},
    lambda: hooked(register_module_parameter_registration_hook): {
        "global parameter registration hooks"
    },
    lambda: hooked(register_optimizer_step_post_hook): {"global optimizer post hooks"},
    scope_of_another_thread: {
        "Module.__init__",
        "Module.__setstate__",
        "Optimizer.__init__",
        "global parameter registration hooks",
    },
}


def settings_in(message: str) -> set[str]:
    """The settings that a message names."""
    return {line.split(" was ")[0] for line in message.splitlines()}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_left_on_is_found(
    change: Callable[[], AbstractContextManager[Any]],
) -> None:
    with ExitStack() as later:
        with pytest.raises(AssertionError) as caught, no_torch_state_leaks():
            later.enter_context(change())
        assert settings_in(str(caught.value)) == CHANGES[change]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_taken_back_is_no_leak(
    change: Callable[[], AbstractContextManager[Any]],
) -> None:
    with no_torch_state_leaks(), change():
        pass


@given(
    st.permutations([torch.no_grad, Mode, DispatchMode, torch.inference_mode]),
    st.integers(0, 4),
)
def test_of_several_things_that_are_left_on_each_is_found(
    changes: list[Callable[[], AbstractContextManager[Any]]], count: int
) -> None:
    left, taken_back = changes[:count], changes[count:]
    found: set[str] = set()
    with ExitStack() as later:
        try:
            with no_torch_state_leaks():
                for change in left:
                    later.enter_context(change())
                for change in taken_back:
                    with change():
                        pass
        except AssertionError as error:
            found = settings_in(str(error))
    assert found == set().union(*(CHANGES[change] for change in left))


def test_the_message_has_the_value_before_and_the_value_now() -> None:
    with (
        ExitStack() as later,
        pytest.raises(
            AssertionError,
            match=r"^the default dtype was torch\.float32, and is torch\.float64\.$",
        ),
        no_torch_state_leaks(),
    ):
        later.enter_context(
            other(torch.get_default_dtype, torch.set_default_dtype, torch.float64)
        )


def test_another_accelerator_that_is_left_current_is_found(
    simulated_devices: list[torch.device],
) -> None:
    with (
        pytest.raises(
            AssertionError, match=r"^the current accelerator was 0, and is 1\.$"
        ),
        no_torch_state_leaks(),
    ):
        torch.accelerator.set_device_index(simulated_devices[1])
    torch.accelerator.set_device_index(simulated_devices[0])


def test_random_numbers_that_were_drawn_are_no_leak() -> None:
    with no_torch_state_leaks():
        torch.rand(3)


def test_the_error_of_the_block_notes_what_is_left_on() -> None:
    with (
        ExitStack() as later,
        pytest.raises(ValueError) as caught,
        no_torch_state_leaks(),
    ):
        later.enter_context(torch.no_grad())
        raise ValueError
    assert caught.value.__notes__ == ["grad was True, and is False."]


# All of it


@for_changes
def test_one_report_names_all_that_was_left() -> None:
    with (
        ExitStack() as later,
        pytest.raises(AssertionError) as caught,
        no_leaks(timeout=0),
    ):
        later.enter_context(thread("prefetch"))
        later.enter_context(torch.no_grad())
        later.enter_context(one().scope())
    message = str(caught.value)
    assert "'prefetch' is still running" in message
    assert "is in the scope of" in message
    assert "grad was True, and is False." in message
    assert "Optimizer.__init__ was" in message
