"""The settings of optimizers, which have to be alike in all workers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from torchstrategy._base.marks import mark_of


class _Known(NamedTuple):
    reference: weakref.ref[Optimizer]
    seen: Any  # what the next look compares
    has_tensors: bool
    settings: list[dict[str, Any]]


@final
class SettingsOfOptimizers:
    """Lists of settings; a list stays the same object while its settings are the same.

    So workers need not look into them again. For a learning rate in the memory of an
    accelerator, the host would have to wait for all that the accelerator has to do.
    """

    def __init__(self) -> None:
        # By the ids of optimizers, each with a reference to it. Each backward looks
        # here, and to look into a `WeakKeyDictionary` takes longer.
        self._known: dict[int, _Known] = {}

    def of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The settings of the groups of an optimizer."""
        now = list(map(_without_parameters, optimizer.param_groups))
        key = id(optimizer)
        known = self._known.get(key)
        is_known = known is not None and known.reference() is optimizer
        if (
            known is not None
            and is_known
            and known.seen == (_seen(now) if known.has_tensors else now)
        ):
            return known.settings
        settings = list(map(_sorted, now))
        has_tensors = _holds_tensors(now)
        reference = weakref.ref(optimizer, lambda _: self._known.pop(key, None))
        self._known[key] = _Known(
            reference, _seen(now) if has_tensors else now, has_tensors, settings
        )
        return settings


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    settings = dict(group)
    del settings["params"]
    return settings


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        any(map(_holds_tensors, value))
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor)
    )


def _seen(value: Any) -> Any:
    """A mark that differs once a value was written or is another object.

    For a tensor on the CPU, the mark always differs.
    """
    if isinstance(value, Mapping):
        return {key: _seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_seen, value))
    if not isinstance(value, torch.Tensor):
        return value
    # NumPy may write on the memory of the CPU, which changes no version.
    is_counted = not value.is_cpu and not value.is_inference()
    return mark_of(value) if is_counted else object()


def _sorted(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings in an order that is the same in all workers."""
    return {
        key: _sorted(value) if isinstance(value, dict) else value
        for key, value in sorted(settings.items())
    }
