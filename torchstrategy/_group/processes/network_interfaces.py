"""The network addresses of this machine's interfaces, such as `eth0`."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path

if sys.platform == "linux":
    import fcntl

_SIOCGIFADDR = 0x8915  # Linux: "get the IPv4 address of an interface"
# Linux: address, index, prefix, scope, flags, interface.
_IPV6_TABLE = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"  # an address of another scope means nothing on other machines
_REQUEST = struct.Struct("16s16x")  # `struct ifreq`: a name, and room for the answer
_ADDRESS = slice(20, 24)  # in the answer, the four bytes of the IPv4 address


def chosen_addresses() -> list[str]:
    """The addresses of the interfaces that the user has chosen for gloo.

    The variable `GLOO_SOCKET_IFNAME` names these interfaces.

    torch connects workers by these interfaces. The machine's own name may mean another
    one, or only this machine.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [address for name in names if name for address in addresses_of(name.strip())]


def addresses_of(interface: str) -> list[str]:
    """The addresses of one interface.

    Systems other than Linux do not tell them: there are none then.
    """
    return [*_ipv4_addresses(interface), *_ipv6_addresses(interface)]


def _ipv4_addresses(interface: str) -> list[str]:
    if sys.platform != "linux":
        return []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(
            asked.fileno(), _SIOCGIFADDR, _REQUEST.pack(os.fsencode(interface)[:15])
        )
        return [socket.inet_ntoa(answer[_ADDRESS])]
    return []


def _ipv6_addresses(interface: str) -> list[str]:
    found = []
    with suppress(OSError):
        for line in os.fsdecode(_IPV6_TABLE.read_bytes()).splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == _GLOBAL_SCOPE:
                found.append(str(IPv6Address(bytes.fromhex(digits))))
    return found
