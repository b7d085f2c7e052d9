"""Load of this machine: processors and memory from /proc, NVIDIA devices from `nvidia-smi`.

Devices are queried through a separate process that repeats its report: a driver that hangs must not hang the agent, and
a vendor's library must not crash it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .loop import EventLoop, Timer

if TYPE_CHECKING:
    import subprocess

_MIB_PER_GIB = 1024
_BYTES_PER_GIB = 1024**3
_KIB_PER_GIB = 1024 * 1024
_QUERY = "--query-gpu=index,utilization.gpu,memory.used,memory.total,temperature.gpu"
_LONGEST_LINE = 64 * 1024


class UsageMeter:
    """Reports the load at intervals, while it is requested. Only the agent's thread uses it.

    `tell` receives JSON: cpu (0..1 since the last report), cores, memory_used_gib, memory_gib, values_gib,
    values_on_disk_gib, devices (index, busy, memory_used_gib, memory_gib, celsius of each). `blob_bytes` returns the
    bytes of blobs in memory and on the disk.
    """

    def __init__(
        self, loop: EventLoop, blob_bytes: Callable[[], tuple[int, int]], tell: Callable[[bytes], None]
    ) -> None:
        self._loop = loop
        self._blob_bytes = blob_bytes
        self._tell = tell
        self._timer: Timer | None = None
        self._interval_s = 0.0
        self._before = (0.0, 0.0)
        self._smi: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._devices: dict[int, dict[str, float]] = {}

    def ask(self, interval_s: float) -> None:
        """Report every `interval_s` seconds from now on; 0 stops the reports."""
        self.close()
        if interval_s > 0:
            self._interval_s = interval_s
            self._before = busy_and_total(_read("/proc/stat"))
            self._start_smi()
            self._timer = self._loop.call_later(interval_s, self._sample)

    def close(self) -> None:
        """Stop the reports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._smi is not None:
            self._end_smi(self._smi)

    def _sample(self) -> None:
        busy, total = busy_and_total(_read("/proc/stat"))
        busy_before, total_before = self._before
        self._before = busy, total
        # Counters may jump back when a container was frozen or moved.
        cpu = min(1.0, max(0.0, (busy - busy_before) / (total - total_before))) if total > total_before else 0.0
        used_gib, gib = memory_of(_read("/proc/meminfo"))
        in_memory, on_disk = self._blob_bytes()
        report: dict[str, Any] = {
            "cpu": cpu,
            "cores": os.cpu_count() or 1,
            "memory_used_gib": used_gib,
            "memory_gib": gib,
            "values_gib": in_memory / _BYTES_PER_GIB,
            "values_on_disk_gib": on_disk / _BYTES_PER_GIB,
            "devices": [self._devices[index] for index in sorted(self._devices)],
        }
        self._tell(json.dumps(report).encode())
        self._timer = self._loop.call_later(self._interval_s, self._sample)

    # Devices --------------------------------------------------------------------------------------------------------

    def _start_smi(self) -> None:
        paths = (os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path())
        program = next((path for path in paths if os.access(path, os.X_OK)), None)
        if program is None:
            return
        import subprocess  # only here: agents of most machines need none

        every_s = str(max(1, round(self._interval_s)))
        try:
            self._smi = subprocess.Popen(
                [program, _QUERY, "--format=csv,noheader,nounits", "--loop", every_s],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # nvidia-smi cannot run: devices are left out
            return
        assert self._smi.stdout is not None
        os.set_blocking(self._smi.stdout.fileno(), False)
        self._rest = b""
        self._loop.watch(self._smi.stdout, self._read_smi)

    def _read_smi(self) -> None:
        assert self._smi is not None
        assert self._smi.stdout is not None
        try:
            piece = os.read(self._smi.stdout.fileno(), _LONGEST_LINE)
        except BlockingIOError:  # no new lines
            return
        if not piece:  # nvidia-smi found no driver, or gave up
            self._end_smi(self._smi)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for device in devices_of(b"\n".join(lines).decode(errors="replace")):
            self._devices[int(device["index"])] = device

    def _end_smi(self, process: subprocess.Popen[bytes]) -> None:
        from subprocess import TimeoutExpired

        assert process.stdout is not None
        self._smi = None
        self._devices.clear()
        self._loop.forget(process.stdout)
        process.stdout.close()
        process.kill()
        with contextlib.suppress(TimeoutExpired):  # the driver holds it; the watchdog will reap it
            process.wait(0.5)


def busy_and_total(stat: str) -> tuple[float, float]:
    """Return busy time and total time of all processors since boot, from /proc/stat.

    Source: proc_stat(5). `guest` is in `user` already; `iowait` is idle time.
    """
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name == "cpu":
            user, nice, system, idle, iowait, irq, softirq, steal = (float(n) for n in [*numbers, *"0000000"][:8])
            busy = user + nice + system + irq + softirq + steal
            return busy, busy + idle + iowait
    return 0.0, 0.0


def memory_of(meminfo: str) -> tuple[float, float]:
    """Return (used, total) memory in GiB, from /proc/meminfo. Memory that the kernel can reclaim counts as free."""
    kib = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):  # a line without a number
            kib[name] = float(rest.split()[0])
    total = kib.get("MemTotal", 0.0)
    return (total - kib.get("MemAvailable", total)) / _KIB_PER_GIB, total / _KIB_PER_GIB


def devices_of(csv: str) -> list[dict[str, float]]:
    """Parse the lines of nvidia-smi. Values that it cannot tell, such as a slice's "[N/A]", become 0."""
    devices = []
    for line in csv.splitlines():
        cells = [_number(cell) for cell in line.split(",")]
        if len(cells) == 5:
            index, percent, used_mib, mib, celsius = cells
            devices.append(
                {
                    "index": index,
                    "busy": percent / 100,
                    "memory_used_gib": used_mib / _MIB_PER_GIB,
                    "memory_gib": mib / _MIB_PER_GIB,
                    "celsius": celsius,
                }
            )
    return devices


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # "[N/A]"
        return 0.0


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # not Linux
        return ""
