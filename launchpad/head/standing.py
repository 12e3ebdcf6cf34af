"""Decides whether an agent may say what it says: about its own ranks only, and only values that there are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from launchpad.protocol.events import (
    RESULT,
    STDERR,
    STDOUT,
    ArrivalTimes,
    AtPrompt,
    BarrierIn,
    CollectivesEntered,
    Crashed,
    DebuggerReady,
    ExceptionRaised,
    Hindrances,
    LinkClosed,
    MilestoneReached,
    MpiRequest,
    Output,
    PmixFetched,
    PmixRequest,
    ProfileTaken,
    RankExited,
    RankFailed,
    RankRaised,
    RankStarted,
    Sampled,
    StackDump,
    StartFailed,
    Suspended,
)

# About a rank, which the sender must have.
OF_A_RANK = frozenset(
    {
        *(ArrivalTimes, AtPrompt, CollectivesEntered, Crashed, DebuggerReady, ExceptionRaised, MilestoneReached),
        *(MpiRequest, Output, ProfileTaken, RankExited, RankFailed, RankRaised, RankStarted, StackDump, StartFailed),
    }
)

# About several ranks, which the sender must have all.
OF_RANKS: Mapping[type, Callable[[Any], Iterable[Any]]] = {Hindrances: lambda event: (row[0] for row in event.ranks)}

# What must hold of their values.
HOLDS: Mapping[type, Callable[[Any], bool]] = {
    Hindrances: lambda event: all(len(row) == 8 for row in event.ranks),
    MpiRequest: lambda event: bool(event.lines),
    Output: lambda event: event.stream in (STDOUT, STDERR, RESULT),
    RankExited: lambda event: -256 < event.code < 256,
    RankFailed: lambda event: 0 < event.code < 256,
    Sampled: lambda event: _has_form(event),
}

# From a node that is lost, or has left, only this counts.
OF_ANY_NODE = frozenset({LinkClosed, Suspended})

# Asks for what few jobs have; in all others nobody may ask.
OF_MPI = frozenset({BarrierIn, MpiRequest, PmixFetched, PmixRequest})


def may_send(node: int, event: Any, node_of: Mapping[int, int]) -> bool:
    """Whether a node may say this. `node_of`: where each rank runs."""
    kind = type(event)
    if kind in OF_A_RANK and node_of.get(event.rank) != node:
        return False
    holds = HOLDS.get(kind)
    if holds is not None and not holds(event):
        return False
    ranks = OF_RANKS.get(kind)
    return ranks is None or all(node_of.get(rank) == node for rank in ranks(event))


def _has_form(sampled: Sampled) -> bool:
    def each(rows: list[list[Any]], *kinds: Any) -> bool:
        return all(len(row) == len(kinds) and all(map(isinstance, row, kinds)) for row in rows)

    number = (int, float)
    return (
        each(sampled.ranks, int, str, number, int, int, int, int)
        and each(sampled.waits, int, str, int, number)
        and each(sampled.gpus, str, int, int, int, dict)
    )
