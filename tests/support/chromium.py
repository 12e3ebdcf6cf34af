"""Drives a headless Chromium over its DevTools pipe: loads a page, evaluates, clicks, types, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support.command import DEADLINE

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")

_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--password-store=basic"),
    "--disable-smooth-scrolling",
)


class Chromium:
    """A browser with one page."""

    def __init__(self, home: Path, *more: str, width: int = 1280, height: int = 900) -> None:
        """`home`: an empty folder for its profile."""
        assert PROGRAM is not None
        root = ["--no-sandbox"] if os.getuid() == 0 else []
        argv = [PROGRAM, *_OPTIONS, *root, f"--user-data-dir={home}", f"--window-size={width},{height}", *more]
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # It reads commands from 3 and writes to 4.
        words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *argv]
        keep = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TZ")}
        self._process = subprocess.Popen(
            words,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=keep | {"HOME": str(home)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(DEADLINE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def call(self, method: str, **params: Any) -> Any:
        """Ask DevTools. Returns the answer."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._out, json.dumps(said).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE
        while True:
            message = self._message(deadline, method)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.events.append(message)

    def _message(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, f"Chromium did not answer {what}"
            if select.select([self._in], [], [], left)[0]:
                data = os.read(self._in, 1 << 20)
                assert data, "Chromium has ended"
                self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + DEADLINE
        while not self.js(expression):
            assert time.monotonic() < deadline, f"waited {DEADLINE:g} s for {expression}"
            time.sleep(0.01)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        self.click_on(f"document.querySelector({json.dumps(selector)})")

    def click_on(self, element: str) -> None:
        """Click on the middle of the element that is the value of an expression."""
        place = self.js(
            f"(() => {{ const one = {element};"
            "one.scrollIntoView({block: 'center'});"
            "const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        """Press a key, as KeyboardEvent.key names it."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "PageDown": 34, "Enter": 13, "ArrowDown": 40}
        number = codes.get(key, ord(key[0]))
        more = {"text": text} if text else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=number, **more)
            more = {}

    def type(self, text: str) -> None:
        """Type where the focus is."""
        self.call("Input.insertText", text=text)

    def problems(self) -> list[str]:
        """What the page complained about: exceptions, and what its policy refused."""
        found = [one["params"] for one in self.events if one["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        return [json.dumps(one) for one in found]

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        sent = [one["params"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot of the page, or with `whole` not of what is on the screen only."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
