"""Simulated devices: tensors in the CPU's memory that torch takes for others.

PyTorch takes them for tensors on `sim:0`, `sim:1` and so on.

A tensor of such a device is a plain `torch.Tensor`, not a subclass; torch's own
autograd, optimizers and modules work on it. Whenever torch needs a kernel, the CPU's
kernel runs on the same bytes.

    ordinals      which simulated devices there are, and which is current on this thread
    replacing     attributes that have other values for a while
    thread_modes  threads that are in a mode of the dispatcher from their start
    listeners     what is told what happens on streams
    pinned        pinned memory: memory of the CPU with a mark
    shapes        operators that are not computed
    program       what the program does with the CPU's memory, and where
    checksums     writes on pinned memory that torch does not see
    memory        one piece of CPU memory, as a tensor of either device
    uses          what was done last with each part of a storage
    recorder      which stream waits for which, and where none does and should
    dtypes        what CUDA refuses to compute, and the CPU does not
    accounts      how many bytes each device holds
    deterministic  `torch.use_deterministic_algorithms`
    kernels       how any operator is run
    backend       registers kernels with torch's dispatcher
    creation      kernels that make, copy and view tensors
    layers        layers for which torch asks a backend for other operators
    attention     attention as one kernel
    batch_norm    kernels of `torch.nn.SyncBatchNorm`
    sparse        kernels of sparse tensors
    recurrent     recurrent layers as cuDNN has them
    autocast      mixed precision
    generators    random numbers
    words         what messages call devices and files
    sync_debug    `torch.cuda.set_sync_debug_mode`
    streams       streams and events
    cuda_graphs   CUDA graphs, whose operators run again
    storages      storages: made, resized, exchanged, sent to another process
    tensors       functions of tensors for which torch's C++ has a wrong answer
    accelerator   `torch.accelerator` and backward
    parallel      `torch.nn.parallel`
    scripted      modules of TorchScript
    fakes         tensors with sizes and no memory
    pending       how an exception of a hook gets out of torch's C++
    facades       how a class of torch is replaced
    module        the module `torch.sim`
    registered    kernels that a program registers for CUDA
    cuda_memory   what `torch.cuda` tells of memory
    cuda_names    what the names of CUDA stand for, and which are missing
    cuda_alias    code that says "cuda"
"""

from __future__ import annotations

import torch

from torchstrategy._base.torch_internals import (
    keep_what_stands_in_for_gpus,
    privateuse1_name,
)
from torchstrategy.testing._simulation import (
    accelerator as _accelerator,
)
from torchstrategy.testing._simulation import (
    attention as _attention,
)
from torchstrategy.testing._simulation import (
    autocast as _autocast,
)
from torchstrategy.testing._simulation import (
    batch_norm as _batch_norm,
)
from torchstrategy.testing._simulation import (
    creation as _creation,
)
from torchstrategy.testing._simulation import (
    cuda_alias as _cuda_alias,
)
from torchstrategy.testing._simulation import (
    fakes as _fakes,
)
from torchstrategy.testing._simulation import (
    generators as _generators,
)
from torchstrategy.testing._simulation import (
    layers as _layers,
)
from torchstrategy.testing._simulation import (
    parallel as _parallel,
)
from torchstrategy.testing._simulation import (
    pinned as _pinned,
)
from torchstrategy.testing._simulation import (
    recurrent as _recurrent,
)
from torchstrategy.testing._simulation import (
    scripted as _scripted,
)
from torchstrategy.testing._simulation import (
    sparse as _sparse,
)
from torchstrategy.testing._simulation import (
    storages as _storages,
)
from torchstrategy.testing._simulation import (
    streams as _streams,
)
from torchstrategy.testing._simulation import (
    tensors as _tensors,
)
from torchstrategy.testing._simulation.backend import Backend
from torchstrategy.testing._simulation.cuda_alias import cuda_alias
from torchstrategy.testing._simulation.memory import check_byte_order
from torchstrategy.testing._simulation.module import make_module
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    declare,
    device_count,
    simulated_devices,
)
from torchstrategy.testing._simulation.pending import answer_whatever_is_pending
from torchstrategy.testing._simulation.recorder import record_streams
from torchstrategy.testing._simulation.torch_internals import (
    make_device_guard,
    register_python_backend,
)

__all__ = [
    "cuda_alias",
    "record_streams",
    "simulate_devices",
    "simulated_devices",
    "why_not_simulated",
]

# torch drops the kernels of a `Library` that nobody refers to.
_registered: list[Backend] = []


def simulate_devices(count: int) -> list[torch.device]:
    """Gives this process devices `sim:0` to `sim:<count - 1>`.

    On them, you can test code for several GPUs.

    Tensors report the device on which they are and compute true numbers. Torch refuses
    to mix two devices in its own words, "Expected all tensors to be on the same
    device". Autograd, `Module.to`, optimizers, checkpoints with `map_location`,
    generators, autocast, streams, `torch.accelerator` and `torch.nn.parallel` work as
    on accelerators; `torch.sim` is to these devices what `torch.cuda` is to GPUs. An
    operator that cannot be simulated raises an error with its name. All work is done at
    once, on the CPU, on the calling thread, backward included: a mistake that only
    shows when streams run at the same time does not show here.

    The devices are there for the whole process and cannot be removed: they become
    torch's accelerator, also on machines with GPUs. Call this once in a process that
    runs tests, before tensors are made; the pytest option `--simulate-devices=4` does.
    Each operator on such a device costs about 20 microseconds more; nothing else costs
    more.

    Args:
        count: How many devices, 1 to 64.

    Returns:
        The devices, in order.

    Raises:
        TypeError: If `count` is not an int.
        ValueError: If it is below 1 or above 64.
        RuntimeError: If this process simulates another number of devices already, if
            torch has another device of this kind (torch has room for one out-of-tree
            device type), or if it cannot simulate any (torch before 2.10).

    Example:
        >>> import subprocess, sys  # in a process of its own: it cannot be undone
        >>> program = '''
        ... import torch, torchstrategy.testing
        ... devices = torchstrategy.testing.simulate_devices(2)
        ... print(torch.ones(2, device="sim:1") * 3)
        ... torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
        ... '''
        >>> done = subprocess.run(
        ...     [sys.executable, "-c", program], capture_output=True, text=True
        ... )
        >>> print(done.stdout.strip())
        tensor([3., 3.], device='sim:1')
        >>> "Expected all tensors to be on the same device" in done.stderr
        True
    """
    _check_count(count)
    if device_count():
        if count != device_count():
            raise RuntimeError(
                f"simulate_devices({count}): this process simulates {device_count()} "
                "devices, and that cannot be changed. Decide on a number once, or use "
                "another process."
            )
        return simulated_devices()
    reason = why_not_simulated()
    if reason is not None:
        raise RuntimeError(f"simulate_devices({count}): {reason}")
    check_byte_order()
    # Before `torch.cuda` may say that the simulated devices are GPUs.
    keep_what_stands_in_for_gpus()
    register_python_backend(
        NAME,
        backend_module=make_module(),
        device_guard=make_device_guard(answer_whatever_is_pending),
    )
    declare(count)
    backend = Backend()
    for part in (
        _creation,
        _layers,
        _attention,
        _batch_norm,
        _sparse,
        _recurrent,
        _autocast,
    ):
        part.register(backend)
    backend.fall_back()
    backend.run_directly()
    _registered.append(backend)
    for mended in (
        _generators,
        _streams,
        _storages,
        _tensors,
        _accelerator,
        _parallel,
        _fakes,
        _cuda_alias,
    ):
        mended.install()
    _recurrent.install()
    _scripted.install()
    _pinned.install()
    _generators.make_default_generators(count)
    return simulated_devices()


def why_not_simulated() -> str | None:
    """Why this process cannot simulate devices; None if it can."""
    if register_python_backend is None:
        return (
            "devices are simulated with torch 2.10 or newer, and this is "
            f"{torch.__version__}."
        )
    if privateuse1_name() not in ("privateuseone", NAME):
        return (
            "torch has room for one device type from outside, and "
            f"{privateuse1_name()!r} has taken it. Do not import the package that "
            "brings it."
        )
    return None


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"simulate_devices takes a number of devices; got {count!r}, a "
            f"{type(count).__name__}."
        )
    if not 1 <= count <= _MOST:
        raise ValueError(f"simulate_devices({count}): simulate 1 to {_MOST} devices.")


_MOST = 64
