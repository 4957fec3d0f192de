"""What the objects hold in one replica, and how images are exchanged."""

from __future__ import annotations

from contextlib import suppress
from operator import is_
from typing import Any, final

import torch

from torchstrategy._base.torch_internals import (
    raw_grads,
    requires_grad_of,
    set_raw_grads,
    set_version,
    versions,
)
from torchstrategy._turns.held import Contents, Held, contents_of, fill, write_class
from torchstrategy._turns.opaque import read_state, write_state
from torchstrategy._turns.reachable import Reached
from torchstrategy._variables.variable import plain_data, set_plain_data


# Note [What an image has]
# An image says what differs from what the objects held when the run began. So an image
# in which nothing differs is empty, and to exchange two such images writes nothing.
# - Containers and places: their contents, compared by identity.
# - Tensors: nothing where the replica shares the memory of the program's own. Else
#   memory of its own, with the version that the tensor has there: a backward would be
#   refused that saved the tensor before.
# - `.grad` of each parameter, and whether it requires grad: a step may freeze a part
#   for one of its backwards.
# - Arrays and random generators: their states, once a replica has changed one.
# Exactly one image is on. Who acts for all replicas has an image, too: the lead's.
@final
class Image:
    """What the objects hold while it is one replica's turn.

    See Note [What an image has].

    Args:
        device: Where the replica runs.
        is_home: Whether this is the device of the program's own parameters.
    """

    __slots__ = (
        "containers",
        "device",
        "flags",
        "grads",
        "is_home",
        "memory",
        "places",
        "shown",
        "states",
        "versions",
    )

    def __init__(self, device: torch.device, is_home: bool = True) -> None:
        self.device, self.is_home = device, is_home
        self.containers: dict[int, Contents] = {}
        self.places: dict[int, Any] = {}
        self.grads: list[torch.Tensor | None] = []
        self.flags: list[bool] = []
        self.memory: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self.states: dict[int, Any] = {}
        # The containers that it had when it was last put on.
        self.shown: dict[int, Contents] = {}

    def follow(self, other: Image) -> None:
        """Takes what another image has, but for gradients and memory elsewhere."""
        self.containers, self.places = dict(other.containers), dict(other.places)
        self.states, self.flags = dict(other.states), list(other.flags)
        if other.is_home:
            self.memory, self.versions = dict(other.memory), dict(other.versions)


@final
class Exchange:
    """Puts images on the objects that a step reaches, and takes them off.

    Used while all replicas stand still, or by the one whose turn it is.

    Args:
        reached: The objects.
        users: The image that the objects have when the run begins.
    """

    def __init__(self, reached: Reached, users: Image) -> None:
        self.reached = reached
        self.base = Held(reached.containers)
        self._places = reached.places
        self.places = [place.read() for place in self._places]
        self.parameters = [reached.tensors[i] for i in reached.parameters]
        # The memory of the program's own tensors, where a replica has other memory.
        self.home: dict[int, torch.Tensor] = {}
        users.grads = raw_grads(self.parameters)
        self.flags = users.flags = requires_grad_of(self.parameters)
        self.users = self.on = users
        # Whether `on` says what the objects hold: it was taken off.
        self.is_taken_off = True
        self.states = list(map(read_state, reached.opaque))

    def take_off(self) -> None:
        """Notes in the image that is on what the objects hold now."""
        if self.is_taken_off:
            return
        image, base = self.on, self.base
        image.containers = (
            {}
            if base.is_same()
            else {key: contents_of(base.containers[key]) for key in base.differing()}
        )
        now = [place.read() for place in self._places]
        image.places = (
            {}
            if all(map(is_, now, self.places))
            else {
                i: value
                for i, (value, before) in enumerate(zip(now, self.places, strict=True))
                if value is not before
            }
        )
        image.grads = raw_grads(self.parameters)
        image.flags = requires_grad_of(self.parameters)
        tensors = self.reached.tensors
        image.versions = dict(
            zip(image.memory, versions([tensors[i] for i in image.memory]), strict=True)
        )
        for i, thing in enumerate(self.reached.opaque):
            state = read_state(thing)
            if i in image.states or state != self.states[i]:
                image.states[i] = state
        self.is_taken_off = True

    def put_on(self, image: Image) -> None:
        """Lets the objects hold what an image says. Another one was taken off."""
        over = self.on
        for key in {**over.containers, **image.containers}:
            self._fill(key, image.containers.get(key))
        for i in {**over.places, **image.places}:
            value = image.places.get(i, self.places[i])
            if self._places[i].read() is not value:
                self._places[i].write(value)
        for i in {**over.states, **image.states}:
            write_state(self.reached.opaque[i], image.states.get(i, self.states[i]))
        if image.device != over.device:
            # torch refuses a gradient that is not where its parameter is.
            set_raw_grads(self.parameters, [None] * len(self.parameters))
        for i in {**over.memory, **image.memory}:
            memory = image.memory.get(i)
            memory = self.home[i] if memory is None else memory
            if over.memory.get(i, self.home.get(i)) is not memory:
                self.put_memory(i, memory, image.versions.get(i))
        flags = image.flags or self.flags  # those of an image that was never on
        if flags != over.flags:
            for parameter, now_is, is_trained in zip(
                self.parameters, over.flags, flags, strict=True
            ):
                if now_is != is_trained:
                    parameter.requires_grad_(is_trained)
        image.flags = flags
        now = raw_grads(self.parameters)
        if not all(map(is_, now, image.grads)):
            rows = zip(self.parameters, image.grads, now, strict=True)
            other = [(p, new) for p, new, old in rows if new is not old]
            set_raw_grads([p for p, _ in other], [new for _, new in other])
        image.shown = image.containers
        self.on, self.is_taken_off = image, False

    def put_memory(self, i: int, memory: torch.Tensor, version: int | None) -> None:
        """Gives a tensor other memory, and the version that it has there."""
        tensor = self.reached.tensors[i]
        set_plain_data(tensor, memory)
        if version is not None:
            # A tensor that was made in inference mode has no version.
            with suppress(RuntimeError):
                set_version(tensor, version)

    def keep_home(self, i: int) -> torch.Tensor:
        """The memory of the program's own tensor: from here on, others may be put."""
        if i not in self.home:
            self.home[i] = plain_data(self.reached.tensors[i])
        return self.home[i]

    def _fill(self, key: int, contents: Contents | None) -> None:
        container = self.reached.containers[key]
        contents = self.base.of(key) if contents is None else contents
        if key in self.reached.classes:
            write_class(self.reached.classes[key], container, contents)
        else:
            fill(container, contents)

    def contents(self, image: Image, key: int) -> Contents:
        """What a container holds in an image that was taken off."""
        own = image.containers.get(key)
        return self.base.of(key) if own is None else own

    def content(self, image: Image, place: int) -> Any:
        """What a place holds in an image that was taken off."""
        return image.places.get(place, self.places[place])
