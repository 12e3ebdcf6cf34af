"""Leases of GPUs (--gpus): a locked file per GPU, in a folder that all users of the machine share.

A lease is a lock (flock) on the file, so it ends with its agent, however that ends. The files themselves stay: one of
another user can't be removed. They hold a line of JSON about the latest lease, for people, and decide nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence

from ... import linux
from ...protocol.commands import LeaseGpus, ListGpus
from ...protocol.events import GpusLeased, GpusListed
from ...protocol.gpus import GpuLease, SeenGpu
from ...protocol.printable import printable
from ...protocol.typed import typed
from ..part import AgentHub
from ..poll import earliest
from . import nvidia_smi
from .child import ChildEnded, PartWithChildren, Task
from .nvidia_smi import GpuDevice

# What nvidia-smi has told, as JSON.
_MOST_SEEN = 1 << 20

_NO_NVIDIA_SMI = "there is no nvidia-smi, which knows the GPUs; put it on PATH"

# The device of AMD's driver for computing.
AMD = "/dev/kfd"

# Of a file about a lease; more is not ours.
_MOST_BYTES = 4096

# One chooses at a time, which takes a few ms: whoever holds that lock for so long wants to keep others from choosing.
_TURN_SECONDS = 5.0
_TRY_SECONDS = 0.01

# Files in /tmp that nobody touches for days are removed.
_TOUCH_SECONDS = 6 * 3600.0


class GpuLeases(PartWithChildren):
    """Carries out LeaseGpus and ListGpus, and holds the leases until the agent exits."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._held: list[int] = []  # descriptors
        self._leased: list[str] = []  # UUIDs
        self._touch_at: float | None = None

    def on(self, command: LeaseGpus | ListGpus) -> None:
        """Answer with the UUIDs of the leased GPUs, or with all GPUs, once nvidia-smi has answered."""
        try:
            task = Task(look, nvidia_smi.ANSWER_SECONDS, _MOST_SEEN, errors=False)
            self.begin(task, functools.partial(self._seen, command))
        except OSError as error:
            self._answer(command, [], f"nvidia-smi can't be started: {error.strerror}")

    def _seen(self, command: LeaseGpus | ListGpus, ended: ChildEnded) -> None:
        if ended.code is None:
            self._answer(command, [], f"nvidia-smi: no answer within {nvidia_smi.ANSWER_SECONDS:g} s")
            return
        try:
            self._answer(command, *typed(tuple[list[GpuDevice], str], json.loads(ended.output)))
        except (ValueError, TypeError):
            self._answer(command, [], "nvidia-smi: its answer was lost")

    def _answer(self, command: LeaseGpus | ListGpus, found: Sequence[GpuDevice], problem: str) -> None:
        now = time.monotonic_ns()
        if isinstance(command, ListGpus):
            self._hub.outbox.say(GpusListed(now, listed(folder(), found), problem))
            return
        if not problem and not self._held:  # otherwise the next head of the same job asks
            self._leased, self._held, problem = lease(folder(), nvidia_smi.visible(found, os.environ), command)
            self._touch_at = time.monotonic() + _TOUCH_SECONDS
        self._hub.outbox.say(GpusLeased(now, self._leased, problem))

    @property
    def deadline(self) -> float | None:
        """When the files must be touched, or nvidia-smi's time is up."""
        return earliest((super().deadline, self._touch_at if self._held else None))

    def tick(self, now: float) -> None:
        """Keep the files from being removed as old ones."""
        super().tick(now)
        if self._touch_at is None or now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_SECONDS
        for held in self._held:
            with contextlib.suppress(OSError):
                os.utime(held)

    def close(self) -> None:
        """End the leases."""
        for held in self._held:
            os.close(held)
        self._held = []


def look() -> None:
    """In a child: write the node's GPUs, and why they can't be told."""
    found: list[GpuDevice] = []
    problem = ""
    try:
        found = nvidia_smi.devices()
    except FileNotFoundError:
        problem = _NO_NVIDIA_SMI
        if os.path.exists(AMD):
            problem = f"{_NO_NVIDIA_SMI}; AMD's can't be chosen so: set ROCR_VISIBLE_DEVICES with --env"
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        problem = printable(nvidia_smi.trouble(error))
    linux.write_all(1, json.dumps([found, problem]).encode())


def folder() -> str:
    """Where the files are: in the same folder for all users, from which only a file's owner can remove it."""
    with contextlib.suppress(OSError):
        facts = os.stat("/run/lock")
        if facts.st_uid == 0 and facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH:
            return "/run/lock"
    return "/tmp"


def lease(place: str, found: Sequence[GpuDevice], wanted: LeaseGpus) -> tuple[list[str], list[int], str]:
    """Lease GPUs of those in `found`: their UUIDs, the descriptors that hold the leases, and why there are none."""
    candidates, count, problem = _candidates(found, wanted)
    if problem:
        return [], [], problem
    held: dict[str, int] = {}
    blocked: list[str] = []  # why those that were tried are not ours
    with _turn(place):
        for device in candidates:
            if count and len(held) == count:
                break
            try:
                held[device.uuid] = _lock(place, device.uuid)
            except BlockingIOError:
                blocked.append(f"GPU {_short(device)} is leased by {_words(_read(place, device.uuid))}")
            except OSError as error:
                blocked.append(f"GPU {_short(device)} can't be leased: {_path(place, device.uuid)}: {error.strerror}")
        if len(held) >= max(1, count):
            for descriptor in held.values():
                _describe(descriptor, wanted.job)
            return list(held), list(held.values()), ""
    for descriptor in held.values():
        os.close(descriptor)
    return [], [], _too_few(found, candidates, wanted, count, blocked, len(held))


def _candidates(found: Sequence[GpuDevice], wanted: LeaseGpus) -> tuple[list[GpuDevice], int, str]:
    """The GPUs to try, how many of them are needed (0: all that there are), and why it can't work."""
    if not wanted.names:
        return [device for device in found if device.free or not wanted.free], wanted.number, ""
    chosen: list[GpuDevice] = []
    for name in wanted.names:
        matching = nvidia_smi.named(found, name)
        if not matching:
            there = ", ".join(dict.fromkeys(str(device.number) for device in found)) or "none"
            return [], 0, f"there is no GPU {name} that ranks can see; there are {there}"
        if len(matching) > 1:
            first = matching[0].uuid
            return [], 0, f"GPU {name} is split into {len(matching)} MIG slices; name slices, like {first}"
        chosen += matching
    return chosen, len(chosen), ""


def _too_few(
    found: Sequence[GpuDevice],
    candidates: Sequence[GpuDevice],
    wanted: LeaseGpus,
    count: int,
    blocked: Sequence[str],
    got: int,
) -> str:
    if wanted.names:
        return "; ".join(blocked)
    kind = "free " if wanted.free else ""
    reasons = list(blocked)
    if wanted.free:
        reasons += [f"GPU {_short(device)} {_why_taken(device)}" for device in found if device not in candidates]
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"{got} of its {len(found)} GPUs are {kind or 'not leased '}and {max(1, count)} are wanted{why}"


def _why_taken(device: GpuDevice) -> str:
    if device.pids:
        return f"is used by {', '.join(_users(device))}"
    return "has had memory errors" if device.faulty else f"has {device.used >> 20} MiB in use"


def _short(device: GpuDevice) -> str:
    return device.uuid if device.parent else str(device.number)


def _words(known: GpuLease | None) -> str:
    return f"{known.user} ({known.job})" if known is not None else "another job"


def listed(place: str, found: Sequence[GpuDevice]) -> list[SeenGpu]:
    """The GPUs, with their users and leases."""
    with _turn(place):
        leases = [_holder(place, device.uuid) for device in found]
    return [
        SeenGpu(*device[:3], device.used, device.total, device.faulty, _users(device), known)
        for device, known in zip(found, leases, strict=True)
    ]


def _users(device: GpuDevice) -> list[str]:
    """Whose processes compute there."""
    return sorted({nvidia_smi.user_of(pid) or f"pid {pid}" for pid in device.pids})


# Files.


def _path(place: str, uuid: str) -> str:
    return os.path.join(place, f"launchpad-gpu-{re.sub(r'[^0-9A-Za-z-]', '_', uuid)}")


def _lock(place: str, uuid: str) -> int:
    """Lock the file of a GPU. Raises BlockingIOError if somebody has it, OSError if it is not a file of ours."""
    path = _path(place, uuid)
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed meanwhile


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _open(path: str) -> int:
    """Open the file, which anybody may write. In a folder that anybody may write to, it can be anything."""
    while True:
        try:
            return _checked(path, os.O_RDWR)
        except PermissionError:  # somebody made it, and doesn't let us write: it can still be locked
            return _checked(path, os.O_RDONLY)
        except FileNotFoundError:
            pass
        # It appears with its permissions, whatever the umask is. With O_CREAT, a file that another user made in such a
        # folder can't be opened (fs.protected_regular).
        made = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o666)
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            os.close(descriptor)
            os.unlink(made)


def _checked(path: str, flags: int) -> int:
    # O_NOFOLLOW: no symbolic link to another file; st_nlink: no hard link; O_NONBLOCK: no named pipe that blocks us.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise OSError(0, "it is not a plain file", path)
    return descriptor


def _describe(descriptor: int, job: str) -> None:
    about = {"user": nvidia_smi.name_of(os.getuid()), "job": job, "since": time.time(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # another user's file, or no room: the lock is what counts
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(about)}\n".encode(), 0)


def _read(place: str, uuid: str) -> GpuLease | None:
    """What the file says of the latest lease. Whoever can open it can have written it, so its user is looked up."""
    try:
        descriptor = _checked(_path(place, uuid), os.O_RDONLY)
    except OSError:
        return None
    try:
        about = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        user = nvidia_smi.user_of(int(about["pid"])) or str(about["user"])
        return GpuLease(printable(user)[:64], printable(str(about["job"]))[:64], float(about["since"]))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    finally:
        os.close(descriptor)


def _holder(place: str, uuid: str) -> GpuLease | None:
    """Who has a lease on it now."""
    try:
        descriptor = _checked(_path(place, uuid), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(place, uuid) or GpuLease("somebody", "", 0.0)
    finally:
        os.close(descriptor)
    return None


@contextlib.contextmanager
def _turn(place: str) -> Iterator[None]:
    """While we choose, nobody else does: two that take turns would each get half of what they want."""
    descriptor = -1
    end = time.monotonic() + _TURN_SECONDS
    with contextlib.suppress(OSError):
        while descriptor < 0 and time.monotonic() < end:
            try:
                descriptor = _lock(place, "turn")
            except BlockingIOError:
                time.sleep(_TRY_SECONDS)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
