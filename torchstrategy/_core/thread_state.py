"""torch's thread-local state, which a replica's thread takes over from the caller of `run`.

A new thread has none of the caller's state: neither its grad mode nor its autocast, modes, default device or context
variables. The default dtype and the deterministic flag belong to the whole process, so nobody has to copy them.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import final

import torch

from torchstrategy._core import torch_internals
from torchstrategy._core.devices import in_use, is_accelerator
from torchstrategy._core.trace import warn_of_unseen_threads
from torchstrategy._core.types import Device, Tree


@final
class CallerState:
    """The state of the caller's thread, which makes this object. `run_in` takes it over on the thread of a replica.

    Args:
        devices: The devices of the replicas.
    """

    def __init__(self, devices: tuple[Device, ...]) -> None:
        warn_of_unseen_threads()  # a profiler is the one part of the state that another thread cannot take over
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in _usual_autocast()]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.saved_tensors = torch_internals.saved_tensors_hooks()
        self.function_modes = tuple(torch_internals.function_modes())  # the default device is one of them
        self.dispatch_modes = tuple(torch_internals.dispatch_modes())
        self.num_threads = torch.get_num_threads()  # the libraries below torch keep it for each thread
        self.streams = {d: torch.accelerator.current_stream(d) for d in dict.fromkeys(devices) if is_accelerator(d)}
        self.variables = contextvars.copy_context()

    def run_in(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        """Calls `fn` on this thread, for a replica on `device`, in the state that was taken.

        Each call gets its own copy of the context variables, so that no replica sees what another one sets.
        """
        return self.variables.copy().run(self._run_in, device, fn)

    def _run_in(self, device: Device, fn: Callable[[], Tree]) -> Tree:
        try:
            torch.set_num_threads(self.num_threads)
            if device in self.streams:
                torch.accelerator.set_device_index(device)
                torch.accelerator.set_stream(self.streams[device])
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(self.autocast_cache)
            for device_type, enabled, dtype in self.autocast:
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
            if self.saved_tensors is not None:
                torch_internals.push_saved_tensors_hooks(*self.saved_tensors)
            for mode in self.function_modes:
                torch_internals.push_function_mode(mode)
            for mode in self.dispatch_modes:
                torch_internals.push_dispatch_mode(mode)
            # Autograd would run the backward of an accelerator on a thread of its own, where no replica is entered.
            # Without multithreading, it runs on this thread, which has the replica's context.
            with (
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.grad),
                torch.autograd.set_multithreading_enabled(False),
                in_use(device),
            ):
                return fn()
        finally:
            _take_everything_off()


def _take_everything_off() -> None:
    """Removes all state from a replica's thread, as it is between runs, also what the step has left behind."""
    torch.set_default_device(None)
    # `left` keeps the modes alive: to pop a mode that nobody else refers to crashes torch 2.10.
    left = torch_internals.dispatch_modes()
    for _ in left:
        torch_internals.pop_dispatch_mode()
    while torch_internals.function_modes():
        torch_internals.pop_function_mode()
    while torch_internals.saved_tensors_hooks() is not None:
        torch_internals.pop_saved_tensors_hooks()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    for device_type, dtype in _usual_autocast().items():
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, dtype)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block whose tensors are no inference tensors, and whose operations autograd does not record.

    It does not depend on the modes of the caller.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _usual_autocast() -> dict[str, torch.dtype]:
    """The device types that have autocast, and the default dtype of autocast on each."""
    return _read_usual_autocast(torch_internals.privateuse1_name())


@functools.cache
def _read_usual_autocast(own_type: str) -> dict[str, torch.dtype]:
    """Reads the defaults on a new thread, on which nobody has changed them.

    Args:
        own_type: The name that torch's type for backends of others, `PrivateUse1`, has now.
    """
    usual: dict[str, torch.dtype] = {}

    def read() -> None:
        for device_type in ("cpu", "cuda", "xpu", "mps", "mtia", own_type):
            with suppress(RuntimeError):
                usual[device_type] = torch.get_autocast_dtype(device_type)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return usual
