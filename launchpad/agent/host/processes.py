"""Process control on Linux: subreaper, parent-death signal, children, and the sweep that kills all descendants."""

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping

from ... import linux
from ...named import NamedTuple
from . import procfs

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# The sweep gives up after this long: a process in uninterruptible sleep can't be killed.
SWEEP_SECONDS = 10.0

# The same for processes of a job that has lost its guard and agent.
STRAYS_SECONDS = 2.0

# How long the sweep sleeps at least between two rounds.
_LEAST_PAUSE = 0.0005

# Helpers of Python and torch that exit as soon as the last process that could use them is gone. The cleaners among them
# remove the shared memory and semaphores of processes that died: killed too early, they would leave those in /dev/shm.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
_HELPERS = (*_CLEANERS, "multiprocessing.forkserver")
HELPER_SECONDS = 2.0

# A process has no command line while it exits, and for a moment while it executes a program.
NAMELESS_SECONDS = 0.25

# Command lines are shown up to this length.
_NAME_LENGTH = 60

# The highest descriptor to try to close where /proc doesn't list the open ones.
_MAX_DESCRIPTORS = 1 << 16

# Kinds of programs.
PYTHON, SHELL, CLEANER, OTHER = "python", "shell", "cleaner", "other"

_SHELLS = frozenset("sh bash rbash dash ash busybox zsh ksh ksh93 mksh fish tcsh csh".split())


# Schedulers and init systems send these to every process of a job. What they mean for the ranks is for the head to say.
_OUTLIVED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def close_inherited(keep: Collection[int | None]) -> None:
    """Close what this process inherited, apart from the standard streams: it would stay open in its children too."""
    try:
        last = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        last = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_DESCRIPTORS) - 1
    first = 3
    for fd in sorted(fd for fd in keep if fd is not None and fd >= first):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, last + 1)  # one by one where Python was built without close_range


def outlive_signals() -> None:
    """Don't die of a signal that is sent to every process of a job. Programs executed from here don't inherit this."""
    for signum in _OUTLIVED:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _do_nothing)


def hold_signals() -> set[int]:
    """Block the signals that we outlive. Returns the mask for `release_signals`."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)


def release_signals(mask: set[int]) -> None:
    """Get the signals that came meanwhile."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def heed_signals() -> None:
    """Undo `outlive_signals`, in a child that is about to execute a program."""
    for signum in _OUTLIVED:
        if signal.getsignal(signum) is _do_nothing:
            signal.signal(signum, signal.SIG_DFL)


def _do_nothing(*_: object) -> None:
    pass


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant, even one that called setsid or forked twice."""
    linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends. Call it in the child."""
    linux.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the prctl
        os._exit(1)


def continue_with_end_of_parent() -> None:
    """Have the kernel continue this process, should it be stopped, when the thread that forked it ends."""
    linux.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def stopped_or_continued(child: int) -> int | None:
    """What has happened to a child since the last call: the signal that stopped it, 0 if it was continued, or None."""
    try:
        change = os.waitid(os.P_PID, child, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    if change is None:
        return None
    return change.si_status if change.si_code == os.CLD_STOPPED else 0


def wakeup_on_exit() -> int:
    """A descriptor that becomes readable when a child exits, stops or is continued, for whoever polls others too."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def children() -> list[int]:
    """This process's children, including zombies; none if /proc can't show them."""
    if not linux.shows_our_pids():  # pids of another namespace belong to other processes here
        return []
    try:
        return procfs.children("self")
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_scan()


def _children_by_scan() -> list[int]:
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = linux.stat(name)[1]
            except OSError:
                continue
            if int(parent) == me:
                found.append(int(name))
    return found


def name_of(pid: int) -> str:
    """The command line of a process; "" if it is gone or exiting."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_helper(name: str) -> bool:
    """Whether a command line is that of a helper of Python or torch, which exits by itself."""
    return _is_one_of(_HELPERS, name)


def left_behind(own: Collection[int]) -> dict[int, str]:
    """Our live children that are none of our `own`, with their command lines. Helpers exit by themselves."""
    found = {pid: name_of(pid) for pid in children() if pid not in own}
    return {pid: name for pid, name in found.items() if not is_helper(name) and not procfs.is_dying(pid)}


def is_zombie(pid: int) -> bool:
    """Whether a child is a zombie; False if /proc hides it."""
    try:
        return linux.stat(pid)[0] in "ZX"
    except OSError:
        return False


class Process(NamedTuple):
    """A process in a rank's process group, as /proc shows it."""

    parent: int
    kind: str
    ignored: int  # the mask of ignored signals; the lowest bit is signal 1

    def ignores(self, signum: int) -> bool:
        """Whether it ignores this signal."""
        return bool(self.ignored >> (signum - 1) & 1)


def kind_of(pid: int) -> str:
    """The kind of program that a process runs."""
    name = procfs.executable(pid)
    if name in _SHELLS:
        return SHELL
    if name.startswith(("python", "pypy")):
        return CLEANER if _is_one_of(_CLEANERS, name_of(pid)) else PYTHON
    return CLEANER if _is_one_of(_CLEANERS, name) else OTHER


def _is_one_of(helpers: Collection[str], name: str) -> bool:
    return any(helper in name for helper in helpers)


def groups(leaders: Collection[int]) -> dict[int, dict[int, Process]]:
    """The live processes of these process groups, by pid; groups without any are left out."""
    found: dict[int, dict[int, Process]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, parent, group = linux.stat(name)[:3]
        except (OSError, ValueError):  # it has just gone
            continue
        if int(group) in leaders and state not in "ZX":
            pid = int(name)
            ignored = int(procfs.status(pid).get("SigIgn", "0"), 16)
            found.setdefault(int(group), {})[pid] = Process(int(parent), kind_of(pid), ignored)
    return found


def has_group(leader: int) -> bool:
    """Whether a process group has any processes, including zombies."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def reap() -> dict[int, int]:
    """Reap all dead children. Returns their exit codes (-n for signal n), by pid."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def telling(reap: Callable[[], object], seconds: float, tell: Callable[[], object]) -> Callable[[], None]:
    """A `reap_children` for `sweep` that also tells somebody every so many seconds that we are still here; 0: never."""
    due = time.monotonic() + seconds

    def reap_and_tell() -> None:
        nonlocal due
        reap()
        now = time.monotonic()
        if seconds and now >= due:
            due = now + seconds
            tell()

    return reap_and_tell


def sweep(
    reap_children: Callable[[], object], own: Collection[int] = (), spared: Collection[int] = ()
) -> dict[int, str]:
    """Kill all descendants. A victim's children become ours, as we are a subreaper, so this takes several rounds.

    `own` are killed but not listed, `spared` are left alone. Returns the command line of each process killed, by
    pid, without those that were already dying of an earlier signal. Gives up after SWEEP_SECONDS on processes that
    can't be killed: those in uninterruptible sleep.
    """
    start = time.monotonic()
    pause = _LEAST_PAUSE
    killed: dict[int, str] = {}
    while True:
        reap_children()
        left = [pid for pid in children() if pid not in spared]
        waited = time.monotonic() - start
        if not left or waited > SWEEP_SECONDS:
            return killed
        for pid in left:
            name = name_of(pid)
            exits_by_itself = is_helper(name) and waited < HELPER_SECONDS
            if exits_by_itself or (not name and waited < NAMELESS_SECONDS) or is_zombie(pid):
                continue
            if name and pid not in own and not procfs.is_dying(pid):
                killed[pid] = name
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        _await_an_end(left, pause)
        pause = min(pause * 2, 0.05)


def _await_an_end(pids: Collection[int], seconds: float) -> None:
    """Wait until one of these processes has ended, at most so long: large ones take some milliseconds to go."""
    time.sleep(_LEAST_PAUSE)
    ends = select.poll()
    opened = []
    try:
        for pid in pids:
            opened.append(os.pidfd_open(pid))
            ends.register(opened[-1], select.POLLIN)
    except OSError:  # it is gone, or there are too many
        pass
    else:
        ends.poll(seconds * 1000)
    for fd in opened:
        os.close(fd)


def kill_those_with(mark: bytes) -> None:
    """Kill all processes of this user whose environment contains the mark, wherever they descend from."""
    deadline = time.monotonic() + STRAYS_SECONDS
    while doomed := [pid for pid in _all_pids() if pid != os.getpid() and mark in _environment(pid)]:
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _all_pids() -> list[int]:
    if not linux.shows_our_pids():
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> bytes:
    """A process's environment; empty if it is gone, a zombie or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def shown(names: Mapping[int, str]) -> list[str]:
    """Processes, by pid, as they are shown: "PID NAME"."""
    return [f"{pid} {_shortened(name)}" for pid, name in names.items()]


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[:_NAME_LENGTH] + "…"
