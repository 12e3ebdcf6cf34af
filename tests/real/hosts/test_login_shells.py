"""What login shells make of the command that starts a node's agent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.transport.ssh.bundle import CUT, Startup

DEADLINE = 30.0


@pytest.mark.parametrize("shell", ["bash", "sh", "tcsh", "fish", "zsh"])
@pytest.mark.parametrize("name", ["py", "py!3", "a'b\"c d$e`f", "50%\\!\\\\n", "two\nlines!", "grün!"])
def test_a_login_shell_starts_the_python_that_is_named(tmp_path: Path, shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    python = tmp_path / name
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$0"\nexec "$PYTHON" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [shell, "-c", Startup(str(python), exact=True).command],
        stdin=subprocess.DEVNULL,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (CUT, f"{python}\n", "")


def test_words_of_enter_pass_through_csh(tmp_path: Path) -> None:
    if shutil.which("tcsh") is None:
        pytest.skip("tcsh is not installed")
    enter = tmp_path / "enter!"
    enter.write_text('#!/bin/sh\necho "$1"; shift; exec "$@"\n')
    enter.chmod(0o755)
    command = Startup(sys.executable, exact=True, enter=(str(enter), "it!is")).command
    done = subprocess.run(
        ["tcsh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (CUT, "it!is")
