"""Accelerators whose module in torch lacks a function that `torch.cuda` has.

On a Mac, every strategy ended in an AttributeError: `torch.mps` has no `current_device`
and no `default_generators`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchstrategy._base.devices import canonical_device, device_count
from torchstrategy._group.random_streams import RandomStreams, generators_of

MPS = torch.device("mps", 0)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Lets torch have one MPS device.

    Returns its generator, which is one of the CPU.
    """
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)
    monkeypatch.setattr(torch.mps, "manual_seed", generator.manual_seed)
    return generator


@pytest.mark.parametrize(
    "name", ["mps", "MPS", "mps:0", "/device:MPS:0", torch.device("mps"), MPS], ids=repr
)
def test_a_mac_has_one_device(name: Any, mac: torch.Generator) -> None:
    assert canonical_device(name) == MPS


def test_a_mac_has_no_second_device(mac: torch.Generator) -> None:
    with pytest.raises(
        ValueError, match=r"The device 'mps:1' is not on this machine, which has mps:0"
    ):
        canonical_device("mps:1")


def test_a_module_without_any_function_has_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.mps, "device_count")
    assert device_count("mps") == 0
    with pytest.raises(ValueError, match="is not on this machine"):
        canonical_device("mps")


def test_each_replica_on_a_mac_draws_numbers_of_its_own(mac: torch.Generator) -> None:
    """There are only functions for its generator's state.

    The library exchanges it by these.
    """

    def drawn() -> list[float]:
        streams = RandomStreams([MPS, MPS], one_at_a_time=True)
        found = []
        for replica in (0, 1, 0, 1):
            streams.put_in_force(replica)
            found.append(torch.rand((), generator=mac).item())
        streams.give_back()
        return found

    torch.manual_seed(0)
    mac.manual_seed(5)
    plain = torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    first, other, second, another = drawn()
    assert [first, second] == plain
    assert len({first, other, second, another}) == 4
    torch.manual_seed(0)
    mac.manual_seed(5)
    assert drawn() == [first, other, second, another]


def test_the_generator_of_a_mac_is_one_whoever_asks(mac: torch.Generator) -> None:
    (one,), (other,) = (
        generators_of(MPS, with_cpu=False),
        generators_of(MPS, with_cpu=False),
    )
    assert one == other and hash(one) == hash(other)
    assert generators_of(MPS, with_cpu=True) == [torch.default_generator, one]


def test_a_generator_whose_state_nobody_can_read_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, mac: torch.Generator
) -> None:
    monkeypatch.delattr(torch.mps, "get_rng_state")
    assert generators_of(MPS, with_cpu=False) == []
