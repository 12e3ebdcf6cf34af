"""Which modules are imported before the ranks are forked: what the command line says, and what the target imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launchpad.errors import UsageError
from launchpad.head.preload import NOT_FORKED, TORCH, Found
from launchpad.job.spec import Target
from launchpad.report.console import say_on_stderr


def what_to_preload(
    options: dict[str, Any], target: Target, look: Callable[[], Found], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The modules to be imported before the ranks are forked; none where they are to be executed.

    `look` reads the target's sources.
    """
    asked = options["preload"]
    if asked is not None and options["start_method"] in ("exec", "spawn"):
        raise UsageError(
            f"--preload says what ranks are forked with, and --start-method {options['start_method']} "
            "executes them: leave one of them out"
        )
    names = tuple(name.strip() for name in (asked or "").split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {name}: not a module's name; write --preload MODULE,MODULE")
    if names and target.kind == "program":
        raise UsageError(f"--preload: {target.name} is not a Python target, so nothing can be imported for it")
    if asked is not None and not names:
        return ()
    if options["start_method"] in ("exec", "spawn") or target.kind == "program":
        return ()
    found = look()
    why_not = found.why_not or next((f"{name} is set" for name in NOT_FORKED if environ.get(name)), "")
    if why_not and (found.torch or names):
        if not options["quiet"]:
            say_on_stderr(f"ranks are executed one by one, and each imports torch itself: {why_not}")
        return ()
    return (*(TORCH if found.torch else ()), *names)
