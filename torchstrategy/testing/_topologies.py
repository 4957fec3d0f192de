"""Strategies by name: of which kind, with how many replicas, on which devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, NamedTuple, final

from torchstrategy._base.context import has_strategy
from torchstrategy._base.devices import canonical_device, local_accelerators
from torchstrategy._base.errors import an
from torchstrategy._base.types import Device
from torchstrategy.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    get_strategy,
)
from torchstrategy.strategy import Strategy
from torchstrategy.testing._simulation import simulated_devices

_PLACES = ("cpu", "sim", "real")
# One replica has nothing to bring together. With three, few batches divide evenly.
_REPLICAS = [1, 2, 3]


def _default(devices: Sequence[Device]) -> Strategy:
    if has_strategy():
        raise RuntimeError(
            "The default strategy is that outside of every scope, and this thread is "
            f"in that of {get_strategy()!r}. Leave it first: an earlier test or a "
            "fixture entered it."
        )
    return get_strategy()


def _central(devices: Sequence[Device]) -> Strategy:
    """With parameters on the CPU, where nobody looks, unless there is one replica."""
    return CentralStorageStrategy(devices, devices[0] if len(devices) == 1 else "cpu:0")


class _Kind(NamedTuple):
    make: Callable[[Sequence[Device]], Strategy]
    devices: Literal["none", "one", "several"]


_KINDS: Mapping[str, _Kind] = {
    "default": _Kind(_default, "none"),
    "one_device": _Kind(lambda devices: OneDeviceStrategy(devices[0]), "one"),
    "central": _Kind(_central, "several"),
    "mirrored": _Kind(MirroredStrategy, "several"),
}


@final
@dataclass(frozen=True)
class Topology:
    """A strategy to make any number of times, and its name: `central-2-cpu`."""

    kind: str
    place: str | None = None  # the type of its devices; None: it is bound to none
    # The device of each replica; empty for a place that is not here.
    devices: tuple[Device, ...] = ()

    def __str__(self) -> str:
        counted = (
            [str(len(self.devices))]
            if _KINDS[self.kind].devices == "several" and self.devices
            else []
        )
        return "-".join([self.kind, *counted, *([self.place] if self.place else [])])

    @property
    def is_here(self) -> bool:
        """Whether its devices are on this machine."""
        return bool(self.devices) or self.place is None

    def make(self) -> Strategy:
        """A new strategy of this topology, or the one default strategy."""
        return _KINDS[self.kind].make(self.devices)


def accelerators() -> list[Device]:
    """The real accelerators that torch uses in this process.

    There are none once devices are simulated.
    """
    return [] if simulated_devices() else local_accelerators()


def devices_here(real: list[Device]) -> dict[str, Sequence[Device]]:
    """The devices of each place.

    `real` are the real devices, which were found before any were simulated.
    """
    return {
        "cpu": [canonical_device("cpu:0")],
        "sim": simulated_devices(),
        "real": real,
    }


def topologies(
    *kinds: str,
    replicas: Iterable[int] | None = None,
    places: Iterable[str] | None = None,
    here: Mapping[str, Sequence[Device]],
) -> list[Topology]:
    """Every strategy of these kinds, with each number of replicas, in each place.

    More replicas than devices share them in turn.

    Args:
        kinds: Names of strategies; all of them where none is named.
        replicas: How many replicas, for the kinds that have several; None: 1, 2 and 3.
        places: `"cpu"`, `"sim"`, `"real"`; None: those that are here.
        here: The devices of each place.

    Raises:
        ValueError: If a name is unknown, a count is not positive, or one of them has
            nothing to say to any kind.
        TypeError: If one of them is of the wrong type.
    """
    named = _names("a strategy", kinds, tuple(_KINDS)) or list(_KINDS)
    counts = _REPLICAS if replicas is None else _counts(replicas)
    where = (
        [place for place in _PLACES if here.get(place)]
        if places is None
        else _names("a place", places, _PLACES)
    )
    taken = {_KINDS[kind].devices for kind in named}
    if replicas is not None and "several" not in taken:
        raise ValueError(
            f"replicas={counts} says nothing to {', '.join(named)}, which has one "
            "replica: leave it out."
        )
    if places is not None and taken == {"none"}:
        raise ValueError(
            f"places={where} says nothing to {', '.join(named)}, which is bound to no "
            "device."
        )
    if not where:
        raise ValueError(
            f"places=[] leaves nowhere to run. Choose from {_listed(_PLACES)}, or "
            "leave it out."
        )
    return [
        topology for kind in named for topology in _of_kind(kind, counts, where, here)
    ]


def _of_kind(
    kind: str,
    counts: Iterable[int],
    places: Iterable[str],
    here: Mapping[str, Sequence[Device]],
) -> Iterator[Topology]:
    takes = _KINDS[kind].devices
    if takes == "none":
        yield Topology(kind)
        return
    for place in places:
        devices = here.get(place, ())
        if not devices:
            yield Topology(kind, place)
            continue
        for count in counts if takes == "several" else (1,):
            yield Topology(kind, devices[0].type, tuple(islice(cycle(devices), count)))


def _names(what: str, names: Iterable[str], choices: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"{names!r} is {an(type(names).__name__)}, and not a list of names: write "
            f"[{names!r}]."
        )
    names = list(names)
    for name in names:
        if name not in choices:
            raise ValueError(f"{name!r} is not {what}: choose from {_listed(choices)}.")
    return list(dict.fromkeys(names))


def _counts(replicas: Iterable[int]) -> list[int]:
    if isinstance(replicas, (str, Mapping)) or not isinstance(replicas, Iterable):
        raise TypeError(
            f"replicas={replicas!r} is not a list of counts: write replicas=[1, 2, 4]."
        )
    counts = list(replicas)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(
                f"{count!r} is not a number of replicas: it is "
                f"{an(type(count).__name__)}, not an int."
            )
        if count < 1:
            raise ValueError(f"{count} is not a number of replicas: it is 1 or more.")
    if not counts:
        raise ValueError(
            "replicas=[] runs the test with no replica. Name counts, or leave it out."
        )
    return list(dict.fromkeys(counts))


def _listed(choices: Iterable[str]) -> str:
    return ", ".join(map(repr, choices))
