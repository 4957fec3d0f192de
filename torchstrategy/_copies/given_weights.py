"""Weights for one forward of a `DataParallel`, by `torch.func.functional_call`.

`functional_call` puts tensors in the places of parameters and buffers for the length of
a call. They may be plain tensors, and may have a history, as the fast weights of MAML,
which an inner step computes from parameters.

Replicas have copies of parameters, which are leaves and are kept between forwards. So
while the replicas run, the module has its own parameters back, and nothing has to be
copied anew. The given tensors go to the replicas' devices as inputs do, through
autograd, and are put into each replica's own copy of the module. Gradients flow back to
them, also those of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchstrategy._base.marks import Versions
from torchstrategy._base.objects.proxies import plain_class
from torchstrategy._base.types import Device
from torchstrategy._variables.variable import is_variable

Table = dict[str, Any]  # the `_parameters` or the `_buffers` of a module


@final
class _Given(NamedTuple):
    """A tensor in the place of a parameter or buffer."""

    path: str
    table: Table
    name: str
    tensor: torch.Tensor


# By the module of a DataParallel: its tables, each with what it held when it was last
# seen without given tensors.
_own: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def own_weights_in_place(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """A block in which a module has its own parameters in the places of given tensors.

    Yields:
        The given tensors by their paths in the module; most often there are none.
    """
    parts = list(module.modules())
    if not any(map(_has_given, parts)):
        tables = (
            table for part in parts for table in (part._parameters, part._buffers)
        )
        _own[module] = [(table, dict(table)) for table in tables if table]
        yield {}
        return
    given = list(_find_given(module))
    for place, own in _find_own(module, given):
        place.table[place.name] = own
    try:
        yield {place.path: place.tensor for place in given}
    finally:
        for place in given:
            place.table[place.name] = place.tensor


def _has_given(part: nn.Module) -> bool:
    parameters, buffers = part._parameters.values(), part._buffers.values()
    return any(map(_is_given_parameter, parameters)) or any(
        map(_is_given_buffer, buffers)
    )


def _find_given(module: nn.Module) -> Iterator[_Given]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for table, is_given in (
            (part._parameters, _is_given_parameter),
            (part._buffers, _is_given_buffer),
        ):
            for name, tensor in table.items():
                if tensor is not None and is_given(tensor):
                    yield _Given(prefix + name, table, name, tensor)


def _is_given_parameter(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor in the place of a parameter is none."""
    if tensor is None or type(tensor) is nn.Parameter:
        return False
    # A subclass of `torch.nn.Parameter` is one, which is refused elsewhere, by its
    # name.
    return not issubclass(plain_class(type(tensor)), nn.Parameter) and not is_variable(
        tensor
    )


def _is_given_buffer(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor in the place of a buffer learns.

    Any other is brought as buffers are that were replaced.
    """
    return tensor is not None and tensor.requires_grad and not is_variable(tensor)


def _find_own(
    module: nn.Module, given: list[_Given]
) -> list[tuple[_Given, torch.Tensor | None]]:
    """What belongs in the place of each given tensor.

    If that is not known, it is a new parameter: the values do not matter, since the
    given tensor is used.
    """
    seen: list[tuple[Table, Table]] = _own.setdefault(module, [])
    known = {id(table): content for table, content in seen}
    stand_ins: dict[int, nn.Parameter] = {}
    pairs: list[tuple[_Given, torch.Tensor | None]] = []
    for place in given:
        if id(place.table) not in known:
            known[id(place.table)] = {}
            seen.append((place.table, known[id(place.table)]))
        content, tensor = known[id(place.table)], place.tensor
        own = content.get(place.name)
        if own is None or own.device != tensor.device:
            own = stand_ins.get(id(tensor))
            if own is None:
                own = nn.Parameter(
                    torch.empty_like(tensor.detach()), tensor.is_floating_point()
                )
            stand_ins[id(tensor)] = content[place.name] = own
        pairs.append((place, own))
    return pairs


def send_given(
    given: Mapping[str, torch.Tensor], device: Device
) -> dict[str, torch.Tensor]:
    """Given tensors on the device of a replica, through autograd.

    They have the attributes that the user has set on them.
    """
    sent = {}
    for path, tensor in given.items():
        sent[path] = there = tensor.to(device)
        if there is not tensor:
            held = {
                name: v.to(device) if isinstance(v, torch.Tensor) else v
                for name, v in vars(tensor).items()
            }
            vars(there).update(held)
    return sent


def call_with(
    module: nn.Module,
    given: Mapping[str, torch.Tensor],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module with given tensors in the places of parameters and buffers.

    Runs in each replica.

    Raises:
        RuntimeError: If forward writes on one, or puts another tensor into its place.
    """
    placed = dict(given)
    known = Versions(list(given.values()))
    output = torch.func.functional_call(
        module, placed, inputs, kwargs, tie_weights=False
    )
    written = known.written()
    for position, (path, tensor) in enumerate(given.items()):
        if position in written or placed[path] is not tensor:
            raise RuntimeError(_WRITTEN.format(path=path))
    return output


_WRITTEN = (
    "forward wrote on {path}, which is a tensor that torch.func.functional_call gave "
    "to a DataParallel. Each replica would write it from its own rows, and you would "
    "get nothing of that. Let forward return what it computes; or, of a buffer, give "
    "one that does not require grad."
)
