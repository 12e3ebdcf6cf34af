"""Opens a link to each host, the way it needs: with paramiko, through ssh, or into a container on this machine."""

from __future__ import annotations

import functools
import getpass
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.console.message import say_on_stderr
from launchpad.errors import ConnectError
from launchpad.job.hosts import Host
from launchpad.output.status_line import aside
from launchpad.runner.options import HostOptions
from launchpad.transport import Link
from launchpad.transport.process import Openings, ProcessLink
from launchpad.transport.ssh.bundle import Startup, held_at
from launchpad.transport.ssh.config import SshConfig
from launchpad.transport.ssh.handover import START_SECONDS

if TYPE_CHECKING:
    from launchpad.transport.held_link import HeldLink, LinkState
    from launchpad.transport.ssh.connection_pool import ConnectionPool
    from launchpad.transport.ssh.known_hosts import KnownHosts
    from launchpad.transport.ssh.openssh import OpenSsh


class Connector:
    """Opens links to hosts over SSH, and to a container on this machine."""

    def __init__(self, options: HostOptions) -> None:
        self._config = SshConfig(options.ssh_config)
        self._way = options.ssh
        self._accept_new = options.accept_new_host_keys
        self._ask = self._prompt if sys.stdin.isatty() and sys.stderr.isatty() else None
        self._may_ask = True
        self._terminal = threading.Lock()  # hosts are reached at the same time, and ask one after the other
        self.asking = False  # whether the user is being asked for a passphrase or the like
        self.asked = False  # whether the user has been
        self._pool: ConnectionPool | None = None
        self._known: KnownHosts | None = None
        self._openssh: OpenSsh | None = None
        self._openings = Openings()
        self._ssh_config = os.path.abspath(options.ssh_config) if options.ssh_config else ""
        self._keep_running, self._silence = options.keep_running, options.heartbeat_timeout

    def begin(self, hosts: Sequence[Host]) -> None:
        """Ask ssh for the configuration of the hosts, and import paramiko (100 ms) in the meantime."""
        hosts = [host for host in hosts if not host.here]
        for host in hosts:
            self._config.ask(host.name, host.user, host.port)
        if not hosts:
            return
        from launchpad.transport.ssh.openssh import OpenSsh

        self._openssh = OpenSsh(self._config, accept_new=self._accept_new, ask=self._ask, tell=say_on_stderr)
        if self._way != "openssh":
            from launchpad.transport.ssh import choice, link  # noqa: F401  # once, before the threads that need them
            from launchpad.transport.ssh.connection_pool import ConnectionPool
            from launchpad.transport.ssh.known_hosts import KnownHosts

            self._pool = ConnectionPool(self._config, accept_new=self._accept_new, ask=self._ask)
            self._known = KnownHosts()

    def connect(self, host: Host, startup: Startup) -> Link:
        """Connect to the host and start its agent. Raises ConnectError or UsageError."""
        if not self._keep_running:
            return self._connect(host, startup)
        from launchpad.transport.held_link import HeldLink, Way

        dial = functools.partial(self._dial, host, startup)
        way = Way(host.user, host.port, startup.python, self._way or "", self._ssh_config, host.here)
        link = HeldLink(host.name, way, dial, self._keep_running, self._silence)
        if not host.here:
            try:
                link.try_out()
            except ConnectError:
                link.abandon()
                raise
        return link

    def resume(self, host: Host, state: LinkState) -> HeldLink:
        """The link that was in this state. It is not connected yet."""
        from launchpad.transport.held_link import HeldLink

        dial = functools.partial(self._dial, host, Startup(state.way.python))
        return HeldLink(state.name, state.way, dial, state.seconds, state.silence, state)

    def _dial(self, host: Host, startup: Startup, asked: Mapping[str, Any]) -> Link:
        if "resume" in asked:
            return self._connect(host, startup._replace(held=held_at(**asked["resume"])))
        return self._connect(host, startup._replace(asked=json.dumps(json.loads(startup.asked) | asked)))

    def _connect(self, host: Host, startup: Startup) -> Link:
        if host.here:
            return self._enter(host, startup)
        if self._way == "openssh" or (self._way is None and self._needs_ssh(host)):
            return self._through_ssh(host, startup)
        from launchpad.transport.ssh.link import SshLink
        from launchpad.transport.ssh.login import LoginRefused

        assert self._pool is not None
        try:
            transport = self._pool.connect(host.name, host.user, host.port)
        except LoginRefused as error:
            if self._way is None and self._may_be_asked(host, error.methods):
                return self._through_ssh(host, startup)
            raise
        try:
            return SshLink(host.name, transport, startup)
        except ConnectError:
            transport.close()
            raise

    def _through_ssh(self, host: Host, startup: Startup) -> Link:
        assert self._openssh is not None
        return self._openssh.connect(host.name, host.user, host.port, startup)

    def _needs_ssh(self, host: Host) -> bool:
        from launchpad.transport.ssh.choice import needs_ssh

        assert self._known is not None
        destination = self._config.lookup(host.name, host.user, host.port)
        return shutil.which("ssh") is not None and bool(needs_ssh(self._config, self._known, destination))

    def _may_be_asked(self, host: Host, methods: Sequence[str]) -> bool:
        """Whether ssh would ask the user for what the host wants besides keys."""
        wanted = {"password", "keyboard-interactive"} & set(methods)
        prompts = self._config.lookup(host.name, host.user, host.port).prompts
        return bool(wanted) and prompts and self._ask is not None and shutil.which("ssh") is not None

    def _enter(self, host: Host, startup: Startup) -> Link:
        words = startup.words
        try:
            make = functools.partial(ProcessLink, host.name, words)
            return self._openings.begin(host.name, make, startup, START_SECONDS)
        except OSError as error:
            text = f"can't run {words[0]} ({error.strerror}); install it, or correct --enter"
            raise ConnectError("enter", host.name, text) from None

    def stop_asking(self) -> None:
        """From now on, a question to the user counts as not answered: the terminal is the job's."""
        self._may_ask = False

    def _prompt(self, prompt: str) -> str | None:
        with self._terminal:
            if not self._may_ask:
                return None
            self.asking = self.asked = True
            try:
                return _ask(prompt)
            finally:
                self.asking = False

    def abandon(self) -> None:
        """Abort everything in progress."""
        self._config.close()
        self._openings.abandon()
        if self._openssh is not None:
            self._openssh.abandon()
        if self._pool is not None:
            self._pool.abandon()


def _ask(prompt: str) -> str | None:
    with aside:
        try:
            return _ask_openly(prompt) if "(yes/no" in prompt else getpass.getpass(prompt)
        except (EOFError, OSError):
            return None


def _ask_openly(prompt: str) -> str | None:
    """Ask for what may be seen while it is typed. Standard input is left to the ranks."""
    with open("/dev/tty", "r+b", buffering=0) as terminal:
        terminal.write(prompt.encode())
        return terminal.readline().decode(errors="replace").strip() or None
