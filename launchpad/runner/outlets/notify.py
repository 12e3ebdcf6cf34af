"""`--notify`: runs the user's command when the job is over, with the verdict in variables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

from launchpad import linux
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.verdict_json import as_json
from launchpad.job.outcome import STOPPING
from launchpad.runner.outlets.outlet import Ended, Outlet, Says
from launchpad.transport.local import guard_environ

# How long the command may take.
MOST_SECONDS = 60.0

# How long what it has started may take to end, if it has to.
END_SECONDS = 1.0

# The most of its output that is shown.
_MOST_BYTES = 4096

# The kernel's limit is 128 KiB for each variable.
_MOST_VALUE = 32 << 10


class NotifyOutlet(Outlet):
    """The outlet."""

    name = "--notify"

    def __init__(self, command: str, says: Says) -> None:
        """`command`: for a shell."""
        self._command = command
        self._says = says

    def finish(self, ended: Ended) -> None:
        """Run the command."""
        for line in run_command(self._command, variables(ended.diagnosis, ended.lines, ended.code, ended.folder)):
            self._says.say(line)


def variables(diagnosis: Diagnosis, lines: Sequence[str], code: int, folder: str) -> dict[str, str]:
    """The verdict for the command: `lines` is its text, `code` the job's exit code, `folder` has the record."""
    verdict = as_json(diagnosis.history, diagnosis.verdict(), list(lines), diagnosis.earlier)
    said = {
        "JOB": verdict["job"],
        "EXIT_CODE": code,
        "KIND": verdict["kind"],
        "RANK": verdict["rank"],
        "HOST": verdict["host"],
        "VERDICT": "\n".join(lines),
        "LOGS": folder,
    }
    return {f"LAUNCHPAD_{name}": "" if value is None else str(value) for name, value in said.items()}


def run_command(command: str, more: Mapping[str, str]) -> list[str]:
    """Run the command with these variables. Returns what to show of it: its output, and how it failed."""
    environ = {os.fsencode(name): os.fsencode(value) for name, value in guard_environ().items()}
    for name, value in more.items():
        environ[name.encode()] = value.replace("\0", "").encode(errors="backslashreplace")[:_MOST_VALUE]
    output = os.memfd_create("notify")
    problem = []
    try:
        with _in_a_group(command, environ, output) as process:
            code = process.wait(MOST_SECONDS)
        if code != 0:
            problem.append(f"--notify: the command ended with exit code {code if code > 0 else 128 - code}")
    except OSError as error:
        problem.append(f"--notify: /bin/sh: {error.strerror}")
    except subprocess.TimeoutExpired:
        problem.append(f"--notify: the command was killed: it took more than {MOST_SECONDS:g} s")
    size = os.fstat(output).st_size
    said = os.pread(output, _MOST_BYTES, max(0, size - _MOST_BYTES))
    os.close(output)
    return [*said.decode(errors="replace").splitlines(), *problem]


@contextlib.contextmanager
def _in_a_group(command: str, environ: Mapping[bytes, bytes], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in a process group of its own, which is ended if the block fails, or a signal kills us in it."""
    started: list[int] = []
    early: list[int] = []  # signals that came before the process was known

    def end(signum: int, _: object) -> None:
        if not started:
            early.append(signum)
            return
        linux.end_group(started[0], END_SECONDS)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    here = threading.current_thread() is threading.main_thread()
    deadly = [one for one in STOPPING if here and signal.getsignal(one) == signal.SIG_DFL]
    for signum in deadly:
        signal.signal(signum, end)
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            start_new_session=True,
        )
        started.append(process.pid)
        for came in early:
            end(came, None)
        try:
            yield process
        except BaseException:  # Ctrl-C in launchpad.run, too
            linux.end_group(process.pid, END_SECONDS)
            process.wait()
            raise
    finally:
        for signum in deadly:
            signal.signal(signum, signal.SIG_DFL)
