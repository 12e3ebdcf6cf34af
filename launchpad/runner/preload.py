"""Decides which modules to import before forking, from the command line and the target's imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launchpad.console.console import say_on_stderr
from launchpad.console.summary import not_forked
from launchpad.errors import UsageError
from launchpad.job.spec import Target
from launchpad.runner.imports import NOT_FORKED, TORCH, Found
from launchpad.runner.options import RunOptions


def what_to_preload(
    options: RunOptions, target: Target, look: Callable[[], Found], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The modules to import before the ranks are forked; empty if the ranks are executed instead.

    `look` reads the target's source.
    """
    if options.no_hooks:
        _check_no_hooks(options, target)
        return ()
    requested = options.preload
    if requested is not None and options.start_method in ("exec", "spawn"):
        raise UsageError(
            f"--preload is for forked ranks, but --start-method {options.start_method} executes them; "
            "leave one of them out"
        )
    names = tuple(name.strip() for name in (requested or "").split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {name}: not a module's name; write --preload MODULE,MODULE")
    if names and target.kind == "program":
        raise UsageError(f"--preload: {target.name} is not a Python target, so nothing can be imported for it")
    if requested is not None and not names:
        return ()
    if options.start_method in ("exec", "spawn") or target.kind == "program":
        return ()
    found = look()
    why_not = found.why_not or next((f"{name} is set" for name in NOT_FORKED if environ.get(name)), "")
    if why_not and (found.torch or names):
        if not options.reports.quiet:
            say_on_stderr(not_forked(why_not))
        return ()
    return (*(TORCH if found.torch else ()), *names)


def _check_no_hooks(options: RunOptions, target: Target) -> None:
    """Raise UsageError for options that need our code in the ranks."""
    if target.kind == "function":
        raise UsageError(
            f"--no-hooks: {target.name} needs launchpad's code to call it; give a script, or leave --no-hooks out"
        )
    forks = "--preload" if (options.preload or "").strip(", ") else ""
    if options.start_method in ("fork", "forkserver"):
        forks = f"--start-method {options.start_method}"
    if forks:
        raise UsageError(f"--no-hooks executes each rank, but {forks} forks them; leave one of them out")
