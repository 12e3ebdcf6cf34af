"""A sink for those who look into a rank: says where its debugger can be reached, and hands over profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launchpad.protocol.events import DebuggerListening, ProfilesTaken

# What an answer begins with that says why there is none.
REFUSED = "error: "


class DebuggerSink:
    """The sink."""

    def __init__(self, say: Callable[[str], None], answer: Callable[[int, str], None]) -> None:
        """`say` shows text; `answer` responds to a request."""
        self._say = say
        self._answer = answer

    def on(self, event: Any) -> bool:
        """Handle a debugger that listens, or doesn't, and profiles that were asked for."""
        if type(event) is DebuggerListening:
            if event.asker:
                self._answer(event.asker, f"{REFUSED}{event.problem}" if event.problem else where(event))
            else:
                self._say(event.problem or where(event))
        if type(event) is ProfilesTaken:
            import json

            profiles = [[one.rank, one.pid, one.problem, one.profile] for one in event.profiles]
            self._answer(event.asker, f"{REFUSED}{event.problem}" if event.problem else json.dumps(profiles))
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is held open."""


def where(event: DebuggerListening) -> str:
    """Where the debugger is, and how to attach to it."""
    import json

    configuration: dict[str, Any] = {
        "name": f"rank {event.rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": event.port},
    }
    if event.folder:  # on another machine
        configuration["pathMappings"] = [{"localRoot": "${workspaceFolder}", "remoteRoot": event.folder}]
    state = "waits for a debugger" if event.waits else "can be debugged"
    head = f"rank {event.rank} {state} at 127.0.0.1:{event.port}; for VS Code, in launch.json:"
    return "\n".join([head, *(f"  {line}" for line in json.dumps(configuration, indent=2).splitlines())])
