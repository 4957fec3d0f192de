"""The sums over all workers of gradients that are sent while backward still makes others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from torchstrategy._communication.workers import packs_of
from torchstrategy._core.torch_internals import has_one_tensor, on_gradient, raw_grad, unseen_by_function_modes, version
from torchstrategy._execution.worker_streams import WorkerStreams
from torchstrategy._training.replica_gradients import ReplicaParameter, offer_gradient
from torchstrategy._training.replica_weights import ReplicaWeights

_FreeMemory = Callable[[torch.Tensor, int], torch.Tensor]


# Note [Gradients that are sent early]
# A worker with one replica sends a gradient as soon as backward has added to it. The packs in which gradients are sent
# are the same in all workers, since they are made of what the reduction before this one has told all of them: the
# parameters that had a dense gradient in some worker. All workers send the packs in the same order, and whoever comes
# to the reduction sends those that are left, with zeros in the places of gradients that it does not have.
# - What was sent is an offer. The workers tell each other for which parameters their gradient is another one by the
#   time of the reduction: a second backward has added to it, or the step has cleared it. The sums of these are thrown
#   away, and the gradients are sent again. From then on, nothing is sent early: such a step would send them twice.
# - A worker that fails, or goes another way, may leave others with packs under way. The workers learn of it by the
#   messages of Note [Exchanges between workers], which have a group of their own.
@final
class OverlappedSums:
    """What one worker sends during backward, in one run after the other.

    Args:
        streams: The workers, and what they have told each other of the gradients of models.
        names: The names of the parameters.
        parameters: The parameters of the only replica of this worker.
    """

    def __init__(self, streams: WorkerStreams, names: Sequence[str], parameters: Sequence[ReplicaParameter]) -> None:
        self._streams = streams
        self._parameters = parameters
        self._model = tuple((name, parameter.shape) for name, parameter in zip(names, parameters, strict=False))
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
        self._packs = _packs(indices, self._parameters, self._free_memory)
        self._pack_of = {index: pack for pack in self._packs for index in pack.places}
        self._weight = weights.weights[0]
        self._is_open = is_open and not weights.is_understudy
        self._num_sent = 0
        self._offered: dict[int, tuple[torch.Tensor, int]] = {}  # the gradients that were copied into packs
        self._having: set[int] = set()  # the positions of parameters that have a gradient when gradients are reduced
        self._valid: set[int] = set()  # those of them of which it is the gradient that was sent
        for index in indices:
            parameter = self._parameters[index]
            if not parameter.is_sent_early and parameter.requires_grad:
                parameter.is_sent_early = True  # the hook stays as long as the parameter
                on_gradient(parameter, offer_gradient)

    def offer(self, index: int) -> None:
        """Backward has added to a gradient. Called in backward, on whichever thread it runs."""
        pack, gradient = self._pack_of.get(index), raw_grad(self._parameters[index])
        if not self._is_open or pack is None or index not in pack.missing or gradient is None:
            return
        if gradient.requires_grad or gradient.layout is not torch.strided:
            return
        with unseen_by_function_modes(), torch.no_grad():
            torch.mul(gradient, self._weight, out=pack.part(index))
        self._offered[index] = gradient, version(gradient)
        pack.missing.discard(index)
        self._send(only_full=True)

    def settle(self, local: Mapping[int, torch.Tensor]) -> None:
        """Compares what was sent with the gradients that the replica has when gradients are reduced."""
        offered = self._offered.items()
        self._having = local.keys() & self._pack_of.keys()
        self._valid = {i for i, (own, known) in offered if local.get(i) is own and version(own) == known}

    def finish(self) -> dict[int, torch.Tensor]:
        """The sums over all workers, by position. Each worker calls it if one of them has begun."""
        self._send(only_full=False)
        sums = {}
        for pack in self._packs:
            assert pack.arrived is not None
            pack.arrived()
            sums.update({index: pack.part(index) for index in pack.places})
        self._packs, self._pack_of, self._num_sent = [], {}, 0
        return sums

    def learn(self, dense: Sequence[int], was_in_vain: bool) -> None:
        """All workers have told each other which gradients are dense, and whether some were sent in vain."""
        # If nobody has sent anything yet, the packs are as if nothing had been offered: these gradients are taken.
        self._offered, self._having, self._valid = {}, set(), set()
        for pack in self._packs:
            pack.missing = set(pack.places)
        known = self._streams.dense_gradients
        if was_in_vain or known.get(self._model, ()) is None:
            known[self._model] = None
        elif dense:
            known[self._model] = tuple(index for index in dense if index < len(self._parameters))

    def _free_memory(self, like: torch.Tensor, size: int) -> torch.Tensor:
        """A tensor of some elements, in memory that nobody uses."""
        known = (f for f in self._memory if (f.numel(), f.dtype, f.device) == (size, like.dtype, like.device))
        flat = next((one for one in known if has_one_tensor(one.untyped_storage())), None)
        if flat is None:
            flat = like.new_empty(size)
            self._memory = [*self._memory[1 - 2 * len(self._packs) :], flat]
        return flat.detach()  # another tensor, so that its memory counts as used for as long as somebody has it

    def _send(self, only_full: bool) -> None:
        while self._num_sent < len(self._packs) and not (only_full and self._packs[self._num_sent].missing):
            pack = self._packs[self._num_sent]
            for index in pack.missing:
                pack.part(index).zero_()
            pack.missing.clear()
            pack.arrived = self._streams.workers.begin_all_reduce(pack.flat)
            self._num_sent += 1


class _Pack:
    """Gradients of one dtype and device, one after the other in one tensor.

    Args:
        indices: The positions of their parameters.
        like: All parameters.
        free_memory: Returns memory, for a number of elements like those of a tensor.
    """

    def __init__(self, indices: Sequence[int], like: Sequence[torch.Tensor], free_memory: _FreeMemory) -> None:
        self.places: dict[int, tuple[int, int]] = {}  # by position: where it begins, and where it ends
        end = 0
        for index in indices:
            self.places[index] = end, end + like[index].numel()
            end += like[index].numel()
        self._like = like
        self._size = end
        self._free_memory = free_memory
        self.missing = set(indices)
        self.arrived: Callable[[], None] | None = None  # waits until the sums are there

    @functools.cached_property
    def flat(self) -> torch.Tensor:
        """Made when it is needed: a run without a backward needs none."""
        return self._free_memory(self._like[next(iter(self.places))], self._size)

    def part(self, index: int) -> torch.Tensor:
        return self.flat[slice(*self.places[index])].view(self._like[index].shape)


def _packs(indices: Sequence[int], parameters: Sequence[torch.Tensor], free_memory: _FreeMemory) -> list[_Pack]:
    """Backward makes the gradients of the last parameters first."""
    ordered = sorted(indices, reverse=True)
    packs = packs_of([parameters[index] for index in ordered])
    return [_Pack([ordered[i] for i in pack], parameters, free_memory) for pack in packs]
