"""Commands in a mount namespace of their own."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.command import DEADLINE, Launchpad


def run_with_mounts(launchpad: Launchpad, mounts: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run with these mounts, in a mount namespace of its own; skip where that can't be had."""
    argv = [*with_mounts(launchpad, mounts), *launchpad.argv(*args)]
    options = {"capture_output": True, "text": True, "cwd": launchpad.folder, "timeout": DEADLINE}
    return subprocess.run(argv, env=launchpad.environ, stdin=subprocess.DEVNULL, **options)


def with_mounts(launchpad: Launchpad, mounts: str) -> list[str]:
    """What a command line is to begin with; skips where it can't."""
    argv = ["unshare", "-m", "sh", "-ec", mounts + '\nexec "$@"', "sh"]
    options = {"capture_output": True, "text": True, "cwd": launchpad.folder, "timeout": DEADLINE}
    try:
        trial = subprocess.run([*argv, "true"], env=launchpad.environ, **options)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if trial.returncode != 0:
        pytest.skip(f"needs to mount in a namespace of its own (root): {trial.stderr.strip()}")
    return argv
