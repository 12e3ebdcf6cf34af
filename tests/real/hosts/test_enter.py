"""`--enter`: the ranks run where a command leads, here and on hosts. The containers are made with unshare."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad import linux
from tests.support.command import DEADLINE, MARK, Launchpad, wait_until
from tests.support.hosts import Hosts, lines
from tests.support.needs import needs_torch
from tests.support.sshd import needs_sshd

pytestmark = pytest.mark.usefixtures("from_image")

_TRIED = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]

needs_unshare = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(_TRIED, capture_output=True, timeout=DEADLINE).returncode != 0,
    reason="namespaces need root and unshare (util-linux)",
)

SHOW = "import os, sys\nprint(*(os.environ.get(name, '-') for name in sys.argv[1:]), os.getcwd())\n"

WHERE = "localhost  "


class Box:
    """A container: its own processes and environment, and nothing in the head's working folder."""

    def __init__(self, launchpad: Launchpad, folder: Path) -> None:
        folder.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        program = folder / "box"
        inside = f"{MARK}={launchpad.mark} HOME={self.home} TMPDIR={launchpad.scratch} PATH=/usr/bin:/bin IN_BOX=yes"
        program.write_text(
            f"#!/bin/sh\nexec unshare --mount --pid --fork --mount-proc sh -c "
            f'\'mount -t tmpfs none {launchpad.folder} && exec env -i {inside} "$@"\' sh "$@"\n'
        )
        program.chmod(0o755)
        self.words = str(program)


@pytest.fixture
def box(launchpad: Launchpad, tmp_path: Path) -> Box:
    (launchpad.folder / "show.py").write_text(SHOW)
    return Box(launchpad, tmp_path / "box")


@pytest.fixture
def hosts(request: pytest.FixtureRequest, launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        cluster.way = ("--ssh", request.param)
        yield cluster


both_ways = pytest.mark.parametrize("hosts", ["paramiko", "openssh"], indirect=True)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    first, line = done.stderr.splitlines()
    assert first == "launchpad: error: the only host can't take part, so nothing was started:"
    return line.strip()


# Here.


@needs_unshare
def test_ranks_run_inside_with_a_copy_of_the_folder(launchpad: Launchpad, box: Box) -> None:
    launchpad.environ["OUTSIDE"] = "yes"
    names = ("RANK", "WORLD_SIZE", "IN_BOX", "OUTSIDE", "MINE", "NCCL_DEBUG")
    launchpad.environ["NCCL_DEBUG"] = "WARN"
    done = launchpad.run("run", "-n", 2, "--enter", box.words, "--sync", "-x", "MINE=1", "show.py", *names)
    for rank, line in enumerate(lines(done)):
        *shown, folder = line.split()
        assert shown == [f"[{rank}]", str(rank), "2", "yes", "-", "1", "WARN"]
        assert Path(folder).parent == box.home / ".cache" / "launchpad"


@needs_unshare
def test_what_is_not_there_is_told(launchpad: Launchpad, box: Box) -> None:
    done = launchpad.run("run", "--enter", box.words, "--wdir", "/no/such", "show.py")
    assert done.returncode == 3
    assert "localhost  no such folder: there is no folder /no/such\n" in done.stderr
    (launchpad.folder / "calls.py").write_text("def main(): pass\n")
    (launchpad.folder / "package").mkdir()
    (launchpad.folder / "package" / "__main__.py").touch()
    (launchpad.folder / "tool").write_text("#!/bin/sh\n")
    (launchpad.folder / "tool").chmod(0o755)
    for target, problem, remedy in (
        (("show.py",), f"no such file: {launchpad.folder}/show.py", "copy it there, or the whole folder with --sync"),
        (("calls.py:main",), f"no such file: {launchpad.folder}/calls.py", "copy it there"),
        (("-m", "package"), "no such module: package for ", "install it there, or choose another Python with"),
        (("-m", "package.part"), "no such module: package.part for ", "install it there"),
        (("./tool",), f"no such program: {launchpad.folder}/./tool is not there, or not exec", "install it there"),
    ):
        done = launchpad.run("run", "--enter", box.words, *target)
        assert (done.returncode, done.stdout) == (3, "")
        _, said, advice = done.stderr.splitlines()
        assert said.startswith(f"  localhost  {problem}")
        assert advice.startswith(f"launchpad: {remedy}")


@needs_unshare
def test_rank_0_inside_reads_our_standard_input(launchpad: Launchpad, box: Box) -> None:
    program = "import sys; print(len(sys.stdin.read()))"
    done = launchpad.run("run", "-n", 2, "--enter", box.words, "python3", "-c", program, input="x" * (3 << 20))
    assert lines(done) == [f"[0] {3 << 20}", "[1] 0"]


def turns(launchpad: Launchpad, *options: object, does: str) -> list[str]:
    """What launchpad's ranks print in a loop over the three lines of a file."""
    (launchpad.folder / "words").write_text("a\nb\nc\n")
    argv = shlex.join(launchpad.argv("run", *options, "sh", "-c", does))
    shell = ["bash", "-c", f'while read -r x; do {argv} "$x"; done < words']
    environ, folder = launchpad.environ, launchpad.folder
    return lines(subprocess.run(shell, capture_output=True, text=True, env=environ, cwd=folder, timeout=DEADLINE))


def test_a_file_is_left_to_the_next_command_of_a_loop(launchpad: Launchpad) -> None:
    options = ("--enter", "env", "-n", 2)
    assert turns(launchpad, *options, does="echo $0") == [f"[{rank}] {word}" for rank in range(2) for word in "abc"]
    assert turns(launchpad, *options, does="cat > rest; echo $0") == ["[0] a", "[1] a"]


def test_input_from_a_pipe_that_no_rank_used_is_told(launchpad: Launchpad) -> None:
    program = "import os; print(os.read(0, 2))"
    done = launchpad.run("run", "--enter", "env", "python3", "-c", program, input="a\nb\nc\n")
    assert (done.returncode, done.stdout) == (0, "[0] b'a\\n'\n")
    assert done.stderr == (
        "launchpad: read 4 bytes of standard input that no rank used; "
        "run it with < /dev/null to leave standard input to other commands\n"
    )


@needs_unshare
def test_a_rank_that_fails_inside_is_named(launchpad: Launchpad, box: Box) -> None:
    launchpad.use_no_images()
    done = launchpad.run("run", "-n", 3, "--enter", box.words, "sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 600")
    assert done.returncode == 7
    assert done.stderr.startswith("launchpad: rank 1 failed first: exit code 7 ")
    assert not launchpad.survivors()


@needs_unshare
@pytest.mark.parametrize("end", ["ctrl-c", "kill"])
def test_nothing_stays_inside(launchpad: Launchpad, box: Box, end: str) -> None:
    process = launchpad.start(
        *("run", "-n", 2, "--enter", box.words, "sh", "-c", "setsid sleep 600 & echo here; wait"),
        start_new_session=True,
    )
    for _ in range(2):
        assert process.stdout.readline().endswith(b"here\n")
    if end == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE) == 130
    else:
        process.kill()
    wait_until(lambda: not launchpad.survivors(), "all to be gone", show=launchpad.survivors)


@needs_unshare
def test_an_agent_that_is_killed_inside_is_started_again(launchpad: Launchpad, box: Box) -> None:
    script = "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 600"
    process = launchpad.start("run", "--enter", box.words, "--max-restarts", 1, "sh", "-c", script)
    assert process.stdout.readline() == b"[0] attempt 0\n"
    both = {int(one.split()[0]) for one in launchpad.survivors() if re.match(r"\d+ \S+ -I -S .*launchpad-agent", one)}
    (agent,) = [pid for pid in both if int(linux.stat(pid)[1]) in both]  # the other one is its guard
    os.kill(agent, signal.SIGKILL)
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, b"[0] attempt 1\n"), errors
    assert b"was lost" in errors


@needs_unshare
@needs_torch
def test_gloo_inside(launchpad: Launchpad, box: Box) -> None:
    (launchpad.folder / "sums.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (1 + dist.get_rank())\ndist.all_reduce(x)\ndist.destroy_process_group()\nprint(x.item())\n"
    )
    done = launchpad.run("run", "-n", 2, "--enter", box.words, "--sync", "sums.py")
    assert lines(done) == ["[0] 3.0", "[1] 3.0"]


def test_words_are_read_as_by_a_shell(launchpad: Launchpad) -> None:
    value = 'it\'s "all" $HOME here'
    done = launchpad.run("run", "--enter", shlex.join(["env", f"A={value}"]), "sh", "-c", 'echo "$A"')
    assert lines(done) == [f"[0] {value}"]


def test_the_plan_is_shown(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--enter", "env", "--dry-run", "true")
    assert done.returncode == 0, done.stderr
    assert "node 0: localhost, 2 of 2 ranks" in done.stdout
    assert "enter = env  (from the command line)" in done.stdout


# Errors.


def test_a_program_that_is_missing(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--enter", "dockr exec -i train", "true")
    text = "enter: can't run dockr (No such file or directory); install it, or correct --enter"
    assert refusal(done) == WHERE + text


def test_a_container_that_does_not_run(launchpad: Launchpad) -> None:
    docker = launchpad.folder / "docker"
    docker.write_text("#!/bin/sh\necho Error response from daemon: No such container: $3 >&2\nexit 1\n")
    docker.chmod(0o755)
    assert refusal(launchpad.run("run", "--enter", f"{docker} exec -i train", "true")) == WHERE + (
        f"enter: {docker} exec -i train exited with code 1 before the agent started (Error response from daemon: No "
        "such container: train); is the program there, and what it enters running?"
    )


def test_a_container_without_python(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--enter", "env PATH=/nowhere", "--python", "python3", "true")
    line = refusal(done)
    assert line.startswith(f"{WHERE}no Python: can't run python3 there (/bin/sh: ")
    assert line.endswith("); name another one with --python")


def test_a_command_that_keeps_the_input_to_itself(launchpad: Launchpad) -> None:
    docker = launchpad.folder / "docker"
    docker.write_text('#!/bin/sh\nshift 2\nexec "$@" </dev/null\n')
    docker.chmod(0o755)
    assert refusal(launchpad.run("run", "--enter", f"{docker} exec train", "true")) == WHERE + (
        f"enter: {docker} exec train doesn't pass standard input on; docker and podman need -i"
    )


def test_a_command_that_leads_nowhere(launchpad: Launchpad) -> None:
    assert refusal(launchpad.run("run", "--enter", "echo", "true")).startswith(f"{WHERE}enter: echo exited with code 0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--enter", "docker 'exec"], "--enter docker 'exec: no closing quotation; quote it as in a shell"),
        (["--enter", " "], "--enter is empty; give a command like 'docker exec -i NAME', or leave it out"),
        (
            ["--enter", "env", "--nnodes", "2", "--node-rank", "0"],
            "--node-rank is for launchpads started on each node",
        ),
        (["--enter", "env", "--ssh", "openssh"], "--ssh needs hosts; name them with --hosts or --hostfile"),
        (["--ssh", "openssh"], "--ssh needs hosts; name them with --hosts or --hostfile"),
        (["--ssh", "telnet"], "--ssh: 'telnet' is not one of 'paramiko', 'openssh'"),
    ],
)
def test_one_sentence_and_code_2(launchpad: Launchpad, words: list[str], message: str) -> None:
    done = launchpad.run("run", *words, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launchpad: error: {message}")
    assert done.stderr.count("\n") == 1


def test_a_command_that_hangs_is_ended_by_ctrl_c(launchpad: Launchpad) -> None:
    hangs = launchpad.folder / "hangs"
    hangs.write_text("#!/bin/sh\ntouch began\nsleep 600\n")
    hangs.chmod(0o755)
    process = launchpad.start("run", "--enter", hangs, "true")
    wait_until((launchpad.folder / "began").exists, "the command")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    wait_until(lambda: not launchpad.survivors(), "it to end", show=launchpad.survivors)


# On hosts.


@needs_sshd
@needs_unshare
@needs_sshd
@both_ways
def test_a_host_leaves_a_file_to_the_next_command_of_a_loop(launchpad: Launchpad, hosts: Hosts) -> None:
    options = ("--ssh-config", hosts.ssh_config, *hosts.way, "-H", "n1")
    assert turns(launchpad, *options, does="echo $0") == ["[0] a", "[0] b", "[0] c"]


@both_ways
def test_containers_on_hosts_and_here(launchpad: Launchpad, box: Box, hosts: Hosts) -> None:
    names = ("RANK", "IN_BOX", "SSH_CONNECTION")
    done = hosts.run(launchpad, "-H", "n1,localhost", "--enter", box.words, "--sync", "show.py", *names)
    # One machine here, but each box has its own processes and files.
    shown = [line.rpartition(" ")[0] for line in lines(done)]
    assert shown == ["[localhost 1] 1 yes -", "[n1        0] 0 yes -"]


@needs_sshd
@both_ways
def test_the_words_pass_a_login_shell_unharmed(launchpad: Launchpad, hosts: Hosts) -> None:
    value = 'it\'s "all" $HOME `here` \\'
    done = hosts.run(launchpad, "-H", "n1", "--enter", shlex.join(["env", f"A={value}"]), "printenv", "A")
    assert lines(done) == [f"[0] {value}"]


@needs_sshd
@both_ways
def test_what_fails_on_a_host_is_told(launchpad: Launchpad, hosts: Hosts) -> None:
    line = refusal(hosts.run(launchpad, "-H", "n1", "--enter", "dockr exec", "true"))
    assert re.fullmatch(
        r"n1  enter: dockr exec exited with code 127 before the agent started \(.*dockr: not found\); is the program "
        r"there, and what it enters running\?",
        line,
    )
    line = refusal(hosts.run(launchpad, "-H", "n1", "--enter", "env", "--python", "/no/python", "true"))
    assert line.startswith("n1  no Python: can't run /no/python there (/bin/sh: ")
    assert "launchpad-entered" not in line


@needs_sshd
@both_ways
def test_an_interpreter_at_the_same_path_inside(launchpad: Launchpad, hosts: Hosts) -> None:
    code = "import sys; print(sys.executable)"
    assert lines(hosts.run(launchpad, "-H", "n1", "--enter", "env", sys.executable, "-c", code)) == [
        f"[0] {sys.executable}"
    ]


# Roles.


ROLES = """
[jobs.j.roles.a]
target = ["show.py", "RANK", "WORLD_SIZE", "LAUNCHPAD_REPLICA", "IN_BOX"]
nproc = 2
replicas = 2

[jobs.j.roles.b]
target = ["show.py", "RANK", "WORLD_SIZE", "LAUNCHPAD_REPLICA", "IN_BOX"]
"""


@needs_unshare
def test_worlds_run_inside(launchpad: Launchpad, box: Box) -> None:
    """Each in a copy of the folder; none has its agent outside."""
    (launchpad.folder / "job.toml").write_text(ROLES)
    done = launchpad.run("run", "--config", "job.toml", "--job", "j", "--enter", box.words, "--sync")
    found = [line.rsplit(" ", 1) for line in lines(done)]
    assert [shown for shown, _ in found] == [
        *(f"[a.{replica} {rank}] {rank} 2 {replica} yes" for replica in range(2) for rank in range(2)),
        "[b   0] 0 1 0 yes",
    ]
    assert {Path(folder).parent for _, folder in found} == {box.home / ".cache" / "launchpad"}


@needs_unshare
@needs_sshd
@both_ways
def test_worlds_run_inside_on_hosts(launchpad: Launchpad, box: Box, hosts: Hosts) -> None:
    (launchpad.folder / "job.toml").write_text(f'[jobs.j]\nhosts = "n1:3,n2:2"\n{ROLES}')
    done = hosts.run(launchpad, "--config", "job.toml", "--job", "j", "--enter", box.words, "--sync")
    assert [line.rsplit(" ", 1)[0] for line in lines(done)] == [
        *(f"[a.{replica} {rank}] {rank} 2 {replica} yes" for replica in range(2) for rank in range(2)),
        "[b   0] 0 1 0 yes",
    ]
