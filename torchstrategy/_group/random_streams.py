"""The random numbers of each replica.

Replica 0 draws from the caller's generators. Every other replica draws from a stream of
its own, so that no two replicas draw the same dropout mask. torch's default generators
belong to the process, not to a thread. So the library sets their state to that of a
replica's stream before the replica goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast, final

import torch

from torchstrategy._base.context import is_accelerator
from torchstrategy._base.devices import device_count
from torchstrategy._base.types import Device, GeneratorLike


# Note [Random streams of replicas]
# Replica 0 draws from the caller's generators, so that a strategy of one replica draws
# what plain PyTorch draws. Replica i > 0 draws from a stream whose seed is made, at
# each run, of the state of the caller's generators, of i, and of the depth of nested
# runs. Nothing is kept between runs: torch's random state is all that a checkpoint has
# to save. Only the caller's thread may exchange the state of a generator, and only
# while all replicas that draw from it stand still. So it does this before it wakes a
# replica, also before it wakes one to stop it.
# At a synchronization point the generators have the caller's streams, since `combine`
# acts for the caller. When the run is over, the caller's generators go on where replica
# 0 stopped, as after a plain step. If replica 0 drew nothing and another replica did,
# the caller's generator moves on by one number: otherwise the next run would make the
# same seeds, and the other replica would draw the same numbers again.
# If replicas may run at the same time, they share the one generator of the CPU, and
# draw from it as they come. This is so, too, in a run in which a `Watch` has them take
# turns, since whether it does depends on what earlier runs wrote.
@final
class RandomStreams:
    """The random streams of the replicas of one run.

    See Note [Random streams of replicas].

    Only the thread that gives the turns may call it, and only while every replica that
    shares a generator stands still.

    Args:
        devices: The device of each replica.
        one_at_a_time: Whether no two replicas ever run at the same time. Only then can
            each replica have a stream of its own on the CPU, which has one generator.
            Otherwise the replicas draw from this generator as they come, and have
            streams of their own only on accelerators.
        depth: How many runs this one is nested in. Its replicas must not draw the
            numbers of the replicas around them.
        first: How many replicas other processes have before these. See Note [Random
            streams of workers].
    """

    def __init__(
        self,
        devices: Sequence[Device],
        one_at_a_time: bool,
        depth: int = 0,
        first: int = 0,
    ) -> None:
        of_device = {
            device: generators_of(device, one_at_a_time) for device in set(devices)
        }
        self._first = first
        self._generators = [of_device[device] for device in devices]
        # The replica whose stream a generator has; 0 if the generator is not in here.
        self._holders: dict[GeneratorLike, int] = {}
        # The state at which a stream began.
        self._begun: dict[tuple[GeneratorLike, int], torch.Tensor] = {}
        # The state at which a stream was left.
        self._paused: dict[tuple[GeneratorLike, int], torch.Tensor] = {}
        self._callers = {
            generator: generator.get_state()
            for generator in generators_of(devices[0], with_cpu=True)
        }
        seeds = [
            depth.to_bytes(4, "little"),
            *(state.numpy().tobytes() for state in self._callers.values()),
        ]
        self._origin = hashlib.blake2b(b"".join(seeds)).digest()

    def put_in_force(self, replica: int) -> None:
        """Sets the generators of `replica` to its stream."""
        for generator in self._generators[replica]:
            self._lend(generator, self._first + replica)

    def put_callers_in_force(self) -> None:
        """Sets all generators to the caller's streams, as outside of replicas."""
        for generator in list(self._holders):
            self._lend(generator, 0)

    def give_back(self) -> bool:
        """Sets the caller's generators to where replica 0 stopped, or beyond.

        Called when the run is over.

        Returns whether another replica has drawn.
        """
        self.put_callers_in_force()
        has_drawn = any(
            not torch.equal(begun, self._paused[stream])
            for stream, begun in self._begun.items()
        )
        as_they_were = (
            torch.equal(generator.get_state(), state)
            for generator, state in self._callers.items()
        )
        leads = not self._first  # replica 0 of all is in this process
        # The states are compared only if need be.
        if has_drawn and leads and all(as_they_were):
            torch.empty((), dtype=torch.int64, device="cpu").random_(
                generator=torch.default_generator
            )
        self._holders.clear()
        return has_drawn

    def _lend(self, generator: GeneratorLike, replica: int) -> None:
        holder = self._holders.get(generator, 0)
        if holder == replica:
            return
        self._paused[generator, holder] = generator.get_state()
        if (generator, replica) in self._paused:
            generator.set_state(self._paused[generator, replica])
        else:
            digest = hashlib.blake2b(
                self._origin, digest_size=8, salt=replica.to_bytes(8, "little")
            ).digest()
            # A seed is a signed 64-bit number.
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            self._begun[generator, replica] = generator.get_state()
        self._holders[generator] = replica


def generators_of(device: Device, with_cpu: bool) -> list[GeneratorLike]:
    """The default generator of a device, if it is an accelerator.

    The CPU's generator comes before it, if you ask for that.

    If torch does not let anybody read the state of an accelerator's generator, replicas
    draw from it as they come.
    """
    generators: list[GeneratorLike] = [torch.default_generator] if with_cpu else []
    if is_accelerator(device):
        module = torch.get_device_module(device.type)
        of_devices = getattr(module, "default_generators", ())
        if device.index < len(of_devices):
            generators.append(of_devices[device.index])
        elif hasattr(module, "get_rng_state"):
            generators.append(_GeneratorOf(device))
    return generators


@final
@dataclass(frozen=True)
class _GeneratorOf:
    """The default generator of a device whose module has only functions for it.

    `torch.mps` is such a module.
    """

    device: Device

    def get_state(self) -> torch.Tensor:
        if self._is_the_only_one:
            return cast(torch.Tensor, self._module.get_rng_state())
        return cast(torch.Tensor, self._module.get_rng_state(self.device))

    def set_state(self, new_state: torch.Tensor) -> None:
        if self._is_the_only_one:
            self._module.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self.device)

    def manual_seed(self, seed: int) -> None:
        with (
            nullcontext()
            if self._is_the_only_one
            else torch.accelerator.device_index(self.device.index)
        ):
            self._module.manual_seed(seed)  # that of the current device

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device.type)

    @property
    def _is_the_only_one(self) -> bool:
        """Whether there is no other device of its type.

        Then the functions need not take a device.
        """
        return device_count(self.device.type) == 1
