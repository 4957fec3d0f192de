"""The settings that torch has once for a process, by its private names.

For each setting, it has one function that reads it and one that sets it.

When torch moves one of them, this file changes and no other does. The tests are in
`tests/unit/testing/test_ranks_and_the_process.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

_C: Any = torch._C
_dist: Any = dist  # type checkers do not know all of it
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _precision_of(backend: str, operator: str) -> _Setting:
    """What asks for an operator's float32 precision, and what sets it."""

    def ask() -> str:
        precision: str = _C._get_fp32_precision_getter(backend, operator)
        return precision

    def put(precision: str) -> None:
        # After this, the operator has the precision of all operators.
        _C._set_fp32_precision_setter(backend, operator, "none")
        if ask() != precision:
            _C._set_fp32_precision_setter(backend, operator, precision)

    return ask, put


def _older(
    ask: Callable[[], Any], put: Callable[[Any], Any], parts: list[tuple[str, str]]
) -> _Setting:
    """A setting that torch tells only if its parts agree with it.

    A program can set the parts apart.
    """

    def ask_in_any_case() -> Any:
        try:
            return ask()
        except RuntimeError:
            pass
        settings = [_precision_of(*part) for part in parts]
        kept = [ask_part() for ask_part, _ in settings]
        for _, put_part in settings:
            put_part("ieee")
        try:
            return ask()
        except RuntimeError:  # of cuDNN, for which `True` fits to nothing but TF32
            return True
        finally:
            for (_, put_part), precision in zip(settings, kept, strict=True):
                put_part(precision)

    return ask_in_any_case, put


_print_options: Any = torch._tensor_str.PRINT_OPTS

_flags_frozen: Any = torch.backends.flags_frozen
_EINSUM: Any = sys.modules["torch.backends.opt_einsum"]
# What programs set on modules that stand for others, where torch has no property: it is
# an attribute then.
_PLAIN: list[tuple[dict[str, Any], str]] = [
    *[
        (vars(module), name)
        for module in (_EINSUM, _EINSUM.m)
        for name in ("enabled", "strategy")
    ],
    (vars(torch.backends.cudnn), "benchmark_limit"),
    # What `disable_global_flags` sets. `torch.backends` stands for another module, too.
    (_flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag"),
]
_ABSENT = object()


def _take_plain() -> list[Any]:
    return [names.get(name, _ABSENT) for names, name in _PLAIN]


def _put_plain(values: list[Any]) -> None:
    for (names, name), value in zip(_PLAIN, values, strict=True):
        if value is not _ABSENT:
            names[name] = value
        else:
            names.pop(name, None)


_SETTINGS: list[_Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_dist.get_debug_level, _dist.set_debug_level),
    (
        lambda: dict(vars(_print_options)),
        lambda options: vars(_print_options).update(options),
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    # By these names and not by those of `torch.backends`, whose setters a program can
    # lock.
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (
        _C._get_math_sdp_allow_fp16_bf16_reduction,
        _C._set_math_sdp_allow_fp16_bf16_reduction,
    ),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda both: _C._set_cublas_allow_fp16_reduced_precision_reduction(*both),
    ),
    (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda both: _C._set_cublas_allow_bf16_reduced_precision_reduction(*both),
    ),
    (
        _C._get_cpu_allow_fp16_reduced_precision_reduction,
        _C._set_cpu_allow_fp16_reduced_precision_reduction,
    ),
    (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
    (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
    (_C._get_rocm_fa_preferred_backend, _C._set_rocm_fa_preferred_backend),
    (_C._get_miopen_immediate, _C._set_miopen_immediate),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    (_C._get_qengine, _C._set_qengine),
    (_C._check_sparse_tensor_invariants, _C._set_check_sparse_tensor_invariants),
    (_C._functorch._is_vmap_fallback_enabled, _C._functorch._set_vmap_fallback_enabled),
    (_C._jit_texpr_fuser_enabled, _C._jit_set_texpr_fuser_enabled),
    (_C._jit_llga_enabled, _C._jit_set_llga_enabled),
    (_C._get_graph_executor_optimize, _C._set_graph_executor_optimize),
    (_C._get_backcompat_broadcast_warn, _C._set_backcompat_broadcast_warn),
    (_C._get_backcompat_keepdim_warn, _C._set_backcompat_keepdim_warn),
    (_take_plain, _put_plain),
    # The older functions come first, since they set what the newer ones set, too.
    _older(
        _C._get_float32_matmul_precision,
        _C._set_float32_matmul_precision,
        [("cuda", "matmul"), ("mkldnn", "matmul")],
    ),
    _older(
        _C._get_cudnn_allow_tf32,
        _C._set_cudnn_allow_tf32,
        [("cuda", "conv"), ("cuda", "rnn")],
    ),
    *[
        _precision_of(backend, operator)
        for backend, operators in {
            "generic": ["all"],
            "cuda": ["all", "matmul", "conv", "rnn"],
            "mkldnn": ["all", "matmul", "conv", "rnn"],
        }.items()
        for operator in operators
    ],
]
if torch.backends.cudnn.is_available():
    _SETTINGS.append(
        (_C._cuda_get_cudnn_benchmark_limit, _C._cuda_set_cudnn_benchmark_limit)
    )


def take_settings() -> list[Any]:
    """The settings that torch has for the process now."""
    return [ask() for ask, _ in _SETTINGS]


def put_settings(settings: list[Any]) -> None:
    """Makes the settings of torch those that `take_settings` returned.

    torch refuses some, such as MAGMA where it was built without, after it has set them.
    It has told the program so.
    """
    for (ask, put), setting in zip(_SETTINGS, settings, strict=True):
        if ask() != setting:
            with suppress(RuntimeError):
                put(setting)


_future: Any = torch.__future__
# Settings that torch has in attributes.
NAMES: list[tuple[Any, str]] = [
    # The parameters that `parametrize.cached` keeps, and how many of its blocks have
    # begun.
    *[(torch.nn.utils.parametrize, name) for name in ("_cache", "_cache_enabled")],
    *[
        (torch.utils.checkpoint, name)
        for name in ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")
    ],
    (torch.utils.checkpoint.DefaultDeviceType, "_default_device_type"),
    (torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled"),
    (torch.distributions.Distribution, "_validate_args"),
    (_future, "_overwrite_module_params_on_conversion"),
    (_future, "_swap_module_params_on_conversion"),
    (torch.backends.mha, "_is_fastpath_enabled"),
    (torch.hub, "_hub_dir"),
    (torch.multiprocessing, "_sharing_strategy"),
    (torch._weights_only_unpickler, "_marked_safe_globals_set"),
    (torch.serialization, "_package_registry"),
    (torch.storage, "_always_warn_typed_storage_removal"),
]
