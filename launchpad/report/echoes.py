"""Which failures are echoes: what a rank says when another one, which it was talking to, is gone or never came. Pure.

The texts are those of torch 2.13 (gloo's tcp transport, ProcessGroupNCCL, TCPStore), NCCL 2.2x, MPICH 4 and 5, Open MPI
4 and 5, and the operating system's.
"""

from __future__ import annotations

import re
from typing import Literal

from launchpad.failures import ExceptionRaised
from launchpad.report.accounts import Account, from_event

Strength = Literal["", "weak", "peer", "late"]

# Patterns are compiled when there is something to be searched: that takes milliseconds.

# Only somebody who talked to another rank says these.
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

# A wait for other ranks that has ended without them.
_LATE = (
    r"timed out waiting \d+ ?ms for (send|recv) operation"
    r"|watchdog caught collective operation timeout|collective operation timeout|wait timeout after \d+ ?ms"
    r"|timed out after \d+ seconds waiting for (clients|workers)|timed out in .*barrier"
    r"|failed to pass monitoredbarrier|monitoredbarrier.*timed? ?out|socket timeout"
    r"|connectfullmesh failed.*timed? ?out|timed out.*(store|rendezvous)|distributed.*timed out"
    r"|waited \d+.* s(econds)? for .*rank"
)

# These can come from anywhere: a database, a proxy, a data loader.
_WEAK_TYPES = {
    "ConnectionResetError",
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "EOFError",
}
_WEAK = r"connection reset by peer|broken pipe|connection refused"

_FLAGS = re.IGNORECASE | re.DOTALL


def echo_of(account: Account) -> Strength:
    """Whether an exception is an echo, judged by what it began with: the end of its chain of causes."""
    roots = account.roots
    strengths = [_of_root(root) for root in roots]
    if "" in strengths:
        return ""
    return next((strength for strength in ("peer", "late", "weak") if strength in strengths), "")


def _of_root(account: Account) -> Strength:
    found = echo_in(account.message)
    if found in ("", "weak") and account.kind in _WEAK_TYPES | {"DistNetworkError", "DistBackendError"}:
        return "weak" if account.kind in _WEAK_TYPES else "peer"
    return found


def waited(event: ExceptionRaised) -> bool:
    """Whether the exception says that its rank has waited for others in vain, or lost them."""
    return (account := from_event(event.account)) is not None and echo_of(account) in ("late", "peer")


def echo_in(text: str) -> Strength:
    """The same, of an error message or of a program's last words."""
    if re.search(_PEER, text, _FLAGS):
        return "peer"
    if re.search(_LATE, text, _FLAGS):
        return "late"
    return "weak" if re.search(_WEAK, text, _FLAGS) else ""


def reason_in(text: str) -> str:
    """The line of some last words that makes them an echo."""
    for line in reversed(text.splitlines()):
        if echo_in(line):
            return line.strip()
    return ""
