"""The memory that each replica has for the tensors that a step reaches.

Most tensors are written by nobody while the replicas run: parameters, masks, tables.
All replicas on the program's device share the memory of these. When a replica has first
written on one, each gets memory of its own, with what was there before the write, and
gets it in all later runs, too. Running statistics are written in every forward, so that
they are given out from the beginning.

A replica on another device has memory of its own for parameters and for all tensors of
modules. It is brought up to date where the program's own has been written since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch

from torchstrategy._base.devices import memory_device
from torchstrategy._base.memory import has_lost_memory
from torchstrategy._base.torch_internals import versions
from torchstrategy._copies.tensor_copies import copy_tensors, group_by_memory
from torchstrategy._group.transfer import Write, write
from torchstrategy._run.refusals import written_parameter
from torchstrategy._turns import refusals
from torchstrategy._turns.image import Exchange, Image
from torchstrategy._turns.numbers import are_same_numbers
from torchstrategy._turns.reachable import Reached
from torchstrategy._variables.variable import is_variable

# Bytes: of a larger tensor that no module has, nobody keeps what was there.
LARGEST_KEPT = 1 << 26
# Bytes: of a tensor up to this size in the memory of the CPU, the numbers are compared
# in each run. A write through `.data` or NumPy changes no version.
COMPARED = 1 << 14


# Note [Writes that change no version]
# A step that writes through `.data` or NumPy does so in its first run, or never. So in
# the first run of a step, the second, the fourth, the eighth and so on, the numbers of
# all tensors in the memory of the CPU are compared with what they were before. In the
# other runs, those of small tensors are.
@final
class KnownMemory:
    """What earlier runs of a step have shown of its tensors, by their positions.

    Args:
        reached: What the step reaches.
    """

    def __init__(self, reached: Reached) -> None:
        tensors = reached.tensors
        groups = group_by_memory([t.detach() for t in tensors])
        # The positions of tensors that share memory with one, itself included.
        self.together = {i: group for group in groups for i in group}
        self.written = set(reached.running)
        # What tensors held that no replica has written, and the versions of all.
        self.kept: dict[int, torch.Tensor] = {}
        self.versions: list[int] = [-1] * len(tensors)
        self.ids: list[int] = []
        # By replica, and by the position of a tensor; and the version of the program's
        # own of which it has the values.
        self.memory: dict[int, dict[int, torch.Tensor]] = {}
        self.sent: dict[int, dict[int, tuple[int, int]]] = {}
        self.num_runs = 0


@final
class ReplicaMemory:
    """Gives replicas memory of their own in one run.

    Args:
        exchange: Puts images on.
        images: Of the replicas that take part.
        known: What earlier runs have shown.
    """

    def __init__(
        self, exchange: Exchange, images: Mapping[int, Image], known: KnownMemory
    ) -> None:
        self._exchange, self._images, self._known = exchange, images, known
        self._reached, self._tensors = exchange.reached, exchange.reached.tensors
        known.num_runs += 1
        self._compares_all = known.num_runs & (known.num_runs - 1) == 0
        self._has_away = any(not image.is_home for image in images.values())
        self._home = exchange.users.device
        parameters = set(self._reached.parameters)
        # The tensors that have memory elsewhere, where a replica is elsewhere.
        self._moved = {
            i
            for i, tensor in enumerate(self._tensors)
            if self._has_away
            and not is_variable(tensor)
            and (i in self._reached.of_modules or i in parameters)
            and memory_device(tensor.device) == self._home
        }
        self._begin()

    def _begin(self) -> None:
        known = self._known
        ids = list(map(id, self._tensors))
        if ids != known.ids:
            # Another tensor stands where one was: what was kept of that one is not its.
            same = dict(enumerate(known.ids))
            known.kept = {i: k for i, k in known.kept.items() if same.get(i) == ids[i]}
            known.ids = ids
        self._now = versions(self._tensors)
        for r in self._images:
            self._give(r, sorted(known.written))
            self._send(r, sorted(self._moved - known.written))
        self._keep_others()
        self._then = list(self._now)

    def _give(self, r: int, positions: Sequence[int]) -> None:
        """Gives a replica memory of its own, with what the tensors hold now."""
        image = self._images[r]
        own = self._known.memory.setdefault(r, {})
        missing: dict[torch.device, list[int]] = {}
        for i in positions:
            home, device = self._exchange.keep_home(i), self._device_of(i, image)
            memory = own.get(i)
            if memory is not None and _are_alike(memory, home, device):
                memory.copy_(home)
            else:
                missing.setdefault(device, []).append(i)
        for device, there in missing.items():
            homes = [self._exchange.home[i] for i in there]
            own.update(zip(there, copy_tensors(homes, device), strict=True))
        for i in positions:
            image.memory[i], image.versions[i] = own[i], self._now[i]

    def _send(self, r: int, positions: Sequence[int]) -> None:
        """Brings the memory of a replica elsewhere up to date."""
        image = self._images[r]
        if image.is_home:
            for i in positions:
                image.memory[i] = self._exchange.keep_home(i)
                image.versions[i] = self._now[i]
            return
        own = self._known.memory.setdefault(r, {})
        sent = self._known.sent.setdefault(r, {})
        missing: list[int] = []
        outdated = Write([], [])
        for i in positions:
            home, memory = self._exchange.keep_home(i), own.get(i)
            told = id(self._tensors[i]), self._now[i]
            if memory is None or not _are_alike(memory, home, image.device):
                missing.append(i)
            elif sent.get(i) != told:
                outdated.targets.append(memory)
                outdated.sources.append(home)
            sent[i] = told
        homes = [self._exchange.home[i] for i in missing]
        own.update(zip(missing, copy_tensors(homes, image.device), strict=True))
        for end in write([outdated]):
            end.synchronize()
        for i in positions:
            image.memory[i], image.versions[i] = own[i], self._now[i]

    def _device_of(self, i: int, image: Image) -> torch.device:
        return image.device if i in self._moved else self._tensors[i].device

    def _keep_others(self) -> None:
        """Keeps what tensors hold, so that a write of a replica can be taken back."""
        known = self._known
        kept = known.kept
        for i, (tensor, then, version) in enumerate(
            zip(self._tensors, known.versions, self._now, strict=True)
        ):
            if i in known.written:
                kept.pop(i, None)
                continue
            if i in kept and (then != version or self._is_other(i)):
                del kept[i]
            # A parameter that an optimizer trains changes in each run. It is kept in
            # those runs only in which all numbers are compared.
            is_due = self._compares_all or i not in self._reached.trained
            if i not in kept and is_due and self._can_keep(i):
                kept[i] = tensor.detach().clone()
            elif i in kept and not is_due:
                del kept[i]
        known.versions = list(self._now)

    def _can_keep(self, i: int) -> bool:
        tensor = self._tensors[i]
        is_of_model = i in self._reached.of_modules or i in self._reached.trained
        return (
            tensor.layout is torch.strided
            and not has_lost_memory(tensor)
            and not is_variable(tensor)
            and type(tensor) in _PLAIN
            and (is_of_model or tensor.nbytes <= LARGEST_KEPT)
        )

    def _is_other(self, i: int) -> bool:
        """Whether a tensor has other numbers than those that were kept.

        See Note [Writes that change no version].
        """
        kept, tensor = self._known.kept.get(i), self._tensors[i]
        if kept is None or not (tensor.is_cpu and kept.is_cpu):
            return False
        if has_lost_memory(tensor):
            return True
        if tensor.nbytes > COMPARED and not self._compares_all:
            return False
        return not are_same_numbers(kept, tensor.detach())

    # Writes

    def note_writes(self, is_for_all: bool) -> None:
        """Finds tensors that were written first since the last look.

        Called when the image that was on has been taken off.

        Args:
            is_for_all: Whether one who acts for all replicas has written.
        """
        known, now = self._known, versions(self._tensors)
        is_away = not self._exchange.on.is_home
        written = {
            i
            for i, (then, version) in enumerate(zip(self._then, now, strict=True))
            if then != version
            or (self._is_other(i) and not (is_away and i in self._moved))
        }
        for i in sorted(written - known.written):
            written.update(known.together.get(i, ()))
        found = sorted(written - known.written)
        if found and is_for_all:
            self._take_over(found, now)
        elif found:
            self._part(found, now)

    def note_put_on(self) -> None:
        """Notes the versions that tensors have under the image that was put on."""
        self._then = versions(self._tensors)

    def _take_over(self, found: Sequence[int], now: Sequence[int]) -> None:
        """Takes what one who acts for all has written: all replicas are to see it."""
        known = self._known
        for i in found:
            self._now[i] = known.versions[i] = now[i]
            if i in known.kept:
                known.kept[i] = self._tensors[i].detach().clone()
        for r in self._images:
            self._send(r, [i for i in found if i in self._moved])

    def _part(self, found: Sequence[int], now: Sequence[int]) -> None:
        """Gives each replica its own of tensors that one of them has written first."""
        known, writer, exchange = self._known, self._exchange.on, self._exchange
        for i in found:
            if has_lost_memory(self._tensors[i]):
                if i in known.kept:
                    exchange.put_memory(i, known.kept.pop(i), None)
                raise RuntimeError(refusals.taken_away(self._name_of(i)))
            if self._tensors[i].is_inference():
                # torch lets nobody give it other memory with a version.
                with torch.inference_mode():
                    self._tensors[i].copy_(known.kept[i])
                raise RuntimeError(refusals.written_large(self._name_of(i)))
            if i not in known.kept and writer.is_home:
                is_parameter = i in self._reached.parameters
                refuse = written_parameter if is_parameter else refusals.written_large
                raise RuntimeError(refuse(self._name_of(i)))
        tensors = [self._tensors[i].detach() for i in found]
        values = dict(zip(found, copy_tensors(tensors, tensors[0].device), strict=True))
        for i in found:
            home = exchange.keep_home(i)
            if writer.is_home or i not in self._moved:
                # The write is taken back in the memory of the program's own.
                if home.shape == known.kept[i].shape:
                    home.copy_(known.kept[i])
                else:  # the step has given it other memory
                    exchange.home[i] = known.kept[i]
            known.kept.pop(i, None)
            for sent in known.sent.values():
                sent.pop(i, None)
        known.written.update(found)
        for r in self._images:
            self._give(r, found)
        for i in found:
            writer.memory[i].copy_(values[i])
            writer.versions[i] = now[i]
            exchange.put_memory(i, writer.memory[i], now[i])

    def _name_of(self, i: int) -> str:
        return self._reached.details.name_of(self._tensors[i]) or "A tensor"

    def versions_at_home(self) -> dict[int, int]:
        """The versions of the program's own tensors, where replicas have others."""
        return {i: self._now[i] for i in self._exchange.home}

    def give_act(self, act: Image, lead: Image) -> None:
        """Gives a function of the program's what a lead elsewhere has written."""
        if not lead.is_home:
            for i in self._known.written:
                device = self._exchange.home[i].device
                (act.memory[i],) = copy_tensors([lead.memory[i]], device)
                act.versions[i] = lead.versions[i]

    def refuse_unlike_parameters(self) -> None:
        """Refuses trained parameters that replicas have written differently."""
        for i in sorted(self._known.written & self._reached.trained):
            first, *others = (image.memory[i] for image in self._images.values())
            if not all(are_same_numbers(first, other) for other in others):
                name = self._reached.details.name_of(self._tensors[i])
                raise RuntimeError(written_parameter(name))

    def tell(self, act: Image, before: Mapping[int, int]) -> None:
        """Gives all replicas what one who acts for all has written.

        Args:
            act: The image of who acts, which has the lead's memory.
            before: The versions of the tensors when it began to act.
        """
        for i in self._known.written:
            memory = act.memory.get(i)
            if memory is None or act.versions.get(i) == before.get(i):
                continue
            for image in self._images.values():
                if image.memory[i] is not memory:
                    image.memory[i].copy_(memory)
                image.versions[i] = act.versions[i]


def _are_alike(memory: torch.Tensor, home: torch.Tensor, device: torch.device) -> bool:
    return (
        memory.shape == home.shape
        and memory.dtype == home.dtype
        and memory.device == device
        and memory.layout is home.layout
        and (memory.layout is not torch.strided or memory.stride() == home.stride())
    )


_PLAIN: Collection[type] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
