"""`launchpad run --hosts`: ranks on several hosts, each behind an sshd of its own on a loopback address."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import paramiko
import pytest

from launchpad.errors import ConnectError, NodeError, UsageError
from launchpad.head.node_facts import check_machines, check_nodes
from launchpad.protocol.events import NodeFacts
from launchpad.transport.ssh import handover
from launchpad.transport.ssh.bundle import Startup, digest, packed
from launchpad.transport.ssh.config import SshConfig
from launchpad.transport.ssh.connection_pool import ConnectionPool
from launchpad.transport.ssh.link import SshLink
from launchpad.transport.ssh.openssh import OpenSsh
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import SHOW, Hosts, lines
from tests.support.hosts import hosts as hosts
from tests.support.needs import needs_torch
from tests.support.sshd import needs_sshd

pytestmark = [needs_sshd, pytest.mark.usefixtures("from_image")]

both_ways = pytest.mark.parametrize("hosts", ["paramiko", "openssh"], indirect=True)


@both_ways
def test_ranks_are_numbered_over_the_hosts_in_their_order(launchpad: Launchpad, hosts: Hosts) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
    assert lines(hosts.run(launchpad, "--hosts", "n2:1,n1:2", "show.py", *names)) == [
        "[n1 1] 1 0 3 2 1 2",
        "[n1 2] 2 1 3 2 1 2",
        "[n2 0] 0 0 3 1 0 2",
    ]


def test_a_host_gets_as_many_ranks_as_nproc_says(launchpad: Launchpad, hosts: Hosts) -> None:
    assert lines(hosts.run(launchpad, "-n", 2, "-H", "n1,n2", "show.py", "RANK")) == [
        "[n1 0] 0", "[n1 1] 1", "[n2 2] 2", "[n2 3] 3",
    ]  # fmt: skip


def test_one_host_alone_is_a_world_on_its_loopback_address(launchpad: Launchpad, hosts: Hosts) -> None:
    assert lines(hosts.run(launchpad, "-H", "n1:2", "show.py", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")) == [
        "[0] 127.0.0.1 -", "[1] 127.0.0.1 -",
    ]  # fmt: skip


@both_ways
def test_several_hosts_meet_at_an_address_that_is_no_name(launchpad: Launchpad, hosts: Hosts) -> None:
    done = lines(
        hosts.run(launchpad, "-H", "n1,n2", "show.py", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    )
    (_, _, address, gloo, nccl), other = done[0].split(), done[1].split()
    assert re.fullmatch(r"[0-9.]+|[0-9a-f:]+", address)
    assert nccl == f"={gloo}"
    assert other[2] == address


def test_an_interface_that_the_user_has_chosen_stays(launchpad: Launchpad, hosts: Hosts) -> None:
    launchpad.environ["GLOO_SOCKET_IFNAME"] = "mine"
    done = hosts.run(launchpad, "-q", "-H", "n1,n2", "show.py", "GLOO_SOCKET_IFNAME")
    assert lines(done) == ["[n1 0] mine", "[n2 1] mine"]


def test_several_programs_each_have_their_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK LR".split()
    done = hosts.run(
        *(launchpad, "-H", "n1:1", "show.py", *names, ":", "-H", "n1:1,n2:1", "-x", "LR=1", "show.py", *names),
        *(":", "-n", 2, "-H", "n3", "sh", "-c", "echo $RANK $LOCAL_RANK"),
    )
    assert lines(done) == [
        "[n1 show.py 0] 0 0 5 0 -",
        "[n1 show.py 1] 1 1 5 0 1",
        "[n2 show.py 2] 2 0 5 1 1",
        "[n3 sh      3] 3 0",
        "[n3 sh      4] 4 1",
    ]
    done = hosts.run(launchpad, "-H", "n1,n2", "show.py", ":", "-H", "n1", "show.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "program 2 has ranks on n1, and so has one before it" in done.stderr
    done = hosts.run(launchpad, "-H", "n1", "show.py", ":", "-H", "n2", "-n", 1, "sh", ":", "-H", "n2", "./gone")
    assert done.returncode == 3
    assert re.search("n2  no such program: .*/gone is not there", done.stderr)


@both_ways
def test_this_machine_may_be_one_of_them(launchpad: Launchpad, hosts: Hosts) -> None:
    assert (
        lines(hosts.run(launchpad, "-H", "localhost,n1", "show.py", "RANK", "SSH_CONNECTION"))[0] == "[localhost 0] 0 -"
    )
    assert (
        lines(hosts.run(launchpad, "-H", "n1,localhost", "show.py", "RANK", "SSH_CONNECTION"))[0] == "[localhost 1] 1 -"
    )


def test_a_hostfile(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "hosts.txt").write_text("# mine\nn1 slots=2\nn2:1\nn3\n")
    done = hosts.run(launchpad, "--hostfile", "hosts.txt", "--exclude", "n3", "show.py", "RANK")
    assert lines(done) == ["[n1 0] 0", "[n1 1] 1", "[n2 2] 2"]
    (launchpad.folder / "hosts.txt").write_text("n1\nn2 slots=none\n")
    done = hosts.run(launchpad, "--hostfile", "hosts.txt", "show.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hosts.txt, line 2" in done.stderr


def test_a_hostfile_without_a_name_is_not_taken_for_none(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--hostfile", "", "echo", "ran here")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "launchpad: error: --hostfile : No such file or directory; give a file with one host per line\n"
    )


def test_what_would_run_is_shown_by_host(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1:2,n2", "--dry-run", "--json", "show.py")
    plan = json.loads(done.stdout)
    assert [(node["name"], len(node["ranks"])) for node in plan["nodes"]] == [("n1", 2), ("n2", 1)]


# The end.


@both_ways
def test_a_rank_that_fails_ends_all_and_is_named_with_its_host(launchpad: Launchpad, hosts: Hosts) -> None:
    launchpad.use_no_images()
    (launchpad.folder / "fails.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '2': sys.exit('the last words')\n"
        "open('stays' + os.environ['RANK'], 'w').close()\ntime.sleep(600)\n"
    )
    done = hosts.run(launchpad, "-H", "n1:2,n2:2", "fails.py")
    assert done.returncode == 1
    assert "launchpad: rank 2 on n2 failed first: exit code 1" in done.stderr
    assert "launchpad:     the last words" in done.stderr
    assert not launchpad.survivors()


def test_a_rank_that_can_not_be_started_there(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1,n2", "no-such-program")
    assert done.returncode == 3
    assert "  n2  no such program: no-such-program is not on PATH" in done.stderr
    (launchpad.folder / "broken").write_text("#!/no/such/interpreter\n")
    (launchpad.folder / "broken").chmod(0o755)
    done = hosts.run(launchpad, "-H", "n1,n2", "./broken")
    assert done.returncode == 2
    assert "could not be started: can't execute " in done.stderr


def test_restarts_over_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "flaky.py").write_text(
        "import os, sys\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1' else 0)\n"
    )
    done = hosts.run(launchpad, "-H", "n1,n2", "--max-restarts", 1, "flaky.py")
    assert done.returncode == 0
    assert "failed: rank 1 on n2, exit code 3" in done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.endswith(" 1")) == ["[n1 0] 1", "[n2 1] 1"]


@both_ways
def test_a_lost_host_that_comes_back_is_part_of_the_next_attempt(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "waits.py").write_text(
        "import os, time\nrank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open('here' + rank + attempt, 'w').close()\nprint('attempt', attempt)\n"
        "while attempt == '0': time.sleep(0.01)\n"
    )
    process = hosts.begin(launchpad, "-H", "n1,n2", "--max-restarts", 1, "waits.py", stderr=subprocess.STDOUT)
    wait_until(lambda: all((launchpad.folder / f"here{rank}0").exists() for rank in range(2)), "the ranks")
    hosts.cut_power(2)
    hosts.hosts[1].start()
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    why = b"ssh ended: .*" if "openssh" in hosts.way else b"its agent hung up"
    note = rb"launchpad: failed: n2 was lost \(" + why + rb"\); restarting all ranks \(restart 1 of 1\)"
    assert re.search(note, output), output
    assert output.count(b"attempt 1") == 2


def test_a_lost_host_ends_the_job_with_4(launchpad: Launchpad, hosts: Hosts) -> None:
    launchpad.use_no_images()
    process = hosts.begin(launchpad, "-H", "n1,n2:2", "sh", "-c", "echo here; exec sleep 600")
    for _ in range(3):
        assert process.stdout.readline().endswith(b"here\n")
    hosts.cut_power(2)
    _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors.splitlines()[:-2]) == (
        4,
        [
            b"launchpad: n2 was lost: its agent hung up; it was running ranks 1-2",
            b"launchpad: stopped because of it: rank 0",
        ],
    )
    assert not launchpad.survivors()


@both_ways
def test_rank_0_reads_our_standard_input(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "reads.py").write_text(
        "import hashlib, os, sys\nread = sys.stdin.buffer.read()\nprint(len(read), hashlib.md5(read).hexdigest())\n"
    )
    data = os.urandom(3 << 20).hex()
    done = hosts.run(launchpad, "-H", "n1,n2", "reads.py", input=data)
    assert lines(done) == [
        f"[n1 0] {len(data)} {hashlib.md5(data.encode()).hexdigest()}",
        f"[n2 1] 0 {hashlib.md5().hexdigest()}",
    ]


def test_the_end_of_our_standard_input_is_told_to_a_rank_0_that_is_back(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "reads.py").write_text(
        "import os, sys, time\nprint(len(sys.stdin.read()))\n"
        "while os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(0.01)\n"
    )
    process = hosts.begin(launchpad, "-H", "n1", "--max-restarts", 1, "reads.py")
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] 0\n"
    hosts.cut_power(1)
    hosts.hosts[0].start()
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, b"[0] 0\n"), errors


def test_a_rank_that_never_reads_holds_nobody_up(launchpad: Launchpad, hosts: Hosts) -> None:
    rank = "until test -e go; do sleep 0.01; done; echo done"
    process = hosts.begin(launchpad, "-H", "n1", "sh", "-c", rank, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"x" * (65536 + 4096))
    process.stdin.flush()  # more than a pipe takes, so launchpad has read some
    (launchpad.folder / "go").touch()
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (0, b"[0] done\n"), err
    assert re.fullmatch(rb"launchpad: read \d+ bytes of standard input that no rank used; .*\n", err)


def test_files_of_all_hosts_come_together(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1,n2", "-r", "3", "--log-dir", "logs", "show.py", "RANK")
    assert (done.returncode, done.stdout) == (0, "")
    found = {path.parent.name: path.read_text() for path in launchpad.folder.glob("logs/*/attempt_0/*/stdout.log")}
    assert found == {"0": "0\n", "1": "1\n"}


# What they are given.


@both_ways
def test_variables_travel_in_a_frame_and_on_no_command_line(launchpad: Launchpad, hosts: Hosts) -> None:
    launchpad.environ |= {"NCCL_DEBUG": "WARN", "MY_A": "1", "MY_B": "2", "OWN": "stays"}
    (launchpad.folder / "waits.py").write_text(
        SHOW + "open('here', 'w').close()\nwhile not os.path.exists('go'): pass\n"
    )
    names = "TOKEN NCCL_DEBUG MY_A MY_B OWN".split()
    (launchpad.folder / "env").write_text("TOKEN=hunter2\n")
    process = hosts.begin(launchpad, "-H", "n1", "--env-file", "env", "-x", "MY_*", "waits.py", *names)
    wait_until((launchpad.folder / "here").exists, "the rank")
    shown = "\n".join(launchpad.survivors())
    assert "launchpad-agent" in shown
    assert "hunter2" not in shown
    (launchpad.folder / "go").touch()
    assert process.communicate(timeout=DEADLINE) == (b"[0] hunter2 WARN 1 2 -\n", b"")


def test_ranks_run_in_the_same_folder_with_the_same_interpreter(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "where.py").write_text("import os, sys\nprint(os.getcwd(), sys.executable)\n")
    done = lines(hosts.run(launchpad, "-H", "n1", "where.py"))
    assert done == [f"[0] {launchpad.folder} {sys.executable}"]


def test_a_folder_that_is_not_there(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1,n2", "--wdir", "/no/such/folder", "true")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "launchpad: error: 2 of 2 hosts can't take part, so nothing was started:\n"
        "  n1  no such folder: there is no folder /no/such/folder\n"
        "  n2  no such folder: there is no folder /no/such/folder\n"
        "launchpad: give --wdir a folder that exists on all hosts, or copy this one with --sync\n"
    )


@both_ways
def test_a_python_that_is_not_there(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1", "--python", "/no/python", "show.py")
    assert done.returncode == 3
    assert "n1  no Python: can't run /no/python there" in done.stderr


def test_a_python_that_is_not_there_is_told_however_soon_the_host_hangs_up(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = paramiko.Channel.sendall

    def send_late(channel: paramiko.Channel, data: bytes) -> None:
        wait_until(lambda: channel.closed, "the end of the channel")
        send(channel, data)

    monkeypatch.setattr(paramiko.Channel, "sendall", send_late)
    pool = ConnectionPool(SshConfig(str(hosts.ssh_config)))
    with pytest.raises(ConnectError, match=r"^n1: no Python: can't run /no/python there"):
        SshLink("n1", pool.connect("n1"), Startup("/no/python", exact=True))
    pool.close()


def play_old(python: Path) -> None:
    """Make it an interpreter that says it is Python 3.8."""
    python.write_text(
        f"#!/bin/sh\nshift 3\nexec {sys.executable} "
        '-c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv.pop(1))" "$@"\n'
    )
    python.chmod(0o755)


@both_ways
def test_a_python_that_is_too_old(launchpad: Launchpad, hosts: Hosts) -> None:
    """Played by the bootstrap itself, to which another version is told."""
    old = launchpad.folder / "old"
    play_old(old)
    done = hosts.run(launchpad, "-H", "n1", "--python", old, "show.py")
    assert done.returncode == 3
    assert re.search(
        r"n1  no Python: its Python \(.*\) is 3\.8, and launchpad needs 3\.10 or newer: name ", done.stderr
    )


@both_ways
def test_one_host_of_several_that_can_not_be_reached(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.hosts[1].stop()
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "touch", "started")
    assert done.returncode == 3
    assert done.stderr.startswith(
        "launchpad: error: 1 of 3 hosts can't take part, so nothing was started:\n  n2  refused: "
    )
    assert not (launchpad.folder / "started").exists()


@both_ways
def test_a_wrong_ssh_config_is_one_sentence_however_many_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.configure("Bogus yes")
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "true")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr == (
        f"launchpad: error: ssh's configuration of n1: {hosts.ssh_config}: line 1: Bad configuration option: bogus; "
        f"correct it and try ssh -G -F {hosts.ssh_config} n1\n"
    )


@both_ways
def test_ctrl_c_while_a_match_exec_hangs(launchpad: Launchpad, hosts: Hosts) -> None:
    started = launchpad.folder / "started"
    hosts.configure(f'Match exec "touch {started}; sleep 600"\n')
    process = hosts.begin(launchpad, "-H", "n1,n2", "true")
    wait_until(started.exists, "the Match exec to run")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130


def test_two_names_of_one_machine_are_refused(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.configure(f"Host other\n  HostName 127.0.0.2\n  Port {hosts.hosts[0].port}\n")
    done = hosts.run(launchpad, "-H", "n1:2,other:2", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("launchpad: error: n1 and other are one machine; name it once")


def test_a_shell_that_greets(launchpad: Launchpad, tmp_path: Path) -> None:
    greeting = 'ForceCommand echo "Welcome to $HOSTNAME, have mail"; echo "and more" >&2; eval "$SSH_ORIGINAL_COMMAND"'
    with Hosts(launchpad, tmp_path / "ssh", greeting) as hosts:
        assert lines(hosts.run(launchpad, "-H", "n1", "echo", "hello")) == ["[0] hello"]


def test_an_account_without_a_shell(launchpad: Launchpad, tmp_path: Path) -> None:
    with Hosts(launchpad, tmp_path / "ssh", "ForceCommand echo This account is not available.; exit 1") as hosts:
        done = hosts.run(launchpad, "-H", "n1", "true")
    assert done.returncode == 3
    assert "n1  protocol: its shell exited with code 1 before the agent started" in done.stderr
    assert "This account is not available." in done.stderr


@both_ways
@pytest.mark.parametrize("kind", ["hangs", "hangs, ignores HUP", "stays", "leaves a child"])
def test_a_proxy_command_does_not_outlive_us(launchpad: Launchpad, hosts: Hosts, kind: str) -> None:
    """Whether it connects or not, it ignores the end of its input, or is a script; the test's end finds its remains."""
    nc = f"import socket, os, threading, sys; s = socket.create_connection(('127.0.0.2', {hosts.hosts[0].port}))"
    (launchpad.folder / "nc.py").write_text(
        f"{nc}\ndef up():\n  while d := os.read(0, 65536): s.sendall(d)\n"
        "threading.Thread(target=up).start()\nwhile d := s.recv(65536): os.write(1, d)\n"
        + ("import time; time.sleep(600)\n" if kind == "stays" else "os._exit(0)\n")
    )
    hangs = kind.startswith("hangs")
    trap = 'trap "" HUP; ' if kind.endswith("HUP") else ""
    aside = "sleep 600 <&- >&- 2>&- & " if kind == "leaves a child" else ""
    proxy = f"{trap}touch began; sleep 600" if hangs else f"{aside}{sys.executable} nc.py"
    hosts.configure(f"Host by\n  HostName 127.0.0.2\n  Port {hosts.hosts[0].port}\n  ProxyCommand sh -c '{proxy}'\n")
    process = hosts.begin(launchpad, "-H", "by", "echo", "hello")
    if hangs:
        wait_until((launchpad.folder / "began").exists, "the command")
        process.terminate()
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == ((143, b"") if hangs else (0, b"[0] hello\n")), errors


# The agent that is sent.


@both_ways
def test_the_agent_is_sent_once_and_kept_private(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.forget_agent()
    assert lines(hosts.run(launchpad, "-H", "n1", "true")) == []
    (kept,) = (hosts.cache / "launchpad").iterdir()
    assert kept.name == f"agent-{digest()}"
    assert (hosts.cache / "launchpad").stat().st_mode & 0o777 == 0o700
    before = kept.stat().st_ino
    assert lines(hosts.run(launchpad, "-H", "n1,n2", "true")) == []
    assert kept.stat().st_ino == before


def test_a_cache_that_others_may_write_to_is_not_used(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.forget_agent()
    (hosts.cache / "launchpad").mkdir(parents=True)
    (hosts.cache / "launchpad").chmod(0o777)
    assert lines(hosts.run(launchpad, "-H", "n1", "true")) == []
    assert not list((hosts.cache / "launchpad").iterdir())


@needs_torch
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_ranks_find_our_launchpad_where_none_is_installed(launchpad: Launchpad, hosts: Hosts, method: str) -> None:
    """Played by a Python that does not see the installed one, but torch."""
    site = Path(importlib.util.find_spec("torch").origin).parents[1]
    paths = launchpad.folder / "paths"
    paths.mkdir()
    for name in os.listdir(site):
        if not re.match("_*(editable_*)*launchpad|.*[.]pth$", name):
            (paths / name).symlink_to(site / name)
    (launchpad.folder / "imports.py").write_text("import torch, launchpad\nprint(launchpad.__file__)\n")
    venv = launchpad.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=DEADLINE)
    (next(venv.glob("lib/python3*/site-packages")) / "torch.pth").write_text(f"{paths}\n")
    python = venv / "bin" / "python"
    (line,) = lines(hosts.run(launchpad, "-H", "n1", "--python", python, "--start-method", method, "imports.py"))
    assert line.startswith(f"[0] {hosts.cache}/launchpad/agent-")
    assert line.endswith("/for_ranks/launchpad/__init__.py")
    source = "import os\ndef unused():\n    import torch\nprint(os.environ.get('PYTHONPATH'))\n"
    (launchpad.folder / "path.py").write_text(source)
    assert lines(hosts.run(launchpad, "-H", "n1", "--python", python, "--no-hooks", "path.py")) == ["[0] None"]


def test_a_host_where_the_agent_has_no_room(tmp_path: Path) -> None:
    """Folders can be made there, and files of more than a few KiB can't; the next place is no better."""
    places = [str(tmp_path / name) for name in "ab"]
    code = f"import io; from launchpad.transport.ssh import bootstrap; bootstrap._bases = lambda: {places}\n"
    code += "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nbootstrap.main(io.FileIO(0))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        input=f"{digest()} {{}}\n".encode() + packed(),
        capture_output=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout) == (1, b"\0launchpad need\n")
    tried = "; ".join(f"{place}: File too large" for place in places)
    assert done.stderr.decode() == (
        f"can't store the agent ({tried}); free some space, or provide a writable home directory"
    )
    assert [os.listdir(place) for place in places] == [[], []]


def test_the_last_words_of_a_node_that_never_answers(launchpad: Launchpad, hosts: Hosts) -> None:
    python = launchpad.folder / "python"
    python.write_text("#!/bin/sh\nprintf '\\0launchpad have\\n'; echo no room >&2\n")
    python.chmod(0o755)
    done = hosts.run(launchpad, "-H", "n1", "--python", python, "true")
    assert done.returncode == 3
    assert done.stderr == "launchpad: error: n1: the agent ended before any rank was started: it said: no room\n"


def test_a_cache_that_can_only_be_read(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.forget_agent()
    assert lines(hosts.run(launchpad, "-H", "n1", "true")) == []
    (kept,) = (hosts.cache / "launchpad").iterdir()
    script = f"import os, sys; from launchpad.transport.ssh import bootstrap; bootstrap._keep({str(kept)!r})"
    refuse = "def no(*_): raise OSError(30, 'Read-only file system')\nimport os; os.utime = no\n"
    done = subprocess.run([sys.executable, "-c", refuse + script], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", ["paramiko", "openssh"])
def test_hosts_without_the_interpreter_are_named_once(launchpad: Launchpad, tmp_path: Path, way: str) -> None:
    """Played by a shell that changes its path in the command."""
    shell = tmp_path / "shell"
    hidden = sys.executable.replace("/", "\\/")
    shell.write_text(f'#!/bin/sh\neval "$(echo "$SSH_ORIGINAL_COMMAND" | sed "s/{hidden}/\\/gone/g")"\n')
    shell.chmod(0o755)
    (launchpad.folder / "hello.py").write_text("print('hello')\n")
    with Hosts(launchpad, tmp_path / "ssh", f"ForceCommand {shell}") as hosts:
        hosts.way = ("--ssh", way)
        done = hosts.run(launchpad, "-H", "n1,n2", "hello.py")
        planned = hosts.run(launchpad, "-H", "n1", "--dry-run", "hello.py")
        silent = [
            hosts.run(launchpad, "-H", "n1", *words)
            for words in (["echo", "hello"], ["--python", "python3", "hello.py"])
        ]
    assert (done.returncode, planned.returncode) == (0, 0), done.stderr + planned.stderr
    text = rf"launchpad: %s no {sys.executable}: %s ranks run in /.*python3 \(Python 3[.0-9]+\); --sync-env gives .*\n"
    assert re.fullmatch(text % ("n1 and n2 have", "their"), done.stderr)
    assert re.fullmatch(text % ("n1 has", "its"), planned.stderr)
    assert [lines(one) for one in silent] == [["[0] hello"]] * 2


@pytest.mark.parametrize("way", ["paramiko", "openssh"])
def test_a_python3_that_is_too_old_gives_way_to_a_newer_one(launchpad: Launchpad, tmp_path: Path, way: str) -> None:
    """Where PATH has both, and this machine's interpreter is not there."""
    names, hidden = tmp_path / "bin", sys.executable.replace("/", "\\/")
    names.mkdir()
    (launchpad.folder / "show.py").write_text(SHOW)
    play_old(names / "python3")
    newer = names / f"python3.{sys.version_info[1]}"
    newer.write_text(f'#!/bin/sh\nexport NEWER=yes; exec {sys.executable} "$@"\n')
    newer.chmod(0o755)
    shell = tmp_path / "shell"
    shell.write_text(
        f'#!/bin/sh\nexport PATH={names}:$PATH\neval "$(echo "$SSH_ORIGINAL_COMMAND" | sed "s/{hidden}/\\/gone/g")"\n'
    )
    shell.chmod(0o755)
    with Hosts(launchpad, tmp_path / "ssh", f"ForceCommand {shell}") as hosts:
        hosts.way = ("--ssh", way)
        assert lines(hosts.run(launchpad, "-H", "n1", "show.py", "NEWER")) == ["[0] yes"]


ASKS = """sh -c 'printf "Continue? "; while read -r x; do :; done'"""


@pytest.mark.parametrize("way", ["paramiko", "openssh"])
@pytest.mark.parametrize(
    ("forced", "seconds", "said"),
    [
        ("cat", 1, ["; is the host"]),
        ("yes", 1, ["; is the host", " (it said: y); does"]),
        (ASKS, 10, [" (it said: Continue?); does"]),  # it must have been started by then
    ],
    ids=["echoes", "prints for ever", "asks"],
)
def test_a_host_that_runs_something_else(
    launchpad: Launchpad,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forced: str,
    seconds: int,
    said: list[str],
    way: str,
) -> None:
    monkeypatch.setattr(handover, "START_SECONDS", seconds)
    with Hosts(launchpad, tmp_path / "ssh", f"ForceCommand {forced}") as hosts:
        config = SshConfig(str(hosts.ssh_config))
        pool = ConnectionPool(config)
        ssh = OpenSsh(config, accept_new=False, ask=None)
        connect = {
            "paramiko": lambda startup: SshLink("n1", pool.connect("n1"), startup),
            "openssh": lambda startup: ssh.connect("n1", "", 0, startup),
        }[way]
        with pytest.raises(ConnectError) as caught:
            connect(Startup("python3", exact=True))
        text = f"n1: timed out: the agent did not start within {seconds} s"
        assert any(str(caught.value).startswith(f"{text}{one}") for one in said)
        assert str(caught.value).endswith(" (ForceCommand)?")
        pool.close()


def test_a_host_that_opens_no_session(launchpad: Launchpad, tmp_path: Path) -> None:
    with Hosts(launchpad, tmp_path / "ssh", "MaxSessions 0") as hosts:
        done = hosts.run(launchpad, "-H", "n1", "true")
    assert "n1  protocol: its sshd refused a session (" in done.stderr


# --sync


def test_the_folder_is_sent_and_the_ranks_run_in_the_copy(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "lib").mkdir()
    (launchpad.folder / "lib" / "one.py").write_text("VALUE = 1\n")
    (launchpad.folder / "lib" / "empty.py").touch()
    (launchpad.folder / "link").symlink_to("lib/one.py")
    (launchpad.folder / "run.sh").write_text("#!/bin/sh\ncat link\n")
    (launchpad.folder / "run.sh").chmod(0o755)
    (launchpad.folder / "main.py").write_text(
        "import os, subprocess, lib.one, lib.empty\n"
        "print(os.getcwd(), lib.one.VALUE, subprocess.check_output('./run.sh', text=True).strip())\n"
        "open('result', 'w').write('kept')\n"
    )
    (line,) = lines(hosts.run(launchpad, "-H", "n1", "--sync", launchpad.folder / "main.py"))
    _, folder, value, text = line.split(maxsplit=3)
    assert Path(folder).parent == hosts.cache / "launchpad"
    assert (value, text) == ("1", "VALUE = 1")
    # Only what changed is sent; what went is removed; what the ranks wrote stays.
    before = (Path(folder) / "lib" / "empty.py").stat().st_ino
    (launchpad.folder / "lib" / "one.py").write_text("VALUE = 22\n")
    (launchpad.folder / "run.sh").unlink()
    (launchpad.folder / "link").unlink()
    (launchpad.folder / "link").mkdir()
    (launchpad.folder / "link" / "inner").write_text("x")
    (launchpad.folder / "main.py").write_text("import os, lib.one\nprint(lib.one.VALUE, sorted(os.listdir()))\n")
    (line,) = lines(hosts.run(launchpad, "-H", "n1", "--sync", "main.py"))
    assert line == "[0] 22 ['lib', 'link', 'main.py', 'result', 'show.py']"
    assert (Path(folder) / "lib" / "empty.py").stat().st_ino == before
    assert (Path(folder) / "result").read_text() == "kept"
    assert (Path(folder) / "lib" / "one.py").stat().st_mode & 0o777 == (
        launchpad.folder / "lib" / "one.py"
    ).stat().st_mode & 0o777


def test_too_large_a_folder_is_refused_before_any_host_is_reached(launchpad: Launchpad) -> None:
    with (launchpad.folder / "large").open("wb") as file:
        file.truncate((256 << 20) + 1)
    done = launchpad.run("run", "-H", "nowhere.invalid", "--sync", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("launchpad: error: --sync: ")


def test_what_git_ignores_is_not_sent(launchpad: Launchpad, hosts: Hosts) -> None:
    environ = {**launchpad.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "init", "-q"], cwd=launchpad.folder, env=environ, check=True, timeout=DEADLINE)
    (launchpad.folder / ".gitignore").write_text("data/\n")
    (launchpad.folder / "data").mkdir()
    (launchpad.folder / "data" / "large").write_bytes(bytes(1 << 20))
    (launchpad.folder / "tracked").touch()
    subprocess.run(["git", "add", "tracked"], cwd=launchpad.folder, env=environ, check=True, timeout=DEADLINE)
    assert lines(hosts.run(launchpad, "-H", "n1", "--sync", "ls", "-A")) == [
        "[0] .gitignore", "[0] show.py", "[0] tracked",
    ]  # fmt: skip


@both_ways
def test_a_large_file_arrives_whole_on_all_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    data = os.urandom(1 << 20) * 12
    (launchpad.folder / "large").write_bytes(data)
    program = "import hashlib; print(hashlib.md5(open('large', 'rb').read()).hexdigest())"
    done = hosts.run(launchpad, "-H", "n1,n2,localhost", "--sync", sys.executable, "-c", program)
    assert len({line.split()[-1] for line in lines(done)}) == 1


def test_a_copy_that_has_no_room(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.run(launchpad, "-H", "n1", "--sync", "true")
    (copy,) = (hosts.cache / "launchpad").glob("copy-*[!n]")
    (launchpad.folder / "name").touch()
    (copy / "name").mkdir()
    (copy / "name" / "of the ranks").touch()
    done = hosts.run(launchpad, "-H", "n1", "--sync", "true")
    assert done.returncode == 3
    assert "the only host can't take part" in done.stderr
    assert "Directory not empty" in done.stderr


# torch


@needs_torch
@pytest.mark.parametrize(("hosts", "method"), [("paramiko", "fork"), ("openssh", "exec")], indirect=["hosts"])
def test_gloo_over_hosts_again_and_again(launchpad: Launchpad, hosts: Hosts, method: str) -> None:
    rounds = 3 if method == "fork" else 1
    (launchpad.folder / "sums.py").write_text(
        "import torch, torch.distributed as dist\n"
        f"for _ in range({rounds}):\n    dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x)\n"
        "    dist.barrier(); dist.destroy_process_group()\nprint(x.item())\n"
    )
    done = hosts.run(launchpad, "-H", "n1:2,n2:1", "--start-method", method, "sums.py")
    assert (done.returncode, done.stdout.count("3.0")) == (0, 3), done.stderr


# Whether nodes fit together.


def facts_of(**facts: object) -> NodeFacts:
    return NodeFacts(0, "/usr/bin/python3", "3.11.7", "2.13.0", "", [], "m", [])._replace(**facts)


def test_another_python_or_torch_is_named() -> None:
    names = ["a", "b"]
    check_nodes(names, [facts_of(), facts_of(version="3.11.2")], torch=True)
    with pytest.raises(
        NodeError, match=r"  b  wrong Python: 3\.12 \(/usr/bin/python3\), but a has 3\.11 \(/usr/bin/python3\)"
    ):
        check_nodes(names, [facts_of(), facts_of(version="3.12.0")], torch=False)
    with pytest.raises(NodeError, match=r"  b  wrong torch: none \(/usr/bin/python3\), but a has 2\.13\.0"):
        check_nodes(names, [facts_of(), facts_of(torch="")], torch=True)
    check_nodes(names, [facts_of(), facts_of(torch="")], torch=False)


def test_all_that_is_wrong_with_a_host_is_told_at_once() -> None:
    missing = "no such file: /work/job.py"
    with pytest.raises(NodeError) as caught:
        check_nodes(
            ["a", "b", "c"],
            [facts_of(), facts_of(problems=[missing], torch="2.12.0"), facts_of(version="3.12.0")],
            torch=True,
        )
    assert str(caught.value).splitlines() == [
        "2 of 3 hosts can't take part, so nothing was started:",
        f"  b  {missing}; wrong torch: 2.12.0 (/usr/bin/python3), but a has 2.13.0 (/usr/bin/python3)",
        "  c  wrong Python: 3.12 (/usr/bin/python3), but a has 3.11 (/usr/bin/python3)",
        "copy it there, or the whole folder with --sync; install the same Python, or choose one with --python; install "
        "the same torch, or choose one with --python",
    ]


def test_one_machine_under_two_names() -> None:
    check_machines(["a", "b"], [facts_of(machine="1"), facts_of(machine="2")])
    with pytest.raises(UsageError, match=r"^a and b are one machine"):
        check_machines(["a", "b"], [facts_of(), facts_of()])


@both_ways
def test_work_that_ranks_left_behind_on_hosts_is_not_cut_short(launchpad: Launchpad, hosts: Hosts) -> None:
    work = "import time; time.sleep(0.5); open(f'done-{time.monotonic_ns()}', 'x')"
    (launchpad.folder / "leave.py").write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {work!r}], start_new_session=True)\n"
    )
    done = hosts.run(launchpad, "-H", "n1,n2", "leave.py")
    assert (done.returncode, "killed" in done.stderr) == (0, False), done.stderr
    assert len(list(launchpad.folder.glob("done-*"))) == 2
