"""`launchpad resume`: take over a job whose launchpad was killed, and whose ranks go on without it."""

from __future__ import annotations

import os
from contextlib import ExitStack

import click

from launchpad.console.message import say_on_stderr
from launchpad.errors import UsageError
from launchpad.job.duration import duration
from launchpad.record import checkpoint, held_hosts, job_store, replay
from launchpad.record.resume_lock import ResumeLock


@click.command("resume", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
def command(job: str | None) -> int:
    """Take over a job that was started with --keep-running, after its launchpad was killed.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest job without a launchpad.
    Its ranks have gone on; what they have printed since comes first. A job that was started with --detach goes on in
    the background, others here, and the exit code is the job's.
    """
    folder = _find(job)
    found, lock = _take(folder)
    if not found.settings.detached:
        from launchpad.runner.resume import resume

        with ExitStack() as closing:
            return resume(folder, found, lock, closing)
    code = _in_background(folder, found, lock)
    if code == 0:
        name = os.path.basename(folder)
        say_on_stderr(f"job {name} goes on in the background; `launchpad attach {name}` shows it")
    return code


def resume_detached(folder: str) -> int:
    """Take over a detached job in a process of its own; the exit code if that can't be done. Raises UsageError."""
    return _in_background(folder, *_take(folder))


def _in_background(folder: str, found: checkpoint.Checkpoint, lock: ResumeLock) -> int:
    from launchpad.runner.departure import Departed, depart
    from launchpad.runner.resume import resume

    departure = depart()
    if isinstance(departure, Departed):
        return departure.code
    with ExitStack() as closing:
        raise SystemExit(resume(folder, found, lock, closing, departure))


def _find(job: str | None) -> str:
    """The folder of a job that can be resumed. Raises UsageError."""
    if job is not None:
        return replay.find_job(job, os.environ)
    place = job_store.jobs_folder(os.environ)
    for name in job_store.jobs(os.environ):
        found = held_hosts.headless(folder := os.path.join(place, name))
        if found is not None and not found.ended:
            return folder
    raise UsageError("no job is without its launchpad; `launchpad jobs` lists all jobs")


def _take(folder: str) -> tuple[checkpoint.Checkpoint, ResumeLock]:
    """Where to go on, and the right to. Raises UsageError."""
    name = os.path.basename(folder)
    _check(folder)
    try:
        lock = ResumeLock(folder)
    except OSError as error:
        raise UsageError(f"job {name} can't be resumed: {error.filename}: {error.strerror}") from None
    _check(folder)  # somebody may have taken it over meanwhile
    found = checkpoint.read(folder)
    if found.settings is None:
        why = f"its results were for a Python program, which is gone; `launchpad stop {name}` ends its ranks"
        raise UsageError(f"job {name} can't be resumed: {why}")
    return found, lock


def _check(folder: str) -> None:
    """Raises UsageError if the job can't be resumed, or if nobody here can tell."""
    name = os.path.basename(folder)
    if replay.is_running(folder):
        raise UsageError(f"job {name} has a launchpad, which goes on with it; nothing needs to be resumed")
    headless = held_hosts.headless(folder)
    if headless is None:
        from launchpad.record.recorded_verdict import look_at

        over = look_at(folder)[0].over
        if over is not None:
            raise UsageError(f"job {name} has ended, with exit code {over.code}; there is nothing to resume")
        raise UsageError(
            f"job {name} can't be resumed: it was not started with --keep-running, or its ranks were ended by "
            "`launchpad stop`"
        )
    if headless.ended:
        away = duration(headless.until - headless.since)
        raise UsageError(
            f"job {name} can't be resumed: it was without launchpad for more than {away}, so its ranks have ended"
        )
    if not headless.resumable:
        raise UsageError(f"job {name} can't be resumed: {_why_not(folder)}; `launchpad stop {name}` ends its ranks")


def _why_not(folder: str) -> str:
    from launchpad.record.recorded_verdict import look_at

    reason = look_at(folder)[0].not_resumable
    return reason or "launchpad was killed before its ranks were started"
