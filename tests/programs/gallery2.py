"""More programs that go wrong, or that only look as if: gallery2.py CASE. Unlike gallery.py's, they are like other people's."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta

CASE = sys.argv[1]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CULPRIT = SIZE - 2


def join(**options):
    import torch.distributed as dist

    dist.init_process_group("gloo", **options)
    return dist


def add(dist):
    import torch

    dist.all_reduce(torch.ones(4))


def forever():
    while True:
        time.sleep(60)


def only_the_culprit(what):
    if RANK != CULPRIT:
        forever()
    what()


def script(name, text):
    path = os.path.join(tempfile.gettempdir(), f"{name}")
    with open(path, "w") as file:
        file.write(text)
    return path


# The loss of the peer in the program's own words, and a slow end of the one that failed


class TrainingAborted(Exception):
    pass


def _train(abort):
    dist = join()
    try:
        for step in range(50):
            if step == 20 and RANK == CULPRIT:
                raise ValueError("bad batch in shard 7")
            try:
                add(dist)
            except RuntimeError as error:
                abort(step, error)
    finally:
        if RANK == CULPRIT:
            dist.destroy_process_group()
            upload()


def upload():
    time.sleep(30)


def wrapped_from_none():
    def abort(step, _):
        raise TrainingAborted(f"collective failed in step {step}") from None

    _train(abort)


def wrapped_from():
    def abort(step, error):
        raise TrainingAborted(f"collective failed in step {step}") from error

    _train(abort)


def wrapped_plainly():
    def abort(step, _):
        raise TrainingAborted(f"collective failed in step {step}")

    _train(abort)


def wrapped_exit():
    """The victims log what they were told, and exit."""

    def abort(*_):
        traceback.print_exc()
        sys.exit(1)

    _train(abort)


def wrapped_later():
    """The victims keep the exception, and raise one of their own when they have left the loop."""
    dist = join()
    lost = None
    try:
        for step in range(50):
            if step == 20 and RANK == CULPRIT:
                raise ValueError("bad batch in shard 7")
            try:
                add(dist)
            except RuntimeError as error:
                lost = error
                break
        if lost is not None:
            raise TrainingAborted(f"step {step} failed")
    finally:
        if RANK == CULPRIT:
            dist.destroy_process_group()
            upload()


def overcome():
    """A group timed out, which the culprit has noted; what it fails of has nothing to do with that."""
    dist = join()
    pair = dist.new_group([0, CULPRIT], timeout=timedelta(seconds=0.5))
    if RANK == CULPRIT:
        try:
            dist.barrier(group=pair)
        except RuntimeError as error:
            missed = error
            print(f"going on without rank 0: {missed}", file=sys.stderr)
    for step in range(50):
        if step == 20 and RANK == CULPRIT:
            raise ValueError("bad batch in shard 7")
        add(dist)


def slow_handler():
    """The culprit writes a report about its error before it raises it again."""
    dist = join()
    add(dist)
    try:
        if RANK == CULPRIT:
            raise ValueError("bad batch in shard 7")
        add(dist)
    except ValueError:
        dist.destroy_process_group()
        upload()
        raise


# Words that only look like a lost peer


def ssh_words():
    def run():
        print("Connection to 10.1.2.3 closed by remote host.", file=sys.stderr)
        sys.exit(255)

    only_the_culprit(run)


def database():
    def run():
        class OperationalError(Exception):
            pass

        raise OperationalError("connection to server at 10.0.0.5, port 5432 failed: no route to host")

    only_the_culprit(run)


def port_taken():
    def run():
        import torch.distributed as dist

        dist.TCPStore("127.0.0.1", _server(), 1, True, timeout=timedelta(seconds=2))

    only_the_culprit(run)


def port_taken_file():
    """Another rank was to have what this one writes."""
    done = os.path.join(tempfile.gettempdir(), "made-by-the-culprit")
    if RANK == CULPRIT:
        port_taken()
    time.sleep(1)
    open(done)


def unknown_host():
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="nosuchhost-7", MASTER_PORT="29500")
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))


# Exceptions that the program handled


def _handle():
    try:
        {}["optional setting"]
    except KeyError:
        traceback.print_exc()


def handled_exit():
    _handle()

    def run():
        print("no more disk quota, giving up", file=sys.stderr)
        sys.exit(3)

    only_the_culprit(run)


def handled_os_exit():
    _handle()

    def run():
        print("no more disk quota, giving up", file=sys.stderr, flush=True)
        os._exit(3)

    only_the_culprit(run)


def handled_signal():
    _handle()
    only_the_culprit(lambda: os.kill(os.getpid(), signal.SIGKILL))


def handled_other():
    _handle()

    def run():
        raise OSError("the shard is gone")

    only_the_culprit(run)


def handled_reset():
    """A connection that was lost and made again."""
    print("ConnectionResetError: [Errno 104] Connection reset by peer; retrying", file=sys.stderr)
    for step in range(5):
        print(f"step {step}", file=sys.stderr)

    def run():
        print("out of quota", file=sys.stderr, flush=True)
        os._exit(9)

    only_the_culprit(run)


# What the program logged, captured, forwarded or left to a thread


def logged_exit():
    """`sys.exit(main())`: the exception is logged, more comes after it, and no rank raises any."""

    def main():
        try:
            dist = join()
            for step in range(50):
                if step == 20 and RANK == CULPRIT:
                    raise ValueError("bad batch in shard 7")
                add(dist)
        except Exception:
            traceback.print_exc()
        print("cleaning up", file=sys.stderr)
        return 1

    sys.exit(main())


def finally_collective():
    dist = join(timeout=timedelta(seconds=4))
    try:
        for step in range(50):
            if step == 20 and RANK == CULPRIT:
                sys.exit("no more data")
            add(dist)
    finally:
        dist.barrier()


def prefetch_thread():
    """The main thread waits for what the thread that died was to bring, and the others for that rank."""
    import queue

    dist = join(timeout=timedelta(seconds=4))
    batches = queue.Queue()

    def prefetch():
        for batch in range(50):
            if batch == 10 and RANK == CULPRIT:
                raise OSError("shard 10: checksum mismatch")
            batches.put(batch)

    threading.Thread(target=prefetch, name="prefetch", daemon=True).start()
    for _ in range(50):
        batches.get()
        add(dist)


def own_timeout():
    """The program says how long it waits for a collective."""
    import torch

    dist = join()
    if RANK == CULPRIT:
        forever()
    dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=3))


def other_size():
    """The others get through a collective that is larger on one rank."""
    import torch

    dist = join(timeout=timedelta(seconds=4))
    dist.all_reduce(torch.ones(8 if RANK == CULPRIT else 4))
    dist.barrier()


def captured():
    def run():
        subprocess.run([sys.executable, "-c", "raise ValueError('bad shard')"], check=True, capture_output=True)

    only_the_culprit(run)


def forwarded():
    import multiprocessing

    def run():
        with multiprocessing.get_context("fork").Pool(2) as workers:
            workers.map(tokenize, [17])

    only_the_culprit(run)


def tokenize(document):
    raise ValueError(f"document {document} is empty")


# A launcher inside the rank

INNER = "import os\nif os.environ.get('RANK', '1') == '1': raise ValueError('the inner cause')\nimport time; time.sleep(60)\n"


def _without_ours():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "LAUNCHPAD_"))}
    # Those that number no ranks pass ours on: RANK=1 is the one that fails.
    return kept | {"XDG_STATE_HOME": os.path.join(tempfile.gettempdir(), "inner"), "RANK": "1"}


def _inside(*words):
    subprocess.run(words, check=True, env=_without_ours())


def torchrun_inside():
    inner = script("inner.py", INNER)
    words = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", inner)
    only_the_culprit(lambda: _inside(*words))


def torchrun_instead():
    """bash -c torchrun …"""
    inner = script("inner.py", INNER)
    words = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {inner}"
    only_the_culprit(lambda: os.execvpe("bash", ["bash", "-c", words], _without_ours()))


def accelerate_inside():
    inner = script("inner.py", INNER)
    words = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", inner)
    only_the_culprit(lambda: _inside(*words))


def mpirun_inside():
    """Open MPI's or MPICH's."""
    names = "os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))"
    inner = script("inner.py", f"import os\nif {names} == '1': raise ValueError('the inner cause')\n")
    environ = _without_ours() | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    only_the_culprit(lambda: os.execvpe("mpirun", ["mpirun", "-n", "2", sys.executable, inner], environ))


def launchpad_inside():
    inner = script("inner.py", INNER)
    only_the_culprit(lambda: _inside(sys.executable, "-m", "launchpad", "run", "-n", "2", inner))


def pytest_inside():
    inner = script("test_inner.py", "def test_it():\n    raise ValueError('the inner cause')\n")
    words = (sys.executable, "-m", "pytest", "-p", "no:launchpad", "-p", "no:cacheprovider", inner)
    only_the_culprit(lambda: os.execvpe(words[0], words, _without_ours()))


def bash_inside():
    inner = script("inner.py", INNER)
    only_the_culprit(lambda: os.execvp("bash", ["bash", "-c", f"RANK=1 {sys.executable} {inner}; exit $?"]))


def command_inside():
    inner = script("inner.py", INNER)
    only_the_culprit(lambda: subprocess.run([sys.executable, inner], check=True, env={**os.environ, "RANK": "1"}))


# Nothing is wrong

SECONDS = 7.0
"""Longer than it takes --stall-timeout 3 to find a hang."""

SERVER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
server.settimeout(60)
print(server.getsockname()[1], flush=True)
line, _ = server.accept()
end = time.monotonic() + float(sys.argv[1])
if len(sys.argv) > 2:
    line.recv(4096)
    line.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
while time.monotonic() < end:
    line.sendall(bytes(7500))
    time.sleep(0.05)
"""


def _server(*more):
    """Something that sends 150 KB a second, and is no child of the rank."""
    process = subprocess.Popen(
        ["setsid", "-f", sys.executable, "-c", SERVER, str(SECONDS), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return int(process.stdout.readline())


def slow_socket():
    if RANK == CULPRIT:
        line = socket.create_connection(("127.0.0.1", _server()))
        while line.recv(1 << 20):
            pass


def slow_http():
    if RANK == CULPRIT:
        from urllib.request import urlopen

        urlopen(f"http://127.0.0.1:{_server('http')}/").read()


def slow_child():
    if RANK == CULPRIT:
        code = "import socket, sys\nline = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        code += "while line.recv(1 << 20): pass"
        subprocess.run([sys.executable, "-c", code, str(_server())], check=True)


def slow_pipe():
    if RANK == CULPRIT:
        code = f"import os, time\nend = time.monotonic() + {SECONDS}\n"
        code += "while time.monotonic() < end: os.write(1, bytes(7500)); time.sleep(0.05)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            while os.read(process.stdout.fileno(), 1 << 16):
                pass


def sleeps_alone():
    """The others have left."""
    if RANK == CULPRIT:
        time.sleep(SECONDS)


def child_sleeps():
    if RANK == CULPRIT:
        subprocess.run(["sleep", str(SECONDS)], check=True)


def child_computes():
    if RANK == CULPRIT:
        code = f"import time\nend = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)


def thread_computes():
    dist = join()

    def compute():
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            sum(range(10_000))

    if RANK == CULPRIT:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    add(dist)


def writes():
    """A large checkpoint on a slow disk; the others wait."""
    dist = join()
    if RANK == CULPRIT:
        end = time.monotonic() + SECONDS
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end:
                file.write(bytes(50_000))
                file.flush()
                time.sleep(0.05)
    add(dist)


def downloads_for_all():
    """One rank fetches the data, the others wait at the barrier."""
    dist = join()
    if RANK == CULPRIT:
        slow_socket()
    dist.barrier()


def retries():
    """A service that is not up at first."""
    dist = join()
    for _ in range(20):
        try:
            socket.create_connection(("127.0.0.1", 1)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
    add(dist)


def other_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            socket.create_server(taken.getsockname()[:2])
        except OSError:
            traceback.print_exc()
            socket.create_server(("127.0.0.1", 0)).close()


def leaves_with_0():
    add(join())
    (sys.exit, os._exit)[RANK % 2](0)


def failing_child():
    """It is expected to fail."""
    subprocess.run([sys.executable, "-c", "raise ValueError('not found')"], check=False)
    add(join())


def pool():
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as workers:
        workers.map(sum, [range(30_000_000)] * 12)


def loader():
    import torch.utils.data

    dist = join()

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            end = time.monotonic() + SECONDS / 4
            while time.monotonic() < end:
                pass
            return torch.zeros(1)

    for _ in torch.utils.data.DataLoader(Images(), num_workers=2):
        pass
    add(dist)


def destroyed_late():
    """The group is left one rank after the other."""
    dist = join()
    add(dist)
    time.sleep(0.3 * RANK)
    dist.destroy_process_group()


def alarm():
    ticks = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    while len(ticks) < 5:
        signal.pause()
    signal.setitimer(signal.ITIMER_REAL, 0)


globals()[CASE]()
