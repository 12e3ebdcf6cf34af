"""Linux facts about this process: its threads, its GPU, its parent's death, and the command line that others see."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[object] = []  # keeps memory alive that the kernel points to


def is_free_threaded() -> bool:
    """Whether this is a free-threaded build (Py_GIL_DISABLED), even if its GIL is enabled now."""
    return "t" in sys.abiflags


def threads() -> int:
    """How many threads this process has, including native ones. Raises OSError if /proc doesn't tell."""
    return len(os.listdir("/proc/self/task"))


def holds_gpu() -> bool:
    """Whether a CUDA or ROCm driver's device is open. Raises OSError if /proc doesn't tell."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(("/dev/nvidia", "/dev/kfd")):
                return True
        except OSError:  # the descriptor of the listing itself
            pass
    return False


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; exit now if it is already dead."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class _MmMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in "start_code end_code start_data end_data start_brk brk".split()),
        *((name, ctypes.c_uint64) for name in "start_stack arg_start arg_end env_start env_end auxv".split()),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show_as(argv: list[bytes], environ: dict[bytes, bytes]) -> None:
    """Have /proc, and so ps and pkill, show this command line, its name and environment for this process.

    If the kernel can't do it (no CONFIG_CHECKPOINT_RESTORE), the command line overwrites the present one, as far as it
    fits. Without /proc this is a no-op.
    """
    words = b"".join(word + b"\0" for word in argv)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in environ.items())
    try:
        with open("/proc/self/comm", "wb") as file:
            file.write(os.path.basename(argv[0]))
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # proc(5) counts from 1, and the first two fields are cut off.
        number = {name: int(fields[place - 3]) for name, place in _PLACES.items()}
        start, end = int(fields[48 - 3]), int(fields[49 - 3])
    except (OSError, IndexError):
        return
    arguments, environment = ctypes.create_string_buffer(words, len(words)), None
    environment = ctypes.create_string_buffer(variables, len(variables) or 1)
    _kept[:] = [arguments, environment]
    _libc.sbrk.restype = ctypes.c_void_p
    shown = _MmMap(
        **number,
        brk=_libc.sbrk(ctypes.c_long(0)),
        arg_start=ctypes.addressof(arguments),
        arg_end=ctypes.addressof(arguments) + len(words),
        env_start=ctypes.addressof(environment),
        env_end=ctypes.addressof(environment) + len(variables),
        exe_fd=0xFFFFFFFF,
    )
    size = ctypes.c_ulong(ctypes.sizeof(shown))
    if _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(shown), size, ctypes.c_ulong(0)) != 0:
        room = end - start
        if room > 0:
            ctypes.memmove(start, words[: room - 1].ljust(room, b"\0"), room)


_PLACES = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}
