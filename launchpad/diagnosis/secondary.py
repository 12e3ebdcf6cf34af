"""Recognises secondary failures: the errors of a rank whose peer is gone or never joined. Pure.

The texts are those of torch 2.13 (gloo's tcp transport, ProcessGroupNCCL, TCPStore), NCCL 2.2x, MPICH 4 and 5, Open MPI
4 and 5, and the operating system.
"""

from __future__ import annotations

import re
from typing import Literal

from launchpad.diagnosis.tracebacks import Traceback, from_event
from launchpad.protocol.events import ExceptionRaised

Strength = Literal["", "weak", "peer", "late"]

# The patterns are compiled on first use, because that takes milliseconds.

# Only a rank that was talking to another one reports these.
_PEER = (
    r"connection closed by peer"
    r"|gloo[/:].*(connection|broken pipe|socket|read error|write error|reset|unexpected|closed)"
    r"|application timeout caused pair closure"
    r"|remote process exited or there was a network error|ncclremoteerror|socket.*remote peer|peer .*closed connection"
    r"|nccl communicator was aborted|ncclcommabort|socketprogress: connection closed by remote"
    r"|connection was likely closed|tcpstore.*(broken pipe|reset|failed to (recv|send)|closed|shut ?down)"
    r"|failed to recv, got 0 bytes|sendbytes failed|recvvalue failed|recvbytes failed"
    r"|communication error with rank|connection to .{0,40}(closed|lost|failed)|err_proc_failed|err_revoked"
    r"|process_failed|peer .{0,40}(hung up|is gone|has failed|has left|disconnected)"
    r"|ucp_?_?ep.*(connection reset|endpoint)|ucx.*(connection reset|endpoint is not connected)"
)

# A wait for other ranks that timed out.
_LATE = (
    r"timed out waiting \d+ ?ms for (send|recv) operation"
    r"|watchdog caught collective operation timeout|collective operation timeout|wait timeout after \d+ ?ms"
    r"|timed out after \d+ seconds waiting for (clients|workers)|timed out in .*barrier"
    r"|failed to pass monitoredbarrier|monitoredbarrier.*timed? ?out|socket timeout"
    r"|connectfullmesh failed.*timed? ?out|timed out.*(store|rendezvous)|distributed.*timed out"
    r"|waited \d+.* s(econds)? for .*rank"
)

# These may have nothing to do with other ranks: a database, a proxy, a data loader.
_WEAK_TYPES = {
    "ConnectionResetError",
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "EOFError",
}
_WEAK = r"connection reset by peer|broken pipe|connection refused"

_FLAGS = re.IGNORECASE | re.DOTALL


def secondary_kind(traceback: Traceback) -> Strength:
    """Whether an exception is a secondary failure, judged by its root: the end of its chain of causes."""
    roots = traceback.roots
    strengths = [_of_root(root) for root in roots]
    if "" in strengths:
        return ""
    return next((strength for strength in ("peer", "late", "weak") if strength in strengths), "")


def _of_root(traceback: Traceback) -> Strength:
    found = secondary_in(traceback.message)
    if found in ("", "weak") and traceback.kind in _WEAK_TYPES | {"DistNetworkError", "DistBackendError"}:
        return "weak" if traceback.kind in _WEAK_TYPES else "peer"
    return found


def waited(event: ExceptionRaised) -> bool:
    """Whether the exception says that its rank lost other ranks, or timed out waiting for them."""
    return (traceback := from_event(event.traceback)) is not None and secondary_kind(traceback) in ("late", "peer")


def secondary_in(text: str) -> Strength:
    """The same for an error message, or for a program's last output."""
    if re.search(_PEER, text, _FLAGS):
        return "peer"
    if re.search(_LATE, text, _FLAGS):
        return "late"
    return "weak" if re.search(_WEAK, text, _FLAGS) else ""


def symptom_in(text: str) -> str:
    """The line of a program's last output that makes its end a secondary failure."""
    for line in reversed(text.splitlines()):
        if secondary_in(line):
            return line.strip()
    return ""
