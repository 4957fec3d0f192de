"""`torch.use_deterministic_algorithms(True)`: the operators that torch refuses.

These operators have no deterministic kernel on GPUs.

Most of them have one on the CPU, so there torch refuses others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchstrategy.testing._simulation.sync_debug import levels_to_the_user

Given = Callable[[str], Any]
"""Returns the argument of a name."""


class NotDeterministic(NamedTuple):
    """What torch's message calls an operator, and for which arguments it comes.

    None stands for all arguments.
    """

    name: str
    is_meant: Callable[[Given], bool] | None = None


def _has_weights(given: Given) -> bool:
    return given("weights") is not None


def _takes_the_greatest(given: Given) -> bool:
    return bool(given("mode") == 2)  # an embedding bag's number for "max"


def _is_reduced(given: Given) -> bool:
    return bool(given("reduction") != 0)


def _is_of_floats(given: Given) -> bool:
    return bool(given("self").dtype.is_floating_point)


# By the operator's name, for all of its overloads but those that `_ONLY` names: what
# torch 2.11 said on an H100, and for the rest what torch documents.
#
# `upsample_bilinear2d`, `upsample_trilinear3d` and the backwards of `replication_pad`
# are not here: for a GPU, `interpolate` and `pad` call other operators in their place,
# which are deterministic.
_NAMES: dict[str, NotDeterministic] = {
    "_adaptive_avg_pool2d_backward": NotDeterministic(
        "adaptive_avg_pool2d_backward_cuda"
    ),
    "_adaptive_avg_pool3d_backward": NotDeterministic(
        "adaptive_avg_pool3d_backward_cuda"
    ),
    "_ctc_loss_backward": NotDeterministic("ctc_loss_backward_gpu"),
    "_embedding_bag_backward": NotDeterministic(
        "embedding_bag_backward_cuda_max", _takes_the_greatest
    ),
    "_embedding_bag_dense_backward": NotDeterministic(
        "embedding_bag_backward_cuda_max", _takes_the_greatest
    ),
    "_upsample_bicubic2d_aa_backward": NotDeterministic(
        "upsample_bicubic2d_aa_backward_out_cuda"
    ),
    "_upsample_bilinear2d_aa_backward": NotDeterministic(
        "upsample_bilinear2d_aa_backward_out_cuda"
    ),
    "adaptive_max_pool2d_backward": NotDeterministic(
        "adaptive_max_pool2d_backward_cuda"
    ),
    "adaptive_max_pool3d_backward": NotDeterministic(
        "adaptive_max_pool3d_backward_cuda"
    ),
    "avg_pool3d_backward": NotDeterministic("avg_pool3d_backward_cuda"),
    "bincount": NotDeterministic("_bincount_cuda", _has_weights),
    "fractional_max_pool2d_backward": NotDeterministic(
        "fractional_max_pool2d_backward_cuda"
    ),
    "fractional_max_pool3d_backward": NotDeterministic(
        "fractional_max_pool3d_backward_cuda"
    ),
    "grid_sampler_2d_backward": NotDeterministic("grid_sampler_2d_backward_cuda"),
    "grid_sampler_3d_backward": NotDeterministic("grid_sampler_3d_backward_cuda"),
    "histc": NotDeterministic("_histc_cuda with floating point input", _is_of_floats),
    "index_reduce": NotDeterministic("index_reduce_cuda"),
    "index_reduce_": NotDeterministic("index_reduce_cuda"),
    "max_pool3d_with_indices_backward": NotDeterministic(
        "max_pool3d_with_indices_backward_cuda"
    ),
    "max_unpool2d": NotDeterministic("max_unpooling2d_forward_out"),
    "max_unpool3d": NotDeterministic("max_unpooling3d_forward_out"),
    "median": NotDeterministic("median CUDA with indices output"),
    "nanmedian": NotDeterministic("median CUDA with indices output"),
    "nll_loss2d_forward": NotDeterministic(
        "nll_loss2d_forward_out_cuda_template", _is_reduced
    ),
    "put": NotDeterministic("put_"),
    "put_": NotDeterministic("put_"),
    "reflection_pad1d_backward": NotDeterministic("reflection_pad1d_backward_out_cuda"),
    "reflection_pad3d_backward": NotDeterministic("reflection_pad3d_backward_out_cuda"),
    "upsample_bicubic2d_backward": NotDeterministic(
        "upsample_bicubic2d_backward_out_cuda"
    ),
    "upsample_linear1d_backward": NotDeterministic(
        "upsample_linear1d_backward_out_cuda"
    ),
}
# Those whose other overloads have no indices among their results.
_ONLY = {"median": ("dim", "dim_values"), "nanmedian": ("dim", "dim_values")}


def not_deterministic(operator: str) -> NotDeterministic | None:
    """What torch says of an operator such as `"aten.put_.default"`.

    It is None if the operator has a deterministic kernel on GPUs.
    """
    _, name, overload = operator.split(".")
    return _NAMES.get(name) if name not in _ONLY or overload in _ONLY[name] else None


def check_deterministic(found: NotDeterministic, given: Given) -> None:
    """Refuses an operator, or warns of it, if it is not deterministic.

    The program has asked for deterministic operators only.

    Raises:
        RuntimeError: With torch's words.
    """
    if found.is_meant is not None and not found.is_meant(given):
        return
    begin = (
        f"{found.name} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms"
    )
    end = (
        "file an issue at https://github.com/pytorch/pytorch/issues to help us "
        "prioritize adding deterministic support "
    )
    end += "for this operation."
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(
            f"{begin}(True, warn_only=True)'. You can {end}",
            stacklevel=levels_to_the_user(),
        )
        return
    raise RuntimeError(
        f"{begin}(True)'. You can turn off determinism just for this operation, or you "
        "can use the 'warn_only=True' option, if that's acceptable for your "
        f"application. You can also {end}"
    )
