"""Host keys: which ones are known for a host, and what to do about one that isn't.

We parse the files ourselves, as paramiko's loader raises on @cert-authority, doesn't support @revoked or wildcards, and
doesn't say which line a key is on.
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
from launchpad.transport.ssh.config import DEFAULT_PORT, USER_KNOWN_HOSTS, Destination, global_known_hosts, home

if TYPE_CHECKING:
    import paramiko

_MARKERS = ("@revoked", "@cert-authority")


class Entry(NamedTuple):
    """A line of a known_hosts file."""

    place: str  # FILE:LINE
    marker: str  # "", @revoked or @cert-authority
    hosts: str
    key_type: str
    blob: bytes


class KnownHosts:
    """All known_hosts files, each read once. Thread-safe."""

    def __init__(self, *, accept_new: bool = False) -> None:
        """`accept_new`: accept and store the key of a host without a known key."""
        self._accept_new = accept_new
        self._lock = threading.Lock()
        self._files: dict[str, list[Entry]] = {}

    def key_types(self, destination: Destination) -> tuple[str, ...]:
        """The types of the host's known keys, to ask it for one of those."""
        with self._lock:
            found = self._known(destination)
        return tuple(dict.fromkeys(entry.key_type for entry in found))

    def has_authority(self, destination: Destination) -> bool:
        """Whether a certificate authority is named for the host."""
        with self._lock:
            return bool(self._matching(destination, [lookup_name(destination)], "@cert-authority"))

    def check(self, destination: Destination, key: paramiko.PKey) -> None:
        """Raises ConnectError unless the host is known by this key, or is new and new ones are accepted."""
        with self._lock:
            self._check(destination, key.get_name(), key.asbytes())

    def _check(self, destination: Destination, key_type: str, blob: bytes) -> None:
        name = lookup_name(destination)
        shown = f"{destination.place} presents the {_short(key_type)} key {fingerprint(blob)}"
        plain = [] if destination.host_key_alias else [destination.address.lower()]
        for entry in self._matching(destination, [name, *plain], "@revoked"):
            if entry.blob == blob:
                raise _error(
                    destination, f"{shown}, which is revoked at {entry.place}: don't trust it; the host needs a new key"
                )
        known = self._known(destination)
        if any(entry.blob == blob for entry in known):
            return
        if known:
            old = next((entry for entry in known if entry.key_type == key_type), known[0])
            raise _error(
                destination,
                f"{shown}, but {old.place} has the {_short(old.key_type)} key {fingerprint(old.blob)}; someone may be "
                f"intercepting the connection. If the key was changed on purpose, run {_forget(old, name)} and accept "
                "the new one",
            )
        # Like ssh: a host on a nonstandard port may be known by the same key without the port.
        if any(entry.blob == blob for entry in self._matching(destination, plain, "")):
            return
        authority = next(iter(self._matching(destination, [name], "@cert-authority")), None)
        if self._accept_new and destination.known_hosts_files:
            self._remember(destination, f"{name} {key_type} {base64.b64encode(blob).decode()}\n")
            return
        hint = ""
        if authority:
            hint = f" ({authority.place} names a certificate authority for it, but paramiko knows only plain keys)"
        raise _error(
            destination, f"{shown}, which is in no known_hosts file{hint}; compare it with the host's own (ssh-keygen "
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
                destination, f"can't write its key to {path}: {error.strerror}; make that file writable"
            ) from None
        self._files.pop(path, None)


def names() -> list[str]:
    """The hosts that the usual files name, without patterns; what is hashed can't be read."""
    found: dict[str, None] = {}
    for path in f"{USER_KNOWN_HOSTS} {global_known_hosts()}".split():
        for entry in _read(path.replace("~", home(), 1)):
            if entry.marker or entry.hosts.startswith("|"):
                continue
            for name in entry.hosts.split(","):
                host = name[1:].partition("]")[0] if name.startswith("[") else name
                if host and not any(mark in host for mark in "*?!"):
                    found[f"[{host}]" if ":" in host else host] = None
    return list(found)


def lookup_name(destination: Destination) -> str:
    """A host's name in known_hosts: its alias, else its address, plus the port if it isn't 22."""
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
    except OSError:  # like ssh, treat an unreadable file as empty
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
    """Whether a line's host field matches the name: it is a hash, or patterns, of which no negated one may match."""
    if hosts.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in hosts[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    found = False
    for pattern in hosts.lower().split(","):
        # OpenSSH's patterns have only * and ?; fnmatch would take the brackets of [host]:port for a character set.
        bare = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, bare):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _short(key_type: str) -> str:
    """The type as in the names of ssh's key files: ed25519, ecdsa, rsa."""
    return key_type.removeprefix("ssh-").partition("-")[0]


def _accept(destination: Destination, key_type: str, name: str) -> str:
    """How to accept the key."""
    if not destination.known_hosts_files:
        return "name a file for it with UserKnownHostsFile"
    file = shlex.quote(destination.known_hosts_files[0])
    if destination.proxy_jump or destination.proxy_command:  # ssh-keyscan can't use a proxy
        return f"run ssh {destination.name} once, or pass --accept-new-host-keys"
    scan = f"ssh-keyscan -t {_short(key_type)} -p {destination.port} {destination.address}"
    if destination.host_key_alias:
        scan += f" | sed 's/^[^ ]*/{name}/'"
    return f"run {scan} >> {file}, or pass --accept-new-host-keys"


def _forget(entry: Entry, name: str) -> str:
    file = entry.place.rpartition(":")[0]
    return f"ssh-keygen -f {shlex.quote(file)} -R {shlex.quote(name)}"


def _error(destination: Destination, text: str) -> ConnectError:
    return ConnectError("host key", destination.name, text)
