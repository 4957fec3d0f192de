"""Differentiable all-reduce and all-gather among replicas, which a step calls.

Replica i has the weight w_i. The parameters get the sum, over all replicas, of w_i times the gradient in replica i. So
a gradient in replica i has to be the gradient of the whole step, divided by w_i. Where the output of replica j depends
on the input of replica i, the gradient of that output is therefore multiplied by w_j / w_i on its way to replica i.
With equal weights, and for SUM, this is a plain sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from torchstrategy._communication.reductions import check_addable, check_gatherable
from torchstrategy._communication.transfer import added, concatenated, in_buckets, sums
from torchstrategy._core.devices import memory_device
from torchstrategy._core.torch_internals import hide_from_compiler
from torchstrategy._core.types import Device
from torchstrategy._execution.replica import Replica

_Columns = list[tuple[torch.Tensor, ...]]  # for each tensor, the tensors of the replicas, in replica order


@final
class Collective:
    """The collective operations of one replica with the others of its run.

    Args:
        replica: This replica.
        present: The replicas of the run, in order.
        weights: The weight of the gradient of each replica of the strategy.
        devices: The device of each replica of the strategy. None: the device of the tensors that it brings.
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
        """The same collective operations, with tensors sent in buckets of at most `bytes_per_pack`."""
        if bytes_per_pack == self._bytes_per_pack:
            return self
        return Collective(self._replica, self._present, self._weights, self._devices, bytes_per_pack)

    @property
    def size(self) -> int:
        """How many replicas take part."""
        return len(self._present)

    @property
    def weight(self) -> float:
        """The factor of this replica's gradient; 0 if the gradient is dropped."""
        return self._weights[self._replica.index]

    @property
    def total_weight(self) -> float:
        """The sum of all weights: the factor of a gradient that is the same in every replica."""
        return sum(self._weights)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str] = (), name: str = "all_reduce"
    ) -> list[torch.Tensor]:
        """The sums of the replicas' tensors, tensor by tensor, on this replica's device.

        Args:
            tensors: The tensors of this replica.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

        Raises:
            ValueError: From `run`, if the shapes or dtypes of what they bring differ.
        """
        # Each device adds the tensors up once. Other replicas on the device get copies, since a replica may write on
        # its result.
        made: dict[Device | None, list[torch.Tensor]] = {}

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
        """The tensors of all replicas, concatenated along `axis` in replica order, on this replica's device.

        Args:
            tensors: The tensors of this replica.
            axis: The dimension along which they are concatenated.
            names: The name of each tensor, the same in every replica.
            name: The name of the synchronization point.

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
        """The sums of the replicas' gradients, each multiplied by its replica's weight over that of this replica."""

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
        # A replica of weight 0 may bring NaN, and 0 * NaN is NaN. So its gradient is left out.
        terms = [t if ratio == 1 else t * ratio for t, ratio in zip(column, ratios, strict=True) if ratio]
        return added(terms, self._where(r, column))

    def _where(self, r: int, column: Sequence[torch.Tensor]) -> Device:
        device = self._devices[r]
        # The single replica on the user's own objects has no device of its own: it runs where its tensors are.
        return column[0].device if device is None else device

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
        """One synchronization point: `given` makes, for each replica, a result of the tensors that all replicas bring.

        Returns:
            The result of this replica, and whether any replica wants gradients. The output of one replica depends on
            the inputs of all replicas. So all of them take part in the backward, or none.
        """

        def combine(brought: Sequence[tuple[list[torch.Tensor], bool, list[str]]]) -> list[tuple[list[Any], bool]]:
            # Tensors are matched by their positions, so without this check, a step would add up tensors that have
            # nothing to do with each other.
            for r, (_, _, other) in zip(self._present, brought, strict=True):
                if other != brought[0][2]:
                    raise ValueError(
                        f"Replicas {self._present[0]} and {r} brought values of different structure to one {name}: one "
                        f"has {_listed(brought[0][2])}, the other {_listed(other)}."
                    )
            columns = list(zip(*(tensors for tensors, _, _ in brought), strict=True))
            wants_grad = any(wants for _, wants, _ in brought)
            return [(given(r, columns), wants_grad) for r in self._present]

        # Detached, so that no graph of one replica leads into that of another: a backward of its own, which is another
        # synchronization point, takes gradients from replica to replica.
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
        # The outputs have to require grad also if only the inputs of another replica do. An additional input that
        # requires grad makes them so.
        gate = torch.ones((), device=here, requires_grad=True)
        # The gradients come back to this device; from here, autograd copies each to the device of the step's tensor.
        return list(_apply_backward(self, axis, sizes, outputs, gate, *(tensor.to(here) for tensor in inputs)))

    def received(self, grads: Sequence[torch.Tensor], axis: int | None, sizes: Sequence[Sequence[int]]) -> list[Any]:
        """The gradients of this replica's inputs, from those of its outputs. This is a synchronization point."""
        totals = _apply_scaled(self, *grads)
        if axis is None:
            return list(totals)
        position = self._present.index(self._replica.index)
        return [
            total.narrow(axis, sum(column[:position]), column[position])
            for total, column in zip(totals, sizes, strict=True)
        ]


class _Backward(torch.autograd.Function):
    """Gives outputs that were computed at a synchronization point their backward: another synchronization point."""

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
    """The sum of the replicas' gradients, as `Collective.scaled_sum` makes it; differentiable for double backward."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.collective = collective
        return tuple(collective.scaled_sum(grads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The forward multiplied the gradient from j to i by w_j / w_i, so its backward has this factor, too. And it has
        # the factor w_i / w_j, as has any gradient that goes from i to j. The product is 1: a plain sum.
        return (None, *ctx.collective.all_reduce(grads))


# `torch.compile` cannot trace the queues and threads of a synchronization point. The backward functions are listed,
# too, since a compiled step also runs its backward.
for _meeting in (Collective.all_reduce, Collective.all_gather, _Backward.backward, _Scaled.backward):
    hide_from_compiler(_meeting)
del _meeting

_apply_backward: Callable[..., Any] = _Backward.apply
_apply_scaled: Callable[..., Any] = _Scaled.apply


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "a bare value" for name in names) or "nothing"


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
