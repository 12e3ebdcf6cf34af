"""Each rank waits for something else: awaits.py CASE …, one for each rank."""

import asyncio
import fcntl
import multiprocessing
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

FORK = multiprocessing.get_context("fork")


def busy(*_):
    time.sleep(1000)


def die(*_):
    os.kill(os.getpid(), 9)


def command():
    subprocess.run(["sh", "-c", "sleep 1000; true"], check=True)


def output():
    process = subprocess.Popen(["sleep", "1001"], stdout=subprocess.PIPE)
    process.stdout.readline()


def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), 19)
        os.waitpid(child, os.WUNTRACED)
    socket.create_connection(address).recv(1)


def pool():
    with FORK.Pool(2) as workers:
        workers.map(busy, [1])


def lost():
    with FORK.Pool(2) as workers:
        workers.map(die, [1])


def executor():
    with ProcessPoolExecutor(2, FORK) as workers:
        workers.submit(busy).result()


def threads():
    with ThreadPoolExecutor(2) as workers:
        workers.submit(busy).result()


def process(method="fork"):
    child = multiprocessing.get_context(method).Process(target=busy, name="encoder")
    child.start()
    child.join()


def forkserver():
    process("forkserver")


def fork():
    child = os.fork()
    if child == 0:
        busy()
    os.waitpid(child, 0)


def messages():
    channel = FORK.Queue()
    FORK.Process(target=busy).start()
    channel.get()


def thread(target=busy, *args):
    found = threading.Thread(target=target, args=args, name="writer", daemon=True)
    found.start()
    return found


def join():
    thread().join()


def keep(mutex, ready):
    with mutex:
        ready.set()
        busy()


def lock(mutex=None):
    mutex = mutex or threading.Lock()
    ready = threading.Event()
    thread(keep, mutex, ready)
    ready.wait()
    with mutex:
        pass


def rlock():
    lock(threading.RLock())


def itself():
    mutex = threading.Lock()
    mutex.acquire()
    mutex.acquire()


def item():
    thread()
    queue.Queue().get()


def nothing():
    queue.Queue().get()


def file(take=fcntl.flock):
    """The first rank that comes has the file, the second waits."""
    with open("shared.lock", "w") as shared:
        take(shared, fcntl.LOCK_EX)
        busy()


def database():
    connection = sqlite3.connect("shared.db", timeout=1000, isolation_level=None)
    connection.execute("begin exclusive")
    busy()


async def fetch(gate):
    await gate.wait()


async def idle():
    await asyncio.sleep(1000)


async def main():
    gate = asyncio.Event()
    other = asyncio.create_task(idle(), name="metrics")
    await asyncio.gather(asyncio.create_task(fetch(gate), name="fetch-3"))
    await other


def tasks():
    asyncio.run(main())


if __name__ == "__main__":
    print("ready", flush=True)
    globals()[sys.argv[1:][int(os.environ["RANK"])]]()
