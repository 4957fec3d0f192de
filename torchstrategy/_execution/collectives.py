"""Reductions and gathers among replicas, from inside the step; gradients flow through them.

A gradient in replica i is the gradient of the whole step, over the share w_i of that replica: w_i times it, summed
over the replicas, is what the parameters get. So where replica j's output depends on replica i's input, what arrives
from j is scaled by w_j / w_i on its way. With equal shares, and for SUM, that is a plain sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from torchstrategy._communication.buckets import in_buckets
from torchstrategy._communication.operands import check_addable, check_gatherable
from torchstrategy._communication.transfer import added, concatenated, sums
from torchstrategy._core.devices import memory_device
from torchstrategy._core.torch_internals import hide_from_compiler
from torchstrategy._core.types import Device
from torchstrategy._execution.replica import Replica

_Columns = list[tuple[torch.Tensor, ...]]  # tensor by tensor: what each replica brings, in replica order


@final
class Collective:
    """The replicas that a replica meets, as seen from it.

    Args:
        replica: This replica.
        present: The replicas of the run, in order.
        weights: The share of each replica of the strategy in the gradient.
        devices: The device of each replica of the strategy; None: that of what it brings.
        bytes_per_pack: How many bytes are sent together at most. 0: each tensor is sent by itself.
    """

    def __init__(
        self,
        replica: Replica,
        present: Sequence[int],
        weights: Sequence[float],
        devices: Sequence[Device | None],
        bytes_per_pack: int = 0,
    ) -> None:
        self._replica = replica
        self._present = tuple(present)
        self._weights = tuple(weights)
        self._devices = tuple(devices)
        self._bytes_per_pack = bytes_per_pack

    def in_buckets(self, bytes_per_pack: int) -> Collective:
        """The same, with what is sent in packs of at most so many bytes."""
        if bytes_per_pack == self._bytes_per_pack:
            return self
        return Collective(self._replica, self._present, self._weights, self._devices, bytes_per_pack)

    @property
    def size(self) -> int:
        """How many replicas take part."""
        return len(self._present)

    @property
    def weight(self) -> float:
        """What this replica's gradient is multiplied by; 0 if it is dropped."""
        return self._weights[self._replica.index]

    @property
    def total_weight(self) -> float:
        """What the gradient of something that is the same in every replica is multiplied by."""
        return sum(self._weights)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str] = (), name: str = "all_reduce"
    ) -> list[torch.Tensor]:
        """The sums of what all replicas bring, tensor by tensor, on this replica's device.

        Args:
            tensors: What this replica brings.
            names: What to call each of them, the same in every replica.
            name: What to call the meeting.

        Raises:
            ValueError: From `run`, if the shapes or dtypes of what they bring differ.
        """

        made: dict[Device | None, list[torch.Tensor]] = {}  # on each device once, and copied for others on it

        def given(r: int, columns: _Columns) -> list[torch.Tensor]:
            if (device := self._devices[r]) in made:
                return [total.clone() for total in made[device]]
            for column in columns:
                check_addable(column)
            made[device] = self._sums(r, columns)
            return made[device]

        outputs, wants_grad = self._exchange(name, tensors, given, names)
        return self._differentiable(tensors, outputs) if wants_grad else outputs

    def all_gather(
        self, tensors: Sequence[torch.Tensor], axis: int, names: Sequence[str] = (), name: str = "all_gather"
    ) -> list[torch.Tensor]:
        """What all replicas bring, one after the other along `axis`, on this replica's device.

        Args:
            tensors: What this replica brings.
            axis: Along which dimension.
            names: What to call each of them, the same in every replica.
            name: What to call the meeting.

        Raises:
            ValueError: From `run`, if they differ in another dimension, in rank or in dtype.
        """

        def gathered(r: int, columns: _Columns) -> list[tuple[torch.Tensor, list[int]]]:
            for column in columns:
                check_gatherable(column, axis)
            there = zip(*(self._sent(tensors, r) for tensors in zip(*columns, strict=True)), strict=True)
            joined = [concatenated(column, axis, self._where(r, column)) for column in there]
            return [(whole, [t.shape[axis] for t in column]) for whole, column in zip(joined, columns, strict=True)]

        pairs, wants_grad = self._exchange(f"{name}(axis={axis})", tensors, gathered, names)
        outputs = [output for output, _ in pairs]
        sizes = [size for _, size in pairs]
        return self._differentiable(tensors, outputs, axis, sizes) if wants_grad else outputs

    def scaled_sum(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of what all replicas bring, each contribution scaled by its share over the receiver's."""

        def sums(r: int, columns: _Columns) -> list[torch.Tensor]:
            return in_buckets(columns, self._bytes_per_pack, lambda column: self._scaled_sum_for(r, column))

        return self._exchange("the backward of a collective", grads, sums)[0]

    def _sums(self, r: int, columns: _Columns) -> list[torch.Tensor]:
        device = self._devices[r]
        if device is not None and not self._bytes_per_pack:
            return sums(columns, device)
        return in_buckets(columns, self._bytes_per_pack, lambda column: added(column, self._where(r, column)))

    def _scaled_sum_for(self, r: int, column: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self._weights[r]:
            return torch.zeros_like(column[self._present.index(r)])  # this replica's gradient will be dropped
        ratios = [self._weights[j] / self._weights[r] for j in self._present]
        # A replica without a share may bring NaN, which zero times does not remove.
        terms = [t if ratio == 1 else t * ratio for t, ratio in zip(column, ratios, strict=True) if ratio]
        return added(terms, self._where(r, column))

    def _where(self, r: int, column: Sequence[torch.Tensor]) -> Device:
        device = self._devices[r]
        return column[0].device if device is None else device  # only a lone replica is where its caller is

    def _sent(self, tensors: Sequence[torch.Tensor], r: int) -> list[torch.Tensor]:
        """The tensors of one replica, on the device of replica `r`."""
        columns = [[tensor] for tensor in tensors]
        return in_buckets(
            columns, self._bytes_per_pack, lambda column: column[0].to(memory_device(self._where(r, column)))
        )

    def _exchange(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        given: Callable[[int, _Columns], list[Any]],
        names: Sequence[str] = (),
    ) -> tuple[list[Any], bool]:
        """One meeting: what `given` makes for this replica of what all bring, and whether any of them wants gradients.

        One replica's output depends on the inputs of all; so all of them take part in the backward, or none.
        """

        def combine(brought: Sequence[tuple[list[torch.Tensor], bool, list[str]]]) -> list[tuple[list[Any], bool]]:
            for r, (_, _, other) in zip(self._present, brought, strict=True):
                if other != brought[0][2]:
                    raise ValueError(
                        f"Replicas {self._present[0]} and {r} brought values of different structure to one {name}: one "
                        f"has {_listed(brought[0][2])}, the other {_listed(other)}."
                    )
            columns = list(zip(*(tensors for tensors, _, _ in brought), strict=True))
            wants_grad = any(wants for _, wants, _ in brought)
            return [(given(r, columns), wants_grad) for r in self._present]

        wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        brought = ([tensor.detach() for tensor in tensors], wants_grad, list(names))
        answer: tuple[list[Any], bool] = self._replica.synchronize(name, combine, brought)
        return answer

    def _differentiable(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        axis: int | None = None,
        sizes: Sequence[Sequence[int]] = (),
    ) -> list[torch.Tensor]:
        here = memory_device(self._where(self._replica.index, inputs))
        # Outputs have to require grad also where only another replica's inputs do.
        gate = torch.ones((), device=here, requires_grad=True)
        # The gradients come back to this device; from there each goes to where the step had its tensor.
        return list(_apply_backward(self, axis, sizes, outputs, gate, *(tensor.to(here) for tensor in inputs)))

    def received(self, grads: Sequence[torch.Tensor], axis: int | None, sizes: Sequence[Sequence[int]]) -> list[Any]:
        """The gradients of this replica's inputs, from those of its outputs. A meeting."""
        totals = _apply_scaled(self, *grads)
        if axis is None:
            return list(totals)
        position = self._present.index(self._replica.index)
        return [
            total.narrow(axis, sum(column[:position]), column[position])
            for total, column in zip(totals, sizes, strict=True)
        ]


class _Backward(torch.autograd.Function):
    """Gives outputs that were computed at a meeting their backward: another meeting."""

    @staticmethod
    def forward(
        ctx: Any,
        collective: Collective,
        axis: int | None,
        sizes: Sequence[Sequence[int]],
        outputs: Sequence[torch.Tensor],
        gate: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.collective, ctx.axis, ctx.sizes = collective, axis, sizes
        ctx.mark_non_differentiable(*(output for output in outputs if not _is_differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None, None, None, *ctx.collective.received(grads, ctx.axis, ctx.sizes))


class _Scaled(torch.autograd.Function):
    """The sum of the replicas' gradients, each scaled by its share over the receiver's; differentiable once more."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.collective = collective
        return tuple(collective.scaled_sum(grads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # What is linear with the coefficients w_j / w_i has, under the same scaling, the plain sum as its backward.
        return (None, *ctx.collective.all_reduce(grads))


# A compiler that followed a replica to a meeting would find locks and threads; a compiled step runs its backward, too.
for _meeting in (Collective.all_reduce, Collective.all_gather, _Backward.backward, _Scaled.backward):
    hide_from_compiler(_meeting)
del _meeting

_apply_backward: Callable[..., Any] = _Backward.apply
_apply_scaled: Callable[..., Any] = _Scaled.apply


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "a bare value" for name in names) or "nothing"


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
