"""A small client of the Debug Adapter Protocol, as an editor would speak it to debugpy."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.command import DEADLINE


class DebugClient:
    """A client that is attached to the debugger at this port."""

    def __init__(self, port: int, **arguments: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self._stream = self._socket.makefile("rb")
        self._last = 0
        self._events: list[dict[str, Any]] = []
        self.ask("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        self.ask("attach", justMyCode=True, **arguments)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Make a request; the body of the response."""
        self._last += 1
        message = {"seq": self._last, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        while True:
            found = self._next()
            if found["type"] == "response" and found["request_seq"] == self._last:
                assert found["success"], found
                body: dict[str, Any] = found.get("body") or {}
                return body
            self._events.append(found)

    def expect(self, event: str) -> dict[str, Any]:
        """Wait for an event; its body."""
        while True:
            found = self._events.pop(0) if self._events else self._next()
            if found.get("event") == event:
                body: dict[str, Any] = found.get("body") or {}
                return body

    def _next(self) -> dict[str, Any]:
        size = 0
        while line := self._stream.readline().strip():
            size = int(line.partition(b":")[2])
        assert size, "the debugger has hung up"
        message: dict[str, Any] = json.loads(self._stream.read(size))
        return message

    def stop_at(self, path: Path, *lines: int) -> None:
        """Set the breakpoints of a file."""
        places = [{"line": line} for line in lines]
        found = self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=places)
        assert all(one["verified"] for one in found["breakpoints"]), found

    def begin(self) -> None:
        """Let a program go on that waits for its debugger."""
        self.ask("configurationDone")

    def top(self) -> tuple[int, dict[str, Any]]:
        """Wait until a breakpoint is hit: the thread, and its innermost frame."""
        thread = self.expect("stopped")["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["stackFrames"][0]

    def variables(self, frame: dict[str, Any]) -> dict[str, str]:
        """A frame's local variables, and their values as text."""
        scope = self.ask("scopes", frameId=frame["id"])["scopes"][0]
        found = self.ask("variables", variablesReference=scope["variablesReference"])["variables"]
        return {one["name"]: one["value"] for one in found}

    def close(self) -> None:
        """Detach."""
        self._stream.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
