"""Asks nvidia-smi for the node's NVIDIA GPUs and MIG slices: UUIDs, memory, who uses them, memory errors."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ... import linux

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# A GPU that has fallen off its bus makes nvidia-smi slow.
ANSWER_SECONDS = 30.0

# A GPU with more memory in use than this part is taken, even if its users can't be seen, as from a container.
_USED_SHARE = 0.05

_LISTED = re.compile(r"^(?:GPU (\d+)|\s+MIG \S+\s+Device +(\d+)): .*\(UUID: ([\w/-]+)\)", re.MULTILINE)

Ask = Callable[[Sequence[str]], str]


class GpuDevice(NamedTuple):
    """A GPU, or a slice of one (MIG)."""

    number: int  # nvidia-smi's, of the GPU
    uuid: str
    name: str  # the model
    parent: str  # of a slice: the UUID of its GPU; "" of a GPU
    used: int  # bytes
    total: int
    faulty: bool  # it has had memory errors that could not be corrected, since the driver was loaded
    pids: tuple[int, ...]  # of the processes that compute there

    @property
    def free(self) -> bool:
        """Whether nobody uses it, and it works."""
        return not self.pids and not self.faulty and self.used <= _USED_SHARE * self.total


def ask(arguments: Sequence[str], seconds: float = ANSWER_SECONDS) -> str:
    """What nvidia-smi prints. Raises OSError and subprocess.SubprocessError."""
    return subprocess.run(
        ["nvidia-smi", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    ).stdout


def trouble(error: Exception, seconds: float = ANSWER_SECONDS) -> str:
    """Why there is no usable answer, after an exception of `ask`, which had so many seconds, or a ValueError."""
    if isinstance(error, subprocess.CalledProcessError):
        said = f"{error.stdout}{error.stderr}".strip().partition("\n")[0]
        return f"nvidia-smi: {said or f'exit code {error.returncode}'}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi: no answer within {seconds:g} s"
    return f"nvidia-smi: {error}"


def devices(ask: Ask = ask) -> list[GpuDevice]:
    """All of the node. Of a GPU that is split, there are only its slices. Raises ValueError, and what `ask` raises."""
    from xml.etree import ElementTree

    slices: dict[int, dict[int, str]] = {}  # UUIDs by their GPU's number, and their own
    number = 0
    for gpu, part, uuid in _LISTED.findall(ask(["-L"])):
        if gpu:
            number = int(gpu)
            slices[number] = {}
        else:
            slices.setdefault(number, {})[int(part)] = uuid
    try:
        gpus = ElementTree.fromstring(ask(["-q", "-x"])).findall("gpu")
    except ElementTree.ParseError as error:
        raise ValueError(f"its answer to -q -x can't be read: {error}") from None
    return [device for index, gpu in enumerate(gpus) for device in _of_gpu(index, gpu, slices.get(index, {}))]


def _of_gpu(index: int, gpu: Element, slices: Mapping[int, str]) -> Iterator[GpuDevice]:
    whole = GpuDevice(
        *(index, _text(gpu, "uuid"), _text(gpu, "product_name"), ""),
        *(_memory(gpu, "used"), _memory(gpu, "total")),
        faulty=any(_is_fault(count) for count in gpu.findall("ecc_errors/volatile/*")),
        pids=(),
    )
    computing = [one for one in gpu.findall("processes/process_info") if "C" in _text(one, "type")]
    parts = gpu.findall("mig_devices/mig_device") if _text(gpu, "mig_mode/current_mig") == "Enabled" else []
    if not parts:
        yield whole._replace(pids=_pids(computing))
    for part in parts:
        uuid = slices.get(_number(_text(part, "index")))
        if uuid is not None:
            mine = [one for one in computing if _instance(one) == _instance(part)]
            used, total = _memory(part, "used"), _memory(part, "total")
            yield whole._replace(uuid=uuid, parent=whole.uuid, used=used, total=total, pids=_pids(mine))


def _is_fault(count: Element) -> bool:
    return "uncorrect" in count.tag and _number(count.text or "") > 0


def _instance(one: Element) -> tuple[str, str]:
    return _text(one, "gpu_instance_id"), _text(one, "compute_instance_id")


def _pids(processes: Sequence[Element]) -> tuple[int, ...]:
    return tuple(_number(_text(one, "pid")) for one in processes)


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _memory(element: Element, what: str) -> int:
    return _number(_text(element, f"fb_memory_usage/{what}").removesuffix(" MiB")) << 20


def _number(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def visible(found: Sequence[GpuDevice], environ: Mapping[str, str]) -> list[GpuDevice]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in their order there."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(found)
    chosen: list[GpuDevice] = []
    for entry in (word.strip() for word in listed.split(",")):
        matching = named(found, entry)
        if not matching:  # as in CUDA, the first invalid entry ends the list
            break
        chosen += [device for device in matching if device not in chosen]
    return chosen


def named(found: Sequence[GpuDevice], name: str) -> list[GpuDevice]:
    """The GPU with this number, UUID or beginning of one; if it is split, its slices."""
    if name.isdecimal():
        return [device for device in found if device.number == int(name)]
    if not name.startswith(("GPU-", "MIG-")):
        return []
    return [device for device in found if device.uuid.startswith(name) or device.parent.startswith(name)]


def user_of(pid: int) -> str:
    """Whose process it is; "" if it can't be seen from here."""
    try:
        return name_of(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def name_of(uid: int) -> str:
    """The user's name, or else the number."""
    return linux.user_name(uid) or str(uid)
