"""Which random numbers does a replica draw?

Replica 0 draws from the caller's generators, so one replica draws exactly what plain PyTorch draws. Replica i > 0 draws
from a stream of its own, which starts, at each run, at a seed made from the state of the caller's generators and from
i: no two replicas draw the same dropout mask, and torch's own random state is all that a checkpoint has to hold.

torch's default generators belong to the process, not to a thread, so a stream is put in force by exchanging their state
whenever the turn goes to another replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import torch

from torchstrategy._core.devices import is_accelerator
from torchstrategy._core.types import Device


@final
class RandomStreams:
    """The streams of the replicas of one run.

    Only the thread that gives the turns may call it, and only while every replica that shares a generator stands still.

    Args:
        devices: The device of each replica.
        one_at_a_time: Whether no two replicas ever run at once. Only then can the one generator of the CPU be lent to
            each in turn; otherwise they draw from it as they come, and have streams of their own on their accelerators.
        depth: Of runs within runs, whose replicas must not draw what those around them draw.
    """

    def __init__(self, devices: Sequence[Device], one_at_a_time: bool, depth: int = 0) -> None:
        self._generators = [_generators(device, one_at_a_time) for device in devices]
        self._holders: dict[torch.Generator, int] = {}  # whose stream a generator produces; if not here, replica 0's
        self._paused: dict[tuple[torch.Generator, int], torch.Tensor] = {}  # where a replica's stream was left
        states = [generator.get_state() for generator in _generators(devices[0], with_cpu=True)]
        seeds = [depth.to_bytes(4, "little"), *(state.numpy().tobytes() for state in states)]
        self._origin = hashlib.blake2b(b"".join(seeds)).digest()

    def put_in_force(self, replica: int) -> None:
        """From here on the generators of `replica` produce its stream."""
        for generator in self._generators[replica]:
            self._lend(generator, replica)

    def put_callers_in_force(self) -> None:
        """From here on all generators produce the caller's streams, as where no replica runs."""
        for generator in list(self._holders):
            self._lend(generator, 0)

    def give_back(self) -> None:
        """The caller's generators go on where replica 0 stopped."""
        for generator, holder in self._holders.items():
            if holder != 0:
                generator.set_state(self._paused[generator, 0])
        self._holders.clear()

    def _lend(self, generator: torch.Generator, replica: int) -> None:
        holder = self._holders.get(generator, 0)
        if holder == replica:
            return
        self._paused[generator, holder] = generator.get_state()
        if (generator, replica) in self._paused:
            generator.set_state(self._paused[generator, replica])
        else:
            generator.manual_seed(self._seed(replica))
        self._holders[generator] = replica

    def _seed(self, replica: int) -> int:
        digest = hashlib.blake2b(self._origin, digest_size=8, salt=replica.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little") >> 1  # a seed is a signed 64-bit number


def _generators(device: Device, with_cpu: bool) -> list[torch.Generator]:
    generators = [torch.default_generator] if with_cpu else []
    if is_accelerator(device):
        generators.append(torch.get_device_module(device.type).default_generators[device.index])
    return generators
