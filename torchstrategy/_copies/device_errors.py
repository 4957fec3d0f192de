"""What a replica's device error says first.

It says which tensor of the step's is on one device for all replicas.

A tensor that is in no module of the strategy is one for all replicas, on one device. In
a replica on another device, torch says which devices met, and not which tensor. The
step may also move such a tensor itself, so the library cannot refuse it beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Sequence

import torch

from torchstrategy._base.devices import memory_device
from torchstrategy._base.types import Device
from torchstrategy._copies.references.step_references import StepReferences
from torchstrategy._copies.run_warnings import shared_tensors

_OF_DEVICES = re.compile(
    r"on the same device|Input type \(\S*cuda\S*\) and weight type|Input type .*weight "
    r"type \(\S*cuda"
)
_DEVICE = re.compile(r"\b(?:cpu\b|[a-z]+:\d+)")
_SHOWN = 3  # at the most so many tensors are in a message


def explain_devices(
    error: BaseException,
    named: StepReferences,
    own: Container[int],
    known: Collection[int],
    devices: Sequence[Device],
) -> None:
    """Lets torch's error about devices begin with the tensors that have caused it.

    It does if the step names such.

    Args:
        error: Any error of a run; others stay as they are.
        named: What the step names.
        own: The ids of the modules of which replicas have copies.
        known: The ids of the parameters of which replicas have copies.
        devices: The device of each replica.
    """
    is_torchs = (
        type(error) is RuntimeError
        and len(error.args) == 1
        and isinstance(error.args[0], str)
    )
    text = error.args[0] if is_torchs else ""
    if not _OF_DEVICES.search(text) or text.startswith(_BEGIN):
        return
    told = set(_DEVICE.findall(text))  # none in some texts
    places = {memory_device(device) for device in devices}
    elsewhere = []
    for name, tensor in shared_tensors(named, own, known):
        is_apart = bool(places - {tensor.device}) and not _is_usable_anywhere(tensor)
        if is_apart and (not told or str(tensor.device) in told):
            elsewhere.append(
                f"`{name}`, of shape {tuple(tensor.shape)} on {tensor.device}"
            )
    if elsewhere:
        more = f" and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
        shown = "; ".join(elsewhere[:_SHOWN]) + more
        here = ", ".join(sorted(map(str, places)))
        error.args = (_TEXT.format(shown=shown, places=here) + text,)


def _is_usable_anywhere(tensor: torch.Tensor) -> bool:
    """Whether torch takes a tensor beside others: a number in the CPU's memory.

    The others may be on any device.
    """
    return tensor.dim() == 0 and tensor.device.type == "cpu"


_BEGIN = "The step uses a tensor that is in no module of the strategy"
_TEXT = (
    f"{_BEGIN}, and so is one for all replicas, on one device: {{shown}}. The replicas "
    "are on {places}. Make it a parameter or buffer of a module that you create in "
    "strategy.scope(), or give such a module to strategy.distribute_module(module): "
    "then each replica has it on its own device. If it is not trained, the step may "
    "move it instead: tensor.to(inputs.device). A moving average of the weights is "
    "updated once a step, and not once in each replica: update it after strategy.run, "
    "from your own model, or in the step by get_replica_context().merge_call(lambda "
    "strategy: ...). What torch says: "
)
