"""Programs that wait for their children, locks, files and tasks: gallery3.py CASE. Some wait for ever."""

import asyncio
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

CASE = sys.argv[1]
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CULPRIT = SIZE - 2
SHARED = Path(tempfile.gettempdir())

SECONDS = 5.0
"""Longer than it takes --stall-timeout 3 to find a hang, counted from its first look."""


def stuck(*_):
    time.sleep(1000)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def compute(*_):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        sum(range(10_000))


def context(method="fork"):
    return multiprocessing.get_context(method)


def thread(target, *args, name="writer"):
    found = threading.Thread(target=target, args=args, name=name, daemon=True)
    found.start()
    return found


# Children


def command():
    subprocess.run(["sleep", "1000"], check=True)


def shell_tree():
    subprocess.run(["sh", "-c", "sh -c 'sleep 1000; true'; true"], check=True)


def output():
    subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE).stdout.readline()


def waits_for_input():
    subprocess.Popen(["cat"], stdin=subprocess.PIPE).wait()


def stopped():
    child = subprocess.Popen(["sleep", "1000"])
    child.send_signal(signal.SIGSTOP)
    child.wait()


def forked():
    child = os.fork()
    if child == 0:
        stuck()
    os.waitpid(child, 0)


def process(method="fork", target=stuck):
    child = context(method).Process(target=target, name="encoder")
    child.start()
    child.join()


def process_spawn():
    process("spawn")


def process_forkserver():
    process("forkserver")


def torch_spawn():
    import torch.multiprocessing

    torch.multiprocessing.spawn(stuck, nprocs=2)


def pool(method="fork"):
    with context(method).Pool(2) as workers:
        workers.map(stuck, [1])


def pool_spawn():
    pool("spawn")


def pool_imap():
    with context().Pool(2) as workers:
        for _ in workers.imap(stuck, [1]):
            pass


def pool_lost():
    with context().Pool(2) as workers:
        workers.map(die, [1])


def executor(method="fork", target=stuck):
    with ProcessPoolExecutor(2, context(method)) as workers:
        workers.submit(target).result()


def executor_spawn():
    executor("spawn")


def executor_broken():
    executor(target=die)


def thread_pool():
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(stuck, [1, 2]))


def loky():
    import joblib

    joblib.Parallel(2)(joblib.delayed(time.sleep)(1000) for _ in range(2))


def joblib_threads():
    import joblib

    joblib.Parallel(2, backend="threading")(joblib.delayed(stuck)() for _ in range(2))


def queue_of_child():
    items = context().Queue()
    context().Process(target=stuck).start()
    items.get()


def pipe_of_child():
    ours, theirs = context().Pipe()
    context().Process(target=stuck, args=(theirs,)).start()
    ours.recv()


def lock_of_child():
    mutex, ready = context().Lock(), context().Event()

    def keep():
        with mutex:
            ready.set()
            stuck()

    context().Process(target=keep).start()
    ready.wait()
    with mutex:
        pass


# DataLoaders


class Images:
    def __init__(self, load=stuck, at=3):
        self.load, self.at = load, at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.at:
            self.load()
        return index


def loader(method="fork", load=stuck):
    import torch.utils.data

    for _ in torch.utils.data.DataLoader(Images(load), num_workers=2, multiprocessing_context=method):
        pass


def loader_spawn():
    loader("spawn")


def loader_forkserver():
    loader("forkserver")


CACHE = threading.Lock()


def read_cache():
    with CACHE:
        pass


def loader_inherits_lock():
    """It was forked while another thread had the lock, which nobody releases in the child."""
    held = threading.Event()

    def fill():
        with CACHE:
            held.set()
            stuck()

    thread(fill)
    held.wait()
    loader(load=read_cache)


def loader_killed():
    loader(load=die)


# Locks


def keep(mutex, ready):
    with mutex:
        ready.set()
        stuck()


def lock(mutex=None):
    mutex = mutex or threading.Lock()
    ready = threading.Event()
    thread(keep, mutex, ready)
    ready.wait()
    with mutex:
        pass


def rlock():
    lock(threading.RLock())


def semaphore():
    lock(threading.Semaphore())


def lock_itself():
    mutex = threading.Lock()
    with mutex, mutex:
        pass


def crossed_locks():
    first, second, ready = threading.RLock(), threading.RLock(), threading.Event()

    def other():
        with second:
            ready.set()
            with first:
                pass

    with first:
        thread(other)
        ready.wait()
        with second:
            pass


def condition():
    changed = threading.Condition()
    with changed:
        changed.wait()


def event():
    thread(stuck)
    threading.Event().wait()


def queue_empty():
    thread(stuck, name="producer")
    queue.Queue().get()


def queue_full():
    items = queue.Queue(1)
    thread(stuck, name="consumer")
    items.put(1)
    items.put(2)


def join_thread():
    thread(stuck).join()


def checkpoint_writer():
    """The disk of the thread that writes it does not answer."""
    fifo = SHARED / "disk"
    os.mkfifo(fifo)

    def save():
        fifo.write_bytes(b"weights")

    thread(save).join()


# Files


def held_file(take):
    """Rank 0 has it, and waits for the others."""
    with open(SHARED / "shared.lock", "w") as file:
        if RANK == 0:
            take(file, fcntl.LOCK_EX)
            (SHARED / "taken").touch()
            meet()
        elif RANK == CULPRIT:
            await_file(SHARED / "taken")
            take(file, fcntl.LOCK_EX)


def await_file(path):
    while not path.exists():
        time.sleep(0.01)


def flock_of_rank():
    held_file(fcntl.flock)


def lockf_of_rank():
    held_file(fcntl.lockf)


def flock_of_other():
    path = SHARED / "other.lock"
    other = subprocess.Popen(["flock", path, "sh", "-c", "echo taken; exec sleep 1000"], stdout=subprocess.PIPE)
    other.stdout.readline()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def package_filelock():
    import filelock

    path = SHARED / "hub.lock"
    if RANK == 0:
        with filelock.FileLock(path):
            (SHARED / "taken").touch()
            meet()
    elif RANK == CULPRIT:
        await_file(SHARED / "taken")
        with filelock.FileLock(path):
            pass


def sqlite():
    connection = sqlite3.connect(SHARED / "index.db", timeout=1000, isolation_level=None)
    if RANK == 0:
        connection.execute("begin exclusive")
        (SHARED / "taken").touch()
        meet()
    elif RANK == CULPRIT:
        await_file(SHARED / "taken")
        connection.execute("begin exclusive")


def stale_baton():
    from torch.utils.file_baton import FileBaton

    (SHARED / "lock").touch()
    FileBaton(str(SHARED / "lock")).wait()


def file_store():
    import torch.distributed as dist

    dist.FileStore(str(SHARED / "store"), 2).get("the key of rank 9")


def fifo():
    """A file server that doesn't answer."""
    os.mkfifo(SHARED / "shard-3")
    (SHARED / "shard-3").read_bytes()


def silent_server():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        line.recv(1)


def stopped_server():
    """A share that does not answer: the server of rank 0 has been stopped."""
    if RANK == 0:
        code = "import http.server as h; s = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
        code += "print(s.server_address[1], flush=True); s.serve_forever()"
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        port = server.stdout.readline()
        server.send_signal(signal.SIGSTOP)
        (SHARED / "port.new").write_text(port)
        (SHARED / "port.new").rename(SHARED / "port")
    elif RANK == CULPRIT:
        import urllib.request

        await_file(SHARED / "port")
        urllib.request.urlopen(f"http://127.0.0.1:{(SHARED / 'port').read_text().strip()}/shard-3").read()


# gRPC


def serve(answer):
    """A server in this process, and what calls it."""
    import grpc

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {
        "Find": grpc.unary_unary_rpc_method_handler(answer),
        "Follow": grpc.unary_stream_rpc_method_handler(answer),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Index", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    return server, channel.unary_unary("/Index/Find"), channel.unary_stream("/Index/Follow")


def grpc_handler():
    _, find, _ = serve(stuck)
    find(b"shard-3")


def grpc_stream():
    _, _, follow = serve(stuck)
    for _ in follow(b"shard-3"):
        pass


def no_shard(*_):
    raise LookupError("shard-3 is in no index")


def grpc_failed():
    _, find, _ = serve(no_shard)
    find(b"shard-3")


def grpc_deadline():
    _, find, _ = serve(stuck)
    find(b"shard-3", timeout=1)


def grpc_gone():
    server, find, _ = serve(no_shard)
    server.stop(None).wait()
    find(b"shard-3")


def found_late(request, _):
    compute()
    return request


def slow_grpc():
    server, find, _ = serve(found_late)
    find(b"shard-3")
    server.stop(None).wait()


# Tasks


async def fetch(gate):
    await gate.wait()


async def gathers():
    await asyncio.gather(asyncio.create_task(fetch(asyncio.Event()), name="fetch-3"), asyncio.sleep(0))


def tasks():
    asyncio.run(gathers())


async def crosses():
    first, second = asyncio.Lock(), asyncio.Lock()

    async def takes(one, other):
        async with one:
            await asyncio.sleep(0.1)
            async with other:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(takes(first, second), name="copy-1")
        group.create_task(takes(second, first), name="copy-2")


def crossed_tasks():
    asyncio.run(crosses())


async def drains():
    items = asyncio.Queue()
    items.put_nowait(1)
    await items.join()


def queue_of_tasks():
    asyncio.run(drains())


async def ships():
    done, _ = await asyncio.wait([asyncio.create_task(fetch(asyncio.Event()), name="upload")])
    return done


def waited_tasks():
    asyncio.run(ships())


async def runs():
    await (await asyncio.create_subprocess_exec("sleep", "1000")).wait()


def command_of_task():
    asyncio.run(runs())


# Commands that fail

TOKENIZER = ["sh", "-c", "echo vocab.json: no such file >&2; exit 4"]


def command_failed():
    subprocess.run(TOKENIZER, check=True)


def command_failed_inside():
    try:
        subprocess.check_output(TOKENIZER)
    except subprocess.CalledProcessError as error:
        raise RuntimeError("no tokenizer") from error


def command_failed_to_file():
    with open(SHARED / "tokenizer.log", "w") as log:
        subprocess.check_call(TOKENIZER, stdout=log, stderr=log)


# Nothing is wrong


def slow_process():
    process(target=compute)


def slow_spawned():
    process("spawn", compute)


def slow_pool():
    with context().Pool(2) as workers:
        workers.map(compute, [1, 2])


def slow_executor():
    executor("forkserver", compute)


def slow_threads():
    with ThreadPoolExecutor(2) as workers:
        workers.submit(compute).result()


def slow_loader():
    loader("spawn", compute)


def slow_join():
    thread(compute).join()


def slow_lock():
    mutex, ready = threading.RLock(), threading.Event()

    def work():
        with mutex:
            ready.set()
            compute()

    thread(work)
    ready.wait()
    with mutex:
        pass


def slow_queue():
    items = queue.Queue()

    def produce():
        compute()
        items.put(1)

    thread(produce)
    items.get()


def slow_tasks():
    async def work():
        await asyncio.gather(asyncio.to_thread(compute), asyncio.sleep(0.1))

    asyncio.run(work())


def slow_tree():
    code = f"import time\nend = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{code}'; true"], check=True)


def turns():
    """The lock goes round the ranks."""
    with open(SHARED / "turns.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = time.monotonic() + SECONDS / 4
        while time.monotonic() < end:
            pass


def database_turns():
    connection = sqlite3.connect(SHARED / "turns.db", timeout=1000, isolation_level=None)
    connection.execute("begin exclusive")
    end = time.monotonic() + SECONDS / 4
    while time.monotonic() < end:
        pass
    connection.execute("commit")


def ended_child():
    child = context().Process(target=stuck)
    child.start()
    child.terminate()
    child.join()


def unreaped_child():
    if os.fork() == 0:
        os._exit(3)
    compute()


def caught_command():
    try:
        subprocess.run(TOKENIZER, check=True)
    except subprocess.CalledProcessError:
        print("without a tokenizer", file=sys.stderr)


def replaced_workers():
    with context().Pool(2, maxtasksperchild=1) as workers:
        workers.map(abs, range(8), chunksize=1)


def writer_thread():
    def save():
        with tempfile.TemporaryFile() as file:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                file.write(bytes(50_000))
                file.flush()
                time.sleep(0.02)

    thread(save).join()


ALL = {"flock_of_rank", "lockf_of_rank", "package_filelock", "sqlite", "turns", "database_turns", "stopped_server"}
"""Cases with a part for every rank; of the others, the culprit alone does what they are about."""


def meet():
    import torch

    dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    meet()
    if RANK == CULPRIT or CASE in ALL:
        globals()[CASE]()
    meet()
