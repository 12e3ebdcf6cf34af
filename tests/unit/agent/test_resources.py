"""agent/host/resources, on fake cgroup trees and device lists."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from launchpad.agent.host import resources

CORES = 16

MakeTree = Callable[[str, dict[str, str]], tuple[str, str]]


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Make a cgroup tree and a process's membership in it; returns the arguments for the functions under test."""

    def make_tree(membership: str, files: dict[str, str]) -> tuple[str, str]:
        root = tmp_path / "cgroup"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (tmp_path / "membership").write_text(membership)
        return str(root), str(tmp_path / "membership")

    return make_tree


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, CORES, id="no quota"),
        pytest.param({"a/b/cpu.max": "300000 100000\n"}, 3, id="own group"),
        pytest.param({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2, id="parent"),
        pytest.param({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "500000 100000\n"}, 4, id="the minimum counts"),
        pytest.param({"cpu.max": "500000 100000\n"}, 5, id="container: the root is the group"),
        pytest.param({"a/b/cpu.max": "250000 100000\n"}, 2, id="fraction is rounded down"),
        pytest.param({"a/b/cpu.max": "50000 100000\n"}, 1, id="at least one"),
        pytest.param({"a/b/cpu.max": "9900000 100000\n"}, CORES, id="capped by the affinity"),
        pytest.param({"a/b/cpu.max": "\n"}, CORES, id="empty file"),
    ],
)
def test_cores_with_cgroup_v2(make_tree: MakeTree, files: dict[str, str], cores: int) -> None:
    assert resources.usable_cores(*make_tree("0::/a/b\n", files)) == cores


@pytest.mark.parametrize(
    ("folder", "quota", "cores"),
    [
        ("cpu/job/step", "150000", 1),
        ("cpu/job", "600000", 6),
        ("cpu", "700000", 7),
        ("cpu/job", "-1", CORES),
        ("memory/job", "100000", CORES),
        ("cpu/other", "100000", CORES),
    ],
)
def test_cores_with_cgroup_v1(make_tree: MakeTree, folder: str, quota: str, cores: int) -> None:
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    membership = "5:memory:/job\n4:cpu,cpuacct:/job/step\n1:name=systemd:/x:y\n0::/\n"
    assert resources.usable_cores(*make_tree(membership, files)) == cores


def test_cores_without_cgroups(tmp_path: Path) -> None:
    assert resources.usable_cores(str(tmp_path), str(tmp_path / "none")) == CORES


@pytest.mark.parametrize(
    ("files", "limit"), [({"a/pids.max": "77\n"}, 77), ({"a/pids.max": "max\n", "pids.max": "88\n"}, 88)]
)
def test_process_limit_of_a_cgroup(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert resources.process_limit(*make_tree("0::/a\n", files)) == limit


@pytest.mark.parametrize(("user", "limit"), [(1000, 50), (0, 77)])
def test_user_process_limit_does_not_apply_to_root(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch, user: int, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 60))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert resources.process_limit(*make_tree("0::/\n", {"pids.max": "77\n"})) == limit


# GPUs.


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,1", 2),
        (" 0, 3 ", 2),
        ("3", 1),
        ("4", 0),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("0,,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("GPU-8932f937,GPU-0aa1", 2),
        ("MIG-GPU-8932f937/1/0", 1),
    ],
)
def test_device_list_ends_at_the_first_invalid_entry(value: str, count: int) -> None:
    assert len(resources.devices_in(value, installed=4)) == count


@pytest.mark.parametrize("value", ["0", "0,1", "GPU-8932f937", ""])
def test_device_list_without_devices_counts_none(value: str) -> None:
    assert resources.devices_in(value, installed=0) == []


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_every_vendors_variable_hides_devices(environ: dict[str, str], count: int) -> None:
    assert resources._visible(4, environ) == count


def test_only_numbered_device_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"]
    monkeypatch.setattr(os, "listdir", lambda _: names)
    assert resources._nvidia_device_files() == 3


# OOM kills.

EVENTS = "low 0\nhigh 2\nmax 9\noom 4\noom_kill {}\noom_group_kill 1\n"
CONTROL = "oom_kill_disable 0\nunder_oom 1\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        pytest.param("0::/a\n", {"a/memory.events": EVENTS.format(3), "memory.events": EVENTS.format(8)}, 3, id="v2"),
        pytest.param("0::/a\n", {"memory.events": EVENTS.format(8)}, 8, id="v2 container"),
        pytest.param("0::/a\n", {"a/memory.events": EVENTS.format(0), "memory.events": EVENTS.format(8)}, 0, id="zero"),
        pytest.param("2:memory:/a\n0::/\n", {"memory/a/memory.oom_control": CONTROL.format(5)}, 5, id="v1"),
        pytest.param("2:memory:/a\n0::/\n", {"memory/memory.oom_control": CONTROL.format(6)}, 6, id="v1 container"),
    ],
)
def test_oom_kills_are_counted_in_the_nearest_group(
    make_tree: MakeTree, membership: str, files: dict[str, str], count: int
) -> None:
    assert resources.oom_kills(*make_tree(membership, files)) == count


def test_oom_kills_fall_back_to_the_nodes_count(make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    read = resources._field
    monkeypatch.setattr(resources, "_field", lambda path, name: 12 if path == "/proc/vmstat" else read(path, name))
    old_kernel = "oom_kill_disable 0\nunder_oom 0\n"
    assert resources.oom_kills(*make_tree("2:memory:/a\n", {"memory/a/memory.oom_control": old_kernel})) == 12
    root = {"memory/memory.oom_control": CONTROL.format(0)}  # without those of the groups below it
    assert resources.oom_kills(*make_tree("2:memory:/../a\n", root)) == 12
