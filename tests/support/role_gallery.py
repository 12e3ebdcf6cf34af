"""Jobs of a service and its clients that go wrong, each with who is to blame; and healthy ones that look broken."""

from __future__ import annotations

from typing import NamedTuple

SERVE = """\
import os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
times = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        if self.path == "/kill":
            os.kill(os.getpid(), 9)
        if self.path == "/raise":
            threading.Thread(target=lambda: (print("ValueError: no such policy", file=sys.stderr), os._exit(1))).start()
            time.sleep(60)
        if self.path == "/stuck":
            time.sleep(60)
        self.send_response({"/bad": 502, "/busy": 503, "/wrong": 500}.get(self.path, 200))
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"x")
    def log_message(self, *_):
        pass
if times == 1:
    open("again", "w").close()
    if len(sys.argv) > 1:  # it never comes up
        time.sleep(60)
ThreadingHTTPServer(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler).serve_forever()
"""

# What clients have in common.
CLIENT = """\
import http.client, os, signal, socket, sys, time, urllib.error, urllib.request
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the error counts, not the end of the job
ADDRESS = os.environ["LAUNCHPAD_SERVE_HTTP"].split(",")[-1]
HOST, _, PORT = ADDRESS.rpartition(":")
RANK = int(os.environ["RANK"])
def ask(path="/", seconds=20):
    return urllib.request.urlopen(f"http://{ADDRESS}{path}", timeout=seconds).read()
def have(path):
    try:
        ask(path, 2)
    except OSError:
        pass
def idle():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)
def die_and_start_again():
    if RANK == 0: have('/die')
    while not os.path.exists("again"):
        time.sleep(0.01)
def patient():
    for _ in range(3000):
        try:
            return ask()
        except OSError:
            time.sleep(0.01)
    raise SystemExit("gave up")
"""


class Play(NamedTuple):
    """A job of roles."""

    name: str
    client: str  # what both ranks of the role train do
    blamed: str = ""  # the beginning of the verdict; "": the job ends well
    code: int = 0
    victim: bool = True  # a rank of train may be one
    restarts: int = 0  # of the service
    replicas: int = 1
    never_up: bool = False  # when it is started again


_DIED = "serve rank 0 failed first: exit code 7"
_KILLED = "serve rank 0 failed first: killed by SIGKILL"

DEAD = [
    Play("refused", "if RANK == 0: have('/die')\nwhile True: ask()", _DIED, 7),
    Play("killed", "if RANK == 0: have('/kill')\nwhile True: ask()", _KILLED, 137),
    Play("raised", "while True: ask('/raise' if RANK == 0 else '/')", "serve rank 0 failed first: ", 1),
    Play("reset", """\
s = socket.create_connection((HOST, int(PORT)))
ask()
if RANK == 0: have('/die')
while True:
    s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n'); time.sleep(0.01)""", _DIED, 7),
    Play("kept connection", """\
c = http.client.HTTPConnection(HOST, int(PORT))
if RANK == 0: have('/die')
while True:
    c.request('GET', '/'); c.getresponse().read()""", _DIED, 7),
    Play("own words", """\
if RANK == 0: have('/die')
try:
    while True: ask()
except OSError as error:
    raise RuntimeError('the rollout service is gone') from error""", _DIED, 7),
    Play("exit code only", """\
if RANK == 0: have('/die')
try:
    while True: ask()
except OSError as error:
    print('error: Connection refused', file=sys.stderr)
    sys.exit(4)""", _DIED, 7),
    Play("ended with 0", "if RANK == 0: have('/die')\nwhile True: ask()", "serve rank 0 failed first: is a service", 1),
    Play("the second replica", "if RANK == 0: have('/die')\nwhile True: ask()",
         "serve.1 rank 0 failed first: exit code 7", 7, replicas=2),
]  # fmt: skip

RESTARTING = [
    Play("refused while it starts", "die_and_start_again()\nwhile True: ask()", _DIED, 7, restarts=2, never_up=True),
    Play("broken by the restart", """\
c = http.client.HTTPConnection(HOST, int(PORT))
c.request('GET', '/')
c.getresponse().read()
if RANK == 1:
    open('had', 'w').close()
    idle()
while not os.path.exists('had'): time.sleep(0.01)
die_and_start_again()
patient()
c.request('GET', '/')
c.getresponse()""", _DIED, 7, restarts=2),
    Play("gave up", """\
die_and_start_again()
for _ in range(20):
    try: ask()
    except OSError as error: kept = error
    time.sleep(0.01)
raise TimeoutError('no rollout for 1 s') from kept""", _DIED, 7, restarts=2, never_up=True),
]  # fmt: skip

OWN = [
    Play("a bug of the client", """\
if RANK == 1: raise ValueError('no such layer')
while True: ask(); time.sleep(0.1)""", "train rank 1 failed first: ValueError: no such layer", 1, victim=False),
    Play("a database that is down", """\
if RANK == 1: idle()
have('/die')
patient()
raise ConnectionRefusedError('database 127.0.0.1:1: connection refused')""",
         "train rank 0 failed first: ConnectionRefusedError: database", 1, victim=False, restarts=2),
    Play("an error that it answers", "if RANK == 0: ask('/wrong')\nidle()",
         "train rank 0 failed first: urllib.error.HTTPError: HTTP Error 500", 1, victim=False),
    Play("a bug after a restart", """\
if RANK == 1: idle()
have('/die')
patient()
raise KeyError('step')""", "train rank 0 failed first: KeyError: 'step'", 1, victim=False, restarts=2),
]  # fmt: skip

HEALTHY = [
    Play("retries while it restarts", "if RANK == 0: have('/die')\npatient()", restarts=2),
    Play("caught", """\
try: socket.create_connection((HOST, 1))
except OSError as error: print(error, file=sys.stderr)
ask()"""),
    Play("busy for a moment", """\
for path in ('/busy', '/bad', '/'):
    try: ask(path)
    except OSError: pass"""),
    Play("a timeout that is none", "try: ask('/stuck', 0.1)\nexcept OSError: pass\nask()"),
    Play("a child that fails", """\
import subprocess
subprocess.run(['sh', '-c', 'echo Connection refused >&2; exit 1'])
ask()"""),
]  # fmt: skip

PLAYS = [*DEAD, *RESTARTING, *OWN, *HEALTHY]


def job_file(play: Play) -> str:
    """The job as a user writes it."""
    words = '["serve.py", "never"]' if play.never_up else '["serve.py"]'
    return (
        f'[jobs.j.roles.serve]\ntarget = {words}\nservice = true\nports = ["http"]\nready = "http:/"\n'
        f"replicas = {play.replicas}\nmax-restarts = {play.restarts}\n"
        '[jobs.j.roles.train]\ntarget = "train.py"\nnproc = 2\nafter = "serve"\n'
    )


def service(play: Play) -> str:
    """Its service."""
    return SERVE.replace("os._exit(7)", "os._exit(0)") if play.name == "ended with 0" else SERVE
