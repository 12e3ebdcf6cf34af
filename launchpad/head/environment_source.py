"""`--sync-env`: has a process of its own look through the ranks' environment, while the hosts are being reached.

Every file's size and time is looked at each time, which takes a moment for tens of thousands of files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from launchpad.errors import UsageError
from launchpad.head.environment import Environment, EnvironmentFile, ask_interpreter, describe, digests

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Neither its start nor that of the interpreter that it asks is to depend on what PYTHON* says for the ranks.
_RUN = f"import sys; sys.path.insert(0, {_ROOT!r}); from launchpad.head.environment_source import main; main()"


class Contents(NamedTuple):
    """The files of an environment."""

    files: list[EnvironmentFile]
    digests: list[str]  # of each


class EnvironmentSource:
    """This machine's environment. What it says may take long; from any thread."""

    def __init__(self, python: str, cwd: str) -> None:
        """`python`: the ranks' interpreter, which is asked in the folder `cwd`."""
        self._words = [python, cwd]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: Environment | None = None
        self._contents: Contents | None = None
        self._start()

    def environment(self) -> Environment:
        """The environment as it is at the start. Raises UsageError."""
        with self._lock:
            if self._environment is None:
                self._environment = self._describe()
            return self._environment

    def contents(self) -> Contents:
        """Its files. Raises UsageError if they can't be read, or if it is no longer the environment that it was."""
        environment = self.environment()
        with self._lock:
            if self._contents is None:
                if self._process is None and self._describe() != environment:
                    self._end()
                    raise UsageError(
                        f"--sync-env: {environment.prefix} has changed since the job began, and further hosts would "
                        "get another one; start the job again"
                    )
                self._contents = self._list()
                self._end()
            return self._contents

    def rest(self) -> None:
        """Leave no process. What is asked for later takes a new one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUN, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        return self._process

    def _describe(self) -> Environment:
        """What the process says unasked."""
        return Environment(*self._hear(self._process or self._start()))

    def _list(self) -> Contents:
        """What it says then, if it is asked."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        files, hashes = self._hear(self._process)
        return Contents([EnvironmentFile(*file) for file in files], hashes)

    def _hear(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        try:
            said = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            said = "--sync-env: the process that looks through the environment has ended; run the command again"
        if isinstance(said, str):
            self._end()
            raise UsageError(said)
        return said

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes, and waits
                pass


def main() -> None:
    """Say what the environment consists of; if a line comes, say what its files are."""
    try:
        python, cwd = sys.argv[1:]
        environment, listing = describe(ask_interpreter(python, cwd, os.environ))
        _say(tuple(environment))
        if sys.stdin.buffer.readline():
            files = listing.all()
            _say(([tuple(file) for file in files], digests(files, environment.installed)))
    except UsageError as error:
        _say(str(error))
    except OSError as error:
        _say(f"--sync-env: {error.filename} can't be read: {error.strerror}; repair the environment")


def _say(what: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        pickle.dump(what, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
