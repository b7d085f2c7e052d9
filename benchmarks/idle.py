"""Memory of each process of an idle Local pool with two slots: `python benchmarks/idle.py`.

It also prints the processor time that each process has used until the pool's first result: the parts of a fresh pool's
start. `pss` counts a shared page once, divided among its processes. `private` is the part that only this process has.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import processes
import workloads

_DEPTHS = "standby", "watchdog", "agent", "zygote", "slot"


def main() -> None:
    """Print one row for each process, and their sum."""
    before_ms = _cpu_ms(os.getpid())
    import skyward as sky

    before_mib = processes.pss_mib([os.getpid()])
    noop = sky.compute(workloads.noop)
    with sky.ComputePool(provider=sky.Local(), concurrency=2) as pool:
        (noop() > pool).result()
        client_ms = _cpu_ms(os.getpid()) - before_ms
        first_ms = {pid: _cpu_ms(pid) for pid in processes.descendants(os.getpid())}
        for future in [noop() > pool for _ in range(40)]:
            future.result()
        time.sleep(1.0)
        total_mib = processes.pss_mib([os.getpid()]) - before_mib
        print(f"client   pss {total_mib:5.1f} MiB more than with `import skyward`, first result {client_ms:5.1f} ms")
        for pid in processes.descendants(os.getpid()):
            pss_mib = processes.pss_mib([pid])
            total_mib += pss_mib
            cpu = f"first result {first_ms.get(pid, 0.0):5.1f} ms"
            print(f"{_role(pid):8} pss {pss_mib:5.1f} MiB, private {_private_mib(pid):4.1f} MiB, {cpu}")
        print(f"all      pss {total_mib:5.1f} MiB, first result {client_ms + sum(first_ms.values()):5.1f} ms")


def _cpu_ms(pid: int) -> float:
    return 1e3 * processes.all_cpu_seconds(pid)


def _role(pid: int) -> str:
    depth = 0
    while (parent := _parent(pid)) != os.getpid():
        pid, depth = parent, depth + 1
    return _DEPTHS[depth]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    main()
