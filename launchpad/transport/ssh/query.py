"""Run `ssh -G`: the settings that ssh would use for a host, or a sentence on what is wrong in its configuration."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence

from launchpad.errors import UsageError

# ssh takes 0.02 s, unless a `Match exec` or CanonicalizeHostname delays it.
ANSWER_SECONDS = 30.0

# Lines on ssh's stderr other than the error itself.
_NOT_THE_ERROR = re.compile(r"terminating, \d+ bad|Unsupported option")


class Query:
    """One run of `ssh -G`. Threads may share it: each gets the same answer."""

    def __init__(self, host: str, options: Sequence[str]) -> None:
        """Start ssh, in its own session, so that the children of a `Match exec` can be killed too. Raises OSError."""
        self._host = host
        self._command = shlex.join(["ssh", "-G", *options, host])
        self._lock = threading.Lock()
        self._answer: str | UsageError | None = None
        # Not a pipe: processes that a `Match exec` leaves behind would hold it open.
        self._stderr = os.memfd_create("ssh")
        try:
            self._process = subprocess.Popen(
                ["ssh", "-G", "-T", *options, "--", host],  # without -T it warns that there is no terminal
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._stderr)
            raise

    def answer(self) -> str:
        """The settings, one per line. Raises UsageError."""
        with self._lock:
            if self._answer is None:
                self._answer = self._wait()
        if isinstance(self._answer, UsageError):
            raise self._answer
        return self._answer

    def give_up(self) -> None:
        """Kill ssh if it is still running."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has just reaped it
                os.killpg(self._process.pid, signal.SIGKILL)
        with self._lock:
            if self._answer is None:
                self._answer = self._wait()

    def _wait(self) -> str | UsageError:
        try:
            output, _ = self._process.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            return UsageError(f"{self._command} takes more than {ANSWER_SECONDS:g} s; fix a Match exec that hangs")
        finally:
            errors = os.fsdecode(os.pread(self._stderr, os.fstat(self._stderr).st_size, 0))
            os.close(self._stderr)
        code = self._process.returncode
        if code == 0:
            return os.fsdecode(output)
        text = _first_error(errors) or f"ssh -G exited with code {code}"
        return UsageError(f"ssh's configuration of {self._host}: {text}; correct it and try {self._command}")


def _first_error(text: str) -> str:
    """The first error: the line that names file and line number, then what ssh said before it."""
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip() and not _NOT_THE_ERROR.search(line)]
    named = next((count for count, line in enumerate(lines, 1) if re.search(r" line \d+: ", line)), len(lines))
    return ": ".join(reversed(lines[:named]))
