"""Linux helpers for head and agent: prctl, ptrace, descriptor I/O, paths through /proc, processes, addresses.

It is sent to the nodes with the agent. Head and agent import it at startup, so slow imports are deferred.
"""

from __future__ import annotations

import errno
import fcntl
import os
from stat import S_ISBLK, S_ISCHR, S_ISFIFO

TYPE_CHECKING = False  # typing would take as long as all the rest
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Collection
    from typing import Any

# Index into what `stat` returns: the process's start time, in clock ticks since boot.
STARTED = 19

# The limits of open files that this process was started with, where it has raised its own.
_files_at_start: tuple[int, int] | None = None

# No text that people write is longer, and some files never end.
MOST_TEXT = 4 << 20

# With the default of 64 KiB, a writer blocks whenever its reader is briefly busy.
PIPE_BYTES = 1 << 20


_library: Any = None


def _libc() -> Any:
    global _library
    if _library is None:
        import ctypes

        _library = ctypes.CDLL(None, use_errno=True)
    return _library


def accepted(listener: _socket.socket) -> _socket.socket:
    """The next caller's connection, as from `accept` of socket.socket, a module that takes 3 ms. Raises OSError."""
    import _socket

    fd, _ = listener._accept()  # type: ignore[attr-defined]
    return _socket.socket(fileno=fd)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Raises OSError.

    Each guard needs it before its agent can start, and to import ctypes takes 3 ms.
    """
    _ctypes: Any = __import__("_ctypes")

    class ULong(_ctypes._SimpleCData):  # type: ignore[misc]
        _type_ = "L"

    class Prctl(_ctypes.CFuncPtr):  # type: ignore[misc]
        _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
        _restype_ = type("Int", (_ctypes._SimpleCData,), {"_type_": "i"})

    if Prctl(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"))(option, ULong(value), 0, 0, 0) != 0:
        code = _ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    """Trace a thread (ptrace(2)). Raises OSError."""
    import ctypes

    if _libc().ptrace(ctypes.c_long(request), thread, ctypes.c_void_p(address), ctypes.c_void_p(data)) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def open_closed(*fds: int) -> None:
    """Open those of these descriptors (0, 1, 2) that are closed, or a pipe of ours would be taken for them.

    They refer to /dev/null, also in child processes.
    """
    for fd in fds:
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free


def user_name(uid: int) -> str:
    """The user's name; "" if the number has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def text_of(path: str) -> str:
    """The whole text of a file; "" if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def whole(path: str, most: int = MOST_TEXT) -> bytes:
    """All of a file, or of a pipe, as in `<(…)`, that the user names. Raises OSError, also if it is longer."""
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"longer than {most >> 20} MiB", path)
    return data


def whole_text(path: str, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The same as text, its lines ended by newlines. Raises OSError and UnicodeDecodeError."""
    text = whole(path).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def never_ends(path: str) -> str:
    """ "a pipe" or "a device" for what may have no end to read to; "" for everything else, /dev/null included."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ""
    if S_ISFIFO(found.st_mode):
        return "a pipe"
    odd = S_ISCHR(found.st_mode) or S_ISBLK(found.st_mode)
    return "a device" if odd and found.st_rdev != os.stat(os.devnull).st_rdev else ""


def contents(path: str) -> bytes:
    """A small file of /proc. Faster than `open`, which counts for hundreds of processes. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def boot_id() -> str:
    """The ID of the machine's current boot. Raises OSError if /proc doesn't tell."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def namespace(kind: str) -> str:
    """Our namespace of a kind (pid, net, mnt …), like pid:[4026531836]. Raises OSError."""
    return os.readlink(f"/proc/self/ns/{kind}")


def shows_our_pids() -> bool:
    """Whether /proc is mounted and shows our own PID namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def stat(process: int | str) -> list[str]:
    """The fields of /proc/PROCESS/stat, starting at the state (field 3 in proc(5)). Raises OSError."""
    with open(f"/proc/{process}/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    if len(fields) <= STARTED:
        raise ProcessLookupError(process)
    return fields


def is_gone(pid: int) -> bool:
    """Whether there is no such process, not even a zombie. Doesn't need /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def wait_for(pidfd: int, seconds: float) -> None:
    """Wait until a process that need not be our child has ended; kill it after so many seconds."""
    import select
    import signal

    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if not ended.poll(seconds * 1000):
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        ended.poll()


def end_group(leader: int, seconds: float) -> None:
    """End what is left of the process group that a child of ours led, and that only our commands are in.

    TERM first, so that each can end its own; KILL after so many seconds.
    """
    import signal
    import time

    deadline = time.monotonic() + seconds
    try:
        os.killpg(leader, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(0.005)
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it is empty, or another user's by now (sudo)
        pass


def files_at_start() -> tuple[int, int] | None:
    """The limits of open files for our children, where we have raised our own."""
    return _files_at_start


def read_now(fd: int, size: int) -> bytes | None:
    """Read from a non-blocking descriptor: None if there is nothing yet, b"" at end-of-file or after an error."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
    except OSError:  # a terminal's EIO: all holders of the other side have closed it
        return b""


def readable(fd: int) -> int:
    """How many bytes there are to read from a pipe or terminal."""
    import struct
    import termios

    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def widen_pipe(writer: int) -> None:
    """Let a pipe hold PIPE_BYTES. Best effort: the user's pipe memory (fs.pipe-user-pages-soft) may be used up."""
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass


def raise_file_limit() -> bool:
    """Raise our limit of open files as far as we may. Returns whether it is higher now."""
    global _files_at_start
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    except (OSError, ValueError):
        return False
    _files_at_start = _files_at_start or before
    return resource.getrlimit(resource.RLIMIT_NOFILE) != before


def lower_file_limit(pid: int) -> None:
    """Give a child that has just been started the limit of open files that we had at first."""
    if _files_at_start is not None:
        import resource

        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _files_at_start)
        except OSError:  # it has gone
            pass


def path_of(fd: int) -> str:
    """A path by which the user's other processes can open this process's descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def by_short_path(path: str, action: Callable[[str], None]) -> None:
    """Call `action`, a Unix socket's bind or connect, with a short alias of `path`: the limit is 107 bytes."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        action(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def address_family(address: str) -> int:
    """The family of a numeric address."""
    import _socket

    return _socket.AF_INET6 if ":" in address else _socket.AF_INET


def owner_of_peer(peer: tuple[str, int], own: tuple[str, int]) -> int:
    """The user who holds the other end of a TCP connection over IPv4 on this machine, of which these are the addresses.

    Raises OSError if /proc doesn't tell.
    """
    import socket

    ends = []
    for address, port in (peer, own):
        number = int.from_bytes(socket.inet_aton(address), "little")
        ends.append(f"{number:08X}:{port:04X}")
    with open("/proc/net/tcp") as file:
        for line in file:
            fields = line.split()
            if fields[1:3] == ends:
                return int(fields[7])
    raise ProcessLookupError(peer)


def network_of(address: str) -> str:
    """What one machine has: an IPv4 address, or 64 bits of IPv6, in which it can choose any number of addresses."""
    import socket

    plain = address.partition("%")[0].removeprefix("::ffff:")
    return socket.inet_pton(socket.AF_INET6, plain)[:8].hex() if ":" in plain else plain


def descriptor(pid: int, targets: Collection[str]) -> str:
    """The path under /proc of the process's descriptor that links to one of `targets`; "" if it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") in targets:
                    return f"{folder}/{name}"
            except OSError:  # it has just been closed
                continue
    except OSError:  # it is another user's, or gone
        pass
    return ""


def ipv4_addresses() -> list[tuple[str, str]]:
    """This machine's, each with its interface.

    From SIOCGIFCONF (netdevice(7)), which fills an array of struct ifreq: a name and a socket address each.
    """
    import _socket
    import array
    import struct

    size = 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(size * 512))
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(any_socket.fileno(), 0x8912, request))[0]
    finally:
        any_socket.close()
    entries = [buffer[start : start + size].tobytes() for start in range(0, length, size)]
    return [(_socket.inet_ntoa(entry[20:24]), entry[:16].split(b"\0")[0].decode()) for entry in entries]


def ipv6_addresses() -> list[tuple[str, str]]:
    """Likewise; one that means something only on its link has the interface as its zone: fe80::1%eth0.

    From /proc/net/if_inet6: address, index, prefix, scope, flags, name.
    """
    import _socket

    found = []
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, _, _, scope, _, interface = line.split()
                zone = "" if scope in ("00", "10") else f"%{interface}"
                found.append((_socket.inet_ntop(_socket.AF_INET6, bytes.fromhex(digits)) + zone, interface))
    except OSError:  # a kernel without IPv6
        pass
    return found


def is_loopback(address: str) -> bool:
    """Whether a numeric address is a loopback address."""
    return address.startswith("127.") or address == "::1"
