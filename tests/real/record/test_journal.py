"""The journal, and the commands that read it: launchpad why, jobs, logs."""

from __future__ import annotations

import json
import os
import resource
import stat

import pytest

from launchpad.record import job_store
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.records import FAILS, store_of


def report(stderr: str) -> list[str]:
    """The report as shown on the console, without the lines that say where the record is."""
    start = stderr.index("launchpad: rank")
    lines = [line.removeprefix("launchpad: ") for line in stderr[start:].splitlines()]
    return [line for line in lines if not line.startswith(("logs: ", "more: "))]


def test_a_failed_job_is_reported_again_from_its_record(launchpad: Launchpad) -> None:
    (launchpad.folder / "fails.py").write_text(FAILS)
    done = launchpad.run("run", "-n", 3, "fails.py")
    (job,) = os.listdir(store_of(launchpad))
    assert f"launchpad: logs: {store_of(launchpad) / job}\nlaunchpad: more: launchpad why {job}\n" in done.stderr
    for asked in ((), (job,), (job[:4],)):
        why = launchpad.run("why", *asked)
        assert (why.returncode, why.stderr) == (0, "")
        assert why.stdout.splitlines()[1:-1] == report(done.stderr)
    verdict = json.loads((store_of(launchpad) / job / "verdict.json").read_text())
    again = json.loads(launchpad.run("why", "--json").stdout)
    assert again == verdict
    assert (verdict["rank"], verdict["type"], verdict["stopped"], verdict["job"]) == (1, "ValueError", [0, 2], job)
    (row,) = json.loads(launchpad.run("jobs", "--json").stdout)
    assert (row["job"], row["kind"], row["exit_code"], row["ranks"], row["words"]) == (
        job,
        "failure",
        1,
        3,
        ["fails.py"],
    )
    assert "rank 1, ValueError: no good after " in launchpad.run("jobs").stdout
    assert row["seconds"] > 0
    logs = launchpad.run("logs").stdout.splitlines()
    assert {f"[{rank}] {way} of {rank}" for rank in range(3) for way in ("out", "err")} <= set(logs)
    assert sorted(launchpad.run("logs", "--rank", 2).stdout.splitlines()) == ["[2] err of 2", "[2] out of 2"]
    private = (store_of(launchpad), *store_of(launchpad).glob("*"), *store_of(launchpad).rglob("*.*"))
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in private)


def test_a_job_that_runs_and_one_whose_launchpad_is_killed(launchpad: Launchpad) -> None:
    (launchpad.folder / "stays.py").write_text(
        "import os, time\nprint('step 1', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "print('step 2', flush=True)\ntime.sleep(600)\n"
    )
    process = launchpad.start("run", "-n", 2, "stays.py")
    for _ in range(2):
        assert b"step 1" in process.stdout.readline()
    assert launchpad.run("why").stdout.splitlines()[1] == "the job is running: ranks 0-1"
    following = launchpad.start("logs", "-f")
    assert {following.stdout.readline() for _ in range(2)} == {b"[0] step 1\n", b"[1] step 1\n"}
    (launchpad.folder / "go").touch()
    assert {following.stdout.readline() for _ in range(2)} == {b"[0] step 2\n", b"[1] step 2\n"}
    process.kill()
    process.wait(timeout=DEADLINE)
    assert following.wait(timeout=DEADLINE) == 0
    why = launchpad.run("why").stdout
    assert "the record is incomplete: launchpad was killed, or could not write the rest" in why
    assert "its record was cut off" in launchpad.run("jobs").stdout
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)


def test_attempts_are_reported(launchpad: Launchpad) -> None:
    (launchpad.folder / "again.py").write_text(
        "import os\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt, flush=True)\n"
        "os._exit(3 + int(attempt))\n"
    )
    done = launchpad.run("run", "--max-restarts", 1, "again.py")
    assert done.returncode == 4
    why = launchpad.run("why").stdout
    assert "rank 0 failed first: exit code 4" in why
    assert "earlier attempt: rank 0, exit code 3 after " in why
    assert launchpad.run("logs").stdout.splitlines() == ["[0] attempt 0", "launchpad: restart 1", "[0] attempt 1"]


def test_with_log_dir_the_record_is_there(launchpad: Launchpad) -> None:
    (launchpad.folder / "fails.py").write_text(FAILS)
    assert launchpad.run("run", "-n", 2, "--log-dir", "logs", "fails.py").returncode == 1
    (folder,) = (launchpad.folder / "logs").iterdir()
    assert {"events.jsonl", "job.json", "verdict.json", "attempt_0"} == set(os.listdir(folder))
    assert launchpad.run("why").stdout.splitlines()[-1] == f"logs: {folder}"
    assert "[1] out of 1" in launchpad.run("logs").stdout


def test_long_output_keeps_its_beginning_and_end(launchpad: Launchpad) -> None:
    (launchpad.folder / "much.py").write_text(
        "print('the beginning', flush=True)\n"
        "for i in range(60): print('x' * 99 + '\\n' + 'y' * 99999, flush=True)\nprint('the end')\n"
    )
    assert launchpad.run("run", "much.py").returncode == 0
    logs = launchpad.run("logs", "--rank", 0).stdout.splitlines()
    assert (logs[0], logs[-1]) == ("[0] the beginning", "[0] the end")
    assert any(line.endswith("bytes left out here …") for line in logs)
    size = sum(path.stat().st_size for path in store_of(launchpad).rglob("*.log"))
    assert 1 << 19 < size < 3 << 20


@pytest.mark.parametrize("why", ["not a folder", "full"])
def test_a_record_that_can_not_be_kept_is_one_warning(launchpad: Launchpad, why: str) -> None:
    options: dict[str, object] = {}
    if why == "not a folder":
        launchpad.environ["XDG_STATE_HOME"] = "/dev/null"
        where = "no record of this job is kept: /dev/null/launchpad: Not a directory"
        notes = [f"launchpad: {where}; set XDG_STATE_HOME to a writable folder"]
    else:  # a file size limit stands in for a full disk
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        notes = []
    (launchpad.folder / "p.py").write_text("print('well', flush=True)\n")
    done = launchpad.run("run", "-n", 2, "p.py", **options)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] well", "[1] well"]
    found = done.stderr.splitlines()
    assert found == notes or (why == "full" and len(found) <= 1 and "events.jsonl: File too large" in done.stderr)


def test_few_descriptors_do_for_many_attempts(launchpad: Launchpad) -> None:
    done = launchpad.run(
        *("run", "-n", 5, "--max-restarts", 11, "--restart", "always", "sh", "-c", "echo out; echo err >&2; exit 3"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (70, 4096)),
    )
    assert done.returncode == 3
    assert "Too many open files" not in done.stderr
    assert launchpad.run("why").stdout.splitlines()[1:-1] == report(done.stderr)
    (job,) = store_of(launchpad).iterdir()
    files = [job / f"attempt_{attempt}/{rank}/stdout.log" for attempt in range(12) for rank in range(5)]
    # A rank that was stopped may not have got that far.
    assert all(path.read_text() == "out\n" for path in files if path.exists())
    kept = (0, *range(4, 12))
    assert {path.parent.parent.name for path in files if path.exists()} == {f"attempt_{n}" for n in kept}
    assert {path.name for path in job.glob("attempt_*")} == {f"attempt_{n}" for n in kept}
    notes = [line for line in launchpad.run("logs").stdout.splitlines() if line.startswith("launchpad:")]
    assert notes == ["launchpad: restarts 1 to 4", *(f"launchpad: restart {n}" for n in range(5, 12))]
    assert "out" in launchpad.run("logs", "--attempt", 4).stdout
    refused = launchpad.run("logs", "--attempt", 3)
    assert refused.returncode == 2
    assert "has the output of attempt 0 and of attempts 4 to 11; launchpad run --log-dir keeps all" in refused.stderr


def test_with_log_dir_the_output_of_all_attempts_is_kept(launchpad: Launchpad) -> None:
    launchpad.run(
        *("run", "--max-restarts", 9, "--restart", "always", "--log-dir", "logs", "sh", "-c", "echo out; exit 3")
    )
    assert len([*launchpad.folder.glob("logs/*/attempt_*/0/stdout.log")]) == 10
    assert launchpad.run("logs", "--attempt", 1).stdout == "[0] out\n"


def test_a_stream_that_can_not_be_kept_ends_neither_record_nor_job(launchpad: Launchpad) -> None:
    """A folder is in the way of a file of the second attempt."""
    (launchpad.folder / "p.py").write_text(
        "import glob, os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    (jobs,) = glob.glob(os.environ['XDG_STATE_HOME'] + '/launchpad/jobs/*')\n"
        "    os.makedirs(jobs + '/attempt_1/0/stdout.log')\n    sys.exit(3)\nprint('well', flush=True)\n"
    )
    done = launchpad.run("run", "--max-restarts", 1, "p.py")
    assert (done.returncode, done.stdout) == (0, "[0] well\n")
    assert done.stderr.count("attempt_1/0/stdout.log: Is a directory") == 1
    assert "every rank exited with code 0" in launchpad.run("why").stdout
    (row,) = json.loads(launchpad.run("jobs", "--json").stdout)
    assert (row["kind"], row["exit_code"]) == ("none", 0)


def test_a_record_that_can_not_be_kept_to_its_end_claims_no_kill(launchpad: Launchpad) -> None:
    limit = 4000  # bytes: room for the plan and the first attempt, but not the last
    (launchpad.folder / "p.py").write_text(
        "import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] != '9': sys.exit(3)\n"
    )
    done = launchpad.run(
        *("run", "--max-restarts", 9, "--restart", "always", "p.py"),
        env={**launchpad.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # Python 3.11 writes it, cut, and takes it for whole
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
    )
    assert (done.returncode, done.stderr.count("events.jsonl: File too large")) == (0, 1)
    why = launchpad.run("why").stdout.splitlines()
    assert "the record is incomplete: launchpad was killed, or could not write the rest" in why
    (row,) = json.loads(launchpad.run("jobs", "--json").stdout)
    assert row["exit_code"] is None


def test_old_jobs_are_removed_and_running_ones_never(launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    (launchpad.folder / "w.py").write_text("print('up', flush=True)\ninput()\n")
    process = launchpad.start("run", "w.py", stdin=-1)
    assert process.stdout.readline() == b"[0] up\n"
    (running,) = os.listdir(store_of(launchpad))
    for number in range(job_store.MOST_JOBS + job_store.SLACK):
        folder = store_of(launchpad) / f"{number:08x}"
        (folder / "attempt_0").mkdir(parents=True)
        (folder / "events.jsonl").write_text("")
        os.utime(folder, (2**31 + number, 2**31 + number))
    elsewhere = launchpad.folder / "mine"
    elsewhere.mkdir()
    (store_of(launchpad) / "linked").symlink_to(elsewhere)
    os.utime(store_of(launchpad) / "linked", (1, 1), follow_symlinks=False)
    job_store.prune(launchpad.environ, by_size=False)
    left = set(os.listdir(store_of(launchpad)))
    assert running in left
    assert elsewhere.is_dir()
    assert "linked" not in left
    assert len(left) == job_store.MOST_JOBS + 1
    assert f"{job_store.MOST_JOBS + job_store.SLACK - 1:08x}" in left
    monkeypatch.setattr(job_store, "MOST_BYTES", 0)
    (store_of(launchpad) / f"{20:08x}" / "attempt_0" / "stdout.log").write_bytes(b"x")
    job_store.prune(launchpad.environ, by_size=True)
    assert f"{20:08x}" not in os.listdir(store_of(launchpad))
    process.communicate(b"\n", timeout=DEADLINE)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "zz"), "job zz: no such job is recorded in "),
        (("logs", ""), "job : no such job is recorded in "),
        (("logs", "--rank", "7"), "--rank 7: the job has ranks 0 to 1"),
    ],
)
def test_bad_input_gets_a_sentence(launchpad: Launchpad, words: tuple[str, ...], sentence: str) -> None:
    assert "no job is recorded in" in launchpad.run("why").stderr
    assert launchpad.run("run", "-n", 2, "true").returncode == 0
    done = launchpad.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launchpad: error: {sentence}")
