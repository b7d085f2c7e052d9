"""Load of this process and its GPU: CPU and memory from the system, GPUs by NVML where its library is installed."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class ProcessLoad:
    """CPU and memory of this process since the last reading."""

    def __init__(self) -> None:
        self._cpu_s, self._at_s = time.process_time(), time.monotonic()

    def read(self) -> dict[str, float]:
        """Return `cpu_percent` (100 for each busy core) and `memory_gb` (resident, 10^9 bytes)."""
        cpu_s, at_s = time.process_time(), time.monotonic()
        passed_s = at_s - self._at_s
        values = {}
        if passed_s > 0.05:
            values["cpu_percent"] = 100 * (cpu_s - self._cpu_s) / passed_s
            self._cpu_s, self._at_s = cpu_s, at_s
        with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
            values["memory_gb"] = int(file.read().split()[1]) * _PAGE / 1e9
        return values


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of this rank, read by NVML. Source: NVIDIA's nvml.h, functions with a stable ABI."""

    nvml: ctypes.CDLL
    handle: ctypes.c_void_p

    @classmethod
    def of_this_rank(cls) -> Gpu | None:
        """Return the GPU that LOCAL_RANK and CUDA_VISIBLE_DEVICES name; None if there is none."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
        local = int(os.environ.get("LOCAL_RANK") or 0)
        if names is not None and not names:
            return None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() != 0:
                return None
            handle = ctypes.c_void_p()
            name = str(local) if names is None else names[local % len(names)]
            if name.isdecimal():
                status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                status = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        except (OSError, AttributeError):  # no driver here, or an old one
            return None
        return cls(library, handle) if status == 0 else None

    @property
    def name(self) -> str:
        """Name of the model, such as `NVIDIA H100 80GB HBM3`."""
        text = ctypes.create_string_buffer(96)
        if self.nvml.nvmlDeviceGetName(self.handle, text, ctypes.c_uint(len(text))) != 0:
            return ""
        return text.value.decode(errors="replace")

    def read(self) -> dict[str, float]:
        """Return utilization in percent, memory in 10^9 bytes, temperature in degrees Celsius and power in watts."""
        values: dict[str, float] = {}
        used, memory, number = _Utilization(), _Memory(), ctypes.c_uint()
        if self.nvml.nvmlDeviceGetUtilizationRates(self.handle, ctypes.byref(used)) == 0:
            values["gpu_percent"] = float(used.gpu)
        if self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)) == 0:
            values["gpu_memory_gb"] = memory.used / 1e9
        if self.nvml.nvmlDeviceGetTemperature(self.handle, ctypes.c_uint(0), ctypes.byref(number)) == 0:
            values["gpu_celsius"] = float(number.value)
        if self.nvml.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(number)) == 0:
            values["gpu_watts"] = number.value / 1000
        return values


class SystemSampler:
    """Thread that passes the load of this process to a function every few seconds.

    Args:
        rank: rank of the process, part of the names: `system/rank0/cpu_percent`.
        every_s: seconds between two samples.
        log: receives the values.
    """

    def __init__(self, rank: int, every_s: float, log: Callable[[dict[str, float]], object]) -> None:
        self.gpu = Gpu.of_this_rank()
        self.peak_memory_gb = 0.0
        self._prefix, self._every_s, self._log = f"system/rank{rank}/", every_s, log
        self._began_s = time.monotonic()
        self._process = ProcessLoad()
        self._is_over = threading.Event()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="skyward-hub-system", daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Pass one sample on now."""
        with self._reading:
            values = self._process.read()
            if self.gpu is not None:
                values |= self.gpu.read()
            peak = values.get("gpu_memory_gb", values.get("memory_gb", 0.0))
            self.peak_memory_gb = max(self.peak_memory_gb, peak)
            self._log({self._prefix + name: value for name, value in values.items()})

    def log_last(self, log: Callable[[dict[str, float], int], object], step: int, *, is_summary: bool) -> None:
        """End with a last sample, and with the sums of the run on its first rank.

        Args:
            log: receives values and the step.
            step: the last step.
            is_summary: whether to pass the sums.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join(5.0)
        self._log = lambda values: log(values, step)
        self.sample()
        if is_summary:
            hours = (time.monotonic() - self._began_s) / 3600
            sums = {"system/peak_memory_gb": self.peak_memory_gb}
            if self.gpu is not None:
                sums["system/gpu_hours_of_rank0"] = hours
            log(sums, step)

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self.sample()
            except Exception as error:
                _log.warning("system metrics end: they cannot be read", exc_info=error)
                return
