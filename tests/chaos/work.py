"""Call of the jobs that chaos submits. Each of its processes imports this module, and neither pytest nor the hub."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import skyward as sky

LINES = 5


@sky.compute
def work(folder: str, name: str, duration_s: float, fails: bool) -> str:
    """Note this run, print lines, and return the name. No two runs of one name may overlap."""
    with open(f"{folder}/{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            Path(folder, f"{name}.overlap").touch()
        with open(f"{folder}/{name}.runs", "a") as runs:
            runs.write(f"{os.getpid()}\n")
        for number in range(LINES):
            print(f"{name} line {number}", flush=True)
            time.sleep(duration_s / LINES)
    if fails:
        raise ValueError(name)
    return name
