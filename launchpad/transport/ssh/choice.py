"""Tells which hosts need ssh itself: paramiko is quick with many hosts, but can't follow every setting of ssh."""

from __future__ import annotations

import base64
import binascii
import functools
import os
import re
import socket
import subprocess
from collections.abc import Iterator

from launchpad.transport.ssh.config import Destination, SshConfig, home
from launchpad.transport.ssh.known_hosts import KnownHosts

# How long a ControlMaster may take to accept, and klist to look for a ticket.
ANSWER_SECONDS = 2.0

# What ssh tries where no IdentityFile is given, and paramiko can't sign with; and the certificates that belong to it.
_SECURITY_KEYS = ("id_ecdsa_sk", "id_ed25519_sk")
_USUAL_NAMES = ("id_rsa", "id_ecdsa", "id_ed25519", *_SECURITY_KEYS)

_SECURITY_KEY = re.compile(rb"sk-(ssh-ed25519|ecdsa-sha2-nistp256)(-cert-v01)?@openssh\.com")


def needs_ssh(config: SshConfig, known: KnownHosts, destination: Destination) -> str:
    """Why this host, or a jump host on the way to it, can be reached by ssh only; "" if paramiko will do."""
    seen = set()
    route = [destination]
    while route:
        hop = route.pop()
        if hop.place not in seen:  # a route in a circle is reported by whoever takes it
            seen.add(hop.place)
            if why := next(_reasons(hop, known), ""):
                return why if hop is destination else f"{hop.name}: {why}"
            route += [config.lookup(*jump) for jump in hop.proxy_jump]
    return ""


def _reasons(destination: Destination, known: KnownHosts) -> Iterator[str]:
    yield from destination.beyond_keys
    if destination.control_path and _accepts(destination.control_path):
        yield f"ControlPath {destination.control_path}"
    if known.has_authority(destination):
        yield "@cert-authority in known_hosts"
    paths = destination.identity_files
    if paths is None:
        paths = tuple(os.path.join(home(), ".ssh", name) for name in _USUAL_NAMES)
    for path in paths:
        if os.path.isfile(f"{path}-cert.pub"):
            yield f"{path}-cert.pub"
        if _is_security_key(path):
            yield f"the security key {path}"
    if destination.gssapi and _has_ticket():
        yield "GSSAPIAuthentication yes"


def _accepts(path: str) -> bool:
    """Whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_SECONDS)
        try:
            client.connect(path)
        except OSError:
            return False
    return True


def _is_security_key(path: str) -> bool:
    """Whether a file, private or public, has a FIDO key. Its type stands at the beginning, in the clear."""
    try:
        with open(path, "rb") as file:
            data = file.read(4096)
    except OSError:
        return False
    found = re.search(rb"BEGIN OPENSSH PRIVATE KEY-----(.*)", data, re.DOTALL)
    if found is None:
        return bool(_SECURITY_KEY.match(data))
    lines = b"".join(found[1].split()[:3])
    try:
        return bool(_SECURITY_KEY.search(base64.b64decode(lines[: len(lines) // 4 * 4])))
    except binascii.Error:
        return False


@functools.cache
def _has_ticket() -> bool:
    """Whether there is a Kerberos ticket. Distributions set GSSAPIAuthentication for users who have never had one."""
    try:
        done = subprocess.run(
            ["klist", "-s"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
