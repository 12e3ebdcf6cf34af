"""Converts events to JSON lines, {"event": "RankExited", "time": …, "rank": …}, and back. Pure."""

from __future__ import annotations

import json
from typing import Any

from launchpad.protocol import wire
from launchpad.protocol.events import Output

RECORDED: dict[str, Any] = {entry.kind.__name__: entry.kind for entry in wire.TABLE if entry.recorded}


def line_of(event: Any) -> str | None:
    """The event as a line without its newline; None for Output, and for events that are not recorded."""
    name = type(event).__name__
    if name not in RECORDED:
        return None
    return json.dumps({"event": name, **event._asdict()})


def text_line(output: Output) -> str:
    """Output with its bytes as text; U+FFFD replaces what is not UTF-8."""
    text = output.data.decode(errors="replace")
    said = {"event": "Output", "time": output.time, "rank": output.rank, "stream": output.stream, "text": text}
    return json.dumps(said)


def event_of(line: str | bytes) -> Any:
    """The event in a line, or a dict that locates some Output; None for a line that was cut off, or isn't ours."""
    try:
        said = json.loads(line)
        name = said.pop("event")
        if name == "Output":
            return said
        kind = RECORDED[name]
        return kind(**{field: said[field] for field in kind._fields if field in said})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
