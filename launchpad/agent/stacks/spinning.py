"""Tells whether a rank without Python waits busily in an MPI library: looks where its running threads are, by ptrace.

A running thread is stopped for some microseconds, in which its registers and its stack are read. One that is blocked is
left alone, as its system call might fail with EINTR. Where ptrace is forbidden, nothing is known.

The rank spins in MPI if, in each look, no running thread is in the program's own code, and the thread that called MPI
has the same stack from that call upwards. A loop that calls MPI changes the stack, even by what it counts in registers,
as MPI's function saves them; or it changes variables of the program or of the MPI library, which are compared too.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ... import linux
from ..host import procfs

# How often the threads are looked at, and how long one may take to stop: others may have the processors.
_LOOKS = 4
_STOP_SECONDS = 0.05

# How far up the stack the call of MPI is searched for, and how much of the stack above it has to stay the same.
_SEARCHED_BYTES = 32 << 10
_COMPARED_BYTES = 256 << 10
# How much is compared of the variables of the program, and of each MPI library.
_DATA_BYTES = 8 << 20

_MPI = re.compile(r"libp?mpi(ch\w*|fort|cxx|_\w+)?[-.]")
# What others call: the C library, and MPI's own libraries and transports. Who called them counts.
_CALLED = re.compile(
    r"ld-|\[(vdso|vsyscall)\]|mca_|lib(c|pthread|open-pal|open-rte|prrte|pmix|pmi2?|event\w*|uc[mpst]|uc[mpst]_\w+"
    r"|fabric|\w+-fi|psm\w*|efa|cxi|ibverbs|mlx\d|rdmacm|hcoll|sharp\w*|xpmem)[-.]"
)

# Values of linux/ptrace.h, linux/wait.h and linux/elf.h.
_SEIZE, _INTERRUPT, _DETACH, _GETREGSET = 0x4206, 0x4207, 17, 0x4204
_EVENT_STOP = 128
_WALL = 0x40000000
_NT_PRSTATUS = 1


class _Registers(NamedTuple):
    """A processor's registers, as indices of the words that PTRACE_GETREGSET returns."""

    words: int
    code: tuple[int, ...]  # those that point to code: the program counter, and where the function returns to
    stack: int
    saved: int  # bytes below a return address in which a function saves its caller's registers


_MACHINES = {"x86_64": _Registers(27, (16,), 19, 48), "aarch64": _Registers(34, (32, 30), 31, 8)}


class MpiPlace(NamedTuple):
    """Where a thread is that is not in the program's own code; empty if nobody knows who called it."""

    library: str = ""  # the MPI library
    call: str = ""  # identifies the program's call of it


class Mappings:
    """The code and the data that a process has mapped."""

    def __init__(self, lines: Iterable[str], program: str) -> None:
        """`lines`: those of /proc/PID/maps. `program`: the name of the executable."""
        self._code: list[tuple[int, int, str]] = []  # start, end, file
        self._data_ends: list[int] = []
        self.variables: list[tuple[int, int]] = []  # start, size: of the program and the MPI libraries
        self.has_mpi = False
        last, owner = 0, ""
        for line in lines:
            fields = line.split(maxsplit=5)
            start, end = (int(one, 16) for one in fields[0].split("-"))
            file = os.path.basename(fields[5].strip()) if len(fields) > 5 else ""
            self.has_mpi = self.has_mpi or bool(_MPI.match(file))
            owner = file or (owner if start == last else "")  # variables without a value in the file follow it
            last = end
            if "x" in fields[1]:
                self._code.append((start, end, file or "anonymous"))
            else:
                self._data_ends.append(end)
            if fields[1].startswith("rw-p") and (owner == program or _MPI.match(owner)):
                self.variables.append((start, min(end - start, _DATA_BYTES)))

    def file_of(self, address: int) -> str:
        """The file that the code at this address is from; "" if there is no code."""
        index = bisect.bisect_right(self._code, address, key=lambda one: one[0]) - 1
        return self._code[index][2] if index >= 0 and address < self._code[index][1] else ""

    def data_after(self, address: int) -> int:
        """How many bytes of data there are from this address on."""
        index = bisect.bisect_right(self._data_ends, address)
        return self._data_ends[index] - address if index < len(self._data_ends) else 0

    def place(self, code: list[int], pointer: int, stack: bytes, saved: int) -> MpiPlace | None:
        """Where a thread is; None in the program's own code. `stack`: its content, from the stack pointer upwards."""
        library = ""
        words = memoryview(stack)[: min(_SEARCHED_BYTES, len(stack)) & ~7].cast("Q")
        for index, word in enumerate([*code, *words], -len(code)):
            file = self.file_of(word)
            if _MPI.match(file):
                library = file
            elif file and not _CALLED.match(file):
                if not library:
                    return None
                at = max(0, 8 * index)
                crc = zlib.crc32(stack[max(0, at - saved) : at + _COMPARED_BYTES])
                return MpiPlace(library, f"{pointer + at:x}:{crc:x}")
        return MpiPlace()


def look(pid: int) -> list[str]:
    """The MPI library in which a rank spins, and what identifies its call of it; empty if it doesn't, or if unknown."""
    registers = _MACHINES.get(os.uname().machine)
    if registers is None:
        return []
    found: list[str] = []

    def search() -> None:
        try:
            found.extend(_look(pid, registers))
        except (OSError, ValueError):  # it has exited, or we may not trace it
            pass

    # A thread that did not stop in time is let go when the thread that traces it ends. Meanwhile nobody waits for
    # children, which would see the stop.
    tracer = threading.Thread(target=search)
    tracer.start()
    own = tracer.native_id
    tracer.join()
    while os.path.exists(f"/proc/self/task/{own}"):  # join returns a little earlier
        time.sleep(0.0001)
    return found


def _look(pid: int, registers: _Registers) -> list[str]:
    library, calls, mappings = "", dict[int, str](), dict[int, Mappings]()
    for _ in range(_LOOKS):
        for process, thread in _running(pid):
            if process not in mappings:
                program = procfs.executable(process)
                with open(f"/proc/{process}/maps", errors="replace") as file:
                    mappings[process] = Mappings(file, program)
                # What Python counts is neither on the stack nor among the variables.
                if not mappings[process].has_mpi or program.startswith("python"):
                    return []
            place = _place(thread, mappings[process], registers)
            if place is None or (place.call and calls.setdefault(thread, place.call) != place.call):
                return []
            library = place.library or library
    if not library:
        return []
    states = {process: _crc(process, one.variables) for process, one in mappings.items()}
    known = [*sorted(calls.items()), *sorted(states.items())]
    return [library, " ".join(f"{number}:{state}" for number, state in known)]


def _running(pid: int) -> Iterator[tuple[int, int]]:
    """The threads of the process and its descendants that are running or want to, each after its process."""
    todo = [pid]
    while todo:
        process = todo.pop()
        todo += procfs.children(process)
        for task in os.listdir(f"/proc/{process}/task"):
            if linux.stat(f"{process}/task/{task}")[0] == "R":
                yield process, int(task)


def _crc(process: int, parts: Iterable[tuple[int, int]]) -> str:
    """The check sum of parts of a process's memory. Raises OSError."""
    crc = 0
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        for start, size in parts:
            crc = zlib.crc32(os.pread(memory.fileno(), size, start), crc)
    return f"{crc:x}"


def _place(thread: int, mappings: Mappings, registers: _Registers) -> MpiPlace | None:
    """Where a thread is, as `Mappings.place`. Raises OSError."""
    linux.ptrace(_SEIZE, thread)
    linux.ptrace(_INTERRUPT, thread)
    signum = _stopped(thread)
    try:
        values = (ctypes.c_uint64 * registers.words)()
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(values), ctypes.sizeof(values))
        linux.ptrace(_GETREGSET, thread, _NT_PRSTATUS, ctypes.addressof(vector))
        pointer = values[registers.stack]
        size = min(_SEARCHED_BYTES + _COMPARED_BYTES, mappings.data_after(pointer))
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            stack = os.pread(memory.fileno(), size, pointer)
    finally:
        linux.ptrace(_DETACH, thread, 0, signum)
    return mappings.place([values[index] for index in registers.code], pointer, stack, registers.saved)


def _stopped(thread: int) -> int:
    """Wait until a thread has stopped. Returns the signal that it was about to take; 0 for none. Raises OSError."""
    deadline = time.monotonic() + _STOP_SECONDS
    # Only a stop is waited for, never an exit, and nothing is taken from whoever waits for it later.
    while (stop := os.waitid(os.P_PID, thread, os.WSTOPPED | os.WNOHANG | os.WNOWAIT | _WALL)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.00005)
    return 0 if stop.si_status >> 8 == _EVENT_STOP else stop.si_status & 0x7F
