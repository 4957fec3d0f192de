"""`torch.accelerator` and backward on simulated devices.

These ask torch's C++ about devices. A device guard that is written in Python can only
say that there is one device, the first. So the functions that ask the guard are
replaced.
"""

from __future__ import annotations

import threading
from typing import Any, final

import torch

from torchstrategy.testing._simulation import module as _module
from torchstrategy.testing._simulation import ordinals as _ordinals
from torchstrategy.testing._simulation import streams as _streams
from torchstrategy.testing._simulation.pending import raise_what_was_taken
from torchstrategy.testing._simulation.torch_internals import ENGINE


def install() -> None:
    """Replaces the functions."""
    accelerator: Any = torch.accelerator
    accelerator.device_count = _ordinals.device_count
    accelerator.current_device_index = accelerator.current_device_idx = (
        _ordinals.current_device
    )
    accelerator.set_device_index = accelerator.set_device_idx = _ordinals.set_device
    accelerator.device_index = _ordinals.current
    accelerator.synchronize = _module.synchronize
    accelerator.current_stream = _streams.current_stream
    accelerator.set_stream = _streams.set_stream
    accelerator.memory_allocated = _module.memory_allocated
    accelerator.max_memory_allocated = _module.max_memory_allocated
    accelerator.reset_peak_memory_stats = _module.reset_peak_memory_stats
    ENGINE.replace(_Engine(ENGINE.now()))


@final
class _Here(threading.local):
    depth = 0


_here = _Here()


def depth_of_backward() -> int:
    """How many backward passes this thread is in: 0 if it is in none."""
    return _here.depth


@final
class _Engine:
    """Runs backward on the calling thread.

    PyTorch's pool of threads has no thread for a second device.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            _here.depth += 1
            try:
                return self._engine.run_backward(*args, **kwargs)
            # Python raises this error for a C function that failed and left no
            # exception; see `pending`.
            except SystemError:
                raise_what_was_taken()
                raise
            finally:
                _here.depth -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
