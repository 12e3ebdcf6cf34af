"""What ssh's configuration says about a host. ssh reads it itself: `ssh -G` prints the settings that it would use.

So Include, Match and CanonicalizeHostname mean what they mean to ssh. Where ssh expands tokens only as it connects, it
prints them, and they are expanded here. StrictHostKeyChecking is not used: launchpad has its own way to accept a new
host key.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import socket
import threading
from collections.abc import Iterator

from launchpad import linux
from launchpad.errors import ConnectError, UsageError
from launchpad.named import NamedTuple
from launchpad.transport.ssh.query import Query

SYSTEM_FOLDER = "/etc/ssh"
CONNECT_SECONDS = 10.0
DEFAULT_PORT = 22
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"

# OpenSSH's valid_hostname and valid_ruser refuse these: %h and %r go into ProxyCommand, which a shell runs.
_UNSAFE = re.compile(r"""^-|['`"$;&<>|(){}\s\x00-\x1f\x7f]""")
# These would make a host's name a user, a URL or an escape.
_NO_HOST = re.compile(r"[@/\\]|^$")

# With no IdentityFile ssh prints those it tries by default, some of which only some versions have.
_DEFAULT_IDENTITIES = {"~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519"}


def global_known_hosts() -> str:
    """The known_hosts files of all users, if the configuration names no others."""
    return f"{SYSTEM_FOLDER}/ssh_known_hosts {SYSTEM_FOLDER}/ssh_known_hosts2"


class Hop(NamedTuple):
    """A jump host as ProxyJump names it; what is left out stands in the configuration."""

    host: str
    user: str = ""
    port: int = 0


class Destination(NamedTuple):
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
    beyond_keys: tuple[str, ...] = ()  # settings, as they would stand in the file, that only ssh itself can follow
    gssapi: bool = False  # log in with Kerberos, if there is a ticket
    control_path: str = ""  # the socket of a connection that ssh keeps
    prompts: bool = True  # whether ssh may ask the user for a password

    @property
    def place(self) -> str:
        """The address and the port, for messages."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class SshConfig:
    """Asks ssh about hosts, once about each. Threads may share one."""

    def __init__(self, file: str | None = None) -> None:
        """`file`: what --ssh-config names, instead of ssh's own files. Raises UsageError where there is none."""
        if file is not None and not os.path.isfile(file):
            raise UsageError(f"--ssh-config {file}: no such file; name one in the format of ~/.ssh/config")
        self._file = os.path.abspath(file) if file is not None else ""
        self._lock = threading.Lock()
        self._asked: dict[Hop, Query | None] = {}
        self._closed = False

    def ask(self, host: str, user: str = "", port: int = 0) -> None:
        """Start what `lookup` waits for. Raises UsageError."""
        self._query(Hop(host, user, port))

    def lookup(self, host: str, user: str = "", port: int = 0) -> Destination:
        """How to connect to `host`; a `user` and a `port` given here win. Raises UsageError."""
        query = self._query(Hop(host, user, port))
        answer = query.answer() if query else f"user {user}\nport {port or ''}\n"
        return _Reader(host, answer).destination()

    def options(self, host: str, user: str = "", port: int = 0) -> list[str]:
        """The options of ssh that make it go where `lookup` says."""
        return self._options(Hop(host, user, port))

    def close(self) -> None:
        """End what is still being asked."""
        with self._lock:
            self._closed = True
            queries = [query for query in self._asked.values() if query]
        for query in queries:
            query.give_up()

    def _query(self, hop: Hop) -> Query | None:
        """Ask ssh; None where ssh can't be asked and there is no configuration either."""
        for what, text in (("host", hop.host), ("user", hop.user)):
            if _UNSAFE.search(text) or (what == "host" and _NO_HOST.search(text)):
                raise UsageError(f"{text!r} is no {what} name that ssh takes; correct it")
        with self._lock:
            if self._closed:
                raise ConnectError("protocol", hop.host, "given up; the run is ending")
            if hop not in self._asked:
                self._asked[hop] = self._begin(hop)
            return self._asked[hop]

    def _begin(self, hop: Hop) -> Query | None:
        try:
            pwd.getpwuid(os.getuid())
            return Query(hop.host, self._options(hop))
        except KeyError:
            problem, mend = f"which knows no user with the id {os.getuid()}", "add one to /etc/passwd"
        except (FileNotFoundError, PermissionError) as error:
            problem, mend = f"which can't be run here ({error.strerror})", "install openssh-client"
        except OSError as error:  # no memory, or too many open files
            raise ConnectError("protocol", hop.host, f"can't start ssh here: {error.strerror}") from None
        files = [self._file] if self._file else [f"{home()}/.ssh/config", f"{SYSTEM_FOLDER}/ssh_config"]
        found = next(filter(os.path.exists, files), None)
        if found:
            raise UsageError(f"{found} is read by ssh, {problem}; {mend}, or remove the file")
        return None

    def _options(self, hop: Hop) -> list[str]:
        file = ["-F", self._file] if self._file else []
        user = ["-l", hop.user] if hop.user else []
        return [*file, *user, *(["-p", str(hop.port)] if hop.port else [])]


class _Reader:
    """Makes a Destination of ssh's answer. What ssh doesn't say has its default."""

    def __init__(self, host: str, answer: str) -> None:
        self._host = host
        self._values: dict[str, list[str]] = {}
        for line in answer.split("\n"):
            keyword, _, value = line.partition(" ")
            self._values.setdefault(keyword.lower(), []).append(value)
        local = _local_user()
        name = socket.gethostname()
        self._port = int(self._first("port") or DEFAULT_PORT)
        self._tokens = {
            "%": "%",
            "h": self._first("hostname") or host,
            "n": host,
            "p": str(self._port),
            "r": self._first("user") or local,
            "u": local,
            "d": home(),
            "i": str(os.getuid()),
            "l": name,
            "L": name.partition(".")[0],
            "k": self._first("hostkeyalias") or host,
        }

    def destination(self) -> Destination:
        return Destination(
            name=self._host,
            address=self._tokens["h"],
            user=self._tokens["r"],
            port=self._port,
            identity_files=self._identity_files(),
            identities_only=self._first("identitiesonly") == "yes",
            identity_agent=self._agent(),
            proxy_jump=tuple(self._hop(part) for part in self._expand(self._first("proxyjump")).split(",") if part),
            proxy_command=self._expand(self._first("proxycommand")),
            known_hosts_files=self._files("userknownhostsfile", USER_KNOWN_HOSTS),
            global_known_hosts_files=self._files("globalknownhostsfile", global_known_hosts()),
            host_key_alias=self._first("hostkeyalias"),
            beyond_keys=tuple(self._beyond_keys()),
            gssapi=self._first("gssapiauthentication") == "yes",
            control_path=self._first("controlpath").replace("none", ""),
            prompts=self._first("batchmode") != "yes",
            connect_timeout=float(self._first("connecttimeout").replace("none", "") or 0) or CONNECT_SECONDS,
        )

    def _first(self, keyword: str) -> str:
        return self._values.get(keyword, [""])[0]

    def _beyond_keys(self) -> Iterator[str]:
        for name in ("CertificateFile", "PKCS11Provider", "RevokedHostKeys"):
            keyword = name.lower()
            if self._first(keyword) not in ("", "none"):
                yield f"{name} {self._first(keyword)}"
        if self._first("hostbasedauthentication") == "yes":
            yield "HostbasedAuthentication yes"
        if self._first("pubkeyauthentication") in ("no", "false"):
            yield "PubkeyAuthentication no"
        methods = self._first("preferredauthentications")
        if methods and "publickey" not in methods.split(","):
            yield f"PreferredAuthentications {methods}"

    def _fail(self, value: str, mend: str) -> UsageError:
        return UsageError(f"ssh's configuration of {self._host}: {value}: {mend}")

    def _expand(self, text: str, *, variables: bool = False) -> str:
        """Tokens, and ${VARIABLES} in what may have them: paths."""

        def replace(found: re.Match[str]) -> str:
            token, variable = found[1], found[2]
            if variable is not None:
                if not variables:
                    return found[0]
                if variable not in os.environ:
                    raise self._fail(text, f"{variable} is not set; set it, or write the path out")
                return os.environ[variable]
            if token not in self._tokens:
                raise self._fail(text, f"launchpad doesn't know the token %{token}; write its value out")
            return self._tokens[token]

        return re.sub(r"%(.?)|\$\{(\w+)\}", replace, text)

    def _path(self, text: str) -> str:
        return _at_home(self._expand(text, variables=True))

    def _files(self, keyword: str, default: str) -> tuple[str, ...]:
        """Files that ssh prints on one line, without the quotes that a name with a space had."""
        names: list[str] = []
        for word in (self._first(keyword) or default).split(" "):
            if names and not word.startswith(("/", "~")) and not os.path.exists(word):
                names[-1] += f" {word}"
            else:
                names.append(word)
        return tuple(self._ends(_at_home(name)) for name in names if name.lower() != "none")

    def _ends(self, path: str) -> str:
        """The path, unless whoever reads it, ssh included, waits or reads for ever."""
        if kind := linux.never_ends(path):
            raise self._fail(path, f"it is {kind}; name a file")
        return path

    def _identity_files(self) -> tuple[str, ...] | None:
        names = self._values.get("identityfile", [])
        if not names or set(names) >= _DEFAULT_IDENTITIES:
            return None
        return tuple(dict.fromkeys(self._ends(self._path(name)) for name in names if name.lower() != "none"))

    def _agent(self) -> str:
        value = self._first("identityagent") or "SSH_AUTH_SOCK"
        if value.lower() == "none":
            return ""
        if value == "SSH_AUTH_SOCK":
            return os.environ.get(value, "")
        if value.startswith("$") and not value.startswith("${"):
            return os.environ.get(value[1:], "")
        return self._path(value)

    def _hop(self, text: str) -> Hop:
        user, _, rest = text.rpartition("@")
        found = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?", rest)
        if found is None:
            raise self._fail(f"ProxyJump {text}", "not a jump host; write USER@HOST:PORT, several with commas")
        return Hop(found[1] or found[3], user, int(found[2] or found[4] or 0))


def home() -> str:
    """Where ssh looks for ~: not in HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _at_home(path: str) -> str:
    return f"{home()}{path[1:]}" if path == "~" or path.startswith("~/") else os.path.expanduser(path)


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        pass
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UsageError(f"user id {os.getuid()} has no name here; set USER to the one to log in with") from None
