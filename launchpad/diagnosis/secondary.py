"""Recognises secondary failures: the errors of a rank whose peer is gone or never joined. Pure.

The texts are those of torch 2.13 (gloo's tcp transport, ProcessGroupNCCL, TCPStore), NCCL 2.2x, MPICH 4 and 5, Open MPI
4 and 5, and the operating system.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from launchpad.diagnosis.tracebacks import Frame, Traceback, from_event, lines_of
from launchpad.protocol.events import ExceptionRaised

# kept: it caught a loss of its peer or a time-out before, and still held that exception when it failed.
Strength = Literal["", "weak", "kept", "peer", "late"]

# The patterns are compiled on first use, because that takes milliseconds.

# Only a rank that was talking to another one reports these.
_PEER = (
    r"connection closed by peer \["
    r"|gloo[/:].*(connection|broken pipe|socket|read error|write error|reset|unexpected|closed)"
    r"|application timeout caused pair closure"
    r"|remote process exited or there was a network error|ncclremoteerror|connection closed by remote peer"
    r"|nccl communicator was aborted|ncclcommabort|socketprogress: connection closed by remote"
    r"|connection was likely closed|tcpstore.*(broken pipe|reset|failed to (recv|send)|closed|shut ?down)"
    r"|failed to recv, got 0 bytes|sendbytes failed|recvvalue failed|recvbytes failed"
    r"|communication error with rank|connection to lifeline|mpi communication peer process"
    r"|err_proc_failed|err_revoked|process_failed"
    r"|ucp_?_?ep.*(connection reset|endpoint)|ucx.*(connection reset|endpoint is not connected)"
)

# So may anything else that talks over a network, unless it is raised in the code that talks to other ranks.
_PEER_THERE = (
    r"connection closed by peer|socket.*remote peer|peer .*closed connection"
    r"|connection to .{0,40}(closed|lost|failed)|peer .{0,40}(hung up|is gone|has failed|has left|disconnected)"
)

# A wait for other ranks that timed out.
_LATE = (
    r"timed out waiting \d+ ?ms for (send|recv) operation"
    r"|watchdog caught collective operation timeout|collective operation timeout|wait timeout after \d+ ?ms"
    r"|timed out after \d+ seconds waiting for (clients|workers)|timed out in .*barrier"
    r"|failed to pass monitoredbarrier|monitoredbarrier.*timed? ?out|connectfullmesh failed.*timed? ?out"
    r"|waited \d+.* s(econds)? for .*rank|^operation timed out!$"
)
_LATE_THERE = r"socket timeout|timed out.*(store|rendezvous)|distributed.*timed out"

# The code that talks to other ranks: the files of an exception's frames, and the modules of its type.
_THERE = r"/(torch/distributed|torch/nn/parallel|mpi4py|horovod|deepspeed|launchpad/collectives)/"
_ITS_TYPES = ("torch.distributed.", "mpi4py.", "launchpad.")

# It also reports what no other rank has to do with: a port that is taken, no standard input, a GPU that can't be used.
_OWN = (
    r"eaddrinuse|address already in use|eaddrnotavail|failed to (listen|bind)"
    r"|^eof when reading a line$"
    r"|nccl error.*(invalid (usage|argument)|unhandled cuda error)|duplicate gpu|cuda failure"
)

# These may have nothing to do with other ranks: a database, a proxy, a data loader.
_WEAK_TYPES = {
    "ConnectionResetError",
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "EOFError",
    # Of HTTP clients and queues, some of which say nothing.
    "ConnectError",
    "ReadError",
    "WriteError",
    "IncompleteRead",
    "ServerDisconnectedError",
    "ClosedResourceError",
    "BrokenResourceError",
}
_WEAK = (
    r"connection reset by peer|broken pipe|connection refused"
    # What clients say of a service that has gone, or is about to.
    r"|remote end closed connection|server disconnected|all connection attempts failed|connect call failed"
    r"|http error 50[23]|50[23] (bad gateway|service unavailable)"
    r"|statuscode\.unavailable|failed to connect to all addresses"
)

_BY_WEIGHT: tuple[Strength, ...] = ("peer", "late", "weak")

# How many lines are the last.
_LAST_LINES = 3

_FLAGS = re.IGNORECASE | re.DOTALL


def secondary_kind(traceback: Traceback) -> Strength:
    """Whether an exception is a secondary failure, judged by its root: the end of its chain of causes.

    A program that says in its own words that it has lost a rank may hide that exception (`raise … from None`).
    """
    strengths = [_of_root(root) for root in traceback.roots]
    if "" not in strengths:
        return next((strength for strength in _BY_WEIGHT if strength in strengths), "")
    link: Traceback | None = traceback
    while link is not None:
        if link.hidden is not None and (found := secondary_kind(link.hidden)) in ("peer", "late"):
            return found
        link = link.before
    return "kept" if lost_before(traceback) else ""


def lost_before(traceback: Traceback) -> Traceback | None:
    """The exception that the program had caught before, and still held, by which it lost another rank."""
    return next((one for one in traceback.kept if secondary_kind(one) in ("peer", "late")), None)


def _of_root(traceback: Traceback) -> Strength:
    if re.search(_OWN, traceback.message, _FLAGS):
        return ""
    there = any(re.search(_THERE, frame.file) for frame in _below_own(traceback))
    there = there or traceback.type.startswith(_ITS_TYPES)
    found = secondary_in(traceback.message, there=there)
    if found in ("", "weak") and traceback.kind in _WEAK_TYPES | {"DistNetworkError", "DistBackendError"}:
        return "weak" if traceback.kind in _WEAK_TYPES else "peer"
    return found


def _below_own(traceback: Traceback) -> Sequence[Frame]:
    """The frames of what the program's own code has called last; all frames if none is its own.

    What calls the program (torch's @record, DDP's forward, `-m mpi4py`) has nothing to do with its exception.
    """
    own = [number for number, frame in enumerate(traceback.frames) if frame.own]
    return traceback.frames[own[-1] + 1 :] if own else traceback.frames


def waited(event: ExceptionRaised) -> bool:
    """Whether the exception says that its rank lost other ranks, or timed out waiting for them."""
    return (traceback := from_event(event.traceback)) is not None and secondary_kind(traceback) in (
        "late",
        "peer",
        "kept",
    )


def secondary_in(text: str, *, there: bool = False) -> Strength:
    """The same for an error message, or for a program's last output.

    `there`: it comes from the code that talks to other ranks.
    """
    if re.search(_PEER, text, _FLAGS) or (there and re.search(_PEER_THERE, text, _FLAGS)):
        return "peer"
    if re.search(_LATE, text, _FLAGS) or (there and re.search(_LATE_THERE, text, _FLAGS)):
        return "late"
    return "weak" if re.search(_WEAK, text, _FLAGS) else ""


def symptom_in(text: str) -> str:
    """The line of a program's last output that makes its end a secondary failure.

    A weak one must be among the last: such errors are often reported and overcome.
    """
    for number, line in enumerate(reversed([line for line in lines_of(text) if line.strip()])):
        found = secondary_in(line)
        if found and (found != "weak" or number < _LAST_LINES):
            return line.strip()
    return ""
