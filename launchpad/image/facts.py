"""What a process hands on to its children, as /proc shows it: read, taken over from another process, compared.

`take_over` changes what can be changed, and `difference` is the judge of the result: only where it finds nothing is the
one process what a child of the other would have been.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Collection, Mapping

Facts = dict[str, str]

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "time_for_children", "user", "uts")

# Fields of /proc/PID/status.
_STATUS = (
    *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"),
    *("Seccomp_filters", "Speculation_Store_Bypass", "SpeculationIndirectBranch", "Cpus_allowed", "Mems_allowed"),
    *("Umask", "THP_enabled", "SigBlk", "SigIgn"),
)

# How the user would say it.
_NAMES = {
    "Uid": "user",
    "Gid": "group",
    "Groups": "set of groups",
    "NoNewPrivs": "no_new_privs",
    "Seccomp": "seccomp mode",
    "Seccomp_filters": "set of seccomp filters",
    "Cpus_allowed": "CPU affinity",
    "Mems_allowed": "set of memory nodes",
    "Umask": "umask",
    "SigBlk": "set of blocked signals",
    "SigIgn": "set of ignored signals",
    "limits": "set of limits (ulimit)",
    "loginuid": "audit login",
    "attr/current": "security label (SELinux, AppArmor)",
    "nice": "nice value",
    "scheduler": "scheduling policy",
    "root": "root folder",
}

# Every Python ignores the first two from its start; SIGCHLD is not left ignored or blocked for an agent.
_OWN_SIGNALS = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD}


def facts_of(
    pid: int, thread: int, *, personality: str = "", blocked: Collection[int] = (), files: tuple[int, int] | None = None
) -> Facts:
    """What a child of this thread of a process gets from it. Raises OSError if it is gone or can't be looked at.

    `personality`: as the process itself reads it, where others may not; `blocked`: the signals that the child will
    have blocked; `files`: its limits of open files, where they are not those of the process.
    """
    place = f"{pid}/task/{thread}"
    status = _lines(_read(place, "status"))
    found = {name: status.get(name, "") for name in _STATUS}
    found["SigIgn"] = _mask(signals(found["SigIgn"]) - _OWN_SIGNALS)
    found["SigBlk"] = _mask({*blocked} - _OWN_SIGNALS)
    for kind in _NAMESPACES:
        try:
            found[f"ns/{kind}"] = os.readlink(f"/proc/{place}/ns/{kind}")
        except FileNotFoundError:  # an older kernel
            found[f"ns/{kind}"] = ""
    for name in ("cgroup", "limits", "oom_score_adj"):
        found[name] = _read(place, name)
    for name in ("loginuid", "attr/current"):
        try:
            found[name] = _read(place, name)
        except OSError:  # no audit, no security module
            found[name] = ""
    found["coredump_filter"] = _read(str(pid), "coredump_filter")
    if files is not None:
        found["limits"] = _with_files(found["limits"], files)
    found["nice"] = str(os.getpriority(os.PRIO_PROCESS, thread))
    found["scheduler"] = f"{os.sched_getscheduler(thread)} {os.sched_getparam(thread).sched_priority}"
    found["personality"] = (personality or _read(place, "personality")).strip()
    root = os.stat(f"/proc/{place}/root/")
    found["root"] = f"{root.st_dev} {root.st_ino}"
    return found


def cpus_and_stack(pid: int, thread: int) -> tuple[str, str]:
    """Two facts that imports may depend on: the CPUs as a mask, and the limits of the stack. Raises OSError."""
    place = f"{pid}/task/{thread}"
    return _lines(_read(place, "status"))["Cpus_allowed"], str(limits(_read(place, "limits")).get("Max stack size"))


def own_facts() -> Facts:
    """The facts of this process, which has one thread."""
    return facts_of(os.getpid(), os.getpid(), blocked=signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _read(pid: str, name: str) -> str:
    with open(f"/proc/{pid}/{name}", errors="surrogateescape") as file:
        return file.read()


def _lines(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def signals(mask: str) -> set[int]:
    """The signals in a mask of Facts."""
    bits = int(mask or "0", 16)
    return {signum for signum in signal.valid_signals() if bits >> (signum - 1) & 1}


def cpus(mask: str) -> set[int]:
    """The CPUs in a mask like ff,ffffffff."""
    bits = int(mask.replace(",", ""), 16)
    return {number for number in range(bits.bit_length()) if bits >> number & 1}


def _mask(signums: Collection[int]) -> str:
    return f"{sum(1 << (signum - 1) for signum in signums):x}"


_LIMIT = re.compile(r"^(Max [a-z- ]*?)  +(\S+) +(\S+)", re.M)


def limits(text: str) -> dict[str, tuple[int, int]]:
    """The soft and hard limits by their names in /proc/PID/limits."""
    return {name: (_number(soft), _number(hard)) for name, soft, hard in _LIMIT.findall(text)}


def _number(word: str) -> int:
    return resource.RLIM_INFINITY if word == "unlimited" else int(word)


def _with_files(text: str, files: tuple[int, int]) -> str:
    words = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in files]
    lines = text.splitlines(keepends=True)
    return "".join(
        f"{'Max open files':<26}{words[0]:<21}{words[1]:<21}{'files':<10}\n"
        if line.startswith("Max open files")
        else line
        for line in lines
    )


_LIMITS = {
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max resident set": resource.RLIMIT_RSS,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
    "Max file locks": 10,  # RLIMIT_LOCKS, which the kernel ignores
    "Max pending signals": resource.RLIMIT_SIGPENDING,
    "Max msgqueue size": resource.RLIMIT_MSGQUEUE,
    "Max nice priority": resource.RLIMIT_NICE,
    "Max realtime priority": resource.RLIMIT_RTPRIO,
    "Max realtime timeout": resource.RLIMIT_RTTIME,
}


def take_over(wanted: Mapping[str, str], *, descends: bool) -> str:
    """Make this process like the other one. Returns the difference that is left, in words, or "".

    `descends`: it descends from the other one, so what confines that confines it.
    """
    take_signals(wanted)
    own = own_facts()
    if own != wanted:
        for step in (_take_cgroup, _take_limits, _take_scheduling, _take_files):
            try:
                step(own, wanted)
            except (OSError, ValueError):  # `difference` will say what is not as it should be
                pass
        own = own_facts()
    return difference(own, wanted, descends=descends)


def _take_cgroup(own: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    # With filters of seccomp, only processes of one cgroup are known to have the same.
    if own["cgroup"] == wanted["cgroup"] or own["Seccomp"] != "0":
        return
    here = own["cgroup"].splitlines()
    for line in wanted["cgroup"].splitlines():
        if line not in here:
            _, controllers, path = line.split(":", 2)
            for root in _roots(controllers):
                if os.path.isdir(root):
                    with open(f"{root}{path}/cgroup.procs", "w") as file:
                        file.write("0")
                    break


def _roots(controllers: str) -> tuple[str, ...]:
    if controllers:
        return (f"/sys/fs/cgroup/{controllers.removeprefix('name=')}",)
    return ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")


def _take_limits(own: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    have = limits(own["limits"])
    for name, pair in limits(wanted["limits"]).items():
        if have.get(name) != pair and name in _LIMITS:
            resource.setrlimit(_LIMITS[name], pair)


def _take_scheduling(own: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    policy, priority = map(int, wanted["scheduler"].split())
    if own["scheduler"] != wanted["scheduler"]:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    if own["Cpus_allowed"] != wanted["Cpus_allowed"]:
        os.sched_setaffinity(0, cpus(wanted["Cpus_allowed"]))
    if own["nice"] != wanted["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, int(wanted["nice"]))


def _take_files(own: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    os.umask(int(wanted["Umask"], 8))
    for name in ("oom_score_adj", "coredump_filter"):
        if own[name] != wanted[name]:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(wanted[name] if name == "oom_score_adj" else f"0x{wanted[name].strip()}")


def take_signals(wanted: Mapping[str, str]) -> None:
    """Set all dispositions and the mask as they are in an interpreter that such a process starts."""
    ignored = signals(wanted["SigIgn"])
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signum == signal.SIGINT and signum not in ignored:
            signal.signal(signum, signal.default_int_handler)
        else:
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals(wanted["SigBlk"]))


def difference(own: Mapping[str, str], wanted: Mapping[str, str], *, descends: bool = False) -> str:
    """What the one process has that the other has not, in words; "" if they are alike.

    `descends`: as in `take_over`.
    """
    if wanted["NoNewPrivs"] != "0" and not descends:
        return "no_new_privs is set, and what else confines this run can't be seen"
    name = next((name for name in wanted if own.get(name) != wanted[name]), "")
    if name.startswith("Cap"):
        return "it has other capabilities"
    if name.startswith("ns/"):
        return f"it is in another {name.removeprefix('ns/').removesuffix('_for_children')} namespace"
    return f"it has another {_NAMES.get(name, name)}" if name else ""
