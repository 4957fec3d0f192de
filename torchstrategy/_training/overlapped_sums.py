"""The sums over all workers of gradients that are sent while backward still makes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import final

import torch

from torchstrategy._communication.transfer import as_factor
from torchstrategy._communication.workers import packs_of
from torchstrategy._core.torch_internals import (
    dtypes,
    has_one_tensor,
    raw_grad,
    shapes,
    unflattened,
    unseen_by_function_modes,
    version,
)
from torchstrategy._execution.replica_weights import ReplicaWeights
from torchstrategy._execution.worker_streams import WorkerStreams
from torchstrategy._training.replica_gradients import ReplicaParameter, call_in_backward, offer_gradient


# Note [Gradients that are sent early]
# A worker with one replica sends gradients in packs. A pack leaves as soon as backward has added to all gradients in it
# and the packs before it have left. What is left goes when the gradients are about to be reduced, before the workers
# have told each other what they have. The packs are the same in all workers, since they are made of what an earlier
# reduction has told all of them: the parameters that had a dense gradient in some worker. All workers send the packs in
# the same order. A worker that has no gradient of them comes to the reduction, hears that another has sent some, and
# sends zeros.
# - What was sent is an offer. The workers tell each other which gradients they have by the time of the reduction, and
#   which are other ones than they were: a second backward has added to them, or the step has cleared them. If all are
#   those that were sent, the sums count. Else all are thrown away, and the gradients are sent again. If that happens
#   twice in a row, nothing is sent early any more: such a step would always send them twice.
# - A worker that fails, or goes another way, may leave others with packs under way. The workers learn of it by the
#   messages of Note [Exchanges between workers], which have a group of their own.
@final
class OverlappedSums:
    """What one worker sends before a reduction, in one run after the other.

    Args:
        streams: The workers, and what they have told each other of the gradients of models.
        names: The names of the parameters.
        parameters: The parameters of the only replica of this worker.
    """

    def __init__(self, streams: WorkerStreams, names: Sequence[str], parameters: Sequence[ReplicaParameter]) -> None:
        self._streams = streams
        self._parameters = parameters
        self._model = tuple((name, parameter.shape) for name, parameter in zip(names, parameters, strict=False))
        self._made_for: object = None  # what the packs were made for
        self._packs: list[_Pack] = []
        # The memory of packs of earlier runs. The user's gradients are parts of it, until the next run replaces them.
        # New memory in each run would cost more time than to write on it.
        self._memory: list[torch.Tensor] = []

    @classmethod
    def of(
        cls, streams: WorkerStreams | None, names: Sequence[str], parameters: Sequence[Sequence[ReplicaParameter]]
    ) -> OverlappedSums | None:
        """None if nothing can be sent early, as by workers of several replicas, whose gradients are added up first."""
        if streams is None or len(parameters) > 1 or not streams.workers.can_overlap:
            return None
        return cls(streams, names, parameters[0])

    @property
    def outdated(self) -> set[int]:
        """The positions of parameters whose gradient is not the one that was sent."""
        return (self._offered.keys() | self._having) - self._valid

    @property
    def has_begun(self) -> bool:
        """Whether something is under way."""
        return self._num_sent > 0

    def begin(self, weights: ReplicaWeights, is_open: bool) -> None:
        """A run begins.

        Args:
            weights: How much the replica counts.
            is_open: Whether gradients may be sent early in this worker.
        """
        indices = self._streams.dense_gradients.get(self._model) or ()
        made_for = indices, shapes(self._parameters), dtypes(self._parameters)
        if made_for != self._made_for:
            self._made_for, self._packs = made_for, _packs(indices, self._parameters)
            self._pack_of = {index: pack for pack in self._packs for index in pack.indices}
        self._weight = weights.weights[0]
        self._is_open = is_open and not weights.is_understudy
        self._forget()
        # If there is one pack, it leaves at the reduction: it would be full when backward ends.
        for index in indices if len(self._packs) > 1 else ():
            if self._parameters[index].requires_grad:
                call_in_backward(self._parameters[index], offer_gradient)

    def _forget(self) -> None:
        """Nothing is under way, and nothing was offered."""
        self._num_sent = 0
        self._offered: dict[int, tuple[torch.Tensor, int]] = {}  # the gradients that were copied into packs
        self._having: set[int] = set()  # the positions of parameters that have a gradient when gradients are reduced
        self._valid: set[int] = set()  # those of them of which it is the gradient that was sent
        for pack in self._packs:
            pack.missing = set(pack.indices)

    def offer(self, index: int) -> None:
        """Backward has added to a gradient. Called in backward, on whichever thread it runs."""
        pack = self._pack_of.get(index)
        if pack is None or not self._is_open:
            return
        pack.missing.discard(index)
        while self._num_sent < len(self._packs) and not (pack := self._packs[self._num_sent]).missing:
            self._send(pack, {i: raw_grad(self._parameters[i]) for i in pack.indices})

    def settle(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Sends what is left of the gradients that the replica has when gradients are reduced.

        Returns those that were not sent, or are not as they were sent.
        """
        self._having = local.keys() & self._pack_of.keys()
        while self._is_open and (self._having or self._num_sent) and self._num_sent < len(self._packs):
            self._send(self._packs[self._num_sent], local)
        offered = self._offered.items()
        self._valid = {i for i, (own, known) in offered if local.get(i) is own and version(own) == known}
        return {i: gradient for i, gradient in local.items() if i not in self._valid}

    def weighted(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is to be sent again of a gradient: times its weight, which `settle` leaves out where it was sent."""
        return gradient * self._weight if index in self._valid else gradient

    def finish(self) -> dict[int, torch.Tensor]:
        """The sums over all workers, by position. Each worker calls it if one of them has begun."""
        for pack in self._packs[self._num_sent :]:
            self._send(pack, {})
        sums: dict[int, torch.Tensor] = {}
        for pack in self._packs:
            sums.update(pack.sums())
        return sums

    def among(self, indices: Set[int]) -> set[int]:
        """Those of the positions that are of parameters of the replica. The others are never sent early."""
        return {index for index in indices if index < len(self._parameters)}

    def learn(self, dense: Set[int], were_sent: bool, is_as_foreseen: bool) -> None:
        """All workers have told each other which gradients are dense, and whether those that were sent early count."""
        # If nobody has sent anything yet, the packs are as if nothing had been offered: these gradients are taken.
        self._forget()
        known, in_vain = self._streams.dense_gradients, self._streams.sent_in_vain
        if were_sent and not is_as_foreseen and self._model in in_vain:
            known[self._model] = None
        if were_sent and not is_as_foreseen:
            in_vain.add(self._model)
        elif were_sent:
            in_vain.discard(self._model)
        if dense and known.get(self._model, ()) is not None:
            known[self._model] = tuple(sorted(dense))

    def _free_memory(self, pack: _Pack) -> torch.Tensor:
        """A tensor for the gradients of a pack, in memory that nobody uses."""
        like = pack.like[0]
        known = (f for f in self._memory if (f.numel(), f.dtype, f.device) == (pack.size, like.dtype, like.device))
        flat = next((one for one in known if has_one_tensor(one.untyped_storage())), None)
        if flat is None:
            flat = like.new_empty(pack.size)
            self._memory = [*self._memory[1 - 2 * len(self._packs) :], flat]
        return flat.detach()  # another tensor, so that its memory counts as used for as long as somebody has it

    def _send(self, pack: _Pack, gradients: Mapping[int, torch.Tensor | None]) -> None:
        with unseen_by_function_modes(), torch.no_grad():
            flat = self._free_memory(pack)
            weight = as_factor(self._weight, [flat])
            for index, part in zip(pack.indices, unflattened(flat, pack.like), strict=True):
                gradient = gradients.get(index)
                if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
                    part.zero_()
                else:
                    torch.mul(gradient, weight, out=part)
                    self._offered[index] = gradient, version(gradient)
        pack.flat, pack.arrived = flat, self._streams.workers.begin_all_reduce(flat)
        self._num_sent += 1


class _Pack:
    """Gradients of one dtype and device, which are sent one after the other in one tensor.

    Args:
        indices: The positions of their parameters.
        like: These parameters.
    """

    missing: set[int]  # those to which backward has not added yet
    flat: torch.Tensor | None = None
    arrived: Callable[[], None]  # waits until the sums are there

    def __init__(self, indices: Sequence[int], like: Sequence[torch.Tensor]) -> None:
        self.indices = indices
        self.like = like
        self.size = sum(tensor.numel() for tensor in like)

    def sums(self) -> dict[int, torch.Tensor]:
        """The sums over all workers, by position, when they are there."""
        self.arrived()
        flat, self.flat = self.flat, None
        assert flat is not None
        return dict(zip(self.indices, unflattened(flat, self.like), strict=True))


def in_order_of_backward(indices: Iterable[int]) -> list[int]:
    """The positions of parameters as they are sent: backward makes the gradients of the last ones first."""
    return sorted(indices, reverse=True)


def _packs(indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> list[_Pack]:
    ordered = in_order_of_backward(indices)
    packs = [[ordered[i] for i in pack] for pack in packs_of([parameters[index] for index in ordered])]
    return [_Pack(pack, [parameters[index] for index in pack]) for pack in packs]
