"""--max-restarts: all ranks start again after a failure, with fresh state, and the history is told."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, Launchpad
from tests.sshd import free_port

# Rank 1 fails in each attempt up to the one that is given.
FLAKY = """
import os, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], "port", os.environ["MASTER_PORT"], flush=True)
open(f"up.{attempt}.{rank}", "w").close()
while rank == "1" and not all(os.path.exists(f"up.{attempt}.{r}") for r in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.005)
if rank == "1" and attempt < int(sys.argv[1]):
    sys.exit(3 + attempt)
if rank != "1" and attempt < int(sys.argv[1]):
    time.sleep(600)
"""


@pytest.fixture
def flaky(launchpad: Launchpad) -> Path:
    path = launchpad.folder / "flaky.py"
    path.write_text(FLAKY)
    return path


def test_the_whole_group_is_restarted_until_it_is_well(launchpad: Launchpad, flaky: Path) -> None:
    done = launchpad.run("run", "-n", 3, "--max-restarts", 5, "--log-dir", "logs", flaky, 2)
    assert done.returncode == 0
    seen = [re.sub(r" port \d+", "", line) for line in done.stdout.splitlines()]
    assert sorted(seen) == sorted(f"[{rank}] attempt {attempt} of 5" for attempt in range(3) for rank in range(3))
    notes = [re.sub(r"\d+\.\d+ s", "T", line) for line in done.stderr.splitlines()]
    assert notes == [
        "launchpad: failed: rank 1, exit code 3 after T; restarting all ranks (restart 1 of 5)",
        "launchpad: failed: rank 1, exit code 4 after T; restarting all ranks (restart 2 of 5)",
    ]
    files = sorted(str(path.relative_to(launchpad.folder)) for path in launchpad.folder.rglob("stdout.log"))
    assert [re.sub("logs/[^/]*/", "", name) for name in files] == [
        f"attempt_{attempt}/{rank}/stdout.log" for attempt in range(3) for rank in range(3)
    ]
    for name in files:
        assert (launchpad.folder / name).read_text().startswith(f"attempt {name.partition('attempt_')[2][0]} of 5")


def test_the_port_that_was_asked_for_is_kept(launchpad: Launchpad, flaky: Path) -> None:
    port = free_port()
    done = launchpad.run("run", "-n", 2, "--max-restarts", 1, "--master-port", port, flaky, 1)
    assert done.returncode == 0
    assert {line.rpartition(" ")[2] for line in done.stdout.splitlines()} == {str(port)}


def test_when_restarts_are_used_up_the_last_failure_counts(launchpad: Launchpad, flaky: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--max-restarts", 2, flaky, 9)
    assert done.returncode == 5
    report = done.stderr[done.stderr.index("launchpad: rank 1 failed first: exit code 5") :]
    assert re.search(
        r"launchpad: earlier attempts: rank 1, exit code 3 after .* s; rank 1, exit code 4 after .* s\n", report
    )


def test_what_an_attempt_left_behind_is_gone_before_the_next(launchpad: Launchpad) -> None:
    """A daemon of the first attempt that holds its output, and a port."""
    script = launchpad.folder / "daemon.py"
    script.write_text(
        "import os, socket, subprocess, sys, time\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "listener.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "listener.listen()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    subprocess.Popen(['sleep', '600'], pass_fds=[listener.fileno()], start_new_session=True)\n"
        "    sys.exit(1)\n"
        "print('well')\n"
    )
    done = launchpad.run("run", "--max-restarts", 1, script)
    assert (done.returncode, done.stdout) == (0, "[0] well\n")
    assert "launchpad: killed 1 process that ranks left behind" in done.stderr


def test_output_of_all_attempts_comes_whole(launchpad: Launchpad) -> None:
    script = launchpad.folder / "much.py"
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "for i in range(20000): print(attempt, i)\n"
        "sys.exit(attempt != '2')\n"
    )
    done = launchpad.run("run", "--max-restarts", 2, script)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"[0] {attempt} {i}" for attempt in range(3) for i in range(20000)]


def test_ctrl_c_ends_a_job_that_would_restart(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--max-restarts", 9, "obeys.py")
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130


def test_file_store_left_by_an_earlier_job_is_named(launchpad: Launchpad) -> None:
    """Seen in the script, in an argument, in a variable; a new or an empty file is no sign of an earlier job."""
    store = launchpad.folder / "store"
    script = launchpad.folder / "meets.py"
    script.write_text(f"METHOD = 'file://{store}'")
    assert launchpad.run("run", script).stderr == ""
    store.touch()
    assert launchpad.run("run", script).stderr == ""
    store.write_bytes(b"init/0")
    plain = launchpad.folder / "plain.py"
    plain.touch()
    method = f"file://{store}?x=1"
    for words in ([script], [plain, "--init", method], ["-x", f"INIT={method}", plain]):
        done = launchpad.run("run", *words)
        assert done.returncode == 0
        assert done.stderr.startswith(
            f"launchpad: {store} (a file:// store) is left over from an earlier job (last wri"
        )


def test_file_store_left_by_the_attempt_before_is_named(launchpad: Launchpad) -> None:
    script = launchpad.folder / "meets.py"
    store = launchpad.folder / "store"
    script.write_text(
        f"import os, sys; open('{store}', 'a').write('x'); 'file://{store}'\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    done = launchpad.run("run", "--max-restarts", 1, script)
    assert done.returncode == 0
    assert done.stderr.count("is left over from an earlier job") == 1


def test_the_port_is_reserved_on_all_addresses(launchpad: Launchpad) -> None:
    """Torch listens on all of them in rank 0, so no other process may be given the port at another one."""
    (launchpad.folder / "binds.py").write_text(
        "import errno, os, socket\n"
        "try:\n    socket.socket().bind(('127.0.0.9', int(os.environ['MASTER_PORT'])))\n"
        "except OSError as error:\n    print(errno.errorcode[error.errno])\n"
    )
    done = launchpad.run("run", "binds.py")
    assert (done.returncode, done.stdout) == (0, "[0] EADDRINUSE\n")
    with socket.socket() as other:
        other.bind(("127.0.0.9", 0))
        port = other.getsockname()[1]
        done = launchpad.run("run", "--master-port", port, "true")  # which torch in rank 0 might miss
        assert (done.returncode, done.stderr) == (0, "")
