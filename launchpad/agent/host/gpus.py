"""Measures the node's NVIDIA GPUs by the driver's own library (NVML), which needs neither torch nor another package."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96
_MOST_PROCESSES = 512
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # nvmlClocksThrottleReason: HwSlowdown, Sw- and HwThermalSlowdown, HwPowerBrake


class Gpu(NamedTuple):
    """A GPU; figures are -1 if the driver doesn't tell."""

    uuid: str
    use: int  # the share of the time, in percent, in which it was busy
    memory: int  # bytes in use, by anybody
    total: int
    by_pid: dict[int, int]  # bytes that processes use, by their pids if these can be seen from here
    slowed: bool = False  # its clocks are lowered: it is too hot, or gets too little power


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class GpuReader:
    """Reads in a thread of its own: a GPU that has failed makes the driver hang."""

    def __init__(self, wake: int) -> None:
        """`wake`: the descriptor of an eventfd, to be written to when something has been read."""
        self._wake = wake
        self._library: Any = None
        self._missing = False
        self.busy = False
        self.gpus: list[Gpu] = []  # as they were last read

    def begin(self) -> None:
        """Read the GPUs, unless the last reading still goes on."""
        if self.busy or self._missing:
            return
        import _thread

        self.busy = True
        try:
            _thread.start_new_thread(self._read, ())
        except RuntimeError:  # out of threads
            self.busy = False

    def _read(self) -> None:
        try:
            if self._library is None:
                self._library = ctypes.CDLL(_LIBRARY)
                self._missing = self._library.nvmlInit_v2() != 0
            self.gpus = [] if self._missing else _gpus(self._library)
        except (OSError, AttributeError):  # no driver, or one that is too old
            self._missing = True
        finally:
            self.busy = False
            os.eventfd_write(self._wake, 1)


def _gpus(nvml: Any) -> list[Gpu]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:  # of another user or container
            continue
        if nvml.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES) != 0:
            continue
        use, memory = _Utilization(), _Memory()
        has_use = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0
        has_memory = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        found.append(
            Gpu(
                uuid.value.decode(errors="replace"),
                use.gpu if has_use else -1,
                memory.used if has_memory else -1,
                memory.total if has_memory else -1,
                _by_pid(nvml, device),
                _is_slowed(nvml, device),
            )
        )
    return found


def _is_slowed(nvml: Any, device: ctypes.c_void_p) -> bool:
    reasons = ctypes.c_ulonglong()
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    return ask is not None and ask(device, ctypes.byref(reasons)) == 0 and bool(reasons.value & _SLOWED)


def _by_pid(nvml: Any, device: ctypes.c_void_p) -> dict[int, int]:
    processes, count = (_ProcessInfo * _MOST_PROCESSES)(), ctypes.c_uint(_MOST_PROCESSES)
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) != 0:
        return {}
    return {one.pid: -1 if one.used == _UNKNOWN else one.used for one in processes[: count.value]}
