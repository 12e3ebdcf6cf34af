"""Roles over hosts: who runs where, how they find each other, restarts, and a host that is lost under two roles."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.hosts import hosts as hosts
from tests.support.needs import needs_torch
from tests.support.sshd import needs_sshd

pytestmark = [needs_sshd, pytest.mark.usefixtures("from_image")]

SERVE = """\
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        self.send_response(200)
        self.end_headers()
        self.wfile.write((os.environ["TMPDIR"] + " " + os.environ["TORCHELASTIC_RESTART_COUNT"]).encode())
    def log_message(self, *_):
        pass
HTTPServer(("", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler).serve_forever()
"""

# Asks all servers, has the first one die, and asks it until it is back.
ASK = """\
import os, time, urllib.request
places = os.environ["LAUNCHPAD_SERVE_HTTP"].split(",")
def ask(place, path="/"):
    return urllib.request.urlopen(f"http://{place}{path}", timeout=30).read().decode()
if os.environ["RANK"] == "0":
    print(*(ask(place) for place in places))
    try:
        ask(places[0], "/die")
    except OSError:
        pass
    deadline = time.monotonic() + 60
    while True:
        try:
            print("then", ask(places[0]))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
"""

FILE = """
[jobs.j.roles.serve]
target = "serve.py"
hosts = ["n1", "n2"]
replicas = 2
service = true
ports = ["http"]
ready = "http:/"
max-restarts = 1

[jobs.j.roles.ask]
target = "ask.py"
nproc = 3
after = "serve"
"""


def run(launchpad: Launchpad, hosts: Hosts, *args: object) -> subprocess.CompletedProcess[str]:
    return hosts.run(launchpad, "--config", "job.toml", "--job", "j", *args)


def write(launchpad: Launchpad, text: str = FILE, **files: str) -> None:
    (launchpad.folder / "job.toml").write_text(text)
    for name, content in {"serve": SERVE, "ask": ASK, **files}.items():
        (launchpad.folder / f"{name}.py").write_text(content)


def test_roles_find_each_other_over_hosts_and_a_replica_starts_again(launchpad: Launchpad, hosts: Hosts) -> None:
    write(launchpad)
    n1, n2, _ = (hosts.scratch[host] for host in hosts.hosts)
    done = run(launchpad, hosts, "-H", "n2:2,n3:2")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line for line in lines if "then" in line] == [f"[ask     0] then {n1} 1"]
    assert f"[ask     0] {n1} 0 {n2} 0" in lines
    assert "failed: serve.0 rank 0 on n1, exit code 7" in done.stderr


def test_a_dry_run_draws_who_is_where(launchpad: Launchpad, hosts: Hosts) -> None:
    write(launchpad)
    done = run(launchpad, hosts, "-H", "n2:2,n3:2", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:6] == [
        "role serve.0: rank 0 of the job",
        "role serve.1: rank 1 of the job",
        "role ask: ranks 2-4 of the job",
        "host n1  serve.0 rank 0",
        "host n2  serve.1 rank 0, ask ranks 0-1",
        "host n3  ask rank 2",
    ]


@needs_torch
def test_a_world_over_two_hosts_beside_another(launchpad: Launchpad, hosts: Hosts) -> None:
    group = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(1)\n"
        "dist.all_reduce(ones)\nprint('sum', int(ones))\ndist.destroy_process_group()\n"
    )
    write(launchpad, '[jobs.j]\nhosts = "n1:2,n2:2"\n[jobs.j.roles.a]\ntarget = "group.py"\nnproc = 1\n'
        '[jobs.j.roles.b]\ntarget = "group.py"\nnproc = 3\n', group=group)  # fmt: skip
    done = run(launchpad, hosts)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] sum 1", *(f"[b {rank}] sum 3" for rank in range(3))]


def test_a_lost_host_under_two_roles_is_one_sentence(launchpad: Launchpad, hosts: Hosts) -> None:
    write(
        launchpad,
        '[jobs.j]\nhosts = "n1:3,n2:1"\n[jobs.j.roles.a]\ntarget = "rest.py"\nnproc = 2\n'
        '[jobs.j.roles.b]\ntarget = "rest.py"\nnproc = 2\n',
        rest="import time\nprint('runs', flush=True)\ntime.sleep(1000)\n",
    )
    seen = launchpad.folder / "out"
    with seen.open("wb") as out:
        job = hosts.begin(launchpad, "--config", "job.toml", "--job", "j", stdout=out)
        wait_until(lambda: seen.read_bytes().count(b"runs") == 4, "the ranks to run")
        hosts.cut_power(1)
        _, said = job.communicate(timeout=DEADLINE)
    assert job.returncode == 4, said
    assert said.count(b"n1 was lost") == 1, said.decode()
    assert b"it was running a ranks 0-1, b rank 0\n" in said, said.decode()
    assert json.loads(launchpad.run("why", "--json").stdout)["exit_code"] == 4


def test_a_host_of_several_worlds_that_can_not_be_reached_is_one(launchpad: Launchpad, hosts: Hosts) -> None:
    write(launchpad, '[jobs.j]\nhosts = "n2:2"\n[jobs.j.roles.ask]\ntarget = "ask.py"\nreplicas = 2\n')
    hosts.cut_power(2)
    done = run(launchpad, hosts)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("launchpad: error: the only host can't take part, so nothing was started:\n  n2  ")


def test_what_hosts_can_not_give_is_one_sentence(launchpad: Launchpad, hosts: Hosts) -> None:
    for options, text, said in (
        (("-H", "n1:2"), 'nproc = 3\n', "jobs.j.roles.ask: it needs 3 ranks, and the job's hosts have 2; write HOST:N"),
        ((), 'hosts = "n1,n2"\nreplicas = 3\n', "3 replicas can't share the 2 ranks of its hosts evenly"),
        (("-H", "n1:2"), 'nproc = "cpu"\n', "jobs.j.roles.ask, nproc: cpu has to be a number on hosts"),
        ((), 'hosts = "n1::2"\n', "jobs.j.roles.ask, hosts: "),
        (("-H", "n1:2", "--spares", "1"), "", "--spares can't be combined with roles"),
    ):  # fmt: skip
        write(launchpad, f'[jobs.j.roles.ask]\ntarget = "ask.py"\n{text}')
        done = run(launchpad, hosts, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert said in done.stderr


def test_each_role_runs_in_its_own_interpreter(launchpad: Launchpad, hosts: Hosts, tmp_path: Path) -> None:
    """With --enter too; one that a host lacks is missed."""
    venv.create(tmp_path / "venv", symlinks=True)
    own = tmp_path / "venv" / "bin" / "python"
    text = '[jobs.j.roles.a]\ntarget = "show.py"\n[jobs.j.roles.b]\ntarget = "show.py"\npython = "{}"\n'
    write(launchpad, text.format(own), show="import sys; print(sys.executable)")
    for more in ([], ["--enter", "env"]):
        done = run(launchpad, hosts, "-H", "n1:2", *more)
        assert sorted(done.stdout.splitlines()) == [f"[a 0] {sys.executable}", f"[b 0] {own}"], done.stderr
    write(launchpad, text.format("/no/python"))
    done = run(launchpad, hosts, "-H", "n1:2")
    assert (done.returncode, done.stdout) == (3, "")
    assert "n1  no Python: can't run /no/python there" in done.stderr
