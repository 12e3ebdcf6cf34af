"""Job files: options from TOML, several jobs one after the other, and where a value came from."""

from __future__ import annotations

import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from launchpad.cli.job_file import parse_jobs
from launchpad.errors import UsageError
from tests.support.command import DEADLINE, Launchpad
from tests.support.needs import needs_torch
from tests.support.targets import shown

ROOT = Path(__file__).parents[3]

TWO = """
timeout = "1m"
env = { SHARED = "all" }

[jobs.first]
target = ["show_env.py", "--flag", "x y"]
nproc = 2

[jobs.second]
target = "show_env.py"
env = { SHARED = "own" }
"""


def write(launchpad: Launchpad, text: str) -> Path:
    (launchpad.folder / "show_env.py").symlink_to(Path(__file__).parents[2] / "programs" / "show_env.py")
    path = launchpad.folder / "jobs.toml"
    path.write_text(text)
    return path


def test_one_job_with_overrides(launchpad: Launchpad) -> None:
    path = write(launchpad, 'target = "show_env.py"\nnproc = 3\nrole = "file"\n[env]\nA = "from file"\n')
    launchpad.environ |= {"SHOW": "A ROLE_NAME"}
    got = shown(launchpad.run("run", "--config", path, "--role", "line").stdout)
    assert [one["env"] for one in got.values()] == [{"A": "from file", "ROLE_NAME": "line"}] * 3
    got = shown(launchpad.run("run", "-n", 1, "--config", path, "-x", "A=line", "show_env.py", "more").stdout)
    assert [(one["env"]["A"], one["argv"][1:]) for one in got.values()] == [("line", ["more"])]


@pytest.mark.parametrize("command", [("run", "--config"), ("smoke",)])
def test_several_jobs_run_one_after_the_other(launchpad: Launchpad, command: tuple[str, ...]) -> None:
    path = write(launchpad, TWO)
    launchpad.environ["SHOW"] = "SHARED"
    done = launchpad.run(*command, path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert [(line["argv"][1:], line["env"]["SHARED"]) for line in lines] == [(["--flag", "x y"], "all")] * 2 + [
        ([], "own")
    ]
    table = [re.sub(r" +\d+\.\d s", " T", line) for line in done.stderr.splitlines()]
    assert table[:2] == ["launchpad: job first", "launchpad: job second"]
    assert table[2:] == ["launchpad: first T  passed", "launchpad: second T  passed"]


def test_one_of_several_jobs(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--config", write(launchpad, TWO), "--job", "second")
    assert (done.returncode, done.stderr, len(shown(done.stdout))) == (0, "", 1)


@pytest.mark.parametrize(("words", "option"), [(("--job", "first"), "--job"), (("--deta",), "--detach")])
def test_options_for_one_job_are_refused(launchpad: Launchpad, words: tuple[str, ...], option: str) -> None:
    done = launchpad.run("smoke", write(launchpad, TWO), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr
    assert "leave it out" in done.stderr


def test_a_failed_job_does_not_keep_the_others_from_running(launchpad: Launchpad) -> None:
    codes = {"a": 5, "b": 0, "c": 6}
    text = "".join(f'[jobs.{name}]\ntarget = ["sh", "-c", "exit {code}"]\n' for name, code in codes.items())
    done = launchpad.run("smoke", write(launchpad, text))
    assert done.returncode == 5
    table = [re.sub(r" +\d+\.\d s", " T", line) for line in done.stderr.splitlines()[-3:]]
    assert table == [
        "launchpad: a T  failed, exit code 5",
        "launchpad: b T  passed",
        "launchpad: c T  failed, exit code 6",
    ]


def test_one_report_has_a_suite_for_each_job(launchpad: Launchpad) -> None:
    (launchpad.folder / "out.xml").write_text("<testsuites><testsuite name='of yesterday'/></testsuites>")
    text = 'junit = "out.xml"\nevents = "out.jsonl"\n[jobs.good]\ntarget = "true"\nnproc = 2\n'
    text += '[jobs.bad]\ntarget = "false"\n'
    done = launchpad.run("smoke", write(launchpad, text))
    assert done.returncode == 1
    root = ET.parse(launchpad.folder / "out.xml").getroot()
    assert [(suite.get("name"), suite.get("failures")) for suite in root] == [
        ("launchpad good", "0"),
        ("launchpad bad", "1"),
    ]
    assert (root.get("tests"), root.get("failures")) == ("3", "1")
    events = [json.loads(line) for line in (launchpad.folder / "out.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "JobOver"] == [0, 1]


def test_a_report_of_yesterday_is_not_added_to(launchpad: Launchpad) -> None:
    """Not even if the job before could not start, or wrote another report."""
    for name in ("out.xml", "other.xml"):
        (launchpad.folder / name).write_text("<testsuites><testsuite name='of yesterday'/></testsuites>")
        os.utime(launchpad.folder / name, (1, 1))
    text = '[jobs.bad]\ntarget = "none.py"\njunit = "out.xml"\n[jobs.good]\ntarget = "true"\njunit = "out.xml"\n'
    text += '[jobs.other]\ntarget = "true"\njunit = "other.xml"\n'
    assert launchpad.run("smoke", write(launchpad, text)).returncode == 2
    for name, jobs in (("out.xml", ["launchpad good"]), ("other.xml", ["launchpad other"])):
        assert [suite.get("name") for suite in ET.parse(launchpad.folder / name).getroot()] == jobs


def test_a_job_that_is_interrupted_is_the_last(launchpad: Launchpad) -> None:
    (launchpad.folder / "wait.py").write_text("import time; print('waiting', flush=True); time.sleep(600)")
    path = write(launchpad, '[jobs.a]\ntarget = "wait.py"\n[jobs.b]\ntarget = "wait.py"\n')
    process = launchpad.start("smoke", path)
    assert b"waiting" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert re.search(r"launchpad: a .*failed, exit code 143\nlaunchpad: b +not run\n", err.decode())


def test_a_reader_that_is_gone_ends_the_next_job_too(launchpad: Launchpad) -> None:
    write(launchpad, '[jobs.a]\ntarget = ["yes"]\n[jobs.b]\ntarget = ["true"]\n')
    process = launchpad.start("smoke", "jobs.toml")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 141
    assert re.search(rb"launchpad: a .*failed, exit code 141\nlaunchpad: b +not run\n", err)


def test_a_file_that_begins_with_a_byte_order_mark(launchpad: Launchpad) -> None:
    path = write(launchpad, '\ufefftarget = "show_env.py"\nenv-file = "vars"\n')
    (launchpad.folder / "vars").write_text("\ufeffA=1\n")
    launchpad.environ["SHOW"] = "A"
    done = launchpad.run("run", "--config", path)
    assert (done.returncode, '"A": "1"' in done.stdout) == (0, True), done


def test_dry_run_says_where_each_value_came_from(launchpad: Launchpad) -> None:
    path = write(launchpad, 'target = "show_env.py"\ngrace = "2m"\n[env]\nTOKEN = "hunter2"\n')
    launchpad.environ["PET_ROLE"] = "pet"
    done = launchpad.run("run", "--config", path, "--dry-run", "-n", 2)
    assert done.returncode == 0, done.stderr
    told = done.stdout[done.stdout.index("options:\n") :]
    assert "  nproc = 2  (from the command line)\n" in told
    assert f"  grace = 120.0  (from {path})\n" in told
    assert "  role = pet  (from PET_ROLE)\n" in told
    assert f"  env = TOKEN  (from {path})\n" in told
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nprocs = 2", "nprocs: there is no such option; did you mean nproc?"),
        ("[jobs.a]\ntarget = 'x'\ntime-out = 1", "jobs.a, time-out: there is no such option; did you mean timeout?"),
        ("nproc = \nrole = 1", "Invalid value (at line 1, column 9)"),
        ("[jobs.a]\nnproc = 2", 'jobs.a has no target; add target = "script.py"'),
        ("jobs = 3", "jobs: write a table for each job, like [jobs.hello]"),
        ("nproc = [[1]]", "nproc: write a string, a number, true, false"),
        ("dry-run = true", "dry-run: it belongs on the command line: "),
        ('module = "a\\u0000b"', "module: it contains a NUL byte, which no program can be given"),
        ('env = { A = "\\u0000" }', "env: it contains a NUL byte"),
        (f"nproc = {'9' * 5000}", "it contains a number of more than 4300 digits"),
        (f"nproc = 0x{'f' * 5000}", "nproc: it contains a number of more than 4300 digits"),
        (f"module = {'[' * 5000}", "its tables and lists are nested too deeply"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str) -> None:
    known = ["nproc", "timeout", "env", "module"]
    with pytest.raises(UsageError) as caught:
        parse_jobs(text, "f.toml", known)
    assert str(caught.value).startswith(f"f.toml: {message}")


def test_a_file_that_does_not_end_is_not_read_to_its_end(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--config", "/dev/zero")
    assert (done.returncode, done.stderr) == (
        2,
        "launchpad: error: --config /dev/zero: longer than 4 Mi characters; give a job file (TOML)\n",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nproc = 0", "nproc: 0 ranks can't be started"),
        ("module = 'yes'", "module: write true or false"),
        ("nproc = [1, 2]", "nproc: write a single value"),
        ("max-restarts = -1", "max-restarts: '-1' is not a number of restarts"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_named(launchpad: Launchpad, text: str, message: str) -> None:
    path = write(launchpad, f"target = 'show_env.py'\n{text}\n")
    done = launchpad.run("run", "--config", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launchpad: error: {path}: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "none.toml"], "--config none.toml: No such file or directory; give a job file (TOML)"),
        (["--config", "jobs.toml", "--job", "frist"], "jobs.toml has no job 'frist'; did you mean first?"),
        (["--job", "first"], "--job first names a job in a file; add --config FILE"),
    ],
)
def test_a_file_or_job_that_is_not_there(launchpad: Launchpad, words: list[str], message: str) -> None:
    write(launchpad, TWO)
    done = launchpad.run("run", *words)
    assert done.returncode == 2
    assert done.stderr == f"launchpad: error: {message}\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_files_in_configs_are_good(launchpad: Launchpad, path: Path) -> None:
    target = [] if "[jobs." in path.read_text() else ["examples/hello.py"]
    done = launchpad.run("run", "--config", path, "--dry-run", *target, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_the_smoke_file_passes(launchpad: Launchpad) -> None:
    done = launchpad.run("smoke", ROOT / "configs" / "smoke.toml", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed") == 3
