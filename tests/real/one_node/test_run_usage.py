"""Bad input: one sentence that names the thing and the mend, exit code 2, nothing started."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad import __version__
from tests.support.command import DEADLINE, Launchpad

pytestmark = pytest.mark.usefixtures("from_image")

CASES = {
    "no target": ([], "nothing to run; write launchpad run"),
    "no such script": (["nope.py"], "no such script: nope.py (looked in "),
    "no such program": (["nope-program"], "no such program: nope-program (it is neither a .py file nor on PATH)"),
    "no such path": (["./nope"], "no such program: ./nope (looked in "),
    "not executable": (["./plain"], "./plain is not executable; chmod +x it, or give a Python script a name"),
    "not on path": (["plain"], "plain is here, but not on PATH; chmod +x it and write ./plain"),
    "folder": (["folder"], "folder is a folder without a __main__.py"),
    "folder as program": (["--no-python", "./folder"], "./folder is a folder; name a program"),
    "zero ranks": (["-n", "0", "ok.py"], "--nproc: 0 ranks can't be started; a job needs at least 1"),
    "negative ranks": (["--nproc", "-1", "ok.py"], "--nproc: -1 ranks can't be started"),
    "ranks in letters": (
        ["-np", "abc", "ok.py"],
        "--nproc: 'abc' is not a number of ranks; give one, or auto",
    ),
    "too many processes": (["-n", "99999999", "ok.py"], "--nproc 99999999 "),
    "no gpu": (["-n", "gpu", "ok.py"], "--nproc gpu: "),
    "redirect": (["-r", "4", "ok.py"], "--redirects 4: '4' is not LOCAL_RANK:STREAMS; write 3 for all ranks"),
    "redirect twice": (["-r", "0:1,0:2", "ok.py"], "--redirects 0:1,0:2: local rank 0 is given twice"),
    "tee": (["--tee", "0:3,x", "ok.py"], "--tee 0:3,x: 'x' is not LOCAL_RANK:STREAMS"),
    "filter": (["--local-ranks-filter", "0,x", "ok.py"], "--local-ranks-filter: '0,x' is not a list of local ranks"),
    "env name": (["-x", "1A=secret", "ok.py"], "--env: the part before '=' is not a variable name"),
    "env unset": (["-x", "NOT_SET", "ok.py"], "--env NOT_SET: NOT_SET is not set here, so it can't be passed on"),
    "env contract": (["-x", "RANK=3", "ok.py"], "--env RANK: launchpad sets RANK"),
    "env file": (["--env-file", "none", "ok.py"], "--env-file none: No such file or directory; give a file of"),
    "env file line": (["--env-file", "vars", "ok.py"], "vars, line 2: the part before '=' is not a variable name"),
    "env file binary": (["--env-file", "binary", "ok.py"], "--env-file binary: not UTF-8 text (byte 0)"),
    "python": (["--python", "nope", "ok.py"], "--python nope: no such interpreter, or not executable"),
    "grace": (["--grace", "soon", "ok.py"], "--grace: 'soon' is not a time; give seconds (30), or 5m"),
    "timeout": (["--timeout", "-1", "ok.py"], "--timeout: '-1' is not a time"),
    "log dir": (["--log-dir", "plain/logs", "ok.py"], "--log-dir "),
    "module path": (["-m", "some/file.py"], "-m some/file.py: module names have dots"),
    "module and program": (["-m", "--no-python", "x"], "-m runs a Python module, --no-python a program"),
    "json alone": (["--json", "ok.py"], "--json only works with --dry-run; add --dry-run"),
    "unknown option": (
        ["--nprocs", "2", "ok.py"],
        "no such option '--nprocs'; did you mean --nnodes or --nproc or --progress?",
    ),
}

# What Python has on Linux, and not on the other system.
LINUX_ALONE = {
    "darwin": "del select.epoll, os.sched_getaffinity, os.memfd_create",
    "win32": "del select.epoll, os.sched_getaffinity, os.memfd_create, signal.SIGCHLD, signal.SIGHUP, signal.SIGTSTP\n"
    "sys.modules |= dict.fromkeys(['fcntl', 'resource', 'termios', 'pwd', 'grp', 'pty'])",
}


@pytest.mark.parametrize("words", [[], ["run", "x.py"], ["--version"], ["hosts", "check"]])
@pytest.mark.parametrize("platform", LINUX_ALONE)
def test_another_system_is_told_apart_before_anything_fails_there(platform: str, words: list[str]) -> None:
    lacks = f"import os, runpy, select, signal, sys\n{LINUX_ALONE[platform]}\nsys.platform = {platform!r}\n"
    code = f"{lacks}sys.argv[1:] = {words}\nrunpy.run_module('launchpad', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"launchpad: error: launchpad needs Linux, and this is {platform}: run it on a Linux machine, or in a Linux "
        "container or VM (WSL 2)\n"
    )


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_code_2(launchpad: Launchpad, case: str) -> None:
    words, message = CASES[case]
    (launchpad.folder / "ok.py").write_text("open('started', 'w')")
    (launchpad.folder / "plain").touch()
    (launchpad.folder / "vars").write_text("A=1\nno name=secret\n")
    (launchpad.folder / "binary").write_bytes(b"\xff\xfe")
    (launchpad.folder / "folder").mkdir()
    launchpad.environ["CUDA_VISIBLE_DEVICES"] = ""
    done = launchpad.run("run", *words)
    assert done.stdout == ""
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: {message}")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
    assert not (launchpad.folder / "started").exists()


def drop_overrides() -> None:
    """Have file permissions bind root too: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH in the bounding set."""
    if os.geteuid() == 0:
        for capability in (1, 2):
            assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP


def test_what_a_user_without_permission_is_told(launchpad: Launchpad) -> None:
    script = launchpad.folder / "ok.py"
    script.write_text("open('started', 'w')")
    script.chmod(0)
    done = launchpad.run("run", script, preexec_fn=drop_overrides)
    assert done.stderr == f"launchpad: error: {script} can't be read; check its permissions\n"
    assert done.returncode == 2
    script.chmod(0o644)
    launchpad.folder.chmod(0o555)
    logs = launchpad.folder / "logs"
    done = launchpad.run("run", "--log-dir", logs, script, preexec_fn=drop_overrides)
    expected = f"launchpad: error: --log-dir {logs}: {logs}: Permission denied; choose a writable folder"
    assert done.stderr.startswith(expected)
    assert done.returncode == 2
    launchpad.folder.chmod(0o755)


def test_more_ranks_than_open_files_allow(launchpad: Launchpad) -> None:
    process = launchpad.start(
        "run", "-n", 100, "true", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    )
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert re.search(
        rb"--nproc 100 needs 332 open files, but the limit on .* is 128: raise it .* or start at most 32", err
    )


def test_no_place_for_temporary_files(launchpad: Launchpad) -> None:
    launchpad.environ["TMPDIR"] = "/proc/nowhere"  # then the next place serves
    assert launchpad.run("run", "true").returncode == 0


def test_help_and_version(launchpad: Launchpad) -> None:
    assert launchpad.run("--version").stdout == f"launchpad {__version__}\n"
    assert "Run N supervised ranks" in launchpad.run("--help").stdout
    text = launchpad.run("run", "--help").stdout
    for heading in (
        "How many ranks:",
        "What the ranks run:",
        "The ranks' environment:",
        "The ranks' output:",
        "When the job ends:",
        "Before running:",
        "Examples:",
    ):
        assert heading in text
    assert "Other:\n  -h, --help" in text
    assert launchpad.run().returncode == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn", "x.py"], "no such command 'runn'; did you mean run?"),
        (["train.py"], "no such command 'train.py'; did you mean launchpad run train.py?"),
        (["xyzzy"], "no such command 'xyzzy'; see launchpad --help"),
        (["run", "--stand-by"], "no such option '--stand-by'; did you mean --standalone?"),
        (["run", "--no"], "--no could be --no-python or --node-rank; see launchpad run --help"),
        (["smoke", "jobs.toml", "--no"], "--no could be --no-python or --node-rank; see launchpad run --help"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_mistyped_is_told_with_what_may_be_meant(launchpad: Launchpad, words: list[str], message: str) -> None:
    (launchpad.folder / "train.py").touch()
    done = launchpad.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launchpad: error: {message}\n"


def test_installed_command_is_the_module() -> None:
    command = shutil.which("launchpad", path=str(Path(sys.executable).parent))
    assert command, "the console script is not installed beside the interpreter"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == f"launchpad {__version__}\n"


@pytest.mark.parametrize(("command", "name"), [("wait", "JOB..."), ("smoke", "FILE"), ("join", "HOST[:PORT],…")])
def test_a_missing_argument_is_named(launchpad: Launchpad, command: str, name: str) -> None:
    done = launchpad.run(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launchpad: error: missing argument '{name}'; see launchpad {command} --help\n"
