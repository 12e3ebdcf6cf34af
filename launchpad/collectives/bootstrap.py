"""Creates the rendezvous store when the launcher set no address: under mpirun, or without a launcher.

On a single host, rank 0 listens on a free port and writes its number to a file that the launcher's other ranks find.
Across hosts, MPI itself broadcasts the address, if mpi4py is installed. `take_rank` serves processes that no launcher
started and that don't know their ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
import tempfile
import time
from datetime import timedelta
from urllib.parse import SplitResult

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from launchpad.collectives.launchers import BY_MPI, World
from launchpad.errors import WorldError

# How often the other ranks check for rank 0's file.
POLL_SECONDS = 0.005

_HOW = (
    "set MASTER_ADDR and MASTER_PORT on all ranks to rank 0's host and a free port there (mpirun -x, mpiexec -genv), "
    "or pass init_method='tcp://HOST:PORT'"
)

# Variables that a rank has and its launcher doesn't.
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"MV2_COMM_WORLD_RANK", b"PMI_RANK", b"PMIX_RANK")

_BACKLOG = 1024

# How many stores this process has asked for.
_calls = 0


def bootstrap_store(world: World, timeout: timedelta) -> Store:
    """A new store for all ranks of `world`. Every rank must make the same number of calls.

    Raises WorldError if the ranks have no way to find each other, or after `timeout`.
    """
    global _calls
    _calls += 1
    if world.size == 1:
        return HashStore()
    if world.source not in BY_MPI:
        raise WorldError(f"{world.source} set no rendezvous address for the {world.size} ranks: {_HOW}")
    if world.one_host:
        return _by_file(world, timeout)
    return _by_mpi(world, timeout)


def take_rank(url: SplitResult, size: int, timeout: timedelta, name: str) -> tuple[Store, int]:
    """The store at a file:// or tcp:// URL, and this process's rank: 0 … size - 1, in order of arrival.

    With tcp://, rank 0 is the process that can listen there. `name` separates successive groups at the same URL.
    Raises WorldError if all ranks are taken, and whatever torch raises.
    """
    store, rank = _tcp(url, size, timeout) if url.scheme == "tcp" else (FileStore(url.netloc + url.path, size), None)
    if rank is None:
        # With tcp://, rank 0 is the listener and isn't counted.
        rank = int(store.add(f"{name}/launchpad/ranks", 1)) - (url.scheme == "file")
    if rank >= size:
        stale = f", or {url.path} is left over from an earlier job: remove it" if url.scheme == "file" else ""
        raise WorldError(f"{url.geturl()}: all {size} ranks are taken: too many processes were started{stale}")
    return store, rank


def _tcp(url: SplitResult, size: int, timeout: timedelta) -> tuple[Store, int | None]:
    """The store, and rank 0 if this process serves it."""
    if not url.hostname or not url.port:
        raise WorldError(f"{url.geturl()} has no host or no port: use tcp://HOST:PORT")
    try:
        family = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((url.hostname, url.port), family=family, backlog=_BACKLOG)
    except OSError:  # another process is listening there, or it is another host's address
        return TCPStore(url.hostname, url.port, size, False, timeout), None
    with listener:
        return _serve(url.hostname, listener, size, timeout), 0


def is_multicast(host: str) -> bool:
    """Whether this is a multicast IP address."""
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


def _by_file(world: World, timeout: timedelta) -> Store:
    launcher = _launcher()
    if not launcher:
        raise WorldError(f"{world.source} started this rank, but its launcher can't be identified in /proc: {_HOW}")
    path = os.path.join(tempfile.gettempdir(), f"launchpad-meet-{launcher}-{_calls}")
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
            try:
                _write(path, listener.getsockname()[1])
                return _serve("127.0.0.1", listener, world.size, timeout)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)
    deadline = time.monotonic() + timeout.total_seconds()
    while (port := _read(path)) is None:
        if time.monotonic() > deadline:
            raise WorldError(
                f"rank 0 did not write its port to {path} within {timeout.total_seconds():g} s: it has not called "
                f"init_process_group, or it runs on another host; if so, {_HOW}"
            )
        time.sleep(POLL_SECONDS)
    return TCPStore("127.0.0.1", port, world.size, False, timeout)


def _by_mpi(world: World, timeout: timedelta) -> Store:
    where = "on several hosts" if world.local_size else "on an unknown number of hosts"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise WorldError(
            f"{world.source} started {world.size} ranks {where} and set no rendezvous address: {_HOW}, or "
            f"pip install mpi4py, which can exchange it ({error})"
        ) from None
    everyone = MPI.COMM_WORLD
    if everyone.Get_size() != world.size:
        raise WorldError(
            f"{world.source} started {world.size} ranks {where}, but mpi4py, which uses "
            f"{MPI.Get_library_version().split(',')[0].splitlines()[0]}, sees {everyone.Get_size()}: {_HOW}"
        )
    if world.rank == 0:
        with socket.create_server(("", 0), backlog=_BACKLOG) as listener:
            host, _ = everyone.bcast((_own_address(), listener.getsockname()[1]))
            return _serve(host, listener, world.size, timeout)
    host, port = everyone.bcast(None)
    return TCPStore(host, port, world.size, False, timeout)


def _serve(host: str, listener: socket.socket, size: int, timeout: timedelta) -> Store:
    """Rank 0's store, which takes over the socket. Returns when all ranks have connected."""
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=True, multi_tenant=False, master_listen_fd=listener.detach()
    )


def _own_address() -> str:
    """The address at which other hosts reach this one: the source address of its outgoing traffic."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address; connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _write(path: str, port: int) -> None:
    """Write the file atomically: a reader finds the whole port or no file."""
    part = f"{path}.{os.getpid()}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(str(port))
    os.replace(part, path)


def _read(path: str) -> int | None:
    """The port, or None if the file doesn't exist yet. Raises WorldError if it isn't a file of this user's.

    Anyone can write to the temporary directory.
    """
    foreign = WorldError(f"{path} is not your own file: remove it, or set TMPDIR to a directory of your own")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:  # unreadable, or a symbolic link
        raise foreign from error
    with open(descriptor) as file:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise foreign
        return int(file.read())


def _launcher() -> str:
    """An id shared by all ranks that one mpirun started on this host, and by no others; "" if it can't be determined.

    It identifies the nearest ancestor without a rank in its environment, as there may be shells in between. Pids are
    reused, and repeat across containers, so the id includes the start time and the pid namespace.
    """
    own = _rank_settings(os.getpid())
    pid = os.getpid()
    try:
        while own and _rank_settings(pid) == own:
            pid = int(_stat(pid)[1])
        if pid <= 1:
            return ""
        facts = (str(pid), _stat(pid)[19], os.readlink("/proc/self/ns/pid"), _boot_id())
    except (OSError, IndexError, ValueError):
        return ""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 1 is the parent, 19 the start time in clock ticks since boot."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _rank_settings(pid: int) -> set[bytes]:
    """The rank variables in the environment that a process was started with."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return {line for line in file.read().split(b"\0") if line.partition(b"=")[0] in _RANK_VARIABLES}


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
