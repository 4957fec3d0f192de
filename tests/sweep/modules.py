"""torch's own database of modules: every constructor call and input.

They are tried in training and in evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from sweep.agreement import Trial
from sweep.copies import copied
from sweep.operators import gradients


@functools.cache
def _entries() -> dict[str, Any]:
    return {entry.formatted_name: entry for entry in module_db}


def names() -> list[str]:
    """Every entry, by name."""
    return sorted(_entries())


def trials(
    name: str, count: int, dtype: torch.dtype = torch.float32
) -> Iterator[Trial]:
    """All samples of an entry, the module made on the device and sent to it.

    `count` limits none: they are few.
    """
    entry = _entries()[name]
    if dtype not in entry.supported_dtypes("cpu"):
        return
    for training in (True, False):
        given = entry.module_inputs_func(
            entry, "cpu", dtype, requires_grad=True, training=training
        )
        for number, sample in enumerate(given):
            for way in ("made there", "sent there"):
                run = functools.partial(
                    _run, entry.module_cls, sample, dtype, training, way == "made there"
                )
                yield Trial(
                    f"sample {number}, {'training' if training else 'evaluation'}, "
                    f"{way}",
                    run,
                )


def _run(
    cls: type,
    sample: Any,
    dtype: torch.dtype,
    training: bool,
    made_there: bool,
    device: torch.device,
) -> Any:
    args, kwargs = copied(
        (sample.constructor_input.args, sample.constructor_input.kwargs), device
    )
    with device if made_there else torch.device("cpu"):
        module = cls(*args, **kwargs)
    module = module.to(dtype=dtype).to(device).train(training)
    inputs = copied((sample.forward_input.args, sample.forward_input.kwargs), device)
    torch.manual_seed(1)
    result = module(*inputs[0], **inputs[1])
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    return {
        "result": result,
        "gradients": gradients(result, (inputs, parameters)),
        "parameters": parameters,
        "buffers": buffers,
        "inputs": inputs,
    }
