"""Host keys: which are known for a host, and what to do about one that is not.

The files are read here and not by paramiko, whose loader raises at @cert-authority, knows no @revoked and no wildcards,
and can't tell which line a key stands on.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import shlex
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import DEFAULT_PORT, Destination

if TYPE_CHECKING:
    import paramiko

_MARKERS = ("@revoked", "@cert-authority")


class Entry(NamedTuple):
    """A line of a known_hosts file."""

    place: str  # FILE:LINE
    marker: str  # empty, @revoked or @cert-authority
    hosts: str
    key_type: str
    blob: bytes


class KnownHosts:
    """All known_hosts files; each is read once. Threads may share one."""

    def __init__(self, *, accept_new: bool = False) -> None:
        """`accept_new`: a host of which no key is known yet is taken, and remembered."""
        self._accept_new = accept_new
        self._lock = threading.Lock()
        self._files: dict[str, list[Entry]] = {}

    def key_types(self, destination: Destination) -> tuple[str, ...]:
        """The types of the keys that are known for the host: those to ask it for."""
        with self._lock:
            found = self._known(destination)
        return tuple(dict.fromkeys(entry.key_type for entry in found))

    def check(self, destination: Destination, key: paramiko.PKey) -> None:
        """Raises ConnectError unless the host is known by this key, or is new and may be accepted."""
        with self._lock:
            self._check(destination, key.get_name(), key.asbytes())

    def _check(self, destination: Destination, key_type: str, blob: bytes) -> None:
        name = lookup_name(destination)
        said = f"{destination.place} shows the {_short(key_type)} key {fingerprint(blob)}"
        plain = [] if destination.host_key_alias else [destination.address.lower()]
        for entry in self._matching(destination, [name, *plain], "@revoked"):
            if entry.blob == blob:
                raise _error(destination, f"{said}, which {entry.place} revokes: do not trust it; give it a new one")
        known = self._known(destination)
        if any(entry.blob == blob for entry in known):
            return
        if known:
            old = next((entry for entry in known if entry.key_type == key_type), known[0])
            raise _error(
                destination,
                f"{said}, but {old.place} knows it by the {_short(old.key_type)} key {fingerprint(old.blob)}; someone "
                f"may be listening in. If the key was changed on purpose: {_forget(old, name)}, then accept the new",
            )
        # As ssh does: a host on an odd port may be known by the same key without the port.
        if any(entry.blob == blob for entry in self._matching(destination, plain, "")):
            return
        authority = next(iter(self._matching(destination, [name], "@cert-authority")), None)
        if self._accept_new and destination.known_hosts_files:
            self._remember(destination, f"{name} {key_type} {base64.b64encode(blob).decode()}\n")
            return
        hint = ""
        if authority:
            hint = f" ({authority.place} has a certificate authority for it, but launchpad checks plain keys only)"
        raise _error(
            destination, f"{said}, which no known_hosts file has{hint}; compare it with the host's own (ssh-keygen "
            f"-lf /etc/ssh/ssh_host_{_short(key_type)}_key.pub there), then {_accept(destination, key_type, name)}"
        )  # fmt: skip

    def _known(self, destination: Destination) -> list[Entry]:
        return self._matching(destination, [lookup_name(destination)], "")

    def _matching(self, destination: Destination, names: list[str], marker: str) -> list[Entry]:
        return [
            entry
            for path in (*destination.known_hosts_files, *destination.global_known_hosts_files)
            for entry in self._entries(path)
            if entry.marker == marker and any(_matches(name, entry.hosts) for name in names)
        ]

    def _entries(self, path: str) -> list[Entry]:
        if path not in self._files:
            self._files[path] = list(_read(path))
        return self._files[path]

    def _remember(self, destination: Destination, line: str) -> None:
        path = destination.known_hosts_files[0]
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
            with open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                    line = f"\n{line}"
                file.write(line.encode())
        except OSError as error:
            raise _error(
                destination, f"its key can't be written to {path}: {error.strerror}; make that file writable"
            ) from None
        self._files.pop(path, None)


def lookup_name(destination: Destination) -> str:
    """The name that a host has in known_hosts: an alias as it stands, else the address, with a port that is not 22."""
    if destination.host_key_alias:
        return destination.host_key_alias.lower()
    address = destination.address.lower()
    return address if destination.port == DEFAULT_PORT else f"[{address}]:{destination.port}"


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -lf` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _read(path: str) -> Iterator[Entry]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:  # as for ssh: a file that isn't there knows no host
        return
    for number, line in enumerate(lines, 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or (marker and marker not in _MARKERS):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        yield Entry(f"{path}:{number}", marker, fields[0], fields[1], blob)


def _matches(name: str, hosts: str) -> bool:
    """Whether a line's host field means the host: a hash, or patterns of which none that is negated may match."""
    if hosts.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in hosts[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    found = False
    for pattern in hosts.lower().split(","):
        # OpenSSH's patterns have * and ? only; fnmatch would take the brackets of [host]:port for a set.
        bare = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, bare):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _short(key_type: str) -> str:
    """The type as ssh's file names have it: ed25519, ecdsa, rsa."""
    return key_type.removeprefix("ssh-").partition("-")[0]


def _accept(destination: Destination, key_type: str, name: str) -> str:
    """The command that would put the key where it is looked for."""
    if not destination.known_hosts_files:
        return "name a file for it with UserKnownHostsFile"
    file = shlex.quote(destination.known_hosts_files[0])
    if destination.proxy_jump or destination.proxy_command:  # ssh-keyscan goes straight there
        return f"ssh {destination.name} once, or give --accept-new-host-keys"
    scan = f"ssh-keyscan -t {_short(key_type)} -p {destination.port} {destination.address}"
    if destination.host_key_alias:
        scan += f" | sed 's/^[^ ]*/{name}/'"
    return f"{scan} >> {file}, or give --accept-new-host-keys"


def _forget(entry: Entry, name: str) -> str:
    file = entry.place.rpartition(":")[0]
    return f"ssh-keygen -f {shlex.quote(file)} -R {shlex.quote(name)}"


def _error(destination: Destination, text: str) -> ConnectError:
    return ConnectError("host key", destination.name, text)
