"""More names of `torch.cuda` that have a meaning on simulated devices.

Some are of torch's C++ below it.

Note [Names that are missing]: `cuda_names` and this file serve names. `AS_THEY_ARE` has
those of torch's own Python that need nothing of us. All others that this torch has
raise an error with their name, `NO_SUCH_THING`, when they are called:
`tests/simulated/test_names_of_cuda.py` takes the list from torch itself, so nothing is
forgotten.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn, final

import torch

from torchstrategy.testing._simulation import accounts as _accounts
from torchstrategy.testing._simulation import cuda_graphs
from torchstrategy.testing._simulation.module import (
    get_device_properties,
    reset_peak_memory_stats,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    current_device,
    device_count,
    known,
    ordinal,
    set_device,
)
from torchstrategy.testing._simulation.streams import (
    Stream,
    current_stream,
    default_stream,
    set_stream,
)
from torchstrategy.testing._simulation.sync_debug import (
    get_sync_debug_mode,
    set_sync_debug_mode,
)
from torchstrategy.testing._simulation.torch_internals import (
    CPP,
    KINETO,
    PRIVATEUSE1_ID,
)

Translated = Callable[[Any], Any]

# What torch's own Python does without a driver: classes of errors, modules, and
# functions that call other names.
AS_THEY_ARE = frozenset(
    (
        *(
            "CudaError",
            "DeferredCudaCallError",
            "StreamContext",
            "check_error",
            "cudaStatus",
            "has_half",
            "has_magma",
        ),
        *(
            "amp",
            "graphs",
            "jiterator",
            "memory",
            "nccl",
            "nvtx",
            "profiler",
            "random",
            "sparse",
            "streams",
            "tunable",
        ),
        *("get_gencode_flags", "make_graphed_callables"),
    )
)
NCCL = (2, 27, 5)


def more_names(translated: Translated) -> Iterator[tuple[Any, str, Any]]:
    """More attributes to replace: the module, the name, and its value in the block."""
    cuda: Any = torch.cuda
    for name, value in _functions(translated).items():
        yield cuda, name, value
    for name in (
        "CUDAGraph",
        "graph",
        "graph_pool_handle",
        "is_current_stream_capturing",
    ):
        yield cuda, name, getattr(cuda_graphs, name)
        yield cuda.graphs, name, getattr(cuda_graphs, name)
    # What has private names, and is in many programs all the same.
    yield cuda, "_sleep", _does_nothing
    yield cuda, "_cudart", _CUDART  # `check_error` asks it
    memory = {
        "_record_memory_history": _does_nothing,
        "_snapshot": lambda device=None, augment_with_fx_traces=False: _snapshot(),
        "_dump_snapshot": _dump_snapshot,
        "_set_allocator_settings": _does_nothing,
    }
    for name, value in memory.items():
        yield cuda.memory, name, value
    for name in ("MemPool", "use_mem_pool", "get_allocator_backend", "memory_snapshot"):
        yield cuda.memory, name, _functions(translated)[name]
    yield cuda.nccl, "version", lambda: NCCL
    for name in ("start", "stop"):
        yield cuda.profiler, name, _does_nothing


def _functions(translated: Translated) -> dict[str, Any]:
    def index(device: Any = None) -> int:
        return ordinal(translated(device))

    class ExternalStream(Stream):
        """A stream by its address, here a number of ours; see `Stream.cuda_stream`."""

        def __new__(cls, stream_ptr: int, device: Any = None, **_: Any) -> Any:
            identity = {
                "stream_id": stream_ptr,
                "device_index": index(device),
                "device_type": PRIVATEUSE1_ID,
            }
            return super().__new__(cls, **identity)

    return {
        "ExternalStream": ExternalStream,
        "MemPool": MemPool,
        "caching_allocator_disabled": _nothing_happens,
        "caching_allocator_enable": _does_nothing,
        "cudart": lambda: _CUDART,
        "current_solver_handle": lambda: 0,
        "device_memory_used": lambda device=None: _accounts.held(index(device)),
        "get_allocator_backend": lambda: "native",
        "get_stream_from_external": ExternalStream,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "get_device_properties": lambda device=None: properties(known(device, index)),
        "get_sync_debug_mode": get_sync_debug_mode,
        "memory_snapshot": lambda *args, **kwargs: _snapshot()["segments"],
        "memory_usage": lambda device=None: 0,
        "reset_accumulated_host_memory_stats": _does_nothing,
        "reset_peak_host_memory_stats": _does_nothing,
        "set_sync_debug_mode": set_sync_debug_mode,
        "use_mem_pool": _nothing_happens,
    }


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that tell a driver what no simulated device has."""


@contextmanager
def _nothing_happens(*args: Any, **kwargs: Any) -> Iterator[None]:
    """For blocks that tell an allocator what no simulated device has."""
    yield


class MemPool:
    """Stands in for `torch.cuda.MemPool`.

    It is a name for memory, which comes from where all comes from.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.id = cuda_graphs.graph_pool_handle()
        self.allocator = None

    def use_count(self) -> int:
        """How many hold it."""
        return 1

    def snapshot(self, *args: Any, **options: Any) -> list[Any]:
        """What is in it: nothing is told apart."""
        return []


def properties(device: int) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` says.

    The sizes are those of no GPU, and nothing enforces them.
    """
    known = get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return _Properties(
        name=known.name,
        major=major,
        minor=minor,
        total_memory=known.total_memory,
        multi_processor_count=known.multi_processor_count,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        gcnArchName="",
        warp_size=32,
        uuid=f"00000000-0000-0000-0000-{device:012x}",
        pci_bus_id=device,
        pci_device_id=0,
        pci_domain_id=0,
        L2_cache_size=4 * 2**20,
        clock_rate=1_000_000,
        memory_clock_rate=1_000_000,
        memory_bus_width=256,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=96 * 2**10,
        shared_memory_per_multiprocessor=96 * 2**10,
    )


class _Properties(SimpleNamespace):
    def __repr__(self) -> str:
        said = f"name='{self.name}', major={self.major}, minor={self.minor}"
        return (
            f"_CudaDeviceProperties({said}, "
            f"total_memory={self.total_memory // 2**20}MB)"
        )


def _snapshot() -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot` says: what devices hold, and no history."""
    segments = [
        {
            "device": device,
            "address": 0,
            "total_size": _accounts.account_of(device).reserved,
            "allocated_size": _accounts.account_of(device).allocated,
            "active_size": _accounts.account_of(device).allocated,
            "requested_size": _accounts.held(device),
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "stream": 0,
            "is_expandable": False,
            "frames": [],
            "blocks": [],
        }
        for device in range(device_count())
    ]
    traces: list[list[Any]] = [[] for _ in segments]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(
    filename: str = "dump_snapshot.pickle", *args: Any, **options: Any
) -> None:
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


class _CudaError(int):
    """The number of an error of the CUDA runtime."""

    success: _CudaError


_CudaError.success = _CudaError(0)


@final
class _Cudart:
    """What `torch.cuda.cudart()` returns: functions of the CUDA runtime."""

    cudaError = _CudaError

    @staticmethod
    def cudaGetErrorString(code: int) -> str:
        return {0: "no error", 2: "out of memory"}.get(code, f"error {code}")

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return free, total

    def __getattr__(self, name: str) -> Any:
        if name in (
            "cudaProfilerStart",
            "cudaProfilerStop",
            "cudaHostRegister",
            "cudaHostUnregister",
        ):
            return lambda *args: _CudaError.success
        raise AttributeError(
            _sentence(f"torch.cuda.cudart().{name}"), name=name, obj=self
        )


_CUDART = _Cudart()


# Profilers


def profilers_without_cuda() -> Iterator[tuple[Any, str, Any]]:
    """The constructors of torch's profilers, without CUDA.

    Its part of them prints a stack trace for each operator.
    """
    cuda, cpu = (
        torch.profiler.ProfilerActivity.CUDA,
        torch.profiler.ProfilerActivity.CPU,
    )
    kineto: Any = KINETO
    legacy: Any = torch.autograd.profiler.profile
    init_kineto, init_legacy = kineto.__init__, legacy.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("activities") is not None:
            kept = [activity for activity in options["activities"] if activity != cuda]
            options["activities"] = kept or [cpu]
        init_kineto(self, *args, **options)

    def init_old(self: Any, *args: Any, **options: Any) -> None:
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        options.pop("use_cuda", None)
        init_legacy(self, *args, **options)

    yield kineto, "__init__", init
    yield legacy, "__init__", init_old


# What is missing


def _sentence(name: str) -> str:
    return (
        f"{name} is not there: this process has simulated devices in place of GPUs, "
        "and no driver of CUDA. Where torch.cuda.get_device_name() begins with "
        "'simulated', run the program without it."
    )


def missing_names(served: set[str]) -> Iterator[tuple[Any, str, Any]]:
    """Stand-ins for public names of `torch.cuda` that neither are served nor work."""
    for name in torch.cuda.__all__:
        if name not in served and name not in AS_THEY_ARE:
            yield torch.cuda, name, _refused(f"torch.cuda.{name}")
    for name, value in list(vars(CPP).items()):
        if name in _OF_CPP:
            # Where torch was built with CUDA, its own function would ask the driver,
            # which need not be there.
            yield CPP, name, _OF_CPP[name]
        elif (
            name.startswith("_cuda_")
            and isinstance(value, type)
            and value.__module__ == "torch._utils"
        ):
            # Where torch was built without CUDA, it has classes in place of some
            # functions, which nobody can use.
            yield CPP, name, _refused(f"torch._C.{name}")


def _refused(name: str) -> Any:
    """A class, since some are used in `isinstance`, that cannot be called."""

    class Refused:
        NO_SUCH_THING = name

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _refuse(name)

    return Refused


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(_sentence(name))


# torch's C++


def of_cpp(name: str) -> Any:
    """What `torch._C` lacks: a function of CUDA, or an error with its name.

    It is asked for that.

    Raises:
        AttributeError: If simulated devices have nothing like it.
    """
    if name in _OF_CPP:
        return _OF_CPP[name]
    if name.startswith(
        (
            "_cuda_",
            "_Cuda",
            "_CUDA",
            "_nccl_",
            "_cudnn",
            "_cusparselt",
            "_gds_",
            "_nvtx",
        )
    ):
        raise AttributeError(_sentence(f"torch._C.{name}"), name=name, obj=CPP)
    raise AttributeError(
        f"module 'torch._C' has no attribute {name!r}", name=name, obj=CPP
    )


def _identity(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, PRIVATEUSE1_ID


def _exchange_device(device: int) -> int:
    before = current_device()
    if device >= 0:
        set_device(device)
    return before


def _put_stream(
    stream_id: int, device_index: int, device_type: int = PRIVATEUSE1_ID
) -> None:
    set_stream(
        Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


# Not `_cuda_getDeviceCount`: by it torch finds out whether it was built with CUDA, and
# would call the driver.
_OF_CPP: dict[str, Any] = {
    # A class: `torch.compiler.reset` imports a file that needs it wherever torch says
    # that it was built with CUDA.
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
    "_cuda_clearCublasWorkspaces": _does_nothing,
    "_cuda_emptyCache": _does_nothing,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_getArchFlags": lambda: " ".join(torch.cuda.get_arch_list()),
    "_cuda_getCompiledVersion": lambda: 12080,
    "_cuda_getCurrentBlasHandle": lambda: 0,
    "_cuda_getCurrentRawStream": lambda device: current_stream(device).stream_id,
    "_cuda_getCurrentStream": lambda device: _identity(current_stream(device)),
    "_cuda_getDefaultStream": lambda device: _identity(default_stream(device)),
    "_cuda_getDevice": current_device,
    "_cuda_get_sync_debug_mode": get_sync_debug_mode,
    "_cuda_init": _does_nothing,
    "_cuda_ipc_collect": _does_nothing,
    "_cuda_isCurrentStreamCapturing": cuda_graphs.is_current_stream_capturing,
    "_cuda_isHistoryEnabled": lambda: False,
    "_cuda_maybeExchangeDevice": _exchange_device,
    "_cuda_resetPeakMemoryStats": reset_peak_memory_stats,
    "_cuda_resetAccumulatedMemoryStats": _does_nothing,
    "_cuda_memoryStats": lambda device: torch.cuda.memory_stats_as_nested_dict(device),
    # Another object than `torch.cuda.set_device`: torch.compile of torch 2.15 has a
    # rule for each, and they differ.
    "_cuda_setDevice": lambda device: set_device(device),
    "_cuda_setStream": _put_stream,
    "_cuda_set_sync_debug_mode": set_sync_debug_mode,
    "_cuda_sleep": _does_nothing,
    "_cuda_synchronize": lambda: torch.get_device_module(NAME).synchronize(),
    "_host_emptyCache": _does_nothing,
}
