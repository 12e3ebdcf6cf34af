"""Odd surroundings that were once mistaken for something else: each has been a defect."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until


def test_stray_whose_name_is_cut_inside_a_character(launchpad: Launchpad) -> None:
    """The kernel keeps 15 bytes of a process's name."""
    stray = launchpad.folder / "x训练训练训练"
    stray.symlink_to("/bin/sleep")
    done = launchpad.run("run", "bash", "-c", f"{shlex.quote(str(stray))} 100 & exit 0")
    assert done.returncode == 0, done.stderr
    assert "launchpad: killed 1 process that ranks left behind" in done.stderr


def test_who_fails_while_others_are_being_started_is_blamed(launchpad: Launchpad) -> None:
    """Rank 20 is gone before rank 0 fails, whom the kernel would list first."""
    first = "echo $$ > pid; mv pid failed; exit 7"
    second = "until [ -e failed ]; do :; done; while [ -e /proc/$(cat failed) ]; do :; done; exit 3"
    script = f"case $RANK in 20) {first};; 0) {second};; esac; sleep 600"
    done = launchpad.run("run", "-n", 100, "-q", "--grace", 1, "sh", "-c", script)
    assert "launchpad: rank 20 failed first: exit code 7" in done.stderr
    assert done.returncode == 7


@pytest.mark.parametrize("how", ["--block-signal=CHLD", "--ignore-signal=CHLD"])
def test_child_signal_that_was_blocked_or_ignored_by_our_parent(launchpad: Launchpad, how: str) -> None:
    argv = ["env", how, *launchpad.argv("run", "-n", 2, "exits.py", 0, 0)]
    done = subprocess.run(
        argv, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_job_that_goes_well_with_descriptors_closed(launchpad: Launchpad) -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        words = shlex.join(launchpad.argv("run", "-n", "2", "exits.py", "0", "0"))
        command = ["sh", "-c", f"{words} {closed}"]
        done = subprocess.run(command, env=launchpad.environ, cwd=launchpad.folder, check=False, timeout=DEADLINE)
        assert done.returncode == 0, closed


def test_reader_of_both_streams_that_leaves_ends_a_job_that_writes_to_stderr_alone(launchpad: Launchpad) -> None:
    script = "while :; do echo words >&2; sleep 0.01; done"
    process = launchpad.start("run", "sh", "-c", script, stderr=subprocess.STDOUT)
    assert process.stdout.readline() == b"[0] words\n"
    process.stdout.close()
    assert process.wait(timeout=DEADLINE) == 128 + signal.SIGPIPE


def test_report_is_said_although_output_is_left_that_nobody_takes(launchpad: Launchpad) -> None:
    script = "[ $RANK = 1 ] && { sleep 0.3; echo dead >&2; exit 7; }; exec yes"
    process = launchpad.start("run", "-n", 2, "sh", "-c", script)
    assert process.stderr.readline() == b"[1] dead\n"
    wait_until(
        lambda: any(path.read_text().count('"RankExited"') == 2 for path in launchpad.state.rglob("events.jsonl")),
        "the ranks to be gone",
    )
    while process.poll() is None:  # Ctrl-C ends the wait for the reader
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 7
    assert b"launchpad: rank 1 failed first: exit code 7" in process.stderr.read()


def test_term_while_output_is_left_is_no_success(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "sh", "-c", "head -c 1800000 /dev/zero | tr '\\0' '\\n'; echo gone >&2")
    assert process.stderr.readline() == b"[0] gone\n"
    while process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 143


def test_error_file_that_is_no_file(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "sh", "-c", "[ $RANK = 0 ] && mkfifo $TORCHELASTIC_ERROR_FILE; exit 3")
    assert done.returncode == 3
    done = launchpad.run(
        "run", "sh", "-c", "mkdir -p $TORCHELASTIC_ERROR_FILE/more && touch $TORCHELASTIC_ERROR_FILE/x"
    )
    assert done.returncode == 0  # and the folder is gone, as the fixture sees


def test_error_file_that_is_nested_without_end(launchpad: Launchpad) -> None:
    (launchpad.folder / "deep").write_text("[" * 100_000)
    done = launchpad.run("run", "sh", "-c", "cp deep $TORCHELASTIC_ERROR_FILE; echo why >&2; exit 3")
    assert done.returncode == 3
    assert "launchpad:     why" in done.stderr


def test_command_behind_a_double_dash(launchpad: Launchpad) -> None:
    argv = [sys.executable, "-m", "launchpad", "--", "run", "echo", "words"]
    done = subprocess.run(
        argv, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[0] words\n", b"")


def test_variable_without_a_name(launchpad: Launchpad) -> None:
    argv = ["env", "=foo", *launchpad.argv("run", "echo", "words")]
    done = subprocess.run(
        argv, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[0] words\n", b"")


def test_dry_run_of_an_argument_that_is_no_text(launchpad: Launchpad) -> None:
    launchpad.environ["PYTHONIOENCODING"] = "utf-8:strict"
    process = launchpad.start("run", "--dry-run", "echo", os.fsdecode(b"\xff"))
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, b"")
    assert b"\xff" in out


def test_dry_run_onto_a_full_disk_is_no_success(launchpad: Launchpad) -> None:
    with open("/dev/full", "wb") as full:
        process = launchpad.start("run", "--dry-run", "true", stdout=full)
        _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (1, b"launchpad: error: <stdout>: No space left on device\n")


def test_pool_of_spawned_processes_is_no_stray(launchpad: Launchpad) -> None:
    script = launchpad.folder / "pool.py"
    script.write_text(
        "import multiprocessing as mp, os\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(2) as pool: print(sum(pool.map(abs, [-1, 2])))\n"
    )
    done = launchpad.run("run", "-n", 2, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 3", "[1] 3"]


def test_nested_launchpad(launchpad: Launchpad) -> None:
    inner = shlex.join(launchpad.argv("run", "-n", "2", "sh", "-c", "echo $LOCAL_WORLD_SIZE"))
    done = launchpad.run("run", "sh", "-c", inner, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] [0] 2", "[0] [1] 2"]
    assert not list(Path(launchpad.scratch).iterdir())
