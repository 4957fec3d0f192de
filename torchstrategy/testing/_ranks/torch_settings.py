"""The settings that torch has once for a process, by its private names: what asks for each, and what sets it.

When torch moves one of them, this file changes and no other does. The tests are in
`tests/unit/testing/test_ranks_and_the_process.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_C: Any = torch._C
_dist: Any = dist  # type checkers do not know all of it
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _precision_of(backend: str, operator: str) -> _Setting:
    """What asks for the precision of float32 numbers in an operator, and what sets it."""
    return (
        lambda: _C._get_fp32_precision_getter(backend, operator),
        lambda precision: _C._set_fp32_precision_setter(backend, operator, precision),
    )


def _older(ask: Callable[[], Any], put: Callable[[Any], Any]) -> _Setting:
    """A setting that torch does not tell where a program has set its parts apart. Then it is left alone."""

    def ask_if_told() -> Any:
        try:
            return ask()
        except RuntimeError:
            return None

    def put_if_told(setting: Any) -> None:
        if setting is not None:
            put(setting)

    return ask_if_told, put_if_told


_print_options: Any = torch._tensor_str.PRINT_OPTS

_SETTINGS: list[_Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_dist.get_debug_level, _dist.set_debug_level),
    (lambda: dict(vars(_print_options)), lambda options: vars(_print_options).update(options)),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    # By these names and not by those of `torch.backends`, whose setters a program can lock.
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
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda both: _C._set_cublas_allow_fp16_reduced_precision_reduction(*both),
    ),
    (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda both: _C._set_cublas_allow_bf16_reduced_precision_reduction(*both),
    ),
    (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
    (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
    # The older functions come first, since they set what the newer ones set, too.
    _older(_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),
    _older(_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
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


def take_settings() -> list[Any]:
    """The settings that torch has for the process now."""
    return [ask() for ask, _ in _SETTINGS]


def put_settings(settings: list[Any]) -> None:
    """Makes the settings of torch those that `take_settings` returned."""
    for (ask, put), setting in zip(_SETTINGS, settings, strict=True):
        if ask() != setting:
            put(setting)
