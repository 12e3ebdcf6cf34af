"""Open authenticated SSH connections to all hosts at once, with one connection per jump host."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import paramiko

from launchpad.errors import ConnectError, UsageError
from launchpad.transport.ssh.config import Destination, SshConfig
from launchpad.transport.ssh.keys import Ask, Keyring
from launchpad.transport.ssh.known_hosts import KnownHosts
from launchpad.transport.ssh.login import log_in
from launchpad.transport.ssh.session import Session
from launchpad.transport.ssh.streams import COMMAND_END_SECONDS, ProxyCommand, open_channel, open_tcp
from launchpad.transport.ssh.turns import Dropped, Turns

# How long to wait for a closed connection's thread; it checks every 0.1 s.
END_SECONDS = 2.0


class ConnectionPool:
    """Connects to hosts as ssh would. Thread-safe; it closes the connections that it opened."""

    def __init__(self, config: SshConfig, *, accept_new: bool = False, ask: Ask | None = None) -> None:
        """`accept_new`: accept and store the key of a host without a known key.

        `ask`: prompts on the terminal and returns the answer; None if there is no terminal.
        """
        self._config = config
        self._hosts = KnownHosts(accept_new=accept_new)
        self._keys = Keyring(ask)
        self._turns = Turns()
        self._closed = False
        self._lock = threading.Lock()
        self._jumps: dict[Destination, Future[Session]] = {}
        self._open: dict[Session, ProxyCommand | None] = {}

    def connect(self, host: str, user: str = "", port: int = 0) -> paramiko.Transport:
        """An authenticated connection to `host`. Raises ConnectError, or UsageError for a bad setting."""
        destination = self._config.lookup(host, user, port)
        via, jump = None, None
        for hop in reversed(self._route(destination)):
            try:
                jump = self._share(hop, via, jump)
            except ConnectError as error:
                text = f"jump host {error.host}: {error.text}"
                raise ConnectError(error.kind, destination.name, text) from None
            via = hop
        return self._connect(destination, via, jump)

    def close(self) -> None:
        """Close all connections, including those still being opened."""
        self._turns.end()
        with self._lock:
            self._closed = True
            sessions, self._open = list(self._open.items()), {}
        for session, _ in reversed(sessions):  # those through a jump host come after its own
            session.hang_up()
        for session, command in sessions:
            session.wait_closed(END_SECONDS)
            if command:
                command.end()
        self._keys.close()

    def abandon(self) -> None:
        """Exit in a hurry: the connections die with this process, but the ProxyCommands must be told to end."""
        self._turns.end()
        with self._lock:
            self._closed = True
            commands = [command for command in self._open.values() if command]
        for command in commands:
            command.hang_up()
        deadline = time.monotonic() + COMMAND_END_SECONDS
        for command in commands:
            command.kill_at(deadline)

    def _route(self, destination: Destination) -> list[Destination]:
        """The jump hosts, last one first."""
        route = [destination]
        while route[-1].proxy_jump:
            *before, last = route[-1].proxy_jump
            hop = self._config.lookup(*last)
            if before:  # like `ssh -J before last`, which overrides the configuration of `last`
                hop = hop._replace(proxy_jump=tuple(before), proxy_command="")
            if any(hop.place == other.place for other in route):
                fix = f"set `ProxyJump none` for it, above the line that sends it through {hop.name}"
                raise UsageError(f"ProxyJump: the route to {destination.name} goes through {hop.name} twice; {fix}")
            route.append(hop)
        return route[1:]

    def _share(self, hop: Destination, via: Destination | None, jump: Session | None) -> Session:
        """The one connection to a jump host, opened by the first thread that needs it."""
        with self._lock:
            future = self._jumps.get(hop)
            first = future is None or (future.done() and not future.result().is_active())
            if future is None or first:
                future = self._jumps[hop] = Future()
        if first:
            try:
                future.set_result(self._connect(hop, via, jump))
            except BaseException as error:
                with self._lock:
                    del self._jumps[hop]
                future.set_exception(error)
        return future.result()

    def _connect(self, destination: Destination, via: Destination | None, jump: Session | None) -> Session:
        return self._turns.take((via, destination.place), lambda: self._attempt(destination, via, jump))

    def _attempt(self, destination: Destination, via: Destination | None, jump: Session | None) -> Session:
        command = None
        session: Session | None = None
        if via is not None and jump is not None:
            session = Session(open_channel(jump, via.name, destination), destination)
        elif not destination.proxy_command:
            session = Session(open_tcp(destination), destination)
        with self._lock:  # whoever ends us must know of each command that has been started
            if not self._closed:
                if session is None:
                    command = ProxyCommand(destination)
                    session = Session(command.stream, destination)
                self._open[session] = command
            given_up = self._closed
        if given_up or session is None:
            if session is not None:
                session.hang_up()
            raise ConnectError("protocol", destination.name, "given up; the run is ending")
        try:
            session.handshake(self._hosts)
            log_in(session, destination, self._keys)
        except BaseException as error:
            with self._lock:
                self._open.pop(session, None)
            session.hang_up()
            session.wait_closed(END_SECONDS)
            output = command.end() if command else ""
            if command and isinstance(error, Dropped):
                text = f"ProxyCommand {command.line!r} ended without a connection: {output!r}; try it by hand"
                raise ConnectError("protocol", destination.name, text) from None
            raise
        return session
