"""What the names of CUDA stand for in a block of `cuda_alias`.

They are those of `torch.cuda`, and of torch's C++ below it. What they tell of memory is
in `cuda_memory`.

Note [Names that are missing]: `AS_THEY_ARE` has the names of torch's own Python that
need nothing of us. Others that this torch has, and that are not served here, raise an
error with their name, `NO_SUCH_THING`, when they are called:
`tests/simulated/test_names_of_cuda.py` takes the list from torch itself, so nothing is
forgotten.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, final

import torch

from torchstrategy.testing._simulation import cuda_graphs
from torchstrategy.testing._simulation.cuda_memory import (
    functions_of_memory,
    private_functions_of_memory,
)
from torchstrategy.testing._simulation.generators import default_generators
from torchstrategy.testing._simulation.module import (
    get_device_properties,
    manual_seed_all,
    reset_peak_memory_stats,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    current_device,
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
from torchstrategy.testing._simulation.torch_internals import CPP, PRIVATEUSE1_ID

# What `torch.sim` has under the same name.
_SAME = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)

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


def names_of_cuda(translated: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    """The attributes to replace: the module, the name, and its value in the block.

    Args:
        translated: Makes, of what a program says for a device, what simulated devices
            are called.
    """
    served = set()
    for owner, name, value in _served(translated):
        if owner is torch.cuda:
            served.add(name)
        yield owner, name, value
    yield from missing_names(served)  # see Note [Names that are missing]


def _served(translated: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    module = torch.get_device_module(NAME)
    for name in _SAME:
        yield torch.cuda, name, _of_its_own(getattr(module, name))
    functions = _functions(translated)
    for name, function in functions.items():
        yield torch.cuda, name, function
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, functions[name]
    # Parts of the module are modules, and have the functions, too.
    for part, names in (
        (torch.cuda.memory, _OF_MEMORY),
        (torch.cuda.random, _OF_RANDOM),
    ):
        for name in names:
            function = functions.get(name) or getattr(module, name)
            yield part, name, _of_its_own(function)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, _marks_nothing
    for name, dtype in _LEGACY.items():
        yield torch.cuda, name, _legacy(name, dtype)
    yield from _of_groups()
    for name in (
        "CUDAGraph",
        "graph",
        "graph_pool_handle",
        "is_current_stream_capturing",
    ):
        yield torch.cuda, name, getattr(cuda_graphs, name)
        yield torch.cuda.graphs, name, getattr(cuda_graphs, name)
    # What has private names, and is in many programs all the same.
    yield torch.cuda, "_sleep", _does_nothing
    yield torch.cuda, "_cudart", _CUDART  # `check_error` asks it
    for name, function in private_functions_of_memory().items():
        yield torch.cuda.memory, name, function
    yield torch.cuda.nccl, "version", lambda: NCCL
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, _does_nothing


def _of_groups() -> Iterator[tuple[Any, str, Any]]:
    """What `torch.distributed` says of groups.

    Its own code goes on to hear of simulated devices.
    """
    groups: Any = torch.distributed
    if groups.is_available():
        yield groups, "get_backend_config", _in_words_of_cuda(groups.get_backend_config)
        yield groups, "is_nccl_available", lambda: True


def _in_words_of_cuda(get_config: Callable[..., str]) -> Callable[..., str]:
    """Makes a replacement that says `cuda:nccl` to programs.

    This library's own strategies look for their devices.
    """

    @functools.wraps(get_config)
    def get(*args: Any, **kwargs: Any) -> str:
        config = get_config(*args, **kwargs)
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return (
            config
            if asks.startswith("torchstrategy.")
            else config.replace(f"{NAME}:", "cuda:")
        )

    return get


_OF_MEMORY = (
    "MemPool",
    "empty_cache",
    "get_allocator_backend",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_peak_memory_stats",
    "use_mem_pool",
)
_OF_RANDOM = (
    "get_rng_state",
    "get_rng_state_all",
    "manual_seed",
    "manual_seed_all",
    "set_rng_state",
    "set_rng_state_all",
)
_LEGACY = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


# These look at the frame that calls them: a DTensor wants another state of random
# numbers than a program.
_ASK_WHO_CALLS = ("get_rng_state", "set_rng_state")


def dtype_of_legacy(kind: Any) -> torch.dtype | None:
    """The dtype of `torch.cuda.FloatTensor` or its like, or of such a name.

    For anything else, it is None.
    """
    name = (
        kind if isinstance(kind, str) else f"torch.cuda.{getattr(kind, '__name__', '')}"
    )
    module, _, name = name.rpartition(".")
    return _LEGACY.get(name) if module == "torch.cuda" else None


def _of_its_own(thing: Any) -> Any:
    """Another object that does the same.

    dynamo's tables refuse one function under two names.
    """
    if inspect.isclass(thing) or thing.__name__ in _ASK_WHO_CALLS:
        return thing

    @functools.wraps(thing)
    def same(*args: Any, **kwargs: Any) -> Any:
        return thing(*args, **kwargs)

    return same


def _functions(translated: Callable[[Any], Any]) -> dict[str, Any]:
    """What `torch.cuda` has, and `torch.sim` has not, or has otherwise."""

    def index(device: Any = None) -> int:
        return ordinal(translated(device))

    def can_device_access_peer(device: Any, peer_device: Any) -> bool:
        one, other = (
            known(value, index, what)
            for value, what in ((device, "device"), (peer_device, "peer device"))
        )
        return one != other

    def capability(device: Any = None) -> tuple[int, int]:
        properties = get_device_properties(known(device, index))
        return properties.major, properties.minor

    def seed_all() -> None:
        manual_seed_all(torch.seed())

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
        **functions_of_memory(index),
        "ExternalStream": ExternalStream,
        "can_device_access_peer": can_device_access_peer,
        "comm": torch.nn.parallel.comm,
        "cudart": lambda: _CUDART,
        "current_blas_handle": lambda: 0,
        "current_solver_handle": lambda: 0,
        "default_generators": tuple(default_generators()),
        "get_arch_list": list,
        "get_device_capability": capability,
        "get_device_properties": lambda device=None: _properties(known(device, index)),
        "get_stream_from_external": ExternalStream,
        "get_sync_debug_mode": get_sync_debug_mode,
        "initial_seed": lambda: default_generators()[current_device()].initial_seed(),
        "ipc_collect": _does_nothing,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "list_gpu_processes": lambda device=None: (
            f"GPU:{index(device)}\nno processes are running"
        ),
        "seed": seed_all,
        "seed_all": seed_all,
        "set_sync_debug_mode": set_sync_debug_mode,
        "utilization": lambda device=None: 0,
    }


def _properties(device: int) -> SimpleNamespace:
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


class _CudaError(int):
    """The number of an error of the CUDA runtime."""

    success: _CudaError


_CudaError.success = _CudaError(0)
# Functions of the CUDA runtime that do nothing here, and say that they have done it.
_SUCCEEDING = (
    "cudaProfilerStart",
    "cudaProfilerStop",
    "cudaHostRegister",
    "cudaHostUnregister",
)


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
        if name in _SUCCEEDING:
            return lambda *args: _CudaError.success
        raise AttributeError(
            _sentence(f"torch.cuda.cudart().{name}"), name=name, obj=self
        )


_CUDART = _Cudart()


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that tell a driver what no simulated device has."""


def _marks_nothing(*args: Any, **kwargs: Any) -> int:
    """For marks in a profile that nobody takes."""
    return 0


def _legacy(name: str, dtype: torch.dtype) -> Any:
    """Makes a stand-in for `torch.cuda.FloatTensor` and its like.

    These are types and constructors at once.
    """

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return (
                isinstance(value, torch.Tensor)
                and value.device.type == NAME
                and value.dtype == dtype
            )

        def __call__(cls, *args: Any) -> torch.Tensor:
            if args and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype, device=NAME)
            return torch.empty(*args or (0,), dtype=dtype, device=NAME)

    return Kind(name, (), {"__module__": "torch.cuda", "dtype": dtype})


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

# With these begin the names of its functions and classes for CUDA.
_PREFIXES_OF_CUDA = (
    "_cuda_",
    "_Cuda",
    "_CUDA",
    "_nccl_",
    "_cudnn",
    "_cusparselt",
    "_gds_",
    "_nvtx",
)


def of_cpp(name: str) -> Any:
    """What `torch._C` lacks: a function of CUDA, or an error with its name.

    Python calls it for a name that `torch._C` does not have.

    Raises:
        AttributeError: If simulated devices have nothing like it.
    """
    if name in _OF_CPP:
        return _OF_CPP[name]
    if name.startswith(_PREFIXES_OF_CUDA):
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
