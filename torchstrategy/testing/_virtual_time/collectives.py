"""How long a collective of ranks takes.

Bytes go around a ring of all ranks, each link carrying its part.
"""

from __future__ import annotations

from torchstrategy.testing._virtual_time.profiles import DeviceProfile

# How much of the whole goes over each link of a ring of n ranks, in units of (n - 1) /
# n. What is not here goes over a link once.
_PARTS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "gather": 1,
    "scatter": 1,
    "all_to_all": 1,
}


def collective_seconds(
    kind: str, size: int, ranks: int, on_devices: bool, profile: DeviceProfile
) -> float:
    """The seconds from when the last rank has come.

    Args:
        kind: Which collective.
        size: The bytes of the whole.
        ranks: How many ranks there are.
        on_devices: Whether the tensors are on devices; else they are on the CPU.
        profile: What is known of the devices.
    """
    part = (
        _PARTS[kind] * (ranks - 1) / ranks
        if kind in _PARTS
        else 1.0
        if ranks > 1
        else 0.0
    )
    bandwidth = profile.peer if on_devices else profile.cpu_bandwidth
    return profile.collective + size * part / (bandwidth * 1e9)
