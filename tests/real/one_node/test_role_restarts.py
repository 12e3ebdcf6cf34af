"""A world of several starts again alone: who runs on, who waits for it, and what ends it for good."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from launchpad.record.console_record import ConsoleEntry
from tests.support.command import DEADLINE, Launchpad, wait_until

pytestmark = pytest.mark.usefixtures("from_image")

# Says who it is, fails as often as it is told to, once all of its world have begun, and ends with the file "end".
RANK = """\
import os, sys, time
own = os.environ
who = own["LAUNCHPAD_ROLE"], own["LAUNCHPAD_REPLICA"], own["RANK"]
times = int(own["TORCHELASTIC_RESTART_COUNT"])
print("pid", os.getpid(), "start", times, flush=True)
def begun(rank):
    return f"begun-{who[0]}-{who[1]}-{rank}-{times}"
def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)
open(begun(who[2]), "w").close()
role, replica, rank, fails, code = (sys.argv[1:] + ["-"] * 5)[:5]
if who == (role, replica, rank) and times < int(fails):
    for each in range(int(own["WORLD_SIZE"])):
        wait_for(begun(each))
    sys.exit(int(code)) if code != "raise" else 1 / 0
wait_for("end")
"""

FILE = """
[jobs.j.roles.a]
target = ["rank.py", {fails}]
nproc = 2
replicas = 2
max-restarts = {most}
{more}

[jobs.j.roles.b]
target = "rank.py"
"""


def write(launchpad: Launchpad, *fails: object, most: int = 2, more: str = "") -> None:
    words = ", ".join(f'"{word}"' for word in fails)
    (launchpad.folder / "job.toml").write_text(FILE.format(fails=words, most=most, more=more))
    (launchpad.folder / "rank.py").write_text(RANK)


def pids(output: bytes | str, rank: str) -> list[int]:
    """Those with which a rank has started, in order."""
    text = output if isinstance(output, str) else output.decode()
    return [int(pid) for pid in re.findall(rf"^\[{re.escape(rank)}\] pid (\d+) ", text, re.MULTILINE)]


class Running:
    """A job of roles in the background."""

    def __init__(self, launchpad: Launchpad, *args: object) -> None:
        self._folder = launchpad.folder
        self._seen = launchpad.folder / "out"
        with self._seen.open("wb") as out:
            self.process = launchpad.start("run", "--config", "job.toml", "--job", "j", *args, stdout=out)

    def starts(self, count: int) -> bytes:
        """The output, once it tells of so many starts of ranks."""
        wait_until(lambda: self._seen.read_bytes().count(b"start") >= count, "the ranks to start")
        return self._seen.read_bytes()

    def end(self) -> tuple[int, str, str]:
        """Have the ranks end."""
        (self._folder / "end").touch()
        _, said = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, self._seen.read_text(), said.decode()


def run(launchpad: Launchpad, *args: object) -> subprocess.CompletedProcess[str]:
    return launchpad.run("run", "--config", "job.toml", "--job", "j", *args)


def test_only_the_replica_that_failed_starts_again(launchpad: Launchpad) -> None:
    write(launchpad, "a", 1, 1, 1, 7)
    job = Running(launchpad, "--events", "events")
    job.starts(7)
    code, output, said = job.end()
    assert code == 0, said
    for rank, starts in {"a.0 0": 1, "a.0 1": 1, "a.1 0": 2, "a.1 1": 2, "b   0": 1}.items():
        assert len(pids(output, rank)) == starts, output
    assert re.search(r"failed: a\.1 rank 1, exit code 7 after [\d.]+ s; restarting a\.1 \(restart 1 of 2\)\n", said)
    assert said.count("\n") == 1, said
    events = [json.loads(line) for line in (launchpad.folder / "events").read_text().splitlines()]
    restarts = [event for event in events if event["event"] == "WorldRestarted"]
    assert [(event["world"], event["ranks"], event["restarts"]) for event in restarts] == [("a.1", [2, 3], 1)]


def test_a_line_of_another_world_goes_on(launchpad: Launchpad) -> None:
    """It is amid a character, even."""
    write(launchpad)
    (launchpad.folder / "rank.py").write_text(
        "import os, sys, time\n"
        "def wait_for(name):\n    while not os.path.exists(name): time.sleep(0.01)\n"
        "times, leads = int(os.environ['TORCHELASTIC_RESTART_COUNT']), os.environ['RANK'] == '0'\n"
        "if os.environ['LAUNCHPAD_ROLE'] == 'b':\n"
        "    os.write(1, b'half \\xc3')\n    wait_for('again')\n    os.write(1, b'\\xa9 and whole\\n')\n"
        "elif os.environ['LAUNCHPAD_REPLICA'] == '1' and leads:\n"
        "    if times: open('again', 'w').close()\n"
        "    else: wait_for('half'); sys.exit(7)\n"
    )
    job = launchpad.run("run", "--config", "job.toml", "--job", "j", "--detach", "--events", "events").stdout.strip()

    def outputs() -> list[str]:
        events = (launchpad.folder / "events").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in events if line.endswith("\n")]
        return [event["text"] for event in found if event["event"] == "Output"]

    wait_until(lambda: outputs() == ["half "], "the first half")
    (launchpad.folder / "half").touch()
    assert launchpad.run("wait", job).returncode == 0
    assert outputs() == ["half ", "é and whole\n"]
    console = (launchpad.state / "launchpad" / "jobs" / job / "console.1.jsonl").read_bytes().splitlines()
    ended = [entry.ranks for entry in map(ConsoleEntry.of, console) if entry.kind == "flush"]
    assert ended[0] == [2, 3], "those of the replica that started again"


def test_when_restarts_are_used_up_the_job_ends(launchpad: Launchpad) -> None:
    write(launchpad, "a", 0, 0, 9, 7, most=1, more='restart = "always"')
    done = run(launchpad)
    assert done.returncode == 7
    assert "launchpad: a.0 rank 0 failed first: exit code 7" in done.stderr
    assert re.search("earlier attempt: a.0 rank 0, exit code 7", done.stderr)
    assert "stopped because of it: a.0 rank 1, a.1 ranks 0-1, b rank 0" in done.stderr
    assert json.loads(launchpad.run("why", "--json").stdout)["exit_code"] == 7


def test_a_failure_that_recurs_is_not_repeated_again(launchpad: Launchpad) -> None:
    """The same place, twice in a row, without progress."""
    write(launchpad, "a", 0, 0, 99, "raise", most=9)
    done = run(launchpad)
    assert done.returncode == 1
    assert "a.0 rank 0 failed first: ZeroDivisionError" in done.stderr
    assert "a.0: it fails the same way each time" in done.stderr
    assert len(pids(done.stdout, "a.0 0")) == 2


def test_ctrl_c_while_a_world_is_being_stopped(launchpad: Launchpad) -> None:
    """Its other rank takes its time."""
    write(launchpad, "a", 0, 0, 9, 7)
    text = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n" + RANK
    (launchpad.folder / "rank.py").write_text(text)
    job = Running(launchpad)
    wait_until(lambda: b"told" in (launchpad.folder / "out").read_bytes(), "the world to be stopped")
    job.process.send_signal(signal.SIGINT)
    code, output, said = job.end()
    assert code == 130, said
    assert len(pids(output, "a.0 0")) == 1


SERVE = """\
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit({code})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["TORCHELASTIC_RESTART_COUNT"].encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler).serve_forever()
"""

CLIENT = """\
import os, time, urllib.request
url = "http://" + os.environ["LAUNCHPAD_SERVE_HTTP"]
def ask(path):
    return urllib.request.urlopen(url + path, timeout=30).read()
print("first", ask("/").decode())
try:
    ask("/die")
except OSError:
    pass
deadline = time.monotonic() + 60
while True:
    try:
        print("then", ask("/").decode())
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


@pytest.mark.parametrize("code", [7, 0])
def test_a_service_starts_again_at_its_old_address_and_a_patient_client_goes_on(
    launchpad: Launchpad, code: int
) -> None:
    """That a service exits with 0 is a failure too."""
    (launchpad.folder / "serve.py").write_text(SERVE.format(code=code))
    (launchpad.folder / "client.py").write_text(CLIENT)
    (launchpad.folder / "job.toml").write_text(
        '[jobs.j.roles.serve]\ntarget = "serve.py"\nservice = true\nports = ["http"]\nready = "http:/"\n'
        'max-restarts = 3\n[jobs.j.roles.client]\ntarget = "client.py"\nafter = "serve"\n'
    )
    done = run(launchpad)
    assert (done.returncode, done.stdout) == (0, "[client 0] first 0\n[client 0] then 1\n"), done.stderr
    assert "restarting serve (restart 1 of 3)" in done.stderr


def test_who_was_to_wait_for_a_service_still_does_after_it_was_started_again(launchpad: Launchpad) -> None:
    """It dies before it is ready, the first time."""
    (launchpad.folder / "serve.py").write_text(
        "import os, signal\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\nprint('up', flush=True)\n"
        "signal.pause()\n"
    )
    (launchpad.folder / "job.toml").write_text(
        '[jobs.j.roles.serve]\ntarget = "serve.py"\nservice = true\nready = "line:up"\nmax-restarts = 1\n'
        '[jobs.j.roles.client]\ntarget = ["echo", "came"]\nafter = "serve"\n'
    )
    done = run(launchpad)
    assert (done.returncode, done.stdout) == (0, "[serve  0] up\n[client 0] came\n"), done.stderr


def test_a_service_that_is_about_to_start_again_when_all_others_have_ended_does_not(launchpad: Launchpad) -> None:
    """Its other rank takes its time to stop: until the record has the client's end."""
    (launchpad.folder / "serve.py").write_text(
        "import glob, os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('told', 'w').close())\n"
        "def ended():\n"
        "    (record,) = glob.glob(os.environ['XDG_STATE_HOME'] + '/launchpad/jobs/*/events.jsonl')\n"
        "    return any('\"RankExited\"' in line and '\"rank\": 2,' in line for line in open(record))\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('up'): time.sleep(0.01)\n"
        "    raise SystemExit(3)\n"
        "print('serves', flush=True)\nopen('up', 'w').close()\n"
        "while not ended(): time.sleep(0.01)\n"
    )
    (launchpad.folder / "client.py").write_text("import os, time\nwhile not os.path.exists('told'): time.sleep(0.01)\n")
    (launchpad.folder / "job.toml").write_text(
        '[jobs.j.roles.serve]\ntarget = "serve.py"\nnproc = 2\nservice = true\nmax-restarts = 1\ngrace = 30\n'
        '[jobs.j.roles.client]\ntarget = "client.py"\n'
    )
    done = run(launchpad)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serves") == 1
