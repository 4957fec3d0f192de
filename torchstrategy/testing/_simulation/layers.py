"""Kernels of layers for which torch asks this backend for other operators.

For the CPU, torch calls other operators than for a backend like this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchstrategy.testing._simulation.backend import Backend, operator
from torchstrategy.testing._simulation.generators import inside_default_generator
from torchstrategy.testing._simulation.kernels import run_on_cpu, written_for_cpu
from torchstrategy.testing._simulation.ordinals import ordinal


def register(backend: Backend) -> None:
    """Registers the kernels."""
    _register_convolution(backend)
    _register_dropout(backend)
    functions: dict[str, Callable[..., Any]] = {
        "histc": _histc,
        "_linalg_svd": _svd,
        "linalg_lstsq": _lstsq,
    }
    for name, function in {**_CELLS, **functions}.items():
        backend.kernel(name)(written_for_cpu(operator(name), function))


def _register_convolution(backend: Backend) -> None:
    forward, backward = (
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    )

    @backend.kernel("convolution_overrideable")
    def _convolution(*args: Any) -> Any:
        return run_on_cpu(forward, *args)

    @backend.kernel("convolution_backward_overrideable")
    def _convolution_backward(
        gradient: Any, inputs: Any, weight: Any, *options: Any
    ) -> Any:
        # Stride, padding, dilation and so on, which both operators take in one order.
        *geometry, wanted = options
        bias_sizes = [gradient.shape[1]] if wanted[2] else None
        return run_on_cpu(
            backward, gradient, inputs, weight, bias_sizes, *geometry, list(wanted)
        )


def _register_dropout(backend: Backend) -> None:
    op = operator("native_dropout")

    @backend.kernel("native_dropout")  # the CPU's takes no generator
    def _native_dropout(inputs: Any, p: float, train: bool | None) -> Any:
        generator = inside_default_generator(ordinal(inputs.device))
        return written_for_cpu(op, functools.partial(_dropout, generator=generator))(
            inputs, p, train
        )


def _dropout(
    inputs: Any, p: float, train: bool | None, generator: torch.Generator
) -> Any:
    kept = torch.ones_like(inputs, dtype=torch.bool)
    if train is False:
        return inputs.clone(), kept
    chosen = kept if inputs.is_meta else kept.bernoulli_(1 - p, generator=generator)
    return inputs * chosen * (0.0 if p == 1 else 1 / (1 - p)), kept


def _histc(inputs: Any, *options: Any, **named: Any) -> Any:
    """Counts integers, too, as on GPUs.

    Layers of experts use it to count the rows of each expert.
    """
    if inputs.dtype.is_floating_point:
        return torch.histc(inputs, *options, **named)
    return torch.histc(inputs.double(), *options, **named).to(inputs.dtype)


def _svd(
    matrix: Any,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> Any:
    """Takes the name of a function of cuSOLVER, as on GPUs.

    The CPU has one function only.
    """
    if driver not in (None, "gesvd", "gesvdj", "gesvda"):
        raise RuntimeError(
            f"torch.linalg.svd: unknown svd driver {driver} in svd_cusolver "
            "computation, please choose from `gesvd`, `gesvdj`, and `gesvda`"
        )
    return operator("_linalg_svd")(matrix, full_matrices, compute_uv)


def _lstsq(
    matrix: Any, other: Any, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Solves as CUDA does, which knows one driver.

    This driver says nothing of the rank, and needs a full one.
    """
    if driver not in (None, "gels"):
        raise RuntimeError(
            "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA"
        )
    return torch.linalg.lstsq(matrix, other, rcond, driver="gels")


# Torch has fused cells of recurrent layers for GPUs only, so they are written below.
# `of_input` and `of_hidden` are the products with the weights, of shape (batch, gates *
# hidden size), in torch's order of gates. `saved` is the tensor that the forward saves
# for the backward.


def _lstm_cell(
    of_input: Any,
    of_hidden: Any,
    cell: Any,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    gates = of_input + of_hidden
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    write, forget, candidate, output = gates.chunk(4, 1)
    write, forget, candidate, output = (
        write.sigmoid(),
        forget.sigmoid(),
        candidate.tanh(),
        output.sigmoid(),
    )
    new_cell = forget * cell + write * candidate
    return (
        output * new_cell.tanh(),
        new_cell,
        torch.cat([write, forget, candidate, output], 1),
    )


def _lstm_cell_backward(
    to_hidden: Any, to_cell: Any, cell: Any, new_cell: Any, saved: Any, has_bias: bool
) -> Any:
    write, forget, candidate, output = saved.chunk(4, 1)
    squashed = new_cell.tanh()
    to_hidden = torch.zeros_like(cell) if to_hidden is None else to_hidden
    through_cell = to_hidden * output * (1 - squashed * squashed)
    if to_cell is not None:
        through_cell = through_cell + to_cell
    of_gates = torch.cat(
        [
            through_cell * candidate * write * (1 - write),
            through_cell * cell * forget * (1 - forget),
            through_cell * write * (1 - candidate * candidate),
            to_hidden * squashed * output * (1 - output),
        ],
        1,
    )
    return of_gates, through_cell * forget, of_gates.sum(0) if has_bias else None


def _gru_cell(
    of_input: Any,
    of_hidden: Any,
    hidden: Any,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> Any:
    from_input = (of_input if input_bias is None else of_input + input_bias).chunk(3, 1)
    from_hidden = (of_hidden if hidden_bias is None else of_hidden + hidden_bias).chunk(
        3, 1
    )
    reset = (from_input[0] + from_hidden[0]).sigmoid()
    update = (from_input[1] + from_hidden[1]).sigmoid()
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    return new + update * (hidden - new), torch.cat(
        [reset, update, new, hidden, from_hidden[2]], 1
    )


def _gru_cell_backward(to_hidden: Any, saved: Any, has_bias: bool) -> Any:
    reset, update, new, hidden, new_from_hidden = saved.chunk(5, 1)
    of_update = to_hidden * (hidden - new) * update * (1 - update)
    of_new = to_hidden * (1 - update) * (1 - new * new)
    of_reset = of_new * new_from_hidden * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    input_bias, hidden_bias = (
        (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    )
    return of_input, of_hidden, to_hidden * update, input_bias, hidden_bias


_CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
