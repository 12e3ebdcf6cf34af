"""The store in which the ranks of a world meet, where the launcher told no address: under mpirun, or alone.

On one host rank 0 listens on a port of its own and writes it to a file that the other ranks of the same launcher find.
Over several hosts MPI itself carries the address, where mpi4py is there. `take_rank` is for processes that no launcher
started, and that don't know their ranks.
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

from ..errors import WorldError
from .world import BY_MPI, World

# How often the others look whether rank 0 has written its address.
LOOK_SECONDS = 0.005

_HOW = (
    "set MASTER_ADDR and MASTER_PORT for all ranks, to rank 0's host and a free port there (mpirun -x, mpiexec -genv), "
    "or give init_method='tcp://HOST:PORT'"
)

# The variables that differ between a rank and the process that launched it.
_RANKS = (b"OMPI_COMM_WORLD_RANK", b"MV2_COMM_WORLD_RANK", b"PMI_RANK", b"PMIX_RANK")

_BACKLOG = 1024

_turn = 0


def meet(world: World, timeout: timedelta) -> Store:
    """A store for all ranks of `world`, new for each call; every rank makes as many calls.

    Raises WorldError where there is no way to meet, or `timeout` passes.
    """
    global _turn
    _turn += 1
    if world.size == 1:
        return HashStore()
    if world.source not in BY_MPI:
        raise WorldError(f"nothing says where the {world.size} ranks meet ({world.source} told the rank): {_HOW}")
    if world.one_host:
        return _by_file(world, timeout)
    return _by_mpi(world, timeout)


def take_rank(url: SplitResult, size: int, timeout: timedelta, name: str) -> tuple[Store, int]:
    """The store at a file:// or tcp:// URL, and the rank that it hands out: 0 … size - 1 as the processes come.

    With tcp:// rank 0 is who can listen there. `name` keeps groups apart that meet there one after the other.
    Raises WorldError where the ranks are all gone, and what torch raises.
    """
    store, rank = _tcp(url, size, timeout) if url.scheme == "tcp" else (FileStore(url.netloc + url.path, size), None)
    if rank is None:
        # A rank 0 that listens has not counted itself.
        rank = int(store.add(f"{name}/launchpad/ranks", 1)) - (url.scheme == "file")
    if rank >= size:
        left = f", or an earlier job left {url.path} behind: remove it" if url.scheme == "file" else ""
        raise WorldError(f"{url.geturl()} has handed out its {size} ranks: more processes came{left}")
    return store, rank


def _tcp(url: SplitResult, size: int, timeout: timedelta) -> tuple[Store, int | None]:
    """The store, and rank 0 where this process serves it."""
    if not url.hostname or not url.port:
        raise WorldError(f"{url.geturl()} is no place to meet: tcp://HOST:PORT")
    try:
        family = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((url.hostname, url.port), family=family, backlog=_BACKLOG)
    except OSError:  # another process listens there, or it is another host's address
        return TCPStore(url.hostname, url.port, size, False, timeout), None
    with listener:
        return _serve(url.hostname, listener, size, timeout), 0


def is_multicast(host: str) -> bool:
    """Whether this is an address of many hosts."""
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


def _by_file(world: World, timeout: timedelta) -> Store:
    launcher = _launcher()
    if not launcher:
        raise WorldError(f"{world.source} started this rank, but which process did can't be told from /proc: {_HOW}")
    path = os.path.join(tempfile.gettempdir(), f"launchpad-meet-{launcher}-{_turn}")
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
                f"rank 0 did not write where to meet, to {path}, in {timeout.total_seconds():g} s: it has not come to "
                f"init_process_group, or it runs on another host; then {_HOW}"
            )
        time.sleep(LOOK_SECONDS)
    return TCPStore("127.0.0.1", port, world.size, False, timeout)


def _by_mpi(world: World, timeout: timedelta) -> Store:
    where = "over several hosts" if world.local_size else "over hosts whose number it doesn't tell"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library for it
        raise WorldError(
            f"{world.source} started {world.size} ranks {where} and told no address to meet at: {_HOW}, or pip install "
            f"mpi4py, which finds it ({error})"
        ) from None
    everyone = MPI.COMM_WORLD
    if everyone.Get_size() != world.size:
        raise WorldError(
            f"{world.source} started {world.size} ranks {where}, but mpi4py, which is built with "
            f"{MPI.Get_library_version().split(',')[0].splitlines()[0]}, finds {everyone.Get_size()}: {_HOW}"
        )
    if world.rank == 0:
        with socket.create_server(("", 0), backlog=_BACKLOG) as listener:
            host, _ = everyone.bcast((_own_address(), listener.getsockname()[1]))
            return _serve(host, listener, world.size, timeout)
    host, port = everyone.bcast(None)
    return TCPStore(host, port, world.size, False, timeout)


def _serve(host: str, listener: socket.socket, size: int, timeout: timedelta) -> Store:
    """Rank 0's store, which takes the socket over. Returns when all ranks have come."""
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=True, multi_tenant=False, master_listen_fd=listener.detach()
    )


def _own_address() -> str:
    """The address of this host that others reach it at: the one it would send from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documents; connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _write(path: str, port: int) -> None:
    """So that a reader finds all of it or nothing."""
    part = f"{path}.{os.getpid()}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(str(port))
    os.replace(part, path)


def _read(path: str) -> int | None:
    """The port; None where there is no such file yet. Raises WorldError of a file that is not this user's."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():  # everybody may write to the temporary folder
                raise WorldError(f"{path} is another user's: remove it, or set TMPDIR to a folder of your own")
            return int(file.read())
    except FileNotFoundError:
        return None


def _launcher() -> str:
    """What all ranks that one mpirun started on this host have in common, and those of no other; "": can't be told.

    That is the nearest ancestor without a rank in its environment, as there may be shells in between. Its pid comes
    back in time, and in other containers: so its start counts, and the pid namespace.
    """
    own = _rank_lines(os.getpid())
    pid = os.getpid()
    try:
        while own and _rank_lines(pid) == own:
            pid = int(_stat(pid)[1])
        if pid <= 1:
            return ""
        facts = (str(pid), _stat(pid)[19], os.readlink("/proc/self/ns/pid"), _boot())
    except (OSError, IndexError, ValueError):
        return ""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 1 is the parent, 19 the start in clock ticks since boot."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _rank_lines(pid: int) -> set[bytes]:
    """The variables of a process, as it started, that tell its rank."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return {line for line in file.read().split(b"\0") if line.partition(b"=")[0] in _RANKS}


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
