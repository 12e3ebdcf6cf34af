"""Private keys: which ones to offer a host, in which order, and the prompt for a passphrase."""

from __future__ import annotations

import base64
import binascii
import copy
import io
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
from paramiko.agent import AgentSSH

from launchpad.named import NamedTuple
from launchpad.transport.ssh.config import Destination, home

Ask = Callable[[str], str | None]

# The types that paramiko can sign with. An agent can sign with any type.
DEFAULT_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
# Like ssh's NumberOfPasswordPrompts.
PROMPTS = 3
# An agent may be waiting for the user to touch a token.
AGENT_SECONDS = 60.0

_CLASSES: dict[str, type[paramiko.PKey]] = {
    "ssh-rsa": paramiko.RSAKey,
    "ssh-ed25519": paramiko.Ed25519Key,
    "ecdsa": paramiko.ECDSAKey,
}
# As ssh's MAX_KEY_FILE_SIZE.
_MOST_CHARACTERS = 1 << 20
_MAGIC = b"openssh-key-v1\0"
_SIGN_REQUEST = b"\r"
_SIGN_RESPONSE = 14


class Offer(NamedTuple):
    """A key to offer a host."""

    label: str
    key: paramiko.PKey


class _KeyFile:
    """A private key file: what can be read of it, and the key once it is unlocked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.text = ""
        self.blob = b""  # the public key, if known
        self.key: paramiko.PKey | None = None
        self.encrypted = False
        self.problem = ""
        self.locked = threading.Lock()


class KeyAgent(AgentSSH):
    """A thread-safe connection to an ssh agent."""

    def __init__(self, path: str) -> None:
        """Raises OSError or SSHException if there is no agent at `path`."""
        super().__init__()
        self._turn = threading.Lock()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(AGENT_SECONDS)
            stream.connect(path)
            self._connect(stream)  # type: ignore[attr-defined]
        except BaseException:
            stream.close()
            raise

    def _send_message(self, msg: Any) -> Any:
        with self._turn:
            kind, answer = super()._send_message(msg)  # type: ignore[misc]
        # If the agent won't sign (the user said no), paramiko would raise in the transport's thread and end the
        # connection. An empty signature is merely rejected, and the next key is tried.
        if bytes(msg)[:1] == _SIGN_REQUEST and kind != _SIGN_RESPONSE:
            refusal = paramiko.Message()
            refusal.add_string(b"")
            refusal.rewind()
            return _SIGN_RESPONSE, refusal
        return kind, answer

    def close(self) -> None:
        """Hang up."""
        self._close()  # type: ignore[attr-defined]


class Keyring:
    """All of the user's keys, shared by all hosts' threads: each file is read once, and its passphrase asked once."""

    def __init__(self, ask: Ask | None) -> None:
        """`ask` prompts the user and returns None for no answer; without it, encrypted keys are not used."""
        self._ask = ask
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._files: dict[str, _KeyFile] = {}
        self._agents: dict[str, KeyAgent | str] = {}

    def offers(self, destination: Destination, notes: list[str]) -> Iterator[Offer]:
        """The keys in the order to try them, each once. The reasons for omitting keys are added to `notes`.

        The order is ssh's, with two exceptions: files named in the configuration come before the agent's other keys,
        which may exceed the host's MaxAuthTries; and keys that need a passphrase come last.
        """
        paths = destination.identity_files
        if paths is None:
            paths = tuple(os.path.join(home(), ".ssh", name) for name in DEFAULT_NAMES)
        files = [self._file(path) for path in paths if destination.identity_files or os.path.exists(path)]
        from_agent = self._agent_keys(destination.identity_agent, notes)
        wanted = {file.blob for file in files if file.blob}
        chosen = [offer for offer in from_agent if offer.key.asbytes() in wanted]
        others = [] if destination.identities_only else [offer for offer in from_agent if offer not in chosen]
        plain = [offer for file in files if file.key for offer in _with_certificate(file.path, file.key)]
        offered: set[bytes] = set()
        for offer in [*chosen, *plain, *others] if destination.identity_files else [*chosen, *others, *plain]:
            if _blob(offer.key) not in offered:
                offered.add(_blob(offer.key))
                yield offer
        for file in files:
            if file.encrypted and file.blob not in offered:  # another host's thread may have unlocked it by now
                key = self._unlock(file, notes)
                if key is not None and key.asbytes() not in offered:
                    offered.add(key.asbytes())
                    yield from _with_certificate(file.path, key)
            elif file.problem and file.blob not in offered:
                notes.append(file.problem)

    def close(self) -> None:
        """Disconnect from the agents."""
        with self._lock:
            agents, self._agents = self._agents, {}
        for agent in agents.values():
            if isinstance(agent, KeyAgent):
                agent.close()

    def _agent_keys(self, path: str, notes: list[str]) -> list[Offer]:
        if not path:
            return []
        with self._lock:
            if path not in self._agents:
                try:
                    self._agents[path] = KeyAgent(path)
                except (OSError, EOFError, paramiko.SSHException) as error:
                    self._agents[path] = f"the agent at {path} doesn't answer ({error})"
            agent = self._agents[path]
        if isinstance(agent, str):
            notes.append(agent)
            return []
        return [Offer(f"agent key {key.comment or key.get_name()}", key) for key in agent.get_keys()]

    def _file(self, path: str) -> _KeyFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = _read(path)
            return self._files[path]

    def _unlock(self, file: _KeyFile, notes: list[str]) -> paramiko.PKey | None:
        """Ask for the passphrase, once for all hosts; the outcome holds for the rest of the run."""
        with self._asking:
            if file.key is None and not file.problem:
                file.problem = f"{shown(file.path)} needs a passphrase; add it with ssh-add"
                prompt = f"Enter passphrase for key '{file.path}': "
                for _ in range(PROMPTS):
                    answer = self._ask(prompt) if self._ask else None
                    if not answer:
                        break
                    file.key = _load(file.text, file.blob, answer)
                    if file.key is not None:
                        file.problem = ""
                        break
                    file.problem = f"{shown(file.path)}: wrong passphrase; add it with ssh-add"
                    prompt = f"Wrong passphrase. Enter passphrase for key '{file.path}': "
        if file.problem:
            notes.append(file.problem)
        return file.key


def shown(path: str) -> str:
    """A path as the user would write it, with ~."""
    folder = home()
    return f"~{path[len(folder) :]}" if path.startswith(f"{folder}/") else path


def _blob(key: paramiko.PKey) -> bytes:
    certificate = getattr(key, "public_blob", None)
    return certificate.key_blob if certificate else bytes(key.asbytes())


def _with_certificate(path: str, key: paramiko.PKey) -> Iterator[Offer]:
    """The key, preceded by the certificate next to it, if there is one."""
    certificate = f"{path}-cert.pub"
    if os.path.isfile(certificate):
        certified = copy.copy(key)
        try:
            certified.load_certificate(certificate)
            yield Offer(shown(certificate), certified)
        except (OSError, ValueError, paramiko.SSHException):  # not a certificate of this key
            pass
    yield Offer(shown(path), key)


def _read(path: str) -> _KeyFile:
    file = _KeyFile(path)
    name = shown(path)
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            file.text = stream.read(_MOST_CHARACTERS)
            status = os.fstat(stream.fileno())
    except OSError as error:
        file.blob = _public(f"{path}.pub")  # the agent may have the private key
        file.problem = f"{name}: {error.strerror}"
        return file
    file.blob = _public(path) or _public(f"{path}.pub")
    if "PRIVATE KEY" not in file.text:
        file.problem = "" if file.blob else f"{name} is not a private key"
        return file
    # Like ssh, only check the user's own files; others are the administrator's business.
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        mode = f"{status.st_mode & 0o777:04o}"
        file.problem = f"{name} is readable by others ({mode}), so it is not used; chmod 600 {name}"
        return file
    try:
        cipher, file.blob = _header(file.text) or ("", file.blob)
        file.encrypted = cipher not in ("", "none") or "ENCRYPTED" in file.text
        if not file.encrypted:
            file.key = _load(file.text, file.blob, None)
    except (ValueError, paramiko.SSHException):
        pass
    if file.key is None and not file.encrypted:
        file.problem = f"{name} has a format that paramiko can't read; rewrite it with ssh-keygen -p -f {name}"
    return file


def _public(path: str) -> bytes:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            fields = file.read(65536).split()
        if fields and re.match(r"(ssh|ecdsa|sk)-", fields[0]):
            return base64.b64decode(fields[1])
    except (OSError, IndexError, ValueError):
        pass
    return b""


def _header(text: str) -> tuple[str, bytes] | None:
    """The cipher and the public key of a file in OpenSSH's format, where they are in the clear."""
    found = re.search(r"BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", text, re.DOTALL)
    if found is None:
        return None
    try:
        data = base64.b64decode(found[1])
    except binascii.Error:
        return None
    if not data.startswith(_MAGIC):
        return None
    message = paramiko.Message(data[len(_MAGIC) :])
    cipher = message.get_text()
    message.get_text()  # the key derivation function
    message.get_binary()  # its salt and rounds
    message.get_int()  # the number of keys: always one
    return cipher, message.get_binary()


def _load(text: str, blob: bytes, passphrase: str | None) -> paramiko.PKey | None:
    """The private key; None if the passphrase is wrong, or if paramiko doesn't know the type or format."""
    kind = paramiko.Message(blob).get_text() if blob else ""
    classes = [found for name, found in _CLASSES.items() if kind.startswith(name)] if kind else _CLASSES.values()
    for known in classes:
        try:
            return known.from_private_key(io.StringIO(text), passphrase)
        except Exception:  # a wrong passphrase decrypts to noise, on which paramiko may raise anything
            continue
    return None
