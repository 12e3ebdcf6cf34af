"""The errors that Launchpad raises: before a job runs, from `launchpad.run`, and in ranks (`launchpad.collectives`).

    LaunchpadError
    ├── UsageError    the request can't be carried out: exit code 2
    │   └── UnpicklableError  launchpad.run: a function, an argument or a result can't be pickled
    ├── NodeError     a node could not be reached or set up: exit code 3; launchpad.run: or a node was lost
    │   └── ConnectError  no SSH connection to a node; `kind` names the step that failed
    ├── RankError     launchpad.run: a rank ended without a result
    ├── JobTimeout    launchpad.run: the ranks ran longer than `timeout`
    ├── WorldError    in a rank: the environment doesn't give its rank, the world size, or where the ranks meet
    └── FrontendError in a rank: the requested frontend (gloo, nccl, mpi) is not available, or can't do this

Each message is one sentence for the user: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ConnectFailure = Literal[
    "unresolvable",
    "refused",
    "timed out",
    "unreachable",
    "host key",
    "authentication",
    "protocol",
    "enter",
    "no Python",
    "session",
]


class LaunchpadError(Exception):
    """Base class of the errors that end `launchpad` with a message instead of a traceback."""

    exit_code = 1


class UsageError(LaunchpadError):
    """The request can't be carried out; nothing was started."""

    exit_code = 2


class UnpicklableError(UsageError, TypeError):
    """A value passed between the caller and the ranks can't be pickled; the message names the part that can't."""


class RankError(LaunchpadError):
    """A rank died, exited before its function returned, or raised or returned a value that can't be unpickled here.

    `code` is its exit code, or -n for signal n. If the rank raised, `__cause__` holds its traceback.
    """

    def __init__(self, text: str, rank: int, host: str, code: int) -> None:
        super().__init__(text)
        self.rank = rank
        self.host = host
        self.code = code


class RemoteTraceback(Exception):
    """A rank's traceback as text: the `__cause__` of the exception that launchpad.run raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}\n"


class JobTimeout(LaunchpadError, TimeoutError):
    """The ranks of launchpad.run ran longer than its `timeout` and were stopped."""


class WorldError(LaunchpadError, ValueError):
    """The variables that give a rank its place are incomplete, contradict each other, or name no rendezvous.

    It is also a ValueError, which is what torch.distributed raises for them.
    """


class FrontendError(LaunchpadError, RuntimeError):
    """A frontend is not available here, or can't do what was asked; also a RuntimeError, as in torch.distributed."""


class NodeError(LaunchpadError):
    """A node could not be reached or set up; nothing was started."""

    exit_code = 3


class ConnectError(NodeError):
    """There is no authenticated SSH connection to a host, or no agent at the other end of it."""

    def __init__(self, kind: ConnectFailure, host: str, text: str) -> None:
        """`text` says what is wrong, where, and what to do; the message adds the host's name and the kind in front."""
        super().__init__(f"{host}: {kind}: {text}")
        self.kind: ConnectFailure = kind
        self.host = host
        self.text = text


def failed_hosts(
    why: Mapping[str, str], count: int, remedy: str, so: str = "can't take part, so nothing was started"
) -> str:
    """The message about hosts that can't take part: one line per host with its reason, then what to do."""
    width = max(map(len, why))
    inner = "\n" + " " * (width + 4)
    lines = [f"  {name:<{width}}  {reason}".replace("\n", inner) for name, reason in why.items()]
    hosts = "the only host" if count == 1 else f"{len(why)} of {count} hosts"
    return "\n".join([f"{hosts} {so}:", *lines, *([remedy] if remedy else [])])
