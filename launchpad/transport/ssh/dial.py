"""SSH up to an authenticated connection to each host: all hosts at once, one connection per jump host."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import paramiko

from launchpad.errors import ConnectError, UsageError
from launchpad.transport.ssh.config import Destination, SshConfig
from launchpad.transport.ssh.keys import Ask, Keyring
from launchpad.transport.ssh.known_hosts import KnownHosts
from launchpad.transport.ssh.login import log_in
from launchpad.transport.ssh.session import Dropped, Session
from launchpad.transport.ssh.streams import Command, open_channel, open_tcp

# sshd drops some of the connections that have not authenticated once there are ten (MaxStartups 10:30:100).
AT_ONCE = 8
# Seconds before each new try at a host that hung up with no banner: others may be connecting to it too.
PAUSES = (0.1, 0.3, 0.9)
# How long a closed connection's thread may take to end; it looks every 0.1 s.
END_SECONDS = 2.0


class Dialer:
    """Connects to hosts as ssh would, for any number of threads; what it opened is its own to close."""

    def __init__(self, config_file: str | None = None, *, accept_new: bool = False, ask: Ask | None = None) -> None:
        """Raises UsageError for a configuration that can't be read.

        `config_file`: what --ssh-config names, None for ssh's own files. `accept_new`: take and remember the key of a
        host that has none. `ask`: shows a prompt on the terminal and returns the answer; None where there is none.
        """
        self._config = SshConfig(config_file)
        self._hosts = KnownHosts(accept_new=accept_new)
        self._keys = Keyring(ask)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._slots: dict[tuple[Destination | None, str], threading.BoundedSemaphore] = {}
        self._jumps: dict[Destination, Future[Session]] = {}
        self._open: dict[Session, Command | None] = {}

    def connect(self, host: str, user: str = "", port: int = 0) -> paramiko.Transport:
        """An authenticated connection to `host`. Raises ConnectError, or UsageError for a wrong setting."""
        destination = self._config.lookup(host, user, port)
        via, jump = None, None
        for hop in reversed(self._route(destination)):
            try:
                jump = self._share(hop, via, jump)
            except ConnectError as error:
                text = f"its jump host {error.host}: {error.text}"
                raise ConnectError(error.kind, destination.name, text) from None
            via = hop
        return self._connect(destination, via, jump)

    def close(self) -> None:
        """Close all connections, also those that are being made."""
        self._closed.set()
        with self._lock:
            sessions, self._open = list(self._open.items()), {}
        for session, _ in reversed(sessions):  # a jump host's comes before those that go through it
            session.hang_up()
        for session, command in sessions:
            session.gone(END_SECONDS)
            if command:
                command.end()
        self._keys.close()

    def abandon(self) -> None:
        """End at once: the connections go with this process, and what was started for them is not to outlive it."""
        self._closed.set()
        with self._lock:
            commands = [command for command in self._open.values() if command]
        for command in commands:
            command.hang_up()

    def _route(self, destination: Destination) -> list[Destination]:
        """The jump hosts, the last one first."""
        route = [destination]
        while route[-1].proxy_jump:
            *before, last = route[-1].proxy_jump
            hop = self._config.lookup(*last)
            if before:  # as `ssh -J before last`, which overrides the configuration of `last`
                hop = replace(hop, proxy_jump=tuple(before), proxy_command="")
            if any(hop.place == other.place for other in route):
                mend = f"give it `ProxyJump none`, above what sends it through {hop.name}"
                raise UsageError(f"ProxyJump: the way to {destination.name} goes twice through {hop.name}; {mend}")
            route.append(hop)
        return route[1:]

    def _share(self, hop: Destination, via: Destination | None, jump: Session | None) -> Session:
        """The one connection to a jump host; the first thread that needs it makes it."""
        with self._lock:
            future = self._jumps.get(hop)
            mine = future is None or (future.done() and not future.result().is_active())
            if future is None or mine:
                future = self._jumps[hop] = Future()
        if mine:
            try:
                future.set_result(self._connect(hop, via, jump))
            except BaseException as error:
                with self._lock:
                    del self._jumps[hop]
                future.set_exception(error)
        return future.result()

    def _connect(self, destination: Destination, via: Destination | None, jump: Session | None) -> Session:
        with self._lock:
            slot = self._slots.setdefault((via, destination.place), threading.BoundedSemaphore(AT_ONCE))
        for pause in (*PAUSES, None):
            with slot:
                try:
                    return self._attempt(destination, via, jump)
                except Dropped as dropped:
                    error = dropped.error
            if pause is None or self._closed.wait(pause):
                break
        raise error

    def _attempt(self, destination: Destination, via: Destination | None, jump: Session | None) -> Session:
        command = None
        if via is not None and jump is not None:
            session = Session(open_channel(jump, via.name, destination), destination)
        elif destination.proxy_command:
            command = Command(destination)
            session = Session(command.stream, destination)
        else:
            session = Session(open_tcp(destination), destination)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise ConnectError("protocol", destination.name, "given up; the run is ending")
                self._open[session] = command
            session.shake_hands(self._hosts)
            log_in(session, destination, self._keys)
        except BaseException as error:
            with self._lock:
                self._open.pop(session, None)
            session.hang_up()
            session.gone(END_SECONDS)
            said = command.end() if command else ""
            if command and isinstance(error, Dropped):
                text = f"ProxyCommand {command.line!r} ended with no connection, saying {said!r}; try it by hand"
                raise ConnectError("protocol", destination.name, text) from None
            raise
        return session
