"""What a job over several nodes has to know of this one: interpreter, torch, folder, identity, addresses."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import sys
import time

from ..commands import Survey
from ..events import Surveyed

# Bridges and tunnels of containers and virtual machines: other machines are hardly reached by these.
_INWARD = ("docker", "br-", "veth", "virbr", "lxc", "lxd", "cni", "flannel", "cali", "podman")

# Prints the versions of Python, torch and launchpad (empty for none) as a rank would find them, importing nothing.
_VERSIONS = """
import importlib.util, os, re, sys
print(*sys.version_info[:3], sep=".")
for name, file in (("torch", "version.py"), ("launchpad", "__init__.py")):
    spec = importlib.util.find_spec(name)
    path = os.path.join(os.path.dirname(spec.origin), file) if spec and spec.origin else os.devnull
    found = re.search("__version__ = [^0-9]*([^'\\"]*)", open(path).read())
    print(found[1] if found else "")
"""


def survey(asked: Survey) -> Surveyed:
    """Answer the head's Survey."""
    problem = _problem(asked.cwd)
    version, torch, launchpad = ".".join(map(str, sys.version_info[:3])), "", ""
    if not problem and (asked.torch or asked.python):
        version, torch, launchpad = _versions(asked) or (version, torch, launchpad)
    return Surveyed(
        time=time.monotonic_ns(),
        python=asked.python or sys.executable,
        version=version,
        torch=torch if asked.torch else "",
        launchpad=launchpad if asked.torch else "",
        problem=problem,
        machine=_machine(),
        addresses=addresses(),
    )


def _versions(asked: Survey) -> tuple[str, str, str] | None:
    """Python's, torch's and launchpad's, as the ranks' interpreter says; None where it says nothing."""
    import subprocess

    argv = [asked.python or sys.executable, "-c", _VERSIONS]
    environ = {name: value for name, value in {**os.environ, **asked.environ}.items() if name}
    try:
        said = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, cwd=asked.cwd, env=environ
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version, torch, launchpad, *_ = [*said.split("\n"), "", "", ""]
    return (version, torch, launchpad) if version else None


def _problem(cwd: str) -> str:
    try:
        os.listdir(os.path.join(cwd, ""))
    except PermissionError:
        return "" if os.access(cwd, os.X_OK) else f"the folder {cwd} can't be entered there"
    except NotADirectoryError:
        return f"{cwd} is no folder there"
    except OSError:
        return f"there is no folder {cwd}"
    return ""


def _machine() -> str:
    """The kernel's boot, and the namespaces of containers. A loopback address stands for a node of its own.

    Who names 127.0.0.2 and 127.0.0.3 as hosts tries several nodes on one machine, and means it.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        parts = [file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt"))]
    server = _ssh_address()
    if server.startswith("127.") and server != "127.0.0.1":
        parts.append(server)
    return " ".join(parts)


def _ssh_address() -> str:
    """The address at which the head's ssh came in; "" without ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def addresses() -> list[list[str]]:
    """This machine's addresses with their interfaces, the one that ssh came in by first, loopback last."""
    found = _ipv4() + _ipv6()
    server = _ssh_address()
    return sorted(found, key=lambda one: (_is_loopback(one[0]), one[0] != server, one[1].startswith(_INWARD)))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _ipv4() -> list[list[str]]:
    """netdevice(7): SIOCGIFCONF fills an array of struct ifreq, a name and a socket address each."""
    size = 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(size * 512))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(any_socket, 0x8912, request))[0]
    entries = [buffer[start : start + size].tobytes() for start in range(0, length, size)]
    found = [[socket.inet_ntoa(entry[20:24]), entry[:16].split(b"\0")[0].decode()] for entry in entries]
    server = _ssh_address()
    if server.startswith("127.") and server not in [address for address, _ in found]:
        found += [[server, interface] for address, interface in found if address == "127.0.0.1"]
    return found


def _ipv6() -> list[list[str]]:
    """Those of global scope, and ::1: /proc/net/if_inet6 has address, index, prefix, scope, flags, name."""
    found = []
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, _, _, scope, _, interface = line.split()
                if scope in ("00", "10"):
                    found.append([socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), interface])
    except OSError:  # a kernel without IPv6
        pass
    return found
