"""The ranks' output: whole lines with their rank, nothing lost, a slow reader, redirects and files."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from launchpad.job.plan import make_plan
from launchpad.job.spec import JobSpec, StreamMap, Target
from launchpad.output.writer import MOST_OPEN
from launchpad.protocol.events import AgentReady, Output, Restarted
from launchpad.record.log_dir import Files, Filter
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.readers import memory_of, wait_until_blocked


def expected_flood(ranks: int, count: int) -> Counter[str]:
    """What flood.py prints, with prefixes."""
    return Counter(f"[{r}] rank {r} line {i:07d} {'x' * (i % 50)}" for r in range(ranks) for i in range(count))


def test_no_line_is_cut_lost_or_duplicated(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 4, "flood.py", 30_000, "both")
    assert done.returncode == 0
    want = expected_flood(4, 30_000)
    for text in (done.stdout, done.stderr):
        assert text.endswith("\n")
        assert Counter(text.splitlines()) == want
        for rank in range(4):
            lines = [line for line in text.splitlines() if line.startswith(f"[{rank}]")]
            assert lines == sorted(lines)


def test_lines_stay_whole_where_stdout_and_stderr_are_one_pipe(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 3, "flood.py", 10_000, "both", stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=60)
    want = expected_flood(3, 10_000)
    assert Counter(out.decode().splitlines()) == want + want


def test_prefixes_are_aligned_from_ten_ranks_on(launchpad: Launchpad) -> None:
    lines = launchpad.run("run", "-n", 11, "echo", "x").stdout.splitlines()
    assert sorted(lines) == [f"[{rank:2d}] x" for rank in range(11)]


def test_bytes_that_are_not_text_pass_through(launchpad: Launchpad) -> None:
    data = bytes(byte for byte in range(256) if byte not in b"\n")
    program = f"import os; os.write(1, {data!r} + b'\\n'); os.write(2, b'\\xff\\xfe no end')"
    process = launchpad.start("run", "--no-python", sys.executable, "-c", program)
    out, err = process.communicate(timeout=60)
    assert out == b"[0] " + data + b"\n"
    assert err == b"[0] \xff\xfe no end\n"


def test_long_lines_of_several_ranks_stay_whole(launchpad: Launchpad) -> None:
    program = "import os, sys; sys.stdout.write(os.environ['RANK'] * 3_000_000 + chr(10))"
    done = launchpad.run("run", "-n", 3, "--no-python", sys.executable, "-c", program)
    assert Counter(done.stdout.splitlines()) == Counter(f"[{rank}] " + str(rank) * 3_000_000 for rank in range(3))


def test_prompt_shows_before_its_newline(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "prompt.py", stdin=subprocess.PIPE)
    assert process.stdout.read(10) == b"[0] name? "
    assert process.communicate(b"Ada\n", timeout=60)[0] == b"hello Ada\n"


def test_unfinished_line_is_closed_when_another_rank_writes(launchpad: Launchpad) -> None:
    script = launchpad.folder / "turns.py"
    script.write_text(
        "import os, time, pathlib\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('half', end='', flush=True)\n"
        "    while not os.path.exists('go on'): time.sleep(0.005)\n"
        "    print(' and rest', flush=True)\n"
        "else:\n"
        "    while not os.path.exists('say'): time.sleep(0.005)\n"
        "    print('other', flush=True)\n"
    )
    process = launchpad.start("run", "-n", 2, script)
    assert process.stdout.read(8) == b"[0] half"
    (launchpad.folder / "say").touch()
    assert process.stdout.read(11) == b"\n[1] other\n"
    (launchpad.folder / "go on").touch()
    assert process.communicate(timeout=60)[0] == b"[0]  and rest\n"


def test_progress_bar_stays_readable_in_a_file(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "bar.py")
    states = done.stderr.rstrip("\n").replace("\n", "\r").split("\r")
    assert all(state.startswith("[0] ") for state in states)
    assert states[-1] == "[0] 100%|##########|"


def test_paused_reader_slows_the_ranks_and_nothing_else(launchpad: Launchpad) -> None:
    """With nobody reading, the ranks block, memory stays bounded, stderr and the end of a rank still get through."""
    script = launchpad.folder / "writes.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    while True: os.write(1, b'x' * 99 + b'\\n')\n"
        "sys.stderr.write('still heard\\n')\n"
    )
    process = launchpad.start("run", "-n", 2, script)
    assert process.stderr.readline() == b"[1] still heard\n"
    wait_until_blocked(process, str(script))
    assert memory_of(process) < 100 << 20
    state = Path(launchpad.environ["XDG_STATE_HOME"])
    wait_until(
        lambda: any(b'"RankExited"' in path.read_bytes() for path in state.rglob("events.jsonl")), "rank 1's end"
    )
    process.send_signal(signal.SIGINT)  # ends the job, though its output can't be written
    note = b"launchpad: sent SIGINT to rank 0; they have 30 s to exit; Ctrl-C kills them at once\n"
    assert process.stderr.readline() == note
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_reader_that_leaves_ends_the_job(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 4, "yes", "some words")
    assert process.stdout.read(4).startswith(b"[")
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert b"standard output can't be written to (Broken pipe)" in process.stderr.read()


def logs(folder: Path) -> dict[str, str]:
    """The files of attempts below a log folder, without the part of the path that differs from run to run."""
    (run,) = folder.iterdir()
    assert re.fullmatch(r"[0-9a-f]{8}_[0-9a-f]{8}", run.name)
    assert run.stat().st_mode & 0o077 == 0
    return {str(path.relative_to(run)): path.read_text() for path in sorted(run.rglob("*_*/**/*.*")) if path.is_file()}


TALKS = "import os, sys; r = os.environ['RANK']; print('out', r, flush=True); print('err', r, file=sys.stderr)"


@pytest.fixture
def talks(launchpad: Launchpad) -> Path:
    path = launchpad.folder / "talks.py"
    path.write_text(TALKS)
    return path


def test_log_dir_keeps_and_shows_everything(launchpad: Launchpad, talks: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--log-dir", "logs", talks)
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert logs(launchpad.folder / "logs") == {
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/1/stderr.log": "err 1\n",
        "attempt_0/1/stdout.log": "out 1\n",
    }


def test_a_filter_forgets_no_last_line_and_mixes_no_attempts() -> None:
    picks = Filter(("loss",))
    assert picks.pick(1, b"loss 1\nstep 2, loss") == b"[1] loss 1\n"
    assert picks.rest() == b"[1] step 2, loss\n"
    assert picks.pick(1, b"step 1\n") == picks.rest() == b""


def test_files_of_many_ranks_need_few_descriptors(tmp_path: Path) -> None:
    """Whether they are this attempt's or the last one's. The nodes are kept alive while they are made."""
    spec = JobSpec(Target("program", "/bin/true"), nproc=100, tee=StreamMap(everywhere=3))
    node = AgentReady(0, 0.0, 1, "here", 4, 0, None, 10_000, 10_000, 29500)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    before = len(os.listdir("/proc/self/fd"))
    plan, made = make_plan(spec, [node], "0123abcd"), list[None]()
    files = Files(spec, plan, str(tmp_path), events.put, "89abcdef", keep_alive=lambda: made.append(None))
    for attempt in range(3):
        if attempt:
            files.on(Restarted(0, attempt, 2, 0, 1, -1))
        for rank in range(100):
            assert files.on(Output(0, rank, 2, b"%d\n" % rank))
        assert [events.get(timeout=DEADLINE).output.rank for _ in range(100)] == list(range(100))
        assert len(os.listdir("/proc/self/fd")) - before <= MOST_OPEN
    files.close()
    assert len(made) == 300
    assert len(os.listdir("/proc/self/fd")) == before
    assert logs(tmp_path) == {
        f"attempt_{attempt}/{rank}/{name}.log": f"{rank}\n" if name == "stderr" else ""
        for attempt in range(3)
        for rank in range(100)
        for name in ("stdout", "stderr")
    }


def test_redirects_go_to_files_only(launchpad: Launchpad, talks: Path) -> None:
    done = launchpad.run("run", "-n", 3, "--log-dir", "logs", "-r", "0:3,1:1", talks)
    assert sorted(done.stdout.splitlines()) == ["[2] out 2"]
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[2] err 2"]
    assert logs(launchpad.folder / "logs") == {
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
    }


def test_tee_for_ranks_above_nine(launchpad: Launchpad, talks: Path) -> None:
    done = launchpad.run("run", "-n", 12, "--log-dir", "logs", "--tee", "10:1,11:2", talks)
    assert len(done.stdout.splitlines()) == 12
    assert logs(launchpad.folder / "logs") == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/11/stderr.log": "err 11\n",
    }


def test_local_ranks_filter(launchpad: Launchpad, talks: Path) -> None:
    done = launchpad.run("run", "-n", 4, "--local-ranks-filter", "1,3", talks)
    assert sorted(done.stdout.splitlines()) == ["[1] out 1", "[3] out 3"]
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[3] err 3"]


def test_redirect_without_a_folder_says_where_the_files_are(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "-r", "3", "exits.py", 5, 0)
    assert done.returncode == 5
    (folder,) = re.findall(r"logs: (.*)", done.stderr)
    assert Path(folder, "attempt_0/1/stdout.log").read_text() == ""


def test_error_file_is_kept_with_the_logs(launchpad: Launchpad) -> None:
    script = launchpad.folder / "writes_error.py"
    script.write_text(
        "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"why\"}'); 1 / 0"
    )
    done = launchpad.run("run", "--log-dir", "logs", script)
    assert done.returncode == 1
    assert logs(launchpad.folder / "logs")["attempt_0/0/error.json"] == '{"message": "why"}'
    assert "launchpad:     ZeroDivisionError: division by zero" in done.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_leaves_only_why_the_job_failed(launchpad: Launchpad, quiet: bool) -> None:
    done = launchpad.run("run", "--grace", "1s", *(["--quiet"] if quiet else []), "strays.py")
    assert done.returncode == 0
    assert ("left behind" in done.stderr) is not quiet
