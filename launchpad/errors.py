"""What can go wrong before a job runs, and in its ranks where they come together (`launchpad.collectives`).

    LaunchpadError
    ├── UsageError    what the user asked for can't be done: exit code 2
    │   └── UnpicklableError  of launchpad.run: a function, an argument or a result can't be pickled
    ├── NodeError     a node could not be reached or set up: exit code 3; of launchpad.run: or was lost
    │   └── ConnectError  no SSH connection to it; `kind` says at which step that failed
    ├── RankError     of launchpad.run: a rank ended without a result
    ├── JobTimeout    of launchpad.run: its time is over
    ├── WorldError    in a rank: its environment doesn't say which rank of how many it is, or where they meet
    └── FrontendError in a rank: the frontend asked for (gloo, nccl, mpi) can't be had, or can't do this

The message is one sentence for the user: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ConnectFailure = Literal[
    "unresolvable", "refused", "timed out", "unreachable", "host key", "authentication", "protocol", "no Python"
]


class LaunchpadError(Exception):
    """Base of all errors that end `launchpad` with a message instead of a traceback."""

    exit_code = 1


class UsageError(LaunchpadError):
    """The request can't be carried out as it stands; nothing was started."""

    exit_code = 2


class UnpicklableError(UsageError, TypeError):
    """What is to travel between the caller and the ranks can't be pickled; the message names the part."""


class RankError(LaunchpadError):
    """A rank died, left before its function had returned, or raised or returned what can't be unpickled here.

    `code`: its exit code, -n for signal n. Where it raised, the `__cause__` is its traceback there.
    """

    def __init__(self, text: str, rank: int, host: str, code: int) -> None:
        super().__init__(text)
        self.rank = rank
        self.host = host
        self.code = code


class RemoteTraceback(Exception):
    """The traceback in a rank, as text: the `__cause__` of what launchpad.run raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}\n"


class JobTimeout(LaunchpadError, TimeoutError):
    """The ranks of launchpad.run took longer than its `timeout`, and were ended."""


class WorldError(LaunchpadError, ValueError):
    """The variables that tell a rank its place are half set, contradict each other, or name no place to meet.

    A ValueError too, as torch.distributed raises one for them.
    """


class FrontendError(LaunchpadError, RuntimeError):
    """A frontend can't be had here, or can't do what was asked; a RuntimeError too, as in torch.distributed."""


class NodeError(LaunchpadError):
    """A node could not be reached or set up; nothing was started."""

    exit_code = 3


class ConnectError(NodeError):
    """There is no authenticated SSH connection to a host, or no agent at its far end."""

    def __init__(self, kind: ConnectFailure, host: str, text: str) -> None:
        """`text` is what is wrong, where, and the mend; the message puts the host's name and the kind before it."""
        super().__init__(f"{host}: {kind}: {text}")
        self.kind: ConnectFailure = kind
        self.host = host
        self.text = text


def failed_hosts(why: Mapping[str, str], count: int, mend: str) -> str:
    """The message for hosts that can't take part: a line for each, by name, then what to do."""
    width = max(map(len, why))
    lines = [f"  {name:<{width}}  {text}" for name, text in why.items()]
    hosts = "the only host" if count == 1 else f"{len(why)} of {count} hosts"
    return "\n".join([f"{hosts} can't take part, so nothing was started:", *lines, *([mend] if mend else [])])
