"""Measure what a record of JsonLogger costs in a short file and in a long one, with and without a reader.

    python benchmarks/training_json_log.py [RECORDS]

Print microseconds for a record while the file grows to RECORDS (100,000). Also print how many times another process
read it meanwhile, with `json.load`, as fast as it can.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from skyward.training import JsonLogWriter

RECORD = {
    "loss": 2.3456789,
    "grad_norm": 1.2345678,
    "learning_rate": 3e-4,
    "tokens": 123456,
    "total_flos": 1.25e15,
    "tok_per_sec": 54321,
    "mfu": 0.4321,
    "peak_mem_allocated": [12_345_678_901, 12_345_678_902],
}

READER = """
import json, sys
reads = 0
try:
    while True:
        with open(sys.argv[1]) as file:
            json.load(file)
        reads += 1
        if reads == 1:
            print("reading", flush=True)
except KeyboardInterrupt:
    print(reads)
"""


def measure(count: int, *, is_read: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = JsonLogWriter("log.json")
        writer.open(folder)
        reader = None
        if is_read:
            reader = subprocess.Popen(
                [sys.executable, "-c", READER, str(Path(folder) / "log.json")], stdout=subprocess.PIPE, text=True
            )
            assert reader.stdout is not None
            reader.stdout.readline()
        done, costs = 0, []
        for until in (count // 100, count // 10, count):
            begun = time.perf_counter()
            for step in range(done, until):
                writer.write_record(step, step / count, RECORD)
            costs.append((time.perf_counter() - begun) / (until - done) * 1e6)
            done = until
        reads = 0
        if reader is not None:
            reader.send_signal(2)
            reads = int(reader.communicate(timeout=60)[0])
        size = (Path(folder) / "log.json").stat().st_size / 1e6
        writer.close()
    spans = "  ".join(f"{each:7.1f}" for each in costs)
    print(f"{'read' if is_read else 'not read':<10} {spans}   {size:5.1f} MB  {reads} reads, none of half a record")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    heads = "  ".join(f"{f'-{until:,}':>7}" for until in (count // 100, count // 10, count))
    print(f"{'us':<10} {heads}")
    measure(count, is_read=False)
    measure(count, is_read=True)


if __name__ == "__main__":
    main()
