"""agent/host/gpu_leases and nvidia_smi: which GPUs there are, who gets them, and files that are not what they seem."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from launchpad.agent.host import gpu_leases
from launchpad.agent.host.gpu_leases import lease, listed
from launchpad.agent.host.nvidia_smi import GpuDevice, devices, visible
from launchpad.protocol.commands import LeaseGpus

ONE, TWO, THREE = (GpuDevice(number, f"GPU-{number}{number}", "H100", "", 0, 100, False, ()) for number in range(3))
ALL = [ONE, TWO, THREE]

XML = """<?xml version="1.0" ?><nvidia_smi_log><gpu><product_name>A100</product_name><uuid>GPU-a</uuid>
<fb_memory_usage><total>100 MiB</total><used>9 MiB</used></fb_memory_usage>
<mig_mode><current_mig>Enabled</current_mig></mig_mode>
<mig_devices><mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id>
<compute_instance_id>0</compute_instance_id><fb_memory_usage><total>50 MiB</total><used>N/A</used></fb_memory_usage>
</mig_device></mig_devices><ecc_errors><volatile><sram_uncorrectable>N/A</sram_uncorrectable></volatile></ecc_errors>
<processes><process_info><gpu_instance_id>1</gpu_instance_id><compute_instance_id>0</compute_instance_id><pid>7</pid>
<type>C</type></process_info></processes></gpu><gpu><product_name>A100</product_name><uuid>GPU-b</uuid>
<ecc_errors><volatile><dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors></gpu></nvidia_smi_log>"""
LIST = "GPU 0: A100 (UUID: GPU-a)\n  MIG 1g.5gb      Device  0: (UUID: MIG-c)\nGPU 1: A100 (UUID: GPU-b)\n"


def ask(arguments: Sequence[str]) -> str:
    return LIST if arguments == ["-L"] else XML


def test_the_gpus_and_slices_that_nvidia_smi_shows() -> None:
    found = devices(ask)
    assert found == [
        GpuDevice(0, "MIG-c", "A100", "GPU-a", 0, 50 << 20, False, (7,)),
        GpuDevice(1, "GPU-b", "A100", "", 0, 0, True, ()),
    ]
    assert [device.free for device in (*found, ONE)] == [False, False, True]
    with pytest.raises(ValueError, match="can't be read"):
        devices(lambda _: "NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("value", "expected"), [("1,0", [TWO, ONE]), ("GPU-22,x,0", [THREE]), ("", []), ("-1", []), ("0,0", [ONE])]
)
def test_what_cuda_visible_devices_leaves(value: str, expected: list[GpuDevice]) -> None:
    assert visible(ALL, {"CUDA_VISIBLE_DEVICES": value}) == expected
    assert visible(ALL, {}) == ALL


def wanted(*names: str, number: int = 0, free: bool = False) -> LeaseGpus:
    return LeaseGpus(list(names), number, free, "j1")


def test_a_lease_is_exclusive_shown_and_ends(tmp_path: Path) -> None:
    place = str(tmp_path)
    uuids, held, problem = lease(place, ALL, wanted("1"))
    assert (uuids, problem) == (["GPU-11"], "")
    assert lease(place, ALL, wanted("1"))[2].endswith(" (j1)")
    assert lease(place, ALL, wanted(number=3))[2].startswith("2 of its 3 GPUs are not leased and 3 are wanted: GPU 1 ")
    others, more, _ = lease(place, ALL, wanted(number=2))
    assert others == ["GPU-00", "GPU-22"]
    assert [one.lease and one.lease.job for one in listed(place, ALL)] == ["j1"] * 3
    for descriptor in (*held, *more):
        os.close(descriptor)
    assert [one.lease for one in listed(place, ALL)] == [None] * 3
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o666}
    assert len(modes) == 4  # with that of the turn


@pytest.mark.parametrize("what", ["symlink", "hard link", "pipe", "folder"])
def test_a_file_that_somebody_put_there_is_not_touched(tmp_path: Path, what: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    path = tmp_path / "launchpad-gpu-GPU-00"
    match what:
        case "symlink":
            path.symlink_to(mine)
        case "hard link":
            os.link(mine, path)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    assert lease(str(tmp_path), ALL, wanted("0"))[2].startswith(f"GPU 0 can't be leased: {path}: ")
    uuids, held, _ = lease(str(tmp_path), ALL, wanted(number=1))
    assert uuids == ["GPU-11"]
    assert [one.lease is not None for one in listed(str(tmp_path), ALL)] == [False, True, False]
    os.close(held[0])
    assert mine.read_text() == "precious"


def test_what_a_file_says_decides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "launchpad-gpu-GPU-00"
    path.write_text('{"user": "\\u001b[2Jann", "job": 1, "since": "x"}')
    _, held, problem = lease(str(tmp_path), ALL, wanted("0"))
    assert problem == ""
    path.write_text("[" * 100_000)
    assert lease(str(tmp_path), ALL, wanted("0"))[2] == "GPU 0 is leased by another job"
    path.unlink()  # by its owner: the lock on it is no lease any more
    uuids, more, _ = lease(str(tmp_path), ALL, wanted("0"))
    assert uuids == ["GPU-00"]
    os.close(held[0])
    os.close(more[0])


def test_the_folder_is_one_from_which_only_owners_can_remove_files() -> None:
    place = gpu_leases.folder()
    assert os.stat(place).st_mode & stat.S_ISVTX


@pytest.mark.parametrize("amd", [True, False])
def test_gpus_of_amd_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], amd: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_leases, "AMD", str(tmp_path if amd else tmp_path / "none"))
    gpu_leases.look()
    found, problem = json.loads(capfd.readouterr().out)
    assert found == []
    assert problem.startswith("there is no nvidia-smi, which knows the GPUs")
    assert ("ROCR_VISIBLE_DEVICES" in problem) == amd
