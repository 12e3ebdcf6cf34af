"""Events as JSON objects, a line each: {"event": "RankExited", "time": …, "rank": …}; and back. Pure."""

from __future__ import annotations

import json
from typing import Any

from launchpad import events, failures, stacks
from launchpad.events import Output

# In the order of their vocabularies; what only concerns the head's own working is no part of a record.
RECORDED: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(events.RankStarted, events.StartFailed, events.NotForked, events.RankRaised, events.RankExited),
        *(events.RankFailed, events.NoMpi, events.StraysEnded, events.NodeLost, events.NodeBack),
        *(events.StopRequested, events.ConsoleClosed, events.PeerFailed, events.LogFailed, events.Restarted),
        *(events.RanksSpawned, events.PhaseChanged),
        *(failures.ExceptionRaised, failures.Crashed, failures.JobPlanned, failures.ClockSeen, failures.RanksHeld),
        *(failures.JobOver, stacks.Stalled),
    )
}


def line_of(event: Any) -> str | None:
    """The event as a line, without its end; None for one that is no part of a record, and for Output."""
    name = type(event).__name__
    if name not in RECORDED:
        return None
    return json.dumps({"event": name, **event._asdict()})


def text_line(output: Output) -> str:
    """Output with its bytes as text; what is not UTF-8 stands there as U+FFFD."""
    text = output.data.decode(errors="replace")
    said = {"event": "Output", "time": output.time, "rank": output.rank, "stream": output.stream, "text": text}
    return json.dumps(said)


def event_of(line: str | bytes) -> Any:
    """The event in a line, a dict for the place of some Output; None for a line that was cut off, or isn't ours."""
    try:
        said = json.loads(line)
        name = said.pop("event")
        if name == "Output":
            return said
        kind = RECORDED[name]
        return kind(**{field: said[field] for field in kind._fields})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
