"""Opens the links to the nodes' agents: the one of this machine, and those of the hosts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.errors import NodeError
from launchpad.transport import Link
from launchpad.transport.local import LocalLink

if TYPE_CHECKING:
    from launchpad.head.arrivals import Reopen
    from launchpad.image.keeper_link import KeeperLink
    from launchpad.job.hosts import Host
    from launchpad.runner.options import HostOptions
    from launchpad.transport.zygote import Zygote


def _no_agent(error: Exception) -> NodeError:
    why = str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        why = f"{error.strerror}: the link to each agent takes some; raise the limit (ulimit -Hn)"
    return NodeError(f"this node's agent can't be started: {why}")


class LocalAgent:
    """The agent of the machine that the head runs on, started when its link is first needed."""

    def __init__(
        self,
        link: LocalLink | None = None,
        keeper: KeeperLink | None = None,
        zygote: Zygote | None = None,
        *,
        leaves: bool = False,
    ) -> None:
        """`link`: to an agent that was started ahead of time; `keeper`: of images to fork it from instead, or `zygote`.

        `leaves`: the head is about to leave the terminal.
        """
        self._zygote = zygote
        self._leaves = leaves
        self._link = link
        self.keeper = keeper
        self._before: list[LocalLink] = []

    def begin(self) -> None:
        """Start the agent. One that is forked from a kept image comes up meanwhile. Raises NodeError if it can't be."""
        if self._link is None:
            try:
                forked = None if self._zygote is None else self._zygote.fork()
                self._link = LocalLink(self.keeper or forked, leaves=self._leaves)
            except (OSError, RuntimeError) as error:
                raise _no_agent(error) from None

    def link(self) -> Link:
        """The link to the agent. Raises NodeError if the agent can't be started."""
        self.begin()
        assert self._link is not None
        try:
            self._link.wait()
        except (OSError, RuntimeError) as error:
            raise _no_agent(error) from None
        return self._link

    def zygote(self) -> Zygote | None:
        """What forks further agents, if they were asked of this agent's guard. Raises NodeError likewise."""
        from launchpad.transport.zygote import Zygote

        self.link()
        assert self._link is not None
        return Zygote(self._link.asks) if self._link.asks else None

    def reopen(self) -> Link:
        """The link to a new agent, after the last one was lost. Raises NodeError likewise."""
        if self._link is not None:
            self._before.append(self._link)
            before, self._link = self._link, None
            self.link().name = before.name
        return self.link()

    def close(self) -> None:
        """Close the links, if there are any."""
        for link in (self._link, *self._before):
            if link is not None:
                link.close()
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    @property
    def started(self) -> bool:
        """Whether there is an agent already."""
        return self._link is not None

    @property
    def why_cold(self) -> str:
        """Why the agent was not forked from a kept image, though there is one."""
        return "" if self._link is None or self.keeper is None else self._link.why_cold


def open_links(
    hosts: Sequence[Host],
    local: LocalAgent,
    closing: ExitStack,
    options: HostOptions,
    python: str,
    *,
    exact: bool,
    quiet: bool,
    asked: Sequence[str] = (),
    dialling: Callable[[Callable[[], None]], None] = lambda _: None,
) -> tuple[list[Link], Reopen]:
    """The links to the hosts' agents (without hosts: to this machine's), and a function that reopens one of them.

    `python` is looked up on each host, with python3 as the fallback unless `exact`. `asked`: of each host's Startup.
    `dialling` is called with a function that aborts the connections in progress.
    """
    if not hosts:
        return [local.link()], lambda _: local.reopen()
    from launchpad.runner.connect import connect_all, enter_words
    from launchpad.transport.ssh.bundle import Startup

    if options.enter or options.keep_running or not any(host.here for host in hosts):
        local.close()

    def at_end(abandon: Callable[[], None]) -> None:
        closing.callback(abandon)
        dialling(abandon)

    startup = Startup(python, exact, enter_words(options))
    startups = [startup._replace(asked=text) for text in asked] or [startup] * len(hosts)
    links, connect_again = connect_all(hosts, local.link, at_end, options, startups, quiet=quiet)

    def reopen(node: int) -> Link:
        if not links[node].remote:
            return local.reopen()
        link = connect_again(node)
        closing.callback(link.close)
        return link

    for link in links:
        if link.remote:  # `local` closes the other one
            closing.callback(link.close)
    return links, reopen
