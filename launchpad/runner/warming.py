"""`launchpad warm`: what to keep on this machine or on hosts, and what is kept there."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.console.terminal import HowFar, status_line, waiting
from launchpad.image import keeper_control
from launchpad.image.keeper_link import IMPORT_SECONDS
from launchpad.job.user_environment import forwarded
from launchpad.protocol import wire
from launchpad.protocol.commands import KeeperRequest
from launchpad.protocol.defaults import defaults_for
from launchpad.protocol.events import KeeperReply
from launchpad.runner.connect import reach
from launchpad.runner.connector import Connector
from launchpad.runner.imports import NOT_FORKED, TORCH, module_names
from launchpad.runner.options import HostOptions
from launchpad.runner.spec import find_python
from launchpad.transport.local import guard_environ
from launchpad.transport.ssh.bundle import Startup

if TYPE_CHECKING:
    from launchpad.job.hosts import Host
    from launchpad.transport import Link

Request = dict[str, Any]
Answer = dict[str, Any]  # of image/keeper_control.py

# How long a host may take to answer, besides the imports.
_ANSWER_SECONDS = 60.0


def keep(seconds: float, preload: str | None) -> Request:
    """The request to keep images of torch and these modules from now on. Raises UsageError."""
    ranks = {"defaults": defaults_for(1), "environ": {}, "never": NOT_FORKED}
    return {"warm": {"seconds": seconds, "extra": module_names(preload or ""), "torch": TORCH, "python": "", **ranks}}


def ask_here(request: Request, python: str | None, head: Mapping[str, Any]) -> Answer:
    """This machine's answer. `python`: the value of --python; `head`: how to start a kept head. Raises UsageError."""
    environ = guard_environ()
    if "warm" in request:
        found = os.path.abspath(find_python(python, environ, sys.executable))
        request = {"warm": {**request["warm"], "python": found, "head": head}}
    return keeper_control.ask(request, environ)


def ask_hosts(
    request: Request,
    hosts: Sequence[Host],
    options: HostOptions,
    python: str | None,
    head: Mapping[str, Any],
) -> dict[str, Answer]:
    """The answers of hosts, by their names. One that can't be reached has {"failed": why}. Raises UsageError.

    `head`: how to start a kept head, if this machine is among them.
    """
    here = any(host.here for host in hosts)
    found = find_python(python, os.environ, sys.executable, here=here)
    startups = [Startup(found, python is not None, asked=json.dumps({"warm": True}))] * len(hosts)
    connector = Connector(options)
    links, failures = reach(
        connector, {place: host for place, host in enumerate(hosts) if not host.here}, startups, quiet=False
    )
    answers: dict[str, Answer] = {hosts[place].name: {"failed": why} for place, why in failures.items()}
    if "warm" in request:
        request = {"warm": {**request["warm"], "environ": forwarded(os.environ)}}

    def ask(host: Host, link: Link | None) -> None:
        answers[host.name] = ask_here(request, python, head) if link is None else _answer_of(link, request)

    asked = [(host, links.get(place)) for place, host in enumerate(hosts) if place not in failures]
    threads = [threading.Thread(target=ask, args=one, name=f"ask-{one[0].name}", daemon=True) for one in asked]

    def look() -> HowFar:
        left = [host.name for host in hosts if host.name not in answers]
        return HowFar(waiting("importing" if "warm" in request else "asking", left), len(answers), len(hosts))

    with status_line(look):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(IMPORT_SECONDS + _ANSWER_SECONDS)
    for host, link in asked:
        if link is None:
            continue
        if host.name in answers:
            link.close()
        else:
            link.abandon()
    connector.abandon()
    silent: Answer = {"failed": "it does not answer"}
    return {host.name: answers.get(host.name, silent) for host in hosts}


def _answer_of(link: Link, request: Request) -> Answer:
    link.send(KeeperRequest(request))
    try:
        for message in link.messages():
            if isinstance(message, KeeperReply):
                return message.answer
    except (OSError, EOFError, wire.WireError) as error:
        return {"failed": str(error) or type(error).__name__}
    return {"failed": "the connection ended before it answered"}
