"""Recognises the host that launchpad itself runs on: its ranks are started without SSH.

Host lists written by schedulers may name it as localhost, by its host name with or without the domain, or by the
address of a network interface. 127.0.0.2 and the like count as other hosts, and so does a host for which the ssh
configuration has another user, another port or a jump host.
"""

from __future__ import annotations

import getpass
import ipaddress
import socket
from collections.abc import Sequence

from launchpad import linux
from launchpad.job.hosts import Host

_NAMES = ("localhost", "127.0.0.1", "::1")

# What /etc/hosts may have for this machine's own name; the last is Debian's.
_LOOPBACK = frozenset(map(ipaddress.ip_address, ("127.0.0.1", "::1", "127.0.1.1")))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_this_machine(host: Host, ssh_config: str | None) -> bool:
    """Whether the host is this machine. `ssh_config`: the file of --ssh-config. Raises UsageError if it is wrong."""
    if host.user or host.port:
        return False
    own = socket.gethostname()
    if host.name in (*_NAMES, own):
        return True
    address = _address(host.name)
    if address is None and _first_label(host.name) != _first_label(own):
        return False  # perhaps an alias, but that is not worth a DNS lookup for each host
    if address is not None and address not in own_addresses():
        return False
    return _is_reached_plainly(host.name, ssh_config)


def _is_reached_plainly(name: str, ssh_config: str | None) -> bool:
    """Whether ssh would log in to this machine, as the same user, at the default port."""
    from launchpad.transport.ssh.config import DEFAULT_PORT, SshConfig

    found = SshConfig(ssh_config).lookup(name)
    if (found.user, found.port) != (getpass.getuser(), DEFAULT_PORT) or found.proxy_jump or found.proxy_command:
        return False
    address = _address(found.address)
    if address is not None:
        return address in own_addresses()
    try:
        places = socket.getaddrinfo(found.address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    own = own_addresses() | _LOOPBACK
    return any(_address(str(place[4][0])) in own for place in places)


def own(addresses: Sequence[str]) -> list[str]:
    """Those that this machine has."""
    here = own_addresses()
    return [one for one in addresses if linux.is_loopback(one) or ipaddress.ip_address(one) in here]


def own_addresses() -> frozenset[Address]:
    """The addresses of the network interfaces, without loopback."""
    found = (_address(address) for address, _ in linux.ipv4_addresses() + linux.ipv6_addresses())
    return frozenset(address for address in found if address is not None and not address.is_loopback)


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:  # a name
        return None


def _first_label(name: str) -> str:
    return name.partition(".")[0].lower()
