"""torch's own database of operators: each of its samples.

Each in each way that the operator can be called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from sweep.agreement import Trial
from sweep.copies import CPU, copied, names_a_device, tensors

# What returns memory as it finds it: sizes and devices are compared, numbers are not.
UNFILLED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# What wants indices on the CPU, on whatever device the rest is.
INDEXED_BY_THE_CPU = {"tensor_split"}


def names() -> list[str]:
    """Every entry, by name."""
    return sorted(_entries())


def call(name: str) -> Callable[..., Any]:
    """The function of an entry."""
    return _entries()[name].op


@functools.cache
def _entries() -> dict[str, Any]:
    return {entry.formatted_name: entry for entry in op_db}


def trials(
    name: str, count: int, dtype: torch.dtype = torch.float32
) -> Iterator[Trial]:
    """The first `count` samples of an entry, each called in several ways.

    As a call, in place, with `out=` and with gaps between its elements.

    An operator that does not take `dtype` is tried with one that it takes; one that
    takes none on the CPU, not at all.
    """
    entry = _entries()[name]
    dtype = dtype_of(name, dtype)
    if dtype is None:
        return
    for number, sample in enumerate(samples(name, count, dtype)):
        for way, call in _ways(entry, sample):
            yield Trial(f"sample {number}, {way}", call)
    for number, sample in enumerate(_wrong_samples(entry, 5 * count)):
        yield Trial(f"wrong sample {number}", functools.partial(_call, entry, sample))


def dtype_of(name: str, preferred: torch.dtype) -> torch.dtype | None:
    """With which dtype an entry is tried."""
    taken = _entries()[name].supported_dtypes("cpu")
    return next((dtype for dtype in (preferred, *_INSTEAD) if dtype in taken), None)


_INSTEAD = (torch.float32, torch.int64, torch.complex64, torch.float8_e4m3fn)


def samples(name: str, count: int, dtype: torch.dtype) -> list[Any]:
    """The first samples of an entry."""
    entry = _entries()[name]
    gradient = entry.supports_autograd and dtype in entry.supported_backward_dtypes(
        "cpu"
    )
    options = (
        {"include_conjugated_inputs": True}
        if dtype.is_complex and entry.test_conjugated_samples
        else {}
    )
    return _made(
        entry.sample_inputs("cpu", dtype, requires_grad=gradient, **options), count
    )


def _wrong_samples(entry: Any, count: int) -> list[Any]:
    errors = entry.error_inputs("cpu") if entry.error_inputs_func is not None else ()
    return _made((error.sample_input for error in errors), count)


def _made(given: Iterable[Any], count: int) -> list[Any]:
    """The first of some samples.

    Not those that have neither tensor nor device, which are the same on all devices.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            sample
            for sample in islice(given, count)
            if names_a_device(arguments(sample))
        ]


def _ways(
    entry: Any, sample: Any
) -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    yield "as a call", functools.partial(_call, entry, sample)
    if all(tensor.layout is torch.strided for tensor in tensors(arguments(sample))):
        yield "with gaps", functools.partial(_call, entry, sample.noncontiguous())
    if entry.get_inplace() is not None and not sample.broadcasts_input:
        yield "in place", functools.partial(_in_place, entry, sample)
    if entry.supports_out:
        for way, make in _OUTS.items():
            yield f"out {way}", functools.partial(_with_out, entry, sample, make)


def arguments(sample: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What an operator is called with."""
    return sample.input, sample.args, sample.kwargs


def _placed(entry: Any, sample: Any, device: torch.device) -> Any:
    stays = sample.args[0] if entry.name in INDEXED_BY_THE_CPU else None
    return copied(
        arguments(sample),
        device,
        (stays, CPU) if isinstance(stays, torch.Tensor) else None,
    )


def _call(entry: Any, sample: Any, device: torch.device) -> Any:
    first, args, kwargs = _placed(entry, sample, device)
    result = entry.op(first, *args, **kwargs)
    return _seen(entry, sample, result, (first, args, kwargs))


def _in_place(entry: Any, sample: Any, device: torch.device) -> Any:
    first, args, kwargs = _placed(entry, sample, device)
    target = first.clone()
    result = entry.get_inplace()(target, *args, **kwargs)
    return {
        **_seen(entry, sample, result, (first, args, kwargs)),
        "is": result is target,
    }


def _seen(entry: Any, sample: Any, result: Any, inputs: Any) -> dict[str, Any]:
    given = tensors(inputs)
    return {
        "gradients": gradients(sample.output_process_fn_grad(result), inputs),
        "inputs": given[:1] if entry.name in INDEXED_BY_THE_CPU else given,
        # What autograd goes by.
        "marks": [
            (tensor._is_view(), tensor._version) for tensor in tensors((result, inputs))
        ],
        "result": _unfilled(entry, result),
    }


def _unfilled(entry: Any, result: Any) -> Any:
    return result.zero_() if entry.name in UNFILLED else result


def _with_out(
    entry: Any,
    sample: Any,
    make: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Any:
    first, args, kwargs = _placed(entry, sample, device)
    with torch.no_grad():
        wanted = entry.op(first, *args, **kwargs)
        out = tree_map_only(torch.Tensor, make, wanted)
        where = [tensor.data_ptr() for tensor in tree_leaves(out)]
        torch.manual_seed(0)
        result = entry.op(first, *args, **kwargs, out=out)
    stayed = [
        tensor.data_ptr() == at
        for tensor, at in zip(tree_leaves(out), where, strict=True)
    ]
    _unfilled(entry, result)
    # Below `data`, because how often a resized tensor counts as written is nobody's
    # business.
    return {
        "out": tree_map_only(torch.Tensor, lambda tensor: tensor.data, out),
        "stayed": stayed,
        "is": result is out,
    }


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(
        *tensor.shape, 2, dtype=tensor.dtype, device=tensor.device
    ).select(-1, 1)


_OUTS = {
    "of the size of the result": _alike,
    "without elements": _empty,
    "with gaps": _with_gaps,
}


def gradients(results: Any, inputs: Any) -> Any:
    """The gradients of results with respect to inputs.

    They come from the same random gradients on every device.
    """
    outputs = [tensor for tensor in tensors(results) if tensor.requires_grad]
    wanted = [tensor for tensor in tensors(inputs) if tensor.requires_grad]
    if not outputs or not wanted:
        return None
    outputs = [
        output if output.layout is torch.strided else output.to_dense()
        for output in outputs
    ]
    seeds = [copied(_random_like(output), output.device) for output in outputs]
    found = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return tree_map_only(torch.Tensor, _in_order, found)


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    """In which order a gradient lies in memory is the choice of a kernel.

    Devices have different ones.
    """
    return gradient.contiguous() if gradient.layout is torch.strided else gradient


def _random_like(output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(
        output.shape, dtype=output.dtype, device=CPU, generator=generator
    )
