"""The judgement of a checkup: each fault is found on its host with a remedy, and nothing on healthy ones."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from launchpad.agent.checkup import gpus, host, mpi, network, software, trial_rank
from launchpad.agent.checkup.answers import Checkup
from launchpad.console.checkup_table import lines, notes, rows, table
from launchpad.console.terminal import drawn
from launchpad.doctor.judge import hidden, judge
from launchpad.doctor.seen import Examination, HostSeen, Pair, size
from launchpad.head.mpi_worlds import MpiWorlds
from launchpad.job.mpi import MpiSeat
from launchpad.job.mpi import environ as mpi_environ
from launchpad.job.plan import NodePlan, RankPlan
from launchpad.protocol import health
from launchpad.protocol.commands import Check
from launchpad.protocol.events import BarrierIn, Checked, PmixRequest
from launchpad.protocol.health import (
    GpuHealth,
    Gpus,
    Heard,
    Inlet,
    Load,
    LookUp,
    MpiThere,
    Network,
    Software,
    facts_of,
)
from launchpad.runner.checkup import HostAnswers, _import, _reduce, places_of, rounds
from tests.support.command import DEADLINE
from tests.support.doctor import GIB, GPU, NO_GPUS, QUERY, address, changed, healthy, on_all
from tests.support.needs import needs_mpi


def with_paths(seen: Examination, pairs: Iterable[Pair], **fields: Any) -> Examination:
    """With other results on these paths."""
    return seen._replace(paths={**seen.paths, **{pair: seen.paths[pair]._replace(**fields) for pair in pairs}})


def out_of(seen: Examination, place: int) -> list[Pair]:
    return [pair for pair in seen.paths if pair[0] == place]


def into(seen: Examination, place: int) -> list[Pair]:
    return [pair for pair in seen.paths if pair[1] == place]


OF_CUDA = "torch==2.13.0+cu130 --index-url URL (pytorch.org/get-started has the one for cu130)"
CUT: dict[str, Any] = {"address": "", "failed": [["10.0.0.9", "no answer"]], "latency": -1.0, "sent": 0, "answered": 0}
CUT["passes"] = -1


def lossy(seen: Examination, place: int, percent: int) -> Examination:
    """The host loses so much of what it sends, questions and answers alike."""
    for other in seen.present:
        if other != place:
            heard = [[one, 100 - percent if one == place else 100] for one in seen.present if one != other]
            seen = changed(seen, other, heard=Heard(heard))
    both = [*out_of(seen, place), *into(seen, place)]
    return with_paths(seen, both, answered=100 - percent)


def fact(subject: str, **fields: Any) -> Callable[[Examination], Examination]:
    """Of host c."""
    return lambda seen: changed(seen, 2, **{subject: seen.hosts[2].facts[subject]._replace(**fields)})


class Case(NamedTuple):
    make: Callable[[Examination], Examination]
    level: str
    subject: str
    says: str
    remedy: str
    hosts: tuple[int, ...] = (2,)


def skewed(seconds: float) -> Callable[[Examination], Examination]:
    def make(seen: Examination) -> Examination:
        hosts = list(seen.hosts)
        hosts[2] = hosts[2]._replace(skew=seconds)
        return seen._replace(hosts=hosts)

    return make


CASES = {
    "gone": Case(
        lambda seen: seen._replace(
            hosts=[*seen.hosts[:2], HostSeen("c", "refused: no sshd"), seen.hosts[3]],
            paths={pair: path for pair, path in seen.paths.items() if 2 not in pair},
        ),
        *("bad", "reach", "refused: no sshd", ""),
    ),
    "no answer": Case(
        lambda seen: seen._replace(
            hosts=[*seen.hosts[:2], seen.hosts[2]._replace(problems={"gpus": "no answer within 5 s"}), seen.hosts[3]]
        ),
        *("warn", "gpus", "the GPUs (no answer within 5 s)", ""),
    ),
    "127.0.1.1": Case(
        fact("lookup", addresses=[["10.0.0.1"], ["10.0.0.2"], ["127.0.1.1"], ["10.0.0.4"]]),
        *("warn", "names", "its own name, c, means 127.0.1.1", "10.0.0.3"),
    ),
    "another's address": Case(
        fact("lookup", addresses=[["10.0.0.1"], ["10.0.0.2"], ["10.0.0.4"], ["10.0.0.4"]]),
        *("warn", "names", "means 10.0.0.4, which is not its address", "10.0.0.3"),
    ),
    "no name": Case(
        fact("lookup", addresses=[["10.0.0.1"], ["10.0.0.2"], [], ["10.0.0.4"]]),
        *("warn", "names", "does not know its own name, c", "echo '10.0.0.3 c'"),
    ),
    "wrong peer": Case(
        fact("lookup", addresses=[["10.9.9.9"], ["10.0.0.2"], ["10.0.0.3"], ["10.0.0.4"]]),
        *("warn", "names", "takes a for 10.9.9.9, which is not a", "10.0.0.1"),
    ),
    "same machine": Case(fact("identity", machine="boot-a"), "bad", "names", "the same machine as a", "-H a:N"),
    "clock ahead": Case(skewed(90.0), "warn", "clock", "90 s ahead of the other hosts", "chronyc"),
    "clock behind": Case(skewed(-3600.0), "warn", "clock", "3600 s behind the other hosts", "timedatectl"),
    "blocked inward": Case(
        lambda seen: with_paths(seen, into(seen, 2), **CUT),
        *("bad", "paths", "the other hosts can't reach it, though it reaches them: no answer", "ufw allow from"),
    ),
    "blocked outward": Case(
        lambda seen: with_paths(seen, out_of(seen, 2), **CUT),
        *("bad", "paths", "it can't reach the other hosts", "ufw"),
    ),
    "cut off": Case(
        lambda seen: with_paths(seen, [*into(seen, 2), *out_of(seen, 2)], **CUT),
        *("bad", "paths", "no other host reaches it, and it reaches none", "ufw"),
    ),
    "a pair apart": Case(
        lambda seen: with_paths(seen, [(1, 2), (2, 1)], **CUT),
        *(
            "bad",
            "paths",
            "b and c can't reach each other: no answer at 10.0.0.9; if a is lost, nei",
            "ufw",
            (1, 2),
        ),
    ),
    "one way": Case(
        lambda seen: with_paths(seen, [(1, 2)], **CUT | {"failed": [["10.0.0.3", "connection refused"]]}),
        *("bad", "paths", "refused at 10.0.0.3; if a is lost, c can't lead a job", "from 10.0.0.2 on c", (1, 2)),
    ),
    "no route": Case(
        lambda seen: with_paths(seen, [(1, 2)], **CUT | {"failed": [["10.0.0.3", "no route to host"]]}),
        *("bad", "paths", "no route to host", "ip route get 10.0.0.3, on b", (1, 2)),
    ),
    "loss": Case(
        lambda seen: lossy(seen, 2, 20),
        "bad",
        "loss",
        "20% of the packets that it sends get lost (120 of 600)",
        "ip -s",
    ),
    "a little loss": Case(
        lambda seen: lossy(seen, 2, 3),
        "warn",
        "loss",
        "3% of the packets that it sends get lost",
        "ip -s link show dev eth0",
    ),
    "late": Case(
        lambda seen: with_paths(seen, [*into(seen, 2), *out_of(seen, 2)], latency=0.03),
        *("warn", "latency", "a round trip to and from it takes 30 ms, elsewhere 100 µs", "tracepath"),
    ),
    "packets": Case(
        lambda seen: with_paths(seen, out_of(seen, 2), passes=0),
        *("bad", "packets", "packets of 1500 bytes that it sends get lost, small ones don't (MTU)", "mtu 1400"),
    ),
    "another MTU": Case(
        lambda seen: changed(seen, 2, network=Network([Inlet("10.0.0.3", "eth0", 9000, 1, 2)], ["lo", "eth0"])),
        *("warn", "packets", "its eth0 takes packets of 9000 bytes (MTU), those of the others 1500", "mtu 1500"),
    ),
    "slow": Case(
        lambda seen: seen._replace(rates={**seen.rates, **dict.fromkeys(out_of(seen, 2), 1.2e6)}),
        *("warn", "speed", "data that it sends flows at 1.2 MB a second, elsewhere at 1 GB", "ethtool eth0"),
    ),
    "interface": Case(
        lambda seen: changed(
            seen._replace(environ={"GLOO_SOCKET_IFNAME": "eth0"}),
            *(2,),
            network=seen.hosts[2].network._replace(interfaces=["lo", "ens3"]),
        ),
        *("bad", "addresses", "GLOO_SOCKET_IFNAME=eth0 is set, and it has no eth0, but lo and ens3", "unset"),
    ),
    "other Python": Case(
        fact("software", python="3.12.1"), "bad", "software", "its Python is 3.12, that of the others 3.11", "--python"
    ),
    "other torch": Case(
        fact("software", torch="2.6.0"),
        *("bad", "software", "its torch is 2.6.0, that of the others 2.13.0", "-m pip install torch==2.13.0"),
    ),
    "other CUDA": Case(
        fact("software", torch="2.13.0+cpu"),
        *("bad", "software", "its torch is 2.13.0+cpu", "--force-reinstall torch==2.13.0"),
    ),
    "no torch": Case(
        fact("software", torch=""), "bad", "software", "its torch is missing", "python3 -m pip install torch==2.13.0"
    ),
    "other interpreter": Case(
        lambda seen: seen._replace(sought={0: "/usr/bin/python3", 2: "/v/bin/python"}),
        *("warn", "software", "it has no /v/bin/python: ranks run in /usr/bin/python3", "--sync-env"),
    ),
    "other MPI": Case(
        fact("software", packages={"mpich": "4.3"}), "warn", "software", "its mpich is 4.3", "install mpich==4.2"
    ),
    "other code": Case(
        fact("code", hashes={"train.py": "9999", "lib/net.py": "5678"}), "warn", "code", "train.py", "--sync"
    ),
    "no folder": Case(
        fact("code", problem="no such folder", hashes={}), "warn", "code", "/work: no such folder", "--sync"
    ),
    "few files": Case(fact("limits", nofile=200), "bad", "limits", "only 200 files", "ulimit -n 65536"),
    "few files, hard": Case(
        fact("limits", nofile=512, nofile_hard=512), "warn", "limits", "512 files", "/etc/security/limits.conf"
    ),
    "few processes": Case(fact("limits", processes=100), "bad", "limits", "only 100 processes", "nproc"),
    "locked memory": Case(
        fact("limits", infiniband=True), "bad", "limits", "only 8.39 MB may be locked in memory", "memlock unlimited"
    ),
    "half a core": Case(fact("limits", cores=0.5), "warn", "limits", "allows 0.5 of 8 cores", "--cpus"),
    "small shm": Case(fact("shm", total=64 << 20, free=64 << 20), "warn", "shm", "has 67.1 MB in all", "--shm-size"),
    "full shm": Case(fact("shm", free=0), "bad", "shm", "has 0 B left", "ls -l /dev/shm"),
    "no shm": Case(fact("shm", problem="no such file or directory"), "warn", "shm", "can't be used", "mount -t tmpfs"),
    "full disk": Case(fact("tmp", free=0), "bad", "tmp", "/tmp, for temporary files, has 0 B left", "TMPDIR"),
    "no space": Case(fact("cache", free=0), "warn", "cache", "has 0 B left", "XDG_CACHE_HOME"),
    "no files": Case(fact("cache", inodes=0), "warn", "cache", "has room for 0 more files", "XDG_CACHE_HOME"),
    "little space": Case(fact("cache", free=500 << 20), "warn", "cache", "/home/me/.cache", "XDG_CACHE_HOME"),
    "no inodes": Case(fact("tmp", inodes=3), "bad", "tmp", "room for 3 more files", "find /tmp"),
    "noexec": Case(fact("tmp", noexec=True), "warn", "tmp", "mounted noexec", "TMPDIR"),
    "read-only": Case(fact("tmp", problem="read-only file system"), "bad", "tmp", "read-only", "TMPDIR"),
    "little memory": Case(fact("memory", available=200 << 20), "bad", "memory", "it has 210 MB more", "ps aux"),
    "cgroup": Case(
        fact("memory", left_in_cgroup=900 << 20), "warn", "memory", "its cgroup allows 944 MB more", "ask for more"
    ),
    "swapping": Case(fact("memory", swapped=30e6), "warn", "memory", "it is swapping 30 MB a second", "ps aux"),
    "busy": Case(
        lambda seen: changed(seen, 2, load=Load(40.0, 1.0)), "warn", "load", "40 tasks want its 8 cores", "top"
    ),
    "busy with one core": Case(
        lambda seen: changed(fact("limits", cores=1.0, all_cores=1)(seen), 2, load=Load(40.0, 1.0)),
        "warn",
        "load",
        "40 tasks want its 1 core",
        "top",
    ),
    "MaxStartups": Case(fact("sshd", begin=3), "warn", "sshd", "as soon as 3 others are logging in", "MaxStartups"),
    "pending": Case(fact("sshd", pending=9), "warn", "sshd", "9 connections to its sshd hang", "ss -tnp"),
    "ECC": Case(
        on_all(gpus=[GPU._replace(ecc=1), GPU._replace(number=1)]),
        "bad",
        "gpus",
        "GPU 0 (H100) has had 1 memory error that",
        "nvidia-smi",
    ),
    "hot": Case(on_all(gpus=[GPU, GPU._replace(number=1, slowed="it is too hot")]), "warn", "gpus", "GPU 1", "-i 1 -q"),
    "taken": Case(
        on_all(gpus=[GPU._replace(used=40 * GIB), GPU._replace(number=1)]), "warn", "gpus", "42.9 GB of 85.9 GB", "-i 0"
    ),
    "fewer GPUs": Case(on_all(gpus=[GPU], links=[]), "warn", "gpus", "its GPUs: 1 × H100", "topo"),
    "driver": Case(on_all(driver="535.2"), "warn", "gpus", "its driver: 535.2, those of the others: 550.1", ""),
    "no GPU at all": Case(on_all(gpus=[], links=[], driver="550.1"), "warn", "gpus", "its GPUs: none", "topo"),
    "no NVLink": Case(on_all(links=[["X", "SYS"], ["SYS", "X"]]), "warn", "gpus", "its NVLinks: none", "topo -m"),
    "P2P": Case(on_all(apart=[[0, 1]]), "warn", "gpus", "its GPUs 0 and 1 can't read each other's memory", "p2p"),
    "Xid": Case(
        on_all(xids=["NVRM: Xid (PCI:0000): 79"]), "warn", "gpus", "reported 1 error, the last: NVRM: Xid (PCI", "dmesg"
    ),
    "silent driver": Case(
        on_all(gpus=[], links=[], unknown="nvidia-smi: no answer within 4 s"),
        *("warn", "gpus", "the GPUs (nvidia-smi: no answer within 4 s)", "nvidia-smi there"),
    ),
    "dead driver": Case(
        on_all(gpus=[], problem="nvidia-smi: no devices were found"), "bad", "gpus", "no devices were found", ""
    ),
    "another MPI": Case(
        fact("mpi", library="Open MPI", version="Open MPI v4.1.4", path="/opt/libmpi.so.40"),
        *(
            "bad",
            "mpi",
            "its mpi4py uses Open MPI (/opt/libmpi.so.40), that of the others MPICH",
            "install MPICH there",
        ),
    ),
    "another version of MPI": Case(
        fact("mpi", version="MPICH Version:      3.4.1"),
        *("warn", "mpi", "uses MPICH 3.4.1 (/usr/lib/libmpi.so.12), that of the others MPICH 4.2.3", "MPI4PY_LIBMPI"),
    ),
    "an MPI that can't be loaded": Case(
        fact("mpi", library="", version="", problem="libucp.so.0: cannot open shared object file"),
        *("warn", "mpi", "its mpi4py can't be used: libucp.so.0", "/usr/bin/python3 -m pip install --force-reinstall"),
    ),
    "no mpi4py": Case(
        lambda seen: changed(fact("software", packages={"numpy": "2.0"})(seen), 2, mpi=MpiThere("", "", "", "")),
        *("warn", "software", "its mpich is missing, that of the others 4.2", "pip install mpich==4.2"),
    ),
    "all_reduce": Case(
        lambda seen: seen._replace(not_reduced={"gloo": "timed out"}),
        *("bad", "gloo", "an all_reduce with gloo over the hosts failed: timed out", "bench", (0, 1, 2, 3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_on_its_host_and_nothing_else(name: str) -> None:
    case = CASES[name]
    (found,) = judge(case.make(healthy()))
    assert (found.level, found.hosts, found.subject) == (case.level, case.hosts, case.subject)
    assert case.says in found.text
    assert case.remedy in found.remedy


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_nothing_is_invented_on_healthy_hosts(count: int) -> None:
    assert judge(healthy(count)) == []


def test_one_host_need_not_know_its_name_or_have_torch() -> None:
    seen = changed(healthy(1), 0, lookup=LookUp([["127.0.1.1"]]), software=Software("3.11.7", "", "", {}))
    assert judge(seen) == []


def test_of_two_hosts_it_is_the_pair() -> None:
    (found,) = judge(with_paths(healthy(2), [(0, 1), (1, 0)], **CUT))
    assert found.hosts == (0, 1)
    assert found.text.startswith("a and b can't reach each other")


def test_of_two_torches_the_first_hosts_is_the_right_one() -> None:
    seen = changed(healthy(2), 1, software=Software("3.11.7", "2.6.0", "", {"mpich": "4.2"}))
    assert [(one.hosts, one.remedy[-13:]) for one in judge(seen)] == [((1,), "torch==2.13.0")]
    assert judge(seen._replace(torch=False)) == []  # a job without it


@pytest.mark.parametrize(
    ("mine", "remedy"),
    [
        ("2.12.1+cpu", "pip install torch==2.13.0"),
        ("", "pip install torch==2.13.0"),
        ("2.13.0", f"pip install {OF_CUDA}"),
        ("2.13.0+cpu", f"pip install {OF_CUDA}"),
    ],
)
def test_pip_can_install_the_others_torch(mine: str, remedy: str) -> None:
    seen = healthy(3)
    for place, torch in enumerate(["2.13.0+cu130", "2.13.0+cu130", mine]):
        seen = changed(seen, place, software=seen.hosts[place].facts["software"]._replace(torch=torch))
    (found,) = judge(seen)
    assert found.remedy.endswith(remedy)


def test_hosts_of_different_families_can_not_meet() -> None:
    seen = changed(healthy(3), 2, network=Network([Inlet("fd00::3", "eth0", 1500, 1, 2)], ["lo", "eth0"]))
    for place in seen.present:
        seen = changed(seen, place, lookup=LookUp([["10.0.0.1"], ["10.0.0.2"], ["fd00::3"]]))
    cut = CUT | {"failed": [["fd00::3", "network is unreachable"]]}
    (found,) = judge(with_paths(seen, [*into(seen, 2), *out_of(seen, 2)], **cut))
    assert found.hosts == (2,)
    assert "network is unreachable at fd00::3 (a has IPv4 only, c has IPv6 only)" in found.text


def test_a_filter_on_udp_is_no_loss() -> None:
    seen = healthy(3)
    for place in seen.present:
        seen = changed(seen, place, heard=Heard([]))
    assert judge(with_paths(seen, seen.paths, answered=0, passes=-1)) == []


def test_a_faint_loss_of_one_host_is_that_hosts_though_single_ways_show_little() -> None:
    seen = healthy(8)
    for other in range(1, 8):
        heard = [
            [one, 95 if (one, other % 3) == (0, 0) else 99 if one == 0 else 100] for one in range(8) if one != other
        ]
        seen = changed(seen, other, heard=Heard(heard))
    (found,) = judge(seen)
    assert (found.subject, found.hosts) == ("loss", (0,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("GLOO_SOCKET_IFNAME", "eth0,lo"),
        ("NCCL_SOCKET_IFNAME", "ib,en,eth"),
        ("NCCL_SOCKET_IFNAME", "=ib0,eth0"),
        ("UCX_NET_DEVICES", "mlx5_0:1"),
        ("UCX_NET_DEVICES", "mlx5_0:1,ib0"),
        ("UCX_NET_DEVICES", "ib0,eth0"),
        ("UCX_NET_DEVICES", "all"),
    ],
)
def test_an_interface_that_is_there(name: str, value: str) -> None:
    assert judge(healthy()._replace(environ={name: value})) == []


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("NCCL_SOCKET_IFNAME", "ib,en", "ib and en"),
        ("NCCL_SOCKET_IFNAME", "=eth,ib0", "eth and ib0"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", "eth1"),
        ("UCX_NET_DEVICES", "ib0", "ib0"),
    ],
)
def test_an_interface_that_is_missing(name: str, value: str, missing: str) -> None:
    found = judge(healthy(1)._replace(environ={name: value}))
    assert [one.text for one in found] == [f"{name}={value} is set, and it has no {missing}, but lo and eth0"]


def test_a_lossy_host_hides_no_hole_of_another() -> None:
    seen = lossy(healthy(), 1, 20)
    seen = with_paths(seen, [*into(seen, 2), *out_of(seen, 2)], passes=0)
    assert [(one.subject, one.hosts) for one in judge(seen)] == [("loss", (1,)), ("packets", (2,))]


def test_a_slow_host_explains_a_slow_answer() -> None:
    seen = healthy()
    seen = seen._replace(rates={**seen.rates, **dict.fromkeys([*out_of(seen, 2), (1, 2)], 1e6)})
    assert [(one.subject, one.hosts) for one in judge(seen)] == [("speed", (2,))]


def test_a_loss_explains_that_data_flows_slowly() -> None:
    seen = lossy(healthy(), 2, 20)
    seen = seen._replace(rates={**seen.rates, **dict.fromkeys([*out_of(seen, 2), *into(seen, 2)], 1e6)})
    assert [one.subject for one in judge(seen)] == ["loss"]


def test_every_clock_but_ours_may_be_right() -> None:
    seen = healthy(4)
    seen = seen._replace(hosts=[host._replace(skew=-500.0) for host in seen.hosts])
    assert judge(seen) == []


@pytest.mark.parametrize("skews", [[10.0], [10.0, 10.0, 0.0]])
def test_how_wrong_a_clock_is(skews: list[float]) -> None:
    seen = healthy(len(skews))
    seen = seen._replace(hosts=[host._replace(skew=skew) for host, skew in zip(seen.hosts, skews, strict=True)])
    found = [(one.subject, one.hosts, "clock is 10 s ahead" in one.text) for one in judge(seen)]
    assert found == [("clock", (place,), True) for place, skew in enumerate(skews) if skew]


def test_the_table_names_each_host_once_and_fits() -> None:
    seen = CASES["small shm"].make(CASES["other torch"].make(CASES["a pair apart"].make(healthy())))
    found = list(rows(seen, judge(seen)))
    assert [row.where for row in found] == ["a", "b", "c", "", "", "d", "b ↔ c", "all_reduce"]
    assert [row.level for row in found] == ["ok", "ok", "bad", "bad", "warn", "ok", "bad", "ok"]
    text = list(lines(found))
    assert text[0].startswith("a           ok    10.0.0.1 (eth0), 8 cores")
    assert any("try: sudo mount -o remount,size=50% /dev/shm" in line for line in text)
    for width in (40, 80, 120):
        shown = drawn(table(found), 1, {"TERM": "xterm", "NO_COLOR": "1"}, width).decode()
        assert all(len(line) <= width for line in shown.splitlines())
    assert [note.partition(":")[0] for note in notes(seen, judge(seen))] == ["c", "b ↔ c", "c"]


def test_what_only_root_can_see_is_said() -> None:
    assert "MaxSessions" in hidden(healthy(2))
    assert "the kernel's log of c" in hidden(changed(healthy(3), 2, gpus=NO_GPUS._replace(log_hidden=True)))


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1e6, "1 MB"), (1.5e15, "1500 TB")])
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


# What the hosts tell.


@pytest.mark.parametrize(
    "facts",
    [
        healthy(2).hosts[0].facts["network"],
        healthy(2).hosts[0].facts["software"],
        Gpus("550", [GPU], [["X"]], [[0, 1]], ["NVRM: Xid"], True, "", ""),
    ],
)
def test_facts_survive_the_way(facts: Any) -> None:
    subject = next(name for name, kind in health.SUBJECTS.items() if kind is type(facts))
    assert facts_of(subject, json.loads(json.dumps(facts))) == facts


@pytest.mark.parametrize(
    ("subject", "fields"),
    [
        ("load", [1.0]),
        ("load", ["much", 1.0]),
        ("network", [[["a"]], []]),
        ("code", ["", {"a": 1}, True]),
        ("kept", [1]),
    ],
)
def test_an_answer_of_another_shape_is_refused(subject: str, fields: list[Any]) -> None:
    with pytest.raises(ValueError):
        facts_of(subject, fields)


def test_every_subject_is_answered() -> None:
    assert Checkup("")._answers.keys() == health.SUBJECTS.keys()


def test_this_machine_answers() -> None:
    assert host.limits().cores > 0
    assert host.memory().total >= host.memory().available > 0
    assert 0 <= host.load().busy <= 1
    assert host.folder("/tmp").total > 0
    request = {"cwd": "/", "environ": {}}
    found = software.versions(request)
    assert found.python == ".".join(map(str, sys.version_info[:3]))


def test_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert host.folder(f"{tmp_path}/new/folder").problem == ""
    (tmp_path / "file").touch()
    assert host.folder(f"{tmp_path}/file/folder").problem == "not a folder"


def test_code_is_compared_by_its_files(tmp_path: Path) -> None:
    for name in ("a.py", "lib/b.py", ".venv/c.py", "__pycache__/d.py", "own/pyvenv.cfg", "own/e.py", "data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = software.code_files({"cwd": str(tmp_path)})
    assert found.hashes.keys() == {"a.py", "lib/b.py"}
    assert found.complete
    assert software.code_files({"cwd": f"{tmp_path}/none"}).problem == "no such folder"


def test_a_large_folder_is_left_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "1.txt", "2.txt", "lib/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    request = {"cwd": str(tmp_path)}
    with monkeypatch.context() as patched:
        patched.setattr(software, "MOST_ENTRIES", 3)
        found = software.code_files(request)
        assert (list(found.hashes), found.complete) == (["a.py"], False)
    monkeypatch.setattr(software, "CODE_SECONDS", -1.0)
    (tmp_path / "a.py").unlink()
    assert not software.code_files(request).complete


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-51\t0\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""
READS = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t

Legend:
  OK = Status Ok
"""


def test_gpus_as_nvidia_smi_shows_them() -> None:
    def ask(arguments: Any) -> str:
        return {"topo -m": TOPOLOGY, "topo -p2p r": READS}.get(" ".join(arguments), QUERY)

    found = gpus.read(ask, [], True)
    assert found.driver == "550.54.15"
    assert found.gpus[0] == GpuHealth(0, "NVIDIA H100 80GB HBM3", 0, "", 4 << 20, 81559 << 20)
    assert (found.gpus[1].ecc, found.gpus[1].slowed) == (3, "the hardware slows it down")
    assert found.links == [["X", "NV18"], ["NV18", "X"]]
    assert found.apart == [[0, 1]]
    one = gpus.read(lambda _: QUERY.splitlines()[0].replace(" 0, 4", " [N/A], 4"), [], False)
    assert (one.gpus[0].ecc, one.links) == (0, [])
    with pytest.raises(ValueError):
        gpus.matrix("something else", 2)


@pytest.mark.parametrize(
    ("script", "problem", "unknown"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "nvidia-smi: NVIDIA-SMI has failed", ""),
        ("exit 9", "nvidia-smi: exit code 9", ""),
        ("exec sleep 60", "", "nvidia-smi: no answer within 0.1 s"),
        ("echo what?", "", "nvidia-smi: not enough values to unpack (expected at least 6, got 1)"),
    ],
)
def test_a_driver_that_fails_or_hangs(
    script: str, problem: str, unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 0.1 if "sleep" in script else 30.0)
    found = gpus.look()
    assert (found.gpus, found.problem, found.unknown) == ([], problem, unknown)


def test_without_nvidia_smi_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpus.look() == NO_GPUS


# Who meets whom.


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_in_rounds_each_meets_every_other_once(count: int) -> None:
    found = rounds(range(count), 99)
    for pairs in found:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    assert len(rounds(range(64), 15)) == 15


def test_where_the_ranks_meet() -> None:
    seen = healthy(3)
    assert places_of([0, 1, 2], seen.paths) == {place: (address(place), "eth0") for place in range(3)}
    assert places_of([0], {}) == {0: ("127.0.0.1", "lo")}
    neighbours = {pair: path for pair, path in seen.paths.items() if pair != (2, 0)}
    assert places_of([0, 1, 2], neighbours) == places_of([0, 1, 2], seen.paths)
    assert places_of([0, 1, 2], {(1, 0): seen.paths[1, 0]}).keys() == {0, 1}  # the third has said nothing


def test_two_listeners_find_each_other() -> None:
    """On one machine, by loopback: the measurements themselves."""
    here, there = network.EchoServer(), network.EchoServer()
    here.listen("a" * 32)
    inlets = [list(one) for one in there.listen("b" * 32).inlets if one.address == "127.0.0.1"]
    wrong = [["127.0.0.1", "lo", 65536, inlets[0][3], inlets[0][4]]]
    found = network.probe({"number": 7, "peers": [[1, "b" * 32, inlets], [2, "c" * 32, wrong]]}).paths
    assert (found[0].address, found[0].interface, found[0].sent, found[0].passes) == ("127.0.0.1", "lo", 100, 1)
    assert found[0].answered == 100
    assert 0 < found[0].latency < 5
    assert there.heard().counts == [[7, 100]]
    assert (found[1].address, found[1].failed[0][0]) == ("", "127.0.0.1")
    request = {"address": "127.0.0.1", "port": inlets[0][3], "secret": "b" * 32, "lasts": 0.02}
    assert network.stream(request).rate > 0


def test_a_path_that_tells_its_limit_is_no_hole() -> None:
    """A router's answer fails one call on the socket, whichever comes next; then large packets leave again."""
    inlets = [["127.0.0.1", "lo", 65536, 9, 9]]

    class Told:
        def __init__(self, *failing: str) -> None:
            self.failing = list(failing)

        def _do(self, what: str) -> None:
            if what in self.failing:
                self.failing.remove(what)
                raise OSError(errno.EMSGSIZE, "Message too long")

        def send(self, _: bytes) -> None:
            self._do("send")

        def recv(self, _: int) -> bytes:
            self._do("recv")
            raise BlockingIOError

    for failing, passes in (("send", -1), ("recv", -1), ("", 0)):
        call = network._PeerCall(1, "b" * 32, inlets)
        call.state["127.0.0.1"] = ""
        exchange = network._Exchange(call, 7)
        exchange.socket.close()
        exchange.socket = Told(failing)  # type: ignore[assignment]
        for _ in range(2):
            exchange.send_large()
            exchange.receive()
        assert exchange.passes == passes


# Enough of torch for a rank: gloo works, and nccl takes the process with it.
TORCH = """
import os
class Tensor:
    def clone(self): return self
    def item(self): return 1.0
def full(*_, **__): return Tensor()
"""
DISTRIBUTED = """
import os, sys
class TCPStore:
    port = 7
    def __init__(self, *_, **__): pass
    def set_timeout(self, limit): pass
def PrefixStore(name, store): return store
def init_process_group(backend, **_):
    if backend == "nccl":
        sys.exit("NCCL WARN no socket interface found")
def all_reduce(_): pass
def destroy_process_group(): pass
"""


def test_each_backend_answers_for_itself(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCH)
    (tmp_path / "torch/distributed.py").write_text(DISTRIBUTED)
    rank = trial_rank.TrialRank("")
    request = {
        "rank": 0,
        "size": 1,
        "address": "127.0.0.1",
        "interface": "lo",
        "backends": {"gloo": 30.0, "nccl": 30.0},
    }
    assert rank.begin({**request, "cwd": str(tmp_path), "environ": {}}).port == 7
    gloo, nccl = (rank.finish({"port": 7}) for _ in request["backends"])  # type: ignore[attr-defined]
    assert (gloo.seconds >= 0, gloo.failed) == (True, "")
    assert (nccl.seconds, nccl.failed) == (-1.0, "NCCL WARN no socket interface found")
    rank.kill()


class ScriptedHost:
    """A connection to a host that imports torch, and answers to each all_reduce in turn."""

    def __init__(self, *answers: tuple[float, str]) -> None:
        self.answers = iter(answers)
        self.said: SimpleQueue[Checked | None] = SimpleQueue()

    def send(self, check: Check) -> None:
        if check.subject == "import":
            self.said.put(Checked(0, "import", [7, False], ""))
        elif found := next(self.answers, None):
            self.said.put(Checked(0, "all_reduce", list(found), ""))
        else:
            self.said.put(None)

    def messages(self) -> Iterator[Checked]:
        while message := self.said.get():
            yield message

    def close(self) -> None:
        self.said.put(None)


@pytest.mark.parametrize(
    ("answers", "reduced", "failed"),
    [
        ([(0.002, ""), (0.3, "")], {"gloo": 0.002, "nccl": 0.3}, {}),
        ([(0.002, ""), (-1.0, "no socket")], {"gloo": 0.002}, {"nccl": "no socket"}),
        ([(-1.0, "timed out")], {}, {"gloo": "timed out"}),
        ([(0.002, "")], {"gloo": 0.002}, {"nccl": "the connection ended"}),
    ],
)
def test_a_failure_is_that_of_the_backend_under_way(
    answers: list[tuple[float, str]], reduced: dict[str, float], failed: dict[str, str]
) -> None:
    links: Any = {0: ScriptedHost((0.001, ""), (0.2, "")), 1: ScriptedHost(*answers)}
    asked = HostAnswers(links)
    seen = on_all()(healthy(3))
    for place in links:
        asked.facts[place] = dict(seen.hosts[place].facts)
    members, backends = _import(asked, healthy(2).paths, "/", {})
    asked.wait("import")
    assert _reduce(asked, members, backends) == (reduced, failed)
    asked.close()


def test_a_rank_that_can_not_import_torch_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    rank = trial_rank.TrialRank("")
    request = {"rank": 0, "size": 1, "address": "127.0.0.1", "interface": "lo", "backends": {"gloo": 30.0}}
    with pytest.raises(OSError, match="libcudart"):
        rank.begin({**request, "cwd": str(tmp_path), "environ": {}})
    rank.kill()


@needs_mpi
def test_a_world_that_never_forms_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host does not come to the first barrier, until the head gives up."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said: SimpleQueue[Any] = SimpleQueue()
    nodes = [NodePlan(rank, f"n{rank}", "/", {}, (RankPlan(rank, 0, (), {}),), {}) for rank in (0, 1)]
    world = list(MpiWorlds(nodes, f"launchpad-{os.getpid()}-doctor").begin(0))
    trial = mpi.TrialWorld(said.put)
    request = {"world": world, "seat": mpi_environ(MpiSeat(0, 2, 0, 1, "n0")), "cwd": "/", "environ": {}}
    found: list[health.Reduced] = []
    running = threading.Thread(target=lambda: found.append(trial.run(request)))
    running.start()
    while not isinstance(said.get(timeout=DEADLINE), BarrierIn | PmixRequest):
        pass
    assert len(list(tmp_path.iterdir())) == 1
    trial.hear(None)
    running.join(DEADLINE)
    assert found[0].seconds < 0
    assert list(tmp_path.iterdir()) == []
