"""`--sync-env`: has a process of its own look through the ranks' environment, while the hosts are being reached.

Every file's size and time is looked at each time, which takes a moment for tens of thousands of files.
"""

from __future__ import annotations

import contextlib
import marshal  # the quickest there is, and both processes are of one Python
import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from launchpad.errors import UsageError
from launchpad.head.environment import Environment, ask_interpreter, describe
from launchpad.head.environment_files import EnvironmentFile, Listing
from launchpad.head.folder_listing import SyncedFile
from launchpad.head.outside_files import Outside, look_outside

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Neither its start nor that of the interpreter that it asks is to depend on what PYTHON* says for the ranks.
_RUN = f"import sys; sys.path.insert(0, {_ROOT!r}); from launchpad.head.environment_source import main; main()"


class Contents(NamedTuple):
    """The files of an environment."""

    files: list[EnvironmentFile]
    digests: list[str]  # of each
    libraries: list[str]  # as in commands.MakeEnvironment


class EnvironmentSource:
    """This machine's environment. What it says may take long; from any thread."""

    def __init__(self, python: str, cwd: str) -> None:
        """`python`: the ranks' interpreter, which is asked in the folder `cwd`."""
        self._words = [python, cwd]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._first: Environment | None = None
        self._latest: Environment | None = None
        self._outside: list[Outside] | None = None
        self._contents: Contents | None = None
        self._start()

    def environment(self) -> Environment:
        """The environment as it is at the start. Raises UsageError."""
        with self._lock:
            if self._first is None:
                self._first = self._describe()
            return self._first

    def outside(self) -> list[Outside]:
        """The folders elsewhere that it imports from, as they are now. Raises UsageError."""
        with self._lock:
            self._describe()
            assert self._outside is not None
            return self._outside

    def contents(self) -> Contents:
        """Its files. Raises UsageError if they can't be read, or if it is no longer the environment that it was."""
        environment = self.environment()
        with self._lock:
            if self._describe() != environment:
                self._end()
                raise UsageError(
                    f"--sync-env: {environment.prefix} has changed since the job began, and further hosts would "
                    "get another one; start the job again"
                )
            if self._contents is None:
                self._contents = self._list()
                self._end()
            return self._contents

    def rest(self) -> None:
        """Leave no process, and forget what it said. What is asked for later takes a new one."""
        with self._lock:
            self._end()
            self._latest = self._outside = self._contents = None

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
        if self._latest is None:
            environment, outside = self._hear(self._process or self._start())
            self._latest = Environment(*environment)
            self._outside = [
                Outside(folder, [SyncedFile(*file) for file in files], libraries)
                for folder, files, libraries in outside
            ]
        return self._latest

    def _list(self) -> Contents:
        """What it says then, if it is asked."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        files, hashes, libraries = self._hear(self._process)
        return Contents([EnvironmentFile(*file) for file in files], hashes, libraries)

    def _hear(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        try:
            said = marshal.load(process.stdout)
        except (EOFError, ValueError, TypeError):
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
        outside = [look_outside(folder, listing.places) for folder in environment.outside]
        _say(
            (
                tuple(environment),
                [(folder, [*map(tuple, files)], libraries) for folder, files, libraries in outside],
            )
        )
        if sys.stdin.buffer.readline():
            _say(_contents(environment, listing))
    except UsageError as error:
        _say(str(error))
    except OSError as error:
        _say(f"--sync-env: {error.filename} can't be read: {error.strerror}; repair the environment")


def _contents(environment: Environment, listing: Listing) -> Any:
    from launchpad.head.environment_records import digests  # only if they are asked for
    from launchpad.head.run_paths import Linked, library_folders

    files = listing.all()
    linked = [Linked(file.source, file.permissions) for file in files if not file.link]
    libraries = library_folders(linked, listing.places)
    return [*map(tuple, files)], digests(files, environment.installed), libraries


def _say(what: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        sys.stdout.buffer.write(marshal.dumps(what))
        sys.stdout.buffer.flush()
