"""The timeline as a trace for Perfetto (ui.perfetto.dev), in the trace-event format. Pure.

A process is a host, a thread a rank; all times are of one clock.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from launchpad.report.timeline import HOST, JOB, Curve, Timeline, TimelineRow

_JOB = 1  # the job's process; those of the hosts follow

# A flow needs a slice of some length, in microseconds.
_LEAST = 1.0


def trace_of(timeline: Timeline, name: str) -> dict[str, Any]:
    """The trace; `name` is the job's."""
    events: list[dict[str, Any]] = [_named("process_name", _JOB, 0, name), _named("thread_name", _JOB, 1, "attempts")]
    events += [_named("process_name", _JOB + 1 + node, 0, host) for node, host in enumerate(timeline.hosts)]
    flows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in timeline.rows:
        process, thread = _place(row)
        if row.rank != JOB:
            events.append(_named("thread_name", process, thread, row.name))
        for span in row.spans:
            said = {
                "name": span.text if span.kind in ("attempt", "import", "collective") else span.kind,
                "cat": span.kind,
            }
            args = {"what": span.words, "outcome": span.outcome}
            duration = max(_micro(span.end - span.start), _LEAST if span.flow else 0.0)
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "ts": _micro(span.start),
                    "dur": duration,
                    **said,
                    "args": args,
                }
            )
            if span.flow:
                flows[span.flow].append({"pid": process, "tid": thread, "ts": _micro(span.start)})
        for mark in row.marks:
            said = {"name": mark.text, "cat": mark.kind, "s": "t" if row.rank >= 0 else "p"}
            events.append({"ph": "i", "pid": process, "tid": thread, "ts": _micro(mark.time), **said})
    for curve in timeline.curves:
        events += _counter(curve)
    for number, entered in enumerate(flows.values()):
        entered.sort(key=lambda one: float(one["ts"]))
        kinds = ["s", *["t"] * (len(entered) - 2), "f"] if len(entered) > 1 else []
        for kind, place in zip(kinds, entered, strict=False):
            events.append({"ph": kind, "id": number, "cat": "collective", "name": "collective", "bp": "e", **place})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": timeline.wall}}


def _place(row: TimelineRow) -> tuple[int, int]:
    """Its process and thread; Perfetto shows both numbers."""
    if row.rank == JOB:
        return _JOB, 1
    process = _JOB + 1 + row.node
    return process, process if row.rank == HOST else 10_000 * process + row.rank


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _counter(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C",
            "pid": _JOB,
            "name": curve.unit if rank == JOB else f"{curve.unit}, rank {rank}",
            "ts": _micro(at),
            "args": {"value": value},
        }
        for rank, points in curve.by_rank.items()
        for at, value in points
    ]


def _micro(ns: int) -> float:
    return ns / 1000
