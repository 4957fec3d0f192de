"""Where workers say that others reach them, on a machine with several networks."""

from __future__ import annotations

import socket
import sys

import pytest

from torchstrategy._group.processes import meeting
from torchstrategy._group.processes.network_interfaces import (
    addresses_of,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell an interface's addresses"
)


def test_an_interface_may_have_any_name() -> None:
    """A variable of the environment holds bytes.

    The locale may know no letters but those of ASCII.
    """
    assert addresses_of("stra\udcc3\udc9fe") == []


def test_workers_are_called_at_the_chosen_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine's name meant 127.0.1.1, as on Debian.

    A store in a file told no better address.
    """

    def by_name(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", by_name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-of-this-name, lo")
    assert meeting._addresses(None) == ["127.0.0.1", "127.0.1.1"]
