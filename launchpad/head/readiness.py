"""Looks whether a role is ready: its ports answer, or a command succeeds. In threads of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from launchpad.job.roles import host_port
from launchpad.job.spec import Ready

# Seconds from one look to the next.
EVERY = 0.1

# How long one answer may take.
ANSWER_SECONDS = 5.0


class ReadinessCheck:
    """Looks until it is there, or is told to stop."""

    def __init__(
        self, ready: Ready, ports: Sequence[tuple[str, int]], environ: Mapping[str, str], done: Callable[[], None]
    ) -> None:
        """`ports`: all that must answer, with their addresses; `environ`: for the command.

        `done` is called in another thread.
        """
        self._ready = ready
        self._ports = ports
        self._environ = {**os.environ, **environ}
        self._done = done
        self._stop = threading.Event()
        self.last = "it has not been asked yet"  # why it is not ready, for people
        threading.Thread(target=self._run, name="readiness", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._is_ready():
                if not self._stop.is_set():
                    self._done()
                return
            self._stop.wait(EVERY)

    def _is_ready(self) -> bool:
        if self._ready.check == "command":
            return self._command()
        return all(self._answers(*port) for port in self._ports)

    def _command(self) -> bool:
        try:
            done = subprocess.run(
                ["sh", "-c", self._ready.text],
                env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=ANSWER_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.last = f"its command takes longer than {ANSWER_SECONDS:g} s"
            return False
        except OSError as error:
            self.last = f"its command can't be run: {error.strerror}"
            return False
        self.last = f"its command ends with {done.returncode}"
        return done.returncode == 0

    def _answers(self, address: str, port: int) -> bool:
        try:
            if self._ready.check == "tcp":
                socket.create_connection((address, port), timeout=ANSWER_SECONDS).close()
                return True
            return self._gets(address, port)
        except OSError as error:
            self.last = f"port {port}: {error.strerror or error}"
            return False

    def _gets(self, address: str, port: int) -> bool:
        """Whether an HTTP GET succeeds. Without http.client, as an error in it is no OSError."""
        with socket.create_connection((address, port), timeout=ANSWER_SECONDS) as asked:
            asked.settimeout(ANSWER_SECONDS)
            path = self._ready.text or "/"
            asked.sendall(f"GET {path} HTTP/1.0\r\nHost: {host_port(address, port)}\r\n\r\n".encode())
            answer = b""
            while b"\n" not in answer and (more := asked.recv(4096)):
                answer += more
        status = answer.split(b"\n")[0].split()[1:2]
        self.last = f"port {port}: {path} answers {status[0].decode(errors='replace') if status else 'nothing'}"
        return bool(status) and status[0][:1] in (b"2", b"3")
