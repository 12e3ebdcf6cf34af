"""Links through the ssh program, one process per host: it knows every way to log in that its configuration names."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Sequence

from launchpad import linux
from launchpad.errors import ConnectError, ConnectFailure, UsageError
from launchpad.transport.process import Openings, ProcessLink
from launchpad.transport.ssh import handover
from launchpad.transport.ssh.askpass import Ask, Askpass, Prompts
from launchpad.transport.ssh.bundle import Startup
from launchpad.transport.ssh.config import DEFAULT_PORT, Destination, SshConfig
from launchpad.transport.ssh.handover import in_one_line
from launchpad.transport.ssh.turns import Dropped, Turns

# How long logging in may take; an agent may be waiting for the user to touch a token.
LOGIN_SECONDS = 60.0
# The same if the user may be asked.
PROMPT_SECONDS = 600.0

# How often to look whether ssh has logged in: what it logs is in a file, which can't be waited for.
_LOOK_SECONDS = 1.0

# ssh's own exit code for an error of its own.
_FAILED = 255

# What would come between us and the agent, whatever the configuration says: forwarded ports that another ssh has
# already, commands to run instead, and being the master of other connections, which would outlive ours. Nor is an agent
# forwarded: ranks could log in wherever the user can, for as long as the job runs.
_PLAIN = (
    *("-T", "-x", "-a", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no"),
    *("-o", "ControlMaster=no"),
)

# Compiled for a connection that fails.
_TURNED_AWAY = (
    r"(?m)Exceeded MaxStartups|Not allowed at this time|"
    r"^kex_exchange_identification: (read: )?Connection (closed|reset)|^Connection (closed|reset) by |"
    r"^banner exchange: .*(Broken pipe|Connection reset)"
)
_NOT_SSHD = r"(?m)kex_exchange_identification: banner line (?:\d+: )?(.*)|^(Protocol major .*)"
_NO_CONNECTION = r"(?m)^ssh: connect to host (\S+) port (\d+): (.*)"
_NO_TUNNEL = r"open failed: (?:connect failed: )?(.*)"
_UNRESOLVABLE = r"Could not resolve hostname (\S+): (.*)"
_REFUSED = r"(?m)^(\S+)@(\S+): Permission denied \(([^)]*)\)"
_TOO_MANY = "Too many authentication failures"
_OFFERED = r"(?m)^debug1: Offering public key: (\S+) (?:\S+ SHA256:\S+)"
_ACCEPTED = r"(?m)^debug1: Server accepts key: (\S+)"
_PRESENTED = r"(?m)^debug1: Server host key: (\S+) (SHA256:\S+)"
_OFFENDING = r"(?m)^Offending .*key in (.*)"
_LOGGED_IN = r"(?m)^Authenticated to |^debug1: mux_client_request_session: master session"
_NOT_AN_ERROR = (
    r"debug\d|Warning: Permanently added|OpenSSH_|Authenticated to |@|Pseudo-terminal|Transferred: |Bytes per second: "
)


class OpenSsh:
    """Opens links through ssh. Thread-safe."""

    def __init__(
        self, config: SshConfig, *, accept_new: bool, ask: Ask | None, tell: Callable[[str], object] = print
    ) -> None:
        """`ask` prompts on the terminal; without it nobody is asked anything. `tell` shows a message there."""
        self._config = config
        self._accept_new = accept_new
        self._asks = ask is not None
        # Whoever has made ssh ask in a window keeps it.
        self._askpass = Askpass(ask, tell) if ask and "SSH_ASKPASS_REQUIRE" not in os.environ else None
        self._turns = Turns()
        self._openings = Openings()

    def connect(self, host: str, user: str, port: int, startup: Startup) -> ProcessLink:
        """A link to the host's agent. Raises ConnectError, or UsageError where there is no ssh."""
        destination = self._config.lookup(host, user, port)
        argv = ["ssh", *_PLAIN, *self._config.options(host, user, port)]
        argv += ["-o", f"ConnectTimeout={destination.connect_timeout:.0f}"]
        if not self._asks:
            argv += ["-o", "BatchMode=yes"]
        if self._accept_new:
            argv += ["-o", "StrictHostKeyChecking=accept-new"]
        first = destination.proxy_jump[0].host if destination.proxy_jump else destination.place
        return self._turns.take(first, lambda: self._attempt(destination, argv, startup))

    def abandon(self) -> None:
        """End what is still being opened."""
        self._turns.end()
        self._openings.abandon()
        if self._askpass:
            self._askpass.close()

    def _attempt(self, destination: Destination, argv: Sequence[str], startup: Startup) -> ProcessLink:
        prompts = Prompts(self._askpass) if self._askpass else None
        seconds = destination.connect_timeout + (PROMPT_SECONDS if self._asks else LOGIN_SECONDS)
        try:
            environ = prompts.environ if prompts else None if self._asks else _asking_nobody()
            make = functools.partial(OpenSshLink, destination, argv, startup, environ)
            link = self._openings.begin(destination.name, make, startup, seconds)
        except (FileNotFoundError, PermissionError) as error:
            text = f"--ssh openssh: ssh can't be run here ({error.strerror}); install openssh-client"
            raise UsageError(f"{text}, or leave the option out") from None
        except OSError as error:  # no memory, or too many open files
            raise ConnectError("protocol", destination.name, f"can't start ssh here: {error.strerror}") from None
        finally:
            if prompts:
                prompts.end()
        return link


def _asking_nobody() -> dict[str, str]:
    """The environment of an ssh that must not ask: the ssh that it starts for a jump host doesn't know its options."""
    environ = {name: value for name, value in os.environ.items() if name != "SSH_ASKPASS"}
    return {**environ, "SSH_ASKPASS_REQUIRE": "never"}


class OpenSshLink(ProcessLink):
    """A Link through one ssh process."""

    apart = True

    def __init__(
        self, destination: Destination, argv: Sequence[str], startup: Startup, environ: dict[str, str] | None
    ) -> None:
        """Start ssh. Raises OSError."""
        self._destination = destination
        # What ssh itself says, with the details that errors need, apart from what comes from the host.
        self._log: int | None = os.memfd_create("ssh")
        self._said = ""
        self._logged_in = False
        detailed = ["-v", "-E", linux.path_of(self._log)]
        words = [*argv, *detailed, "--", destination.name, startup.command]
        try:
            super().__init__(destination.name, words, environ=environ)
        except BaseException:
            os.close(self._log)
            raise

    def receive(self) -> bytes:
        """The next output before there is an agent, b"" at its end; a host's shell has START_SECONDS for it."""
        while not self._logged_in and time.monotonic() < self.deadline:
            self._read_log()
            if re.search(_LOGGED_IN, self._said):
                self._logged_in = True
                self.deadline = time.monotonic() + handover.START_SECONDS
                break
            with contextlib.suppress(TimeoutError):
                return self.read(min(self.deadline, time.monotonic() + _LOOK_SECONDS))
        return super().receive()

    def keep_errors(self) -> None:
        """Keep what ssh has said."""
        super().keep_errors()
        self._read_log()

    def _read_log(self) -> None:
        if self._log is not None:
            self._said = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")

    def close_output(self) -> None:
        """Close what only the reader needs."""
        if self._log is not None:
            os.close(self._log)
            self._log = None
        super().close_output()

    def failure(self, code: int, output: bytes, startup: Startup) -> Exception:
        """Why there is no agent; Dropped if one may come on a retry."""
        if code != _FAILED or "Exit status 255" in self._said:
            return super().failure(code, output, startup)
        error = why(self._destination, self._all_said)
        may_come = error.kind == "protocol" and not self._destination.proxy_command
        if may_come and re.search(_TURNED_AWAY, self._said) and not re.search(_PRESENTED, self._said):
            return Dropped(error)
        return error

    def lateness(self, seconds: float, output: bytes, startup: Startup) -> ConnectError:
        """The error if ssh has not logged in within so many seconds, or has and the agent has not started."""
        if self._logged_in:
            return super().lateness(handover.START_SECONDS, output, startup)
        said = _errors(self._all_said)
        text = f"ssh did not log in within {seconds:g} s{f' ({said})' if said else ''}; try ssh {self.name}"
        return ConnectError("timed out", self.name, text)

    def farewell(self, code: int) -> str:
        """Why ssh has ended, if the host's agent is not the reason."""
        if code == _FAILED:
            return f"ssh ended: {_errors(self._all_said) or 'without a word'}"
        return super().farewell(code)

    @property
    def _all_said(self) -> str:
        return f"{self._said}\n{self.stderr.decode(errors='replace')}"


def why(destination: Destination, said: str) -> ConnectError:
    """The error that ssh has reported, with `-v`."""
    kind, text = _why(destination, said)
    return ConnectError(kind, destination.name, text)


def _why(destination: Destination, said: str) -> tuple[ConnectFailure, str]:
    place, name = destination.place, destination.name
    if "Host key verification failed" in said or "host key for" in said:
        return "host key", _about_host_key(destination, said)
    if found := re.search(_UNRESOLVABLE, said):
        text = f"can't resolve {found[1]} ({found[2].strip()}); correct the name, or set a HostName for it in"
        return "unresolvable", f"{text} ~/.ssh/config"
    if found := re.search(_NO_CONNECTION, said):
        return _not_reached(destination, f"{found[1]}:{found[2]}", found[3].strip())
    if found := re.search(_NO_TUNNEL, said):
        return _not_reached(destination, place, found[1].strip())
    if found := re.search(_REFUSED, said):
        return "authentication", _refused(destination, said, *found.groups())
    if _TOO_MANY in said:
        tried = _tried(said)
        text = f"{place} disconnected user {destination.user!r} after {len(tried)} keys (MaxAuthTries): tried"
        fix = "in ~/.ssh/config, name the right one with IdentityFile and set IdentitiesOnly yes"
        return "authentication", f"{text} {', '.join(tried)}; {fix}"
    turned_away = re.search(_TURNED_AWAY, said)
    if not turned_away and (found := re.search(_NOT_SSHD, said)):
        text = f"{place} is not sshd, or an old one ({(found[1] or found[2])[:80].strip()}); correct the port, or"
        return "protocol", f"{text} update its sshd"
    if "timed out" in said:
        text = f"{place} accepted the connection but sent nothing for {destination.connect_timeout:g} s; is this"
        return "timed out", f"{text} sshd's port, and is the host overloaded?"
    if destination.proxy_command:
        text = f"ProxyCommand {destination.proxy_command!r} ended without a connection: {_errors(said)!r}"
        return "protocol", f"{text}; try it by hand"
    if turned_away:
        text = f"{place} closed the connection ({_errors(said)}); see its sshd's log (MaxStartups, a firewall,"
        return "protocol", f"{text} hosts.deny)"
    return "protocol", f"ssh ended without a connection ({_errors(said) or 'and without a word'}); try ssh {name}"


def _not_reached(destination: Destination, place: str, reason: str) -> tuple[ConnectFailure, str]:
    low = reason.lower()
    if "refused" in low:
        return "refused", f"nothing listens at {place}; start sshd there, or correct the port ({reason})"
    if "timed out" in low:
        text = f"{place} did not accept a connection within {destination.connect_timeout:g} s; is the host up, and does"
        return "timed out", f"{text} a firewall let the port through? ({reason})"
    return "unreachable", f"there is no route to {place}; check the address and this machine's network ({reason})"


def _about_host_key(destination: Destination, said: str) -> str:
    found = re.findall(_PRESENTED, said)
    kind, print_ = found[-1] if found else ("host", "")
    place = destination.place if not destination.proxy_jump else f"{destination.place}, or a jump host on the way,"
    shown = f"{place} presents the {kind} key {print_}".rstrip()
    if "REVOKED" in said or "revoked" in said:
        return f"{shown}, which is revoked: don't trust it; the host needs a new key"
    if "HAS CHANGED" in said or "has changed" in said:
        where = re.search(_OFFENDING, said)
        known = f"{where[1].strip()} has another" if where else "another is known"
        text = f"{shown}, but {known}; someone may be intercepting the connection. If the key was changed on"
        return f"{text} purpose, remove the old one with ssh-keygen -R and accept the new one"
    text = f"{shown}, which is in no known_hosts file; compare it with the host's own, then run ssh {destination.name}"
    if destination.proxy_jump:  # whose own ssh is not told what to accept
        return f"{text} once"
    return f"{text} once, or pass --accept-new-host-keys"


def _refused(destination: Destination, said: str, user: str, address: str, methods: str) -> str:
    here = address in (destination.address, destination.name)
    place = destination.place if here else f"the jump host {address}"
    tried = _tried(said)
    locked = [path for path in re.findall(_ACCEPTED, said) if path in tried]
    if locked and "partial success" not in said:
        return f"{place} takes the key {locked[-1]}, which can't be used here: does it need a passphrase? run ssh-add"
    keys = f"tried {', '.join(tried)}" if tried else "found no key to try"
    refused = f"{place} refused user {user!r} (it accepts {methods.replace(',', ', ')}); {keys}"
    if "publickey" not in methods:
        return (
            f"{refused}; start launchpad on a terminal to be asked, or set PubkeyAuthentication yes in its sshd_config"
        )
    port = "" if not here or destination.port == DEFAULT_PORT else f"-p {destination.port} "
    proxied = here and (destination.proxy_jump or destination.proxy_command)
    copy = f"ssh-copy-id {port}{user}@{destination.name if proxied else address}"
    return f"{refused}; run {copy}, or name the key in ~/.ssh/config"


def _tried(said: str) -> list[str]:
    """The keys that ssh has offered."""
    return list(dict.fromkeys(re.findall(_OFFERED, said)))


def _errors(said: str) -> str:
    """ssh's own words, in one line."""
    lines = [line.strip() for line in said.splitlines()]
    found = in_one_line("\n".join(line for line in lines if line and not re.match(_NOT_AN_ERROR, line)).encode())
    return found.removesuffix(".")
