"""`launchpad completion`: what the Tab key offers, in real shells and as launchpad answers them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad.cli.help import TOPICS
from launchpad.cli.main import COMMANDS
from launchpad.cli.shells import SHELLS
from launchpad.transport.ssh import config, known_hosts
from tests.support.command import DEADLINE, Launchpad
from tests.support.logs import JOB, record
from tests.support.terminal import Terminal

# In a real shell. `launchpad` prints the words that it got, so that what stood on the line can be told from that.

WRAPPER = """#!/bin/sh
if [ -n "$_LAUNCHPAD_COMPLETE" ] || [ "$1" = completion ]; then
    echo noise >&2
    exec {python} -m launchpad "$@"
fi
printf got
printf ' <%s>' "$@"
echo .
"""

# How each is started, and made to read its script.
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(launchpad completion bash 2>/dev/null)"'),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -U compinit; compinit -u -D; eval "$(launchpad completion zsh 2>/dev/null)"',
    ),
    "zsh file": (
        ["zsh", "-f", "-i"],
        "mkdir f; launchpad completion zsh 2>/dev/null >f/_launchpad; fpath=($PWD/f $fpath); "
        "autoload -U compinit; compinit -u -D",
    ),
    "fish": (["fish", "--no-config", "--private", "-i"], "launchpad completion fish 2>/dev/null | source"),
    "tcsh": (["tcsh", "-f"], "(launchpad completion tcsh > c.tcsh) >& /dev/null; source c.tcsh"),
}


class Shell:
    """A shell on a terminal, with completion turned on."""

    def __init__(self, name: str, terminal: Terminal) -> None:
        self.name = name
        self.terminal = terminal

    def __call__(self, keys: str) -> list[str]:
        """Type these, and Enter; the words that launchpad got. Nothing else may have appeared on the terminal."""
        self.terminal.type(f"{keys}\n")
        said = self.terminal.expect(r"got((?: <[^>]*>)*)\.\r?\n")
        shown = said.string[: said.end()]
        assert "noise" not in shown
        assert "Traceback" not in shown
        return re.findall("<([^>]*)>", said[1])


@pytest.fixture
def command(launchpad: Launchpad) -> Path:
    """The folder with `launchpad` in it."""
    folder = launchpad.folder.parent / "bin"
    folder.mkdir()
    (folder / "launchpad").write_text(WRAPPER.format(python=sys.executable))
    (folder / "launchpad").chmod(0o755)
    return folder


@pytest.fixture(params=STARTS)
def shell(request: pytest.FixtureRequest, launchpad: Launchpad, command: Path) -> Iterator[Shell]:
    """A shell whose launchpad only prints its words; the known_hosts of all users are the test's there."""
    argv, setup = STARTS[request.param]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    etc = launchpad.folder.parent / "ssh"
    etc.mkdir()
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA=="
    (etc / "ssh_known_hosts").write_text(f"zzalpha,192.0.2.7 {key}\n[zzbeta]:2222 {key}\nzzbeta {key}\n")
    for name in ("train.py", "trainer.txt"):
        (launchpad.folder / name).touch()
    (launchpad.folder / "logs").mkdir()
    environ = {
        "PATH": f"{command}:{launchpad.environ['PATH']}",
        "HOME": str(launchpad.folder),
        "XDG_RUNTIME_DIR": str(launchpad.folder),  # fish leaves files in both
        "TMPDIR": str(launchpad.folder),
        "HISTFILE": "",
        "LC_ALL": "C.UTF-8",
    }
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/ssh && exec "$@"', str(etc)]
    one = Terminal([*mount, *argv], launchpad, environ)
    one.type(f"{setup}; echo re''ady\n")
    one.expect("ready")

    yield Shell(argv[0], one)
    one.type("exit\n")
    one.rest()
    one.end()


def test_in_a_real_shell(launchpad: Launchpad, shell: Shell) -> None:
    record(launchpad)
    assert shell("launchpad sto\tx") == ["stop", "x"]
    assert shell("launchpad run --heartb\t3") == ["run", "--heartbeat-timeout", "3"]
    assert shell("launchpad run --fold nu\tx") == ["run", "--fold", "numbers", "x"]
    assert shell("launchpad run --fold=nu\tx") == ["run", "--fold=numbers", "x"]
    assert shell("launchpad run --nproc_p\t4") == ["run", "--nproc_per_node", "4"]
    assert shell("launchpad help quicks\t") == ["help", "quickstart"]
    assert shell(f"launchpad why {JOB[:3]}\t") == ["why", JOB]
    assert shell("launchpad run train.p\tx") == ["run", "train.py", "x"]
    assert shell("launchpad run train.py --fol\tx") in (
        ["run", "train.py", "--fol", "x"],
        ["run", "train.py", "--folx"],
    )
    assert shell("launchpad run --log-dir lo\tx")[2].rstrip("/x") == "logs"
    assert shell("launchpad run --log-dir=lo\tx")[1].rstrip("/x") == "--log-dir=logs"
    # After a host its number of ranks may follow, or another host. fish and tcsh always end the word.
    end = ":4" if shell.name in ("bash", "zsh") else ""
    assert shell(f"launchpad run -H zza\t{end} x") == ["run", "-H", f"zzalpha{end}", "x"]
    assert shell(f"launchpad run --hosts me@zza\t{end} x") == ["run", "--hosts", f"me@zzalpha{end}", "x"]
    assert shell(f"launchpad run --hosts=zzalpha:4,zz\t{end} x") == ["run", f"--hosts=zzalpha:4,zzbeta{end}", "x"]
    # Nothing can stand here, and nothing is said about it.
    assert shell("launchpad run --lo x --fol\t equal") == ["run", "--lo", "x", "--fol", "equal"]
    assert shell("launchpad nosuch x\t") == ["nosuch", "x"]


@pytest.mark.parametrize("shell", ["zsh", "fish"], indirect=True)
def test_what_a_word_is(shell: Shell) -> None:
    shell.terminal.type("launchpad st\t")
    shell.terminal.expect("stop a running job")
    assert shell("op x") == ["stop", "x"]


def test_a_quoted_word_in_bash(launchpad: Launchpad) -> None:
    """The line is split as the shell does it."""
    launchpad.environ |= {"COMP_WORDBREAKS": " \t\n\"'><=;|&(:", "_LAUNCHPAD_COMPLETE": "bash"}
    for line, found in (
        ("X=1 launchpad run 'a b' --fo", "file"),
        ("launchpad run --wdir 'a b' --fol", "whole\t--fold"),
        ("launchpad run --fold=nu", "whole\tnumbers"),
        ("launchpad logs --fold 'nu", "whole\tnumbers"),
        ("launchpad run --fold \u00fc --fol", "whole\t--fold"),
    ):
        launchpad.environ |= {"COMP_LINE": f"{line} more", "COMP_POINT": str(len(line.encode()))}
        assert answered(launchpad.run()).split("\n")[0].strip() == found
    launchpad.environ |= {"COMP_LINE": "launchpad run --fold=nu", "COMP_POINT": "23", "COMP_WORDBREAKS": " \t\n"}
    assert answered(launchpad.run()) == "whole\t--fold=numbers\n"


# As launchpad answers.


def answered(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def offered(launchpad: Launchpad, *words: str) -> dict[str, str]:
    """What can stand in the place of the last word, and what that is."""
    launchpad.environ["_LAUNCHPAD_COMPLETE"] = "zsh"
    found = [line.split("\t") for line in answered(launchpad.run(*words)).splitlines()]
    del launchpad.environ["_LAUNCHPAD_COMPLETE"]
    return {value or kind: about for kind, value, about in found}


def test_commands_and_topics(launchpad: Launchpad) -> None:
    commands = offered(launchpad, "")
    assert list(commands) == list(COMMANDS)
    assert all(commands.values())
    assert list(offered(launchpad, "--ver")) == ["--version"]
    topics = offered(launchpad, "help", "")
    assert topics.keys() == {*TOPICS, *COMMANDS}
    assert all(topics.values())
    assert offered(launchpad, "help", "quickstart", "") == {}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["run", "--fold", ""], ["equal", "numbers", "never"]),
        (["run", "-q", "--fold="], ["--fold=equal", "--fold=numbers", "--fold=never"]),
        (["run", "--nproc", ""], ["auto", "cpu", "gpu"]),
        (["run", "--nproc-p", ""], ["auto", "cpu", "gpu"]),  # abbreviated
        (["run", "-qn", "a"], ["auto"]),
        (["run", "-n4", "--dry"], ["--dry-run"]),
        (["run", "--numa_b"], ["--numa_binding"]),
        (["run", "--env-file", ""], ["file"]),
        (["run", "--env-file=x"], ["file"]),
        (["run", "--wdir", ""], ["dir"]),
        (["run", "--role", ""], []),
        (["run", "--", "-"], ["file"]),
        (["run", ""], ["file"]),
        (["run", "train.py", "--f"], ["file"]),
        (["launch", "--use-e"], ["--use-env"]),
        (["run", "--add-to"], []),  # hidden
        (["run", "--lo", "x", "--fo"], []),  # ambiguous
        (["logs", "--merge", ""], ["time"]),
        (["logs", "--rank", ""], []),
        (["completion", ""], list(SHELLS)),
        (["completion", "bash", ""], []),
        (["smoke", ""], ["file"]),
        (["nosuch", ""], []),
        (["--version", ""], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_options_and_what_they_take(launchpad: Launchpad, words: list[str], found: list[str]) -> None:
    assert list(offered(launchpad, *words)) == found


def test_jobs_latest_first_and_only_those_that_run_where_that_matters(launchpad: Launchpad) -> None:
    record(launchpad)
    job = launchpad.run("run", "--detach", "-n", 2, "sleep", "1000").stdout.strip()
    for command in ("logs", "why", "report", "trace", "attach", "wait"):
        found = offered(launchpad, command, "")
        assert list(found) == [job, JOB]
        assert found[job].startswith("running, 2 ranks, ")
        assert found[job].endswith("sleep 1000")
    for command in ("stop", "stacks", "top", "debug", "profile"):
        assert list(offered(launchpad, command, "")) == [job]
    assert list(offered(launchpad, "wait", job, "")) == [job, JOB]
    assert offered(launchpad, "why", job, "") == {}
    assert offered(launchpad, "why", "0a1b") == offered(launchpad, "why", JOB)
    assert launchpad.run("stop", job).returncode == 0
    assert launchpad.run("wait", job).returncode == 143
    assert offered(launchpad, "stop", "") == {}


def test_the_names_in_known_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SYSTEM_FOLDER", str(tmp_path))
    monkeypatch.setattr(known_hosts, "home", lambda: str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA=="
    (tmp_path / ".ssh" / "known_hosts").write_text(
        f"# a comment\nb,192.0.2.1 {key}\n[c]:2222 {key} me@c\n|1|c2FsdA==|aGFzaA== {key}\n*.example.com,!x {key}\n"
        f"@cert-authority *.org {key}\n@revoked evil {key}\nb ssh-rsa AAAA\n2001:db8::5 {key}\n\xfc {key}\nnonsense\n"
    )
    (tmp_path / "ssh_known_hosts").write_text(f"a {key}\nb {key}\n")
    assert known_hosts.names() == ["b", "192.0.2.1", "c", "[2001:db8::5]", "\xfc", "a"]


@pytest.mark.parametrize("words", [["run", "--fo"], ["run", "-n", "2", ""], ["logs", ""], [""], ["help", ""]])
def test_it_loads_only_what_it_needs(launchpad: Launchpad, words: list[str]) -> None:
    record(launchpad)
    launchpad.environ |= {"_LAUNCHPAD_COMPLETE": "zsh", "PYTHONPROFILEIMPORTTIME": "1"}
    done = launchpad.run(*words)
    assert done.stdout
    seen = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "launchpad.cli.complete" in seen
    assert not {name.split(".")[0] for name in seen} & {"torch", "paramiko", "rich", "psutil", "numpy", "asyncio"}


def test_no_agent_is_started(launchpad: Launchpad) -> None:
    code = (
        "import launchpad.transport.local as local\ndef started(): print('started'); raise OSError\n"
        "local.LocalLink = started\nfrom launchpad.cli.entry import main\nmain()"
    )
    for environ, starts in (({}, True), ({"_LAUNCHPAD_COMPLETE": "zsh"}, False)):
        argv = [sys.executable, "-c", code, "run", "--help"]
        done = subprocess.run(
            argv, env={**launchpad.environ, **environ}, capture_output=True, text=True, check=True, timeout=DEADLINE
        )
        assert ("started" in done.stdout) == starts
        assert "--help" in done.stdout


def test_whatever_happens_nothing_is_said(launchpad: Launchpad) -> None:
    for shell in ("zsh", "bash", "tcsh", "nosuch", ""):  # without what that one gives, or without words
        launchpad.environ["_LAUNCHPAD_COMPLETE"] = shell
        assert answered(launchpad.run()) == ""


# The scripts.


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_in_our_spelling_and_in_torchruns(launchpad: Launchpad, shell: str) -> None:
    ours = answered(launchpad.run("completion", shell))
    assert "launchpad" in ours
    for option in ("--print-completion", "--print_completion"):
        assert answered(launchpad.run("run", option, shell)) == ours


def test_other_shells(launchpad: Launchpad) -> None:
    for words, said in (
        (["completion"], "launchpad completion needs a shell; write launchpad completion bash, zsh, fish or tcsh"),
        (["completion", "ksh"], "there is no script for ksh; write launchpad completion bash, zsh, fish or tcsh"),
        (["run", "--print-completion", "ksh"], "--print-completion: 'ksh' is not one of"),
    ):
        done = launchpad.run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"launchpad: error: {said}")
        assert done.stderr.count("\n") == 1
