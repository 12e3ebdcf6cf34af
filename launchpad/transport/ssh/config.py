"""What the user's ssh_config says about a host: as much of it as it takes to connect.

As ssh does: ~/.ssh/config, then /etc/ssh/ssh_config, the first value found counts; a file that --ssh-config names
replaces both. StrictHostKeyChecking is not read: launchpad has one way of its own to accept a new host key.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import paramiko

from launchpad.errors import UsageError
from launchpad.transport.ssh import include
from launchpad.transport.ssh.include import words

SYSTEM_FOLDER = "/etc/ssh"
CONNECT_SECONDS = 10.0
DEFAULT_PORT = 22
MATCH_EXEC_SECONDS = 30.0

# OpenSSH's valid_hostname and valid_ruser refuse these: %h and %r go into ProxyCommand, which a shell runs.
_UNSAFE = re.compile(r"""^-|['`"$;&<>|(){}\s\x00-\x1f\x7f]""")
_DURATION = re.compile(r"(\d+)([smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Hop(NamedTuple):
    """A jump host as ProxyJump names it; what is left out stands in the configuration."""

    host: str
    user: str = ""
    port: int = 0


@dataclass(frozen=True)
class Destination:
    """A host, and how to connect to it."""

    name: str  # as the user wrote it
    address: str  # HostName
    user: str
    port: int
    identity_files: tuple[str, ...] | None = None  # None: the usual names in ~/.ssh
    identities_only: bool = False
    identity_agent: str = ""  # the agent's socket; empty: none
    proxy_jump: tuple[Hop, ...] = ()  # in the order of the way there
    proxy_command: str = ""
    known_hosts_files: tuple[str, ...] = ()  # the user's; an accepted key goes into the first
    global_known_hosts_files: tuple[str, ...] = ()
    host_key_alias: str = ""
    connect_timeout: float = CONNECT_SECONDS

    @property
    def place(self) -> str:
        """The address and the port, for messages."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class _Parser(paramiko.SSHConfig):
    # paramiko would expand tokens before it knows all values, and not all tokens: values are left as they are.
    TOKENS_BY_CONFIG_KEY: dict[str, list[str]] = {}  # noqa: RUF012

    def _does_match(self, matches: list[dict[str, Any]], host: str, *args: Any) -> bool:
        # paramiko has Invoke run `Match exec`, which reads our standard input meanwhile; and it asks the DNS for this
        # machine's full name before, in case a token needs it.
        others = [match for match in matches if match["type"] != "exec"]
        if (others or not matches) and not super()._does_match(others, host, *args):  # type: ignore[misc]
            return False
        commands = [match for match in matches if match["type"] == "exec"]
        reader = _Reader(host, _local_user(), args[-1])
        return all(_succeeds(reader.expand(match["param"], variables=False)) != match["negate"] for match in commands)


class SshConfig:
    """The configuration files, read once."""

    def __init__(self, file: str | None = None) -> None:
        """`file`: what --ssh-config names. Raises UsageError that names the file, and the line where one is wrong."""
        home = os.path.expanduser("~/.ssh")
        if file is not None:
            if not os.path.isfile(file):
                raise UsageError(f"--ssh-config {file}: no such file; name one in the format of ~/.ssh/config")
            self._text = include.read(file, home)
            return
        self._text = ""
        for folder, name in ((home, "config"), (SYSTEM_FOLDER, "ssh_config")):
            path = os.path.join(folder, name)
            if os.path.exists(path):
                self._text += "Match all\n" + include.read(path, folder)

    def lookup(self, host: str, user: str = "", port: int = 0) -> Destination:
        """How to connect to `host`; a `user` and a `port` given here win. Raises UsageError."""
        for what, text in (("host", host), ("user", user)):
            if _UNSAFE.search(text) or (what == "host" and (not text or "\\" in text)):
                raise UsageError(f"{text!r} is no {what} name that ssh takes; correct it")
        local = _local_user()
        given = (f"user {user}\n" if user else "") + (f"port {port}\n" if port else "")
        try:
            options = _Parser.from_text(given + self._text).lookup(host)
        except KeyError as error:  # paramiko reads CanonicalDomains without asking whether it is there
            raise UsageError(f"ssh's configuration of {host} lacks {error}") from None
        except (paramiko.SSHException, ImportError, ValueError) as error:
            raise UsageError(f"ssh's configuration of {host}: {error}") from None
        return _Reader(host, local, options).destination()


class _Reader:
    """Turns paramiko's strings into a Destination."""

    def __init__(self, host: str, local: str, options: Mapping[str, Any]) -> None:
        self._host = host
        self._options = options
        self._tokens = {"%": "%", "h": host, "n": host}
        named = self._first("hostname")  # paramiko puts the host itself here, whose % is no token: fe80::1%eth0
        address = host if named in ("", host) else self.expand(named, variables=False)
        user = self._first("user") or local
        self._port = self._number("port", DEFAULT_PORT)
        self._alias = self._first("hostkeyalias")
        name = socket.gethostname()
        self._tokens |= {
            "h": address,
            "p": str(self._port),
            "r": user,
            "u": local,
            "d": os.path.expanduser("~"),
            "i": str(os.getuid()),
            "l": name,
            "L": name.partition(".")[0],
            "k": self._alias or host,
        }

    def destination(self) -> Destination:
        jump, command = self._proxy()
        return Destination(
            name=self._host,
            address=self._tokens["h"],
            user=self._tokens["r"],
            port=self._port,
            identity_files=self._identity_files(),
            identities_only=self._first("identitiesonly").lower() in ("yes", "true"),
            identity_agent=self._agent(),
            proxy_jump=jump,
            proxy_command=command,
            known_hosts_files=self._files("userknownhostsfile", "~/.ssh/known_hosts", "~/.ssh/known_hosts2"),
            global_known_hosts_files=self._files(
                "globalknownhostsfile", f"{SYSTEM_FOLDER}/ssh_known_hosts", f"{SYSTEM_FOLDER}/ssh_known_hosts2"
            ),
            host_key_alias=self._alias,
            connect_timeout=self._seconds("connecttimeout", CONNECT_SECONDS),
        )

    def _words(self, keyword: str) -> list[str]:
        return words(self._options.get(keyword) or "")

    def _first(self, keyword: str) -> str:
        return next(iter(self._words(keyword)), "")

    def _fail(self, keyword: str, value: str, mend: str) -> UsageError:
        return UsageError(f"ssh's configuration of {self._host}: {keyword} {value}: {mend}")

    def _number(self, keyword: str, default: int) -> int:
        value = self._first(keyword)
        if value and not (value.isdecimal() and 0 < int(value) < 65536):
            raise self._fail(keyword, value, "not a port; give one from 1 to 65535")
        return int(value) if value else default

    def _seconds(self, keyword: str, default: float) -> float:
        value = self._first(keyword)
        if value.lower() in ("", "none", "0"):
            return default
        if not re.fullmatch(f"(?:{_DURATION.pattern})+", value, re.IGNORECASE):
            raise self._fail(keyword, value, "not a time; write seconds, or 1m30s")
        return float(sum(int(number) * _SECONDS[unit.lower()] for number, unit in _DURATION.findall(value)))

    def expand(self, text: str, *, variables: bool = True) -> str:
        """Tokens, and where OpenSSH takes them ${VARIABLES} too."""

        def replace(found: re.Match[str]) -> str:
            token, variable = found[1], found[2]
            if variable is not None:
                if not variables:
                    return found[0]
                if variable not in os.environ:
                    raise self._fail("value", text, f"{variable} is not set; set it, or write the path out")
                return os.environ[variable]
            if token not in self._tokens:
                raise self._fail("value", text, f"launchpad doesn't know the token %{token}; write its value out")
            return self._tokens[token]

        return re.sub(r"%(.?)|\$\{(\w+)\}", replace, text)

    def _path(self, text: str) -> str:
        return os.path.expanduser(self.expand(text))

    def _files(self, keyword: str, *defaults: str) -> tuple[str, ...]:
        return tuple(self._path(word) for word in self._words(keyword) or defaults if word.lower() != "none")

    def _identity_files(self) -> tuple[str, ...] | None:
        values = self._options.get("identityfile")
        if not values:
            return None
        named = [" ".join(words(value)) for value in values]
        return tuple(dict.fromkeys(self._path(name) for name in named if name and name.lower() != "none"))

    def _agent(self) -> str:
        value = self._first("identityagent") or "SSH_AUTH_SOCK"
        if value.lower() == "none":
            return ""
        if value == "SSH_AUTH_SOCK":
            return os.environ.get(value, "")
        if value.startswith("$") and not value.startswith("${"):
            return os.environ.get(value[1:], "")
        return self._path(value)

    def _proxy(self) -> tuple[tuple[Hop, ...], str]:
        """ProxyJump and ProxyCommand: as for ssh the first of them to be set counts, `none` too."""
        for keyword in self._options:
            if keyword == "proxyjump":
                value = self.expand(self._first(keyword), variables=False)
                if value.lower() == "none":
                    return (), ""
                return tuple(self._hop(part) for part in value.split(",")), ""
            if keyword == "proxycommand":
                command = self._options[keyword] or ""  # paramiko makes `none` None
                return (), self.expand(command, variables=False)
        return (), ""

    def _hop(self, text: str) -> Hop:
        rest = text.strip().removeprefix("ssh://").rstrip("/")
        user, _, rest = rest.rpartition("@")
        found = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?", rest)
        if found is None:
            raise self._fail("proxyjump", text, "not a jump host; write USER@HOST:PORT, several with commas")
        return Hop(found[1] or found[3], user, int(found[2] or found[4] or 0))


def _succeeds(command: str) -> bool:
    """Run a `Match exec` as ssh does."""
    argv = [os.environ.get("SHELL") or "/bin/sh", "-c", command]
    quiet = subprocess.DEVNULL
    try:
        return subprocess.run(argv, stdin=quiet, stdout=quiet, timeout=MATCH_EXEC_SECONDS).returncode == 0
    except OSError as error:
        raise UsageError(
            f"Match exec {command!r}: {argv[0]}: {error.strerror}; set SHELL to one that is there"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"Match exec {command!r} takes more than {MATCH_EXEC_SECONDS:g} s; mend it") from None


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UsageError(f"user id {os.getuid()} has no name here; set USER to the one to log in with") from None
