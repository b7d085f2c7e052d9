"""Compare joblib on skyward's Local pool and on loky, joblib's own pool: `python benchmarks/joblib_bench.py --help`.

Each round runs every measure once, in fresh processes. While time is measured, both pools are open and take turns, and
the ratio is the median of the ratios of neighbours. While memory is measured, only one pool is alive. The benchmark
checks the results, and that no process is left. The output holds medians with the 10th and 90th percentile, and a
verdict for each target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import processes
from dispatch import ENVIRONMENT, machine
from joblib_driver import CONTENDERS, MEASURES, JoblibJob
from measures import Samples
from report import percentile

HERE = Path(__file__).resolve().parent
ALONE = ("grid_memory", "reading")
"""One contender at a time: shared memory would make both look lighter."""


def job_of(measure: str, turn: int, output: str, contenders: tuple[str, ...]) -> JoblibJob:
    """Sizes of each measure."""
    half = max(1, (os.cpu_count() or 2) // 2)
    nodes_by_workers, repeats, calls, call_s = {
        "sleeps": ((2, 10), 1, 2_000, 0.05),
        "naps": ((2, 10), 4, 10_000, 0.001),
        "busy": ((2, half), 2, 10_000, 0.001),
        "grid_time": ((2, 2), 2, 0, 0.0),
        "grid_memory": ((2, 2), 3, 0, 0.0),
        "reading": ((2, 2), 2, 0, 0.0),
    }[measure]
    return JoblibJob(
        contenders=contenders,
        measure=measure,
        turn=turn,
        nodes=nodes_by_workers[0],
        workers_per_node=nodes_by_workers[1],
        repeats=repeats,
        calls=calls,
        call_s=call_s,
        array_bytes=200_000_000,
        output=output,
    )


@dataclass(kw_only=True)
class Findings:
    """Samples of all rounds by contender, and the problems."""

    samples: dict[str, Samples] = field(default_factory=lambda: {name: {} for name in CONTENDERS})
    problems: list[str] = field(default_factory=list)
    load_averages: list[float] = field(default_factory=list)

    def add(self, samples: dict[str, Samples]) -> None:
        for name, found in samples.items():
            for key, values in found.items():
                self.samples[name].setdefault(key, []).extend(values)

    def values(self, contender: str, key: str) -> list[float]:
        return self.samples[contender].get(key, [])

    def ratios(self, key: str) -> list[float]:
        """Return the ratios skyward / loky of neighbouring turns."""
        pairs = zip(self.values("skyward", key), self.values("loky", key), strict=False)
        return [mine / theirs for mine, theirs in pairs]


def measure(only: Sequence[str], rounds: int, findings: Findings) -> None:
    for turn in range(rounds):
        findings.load_averages.append(os.getloadavg()[0])
        for name in only:
            everybody = tuple(CONTENDERS) if turn % 2 == 0 else tuple(reversed(CONTENDERS))
            for contenders in [(one,) for one in everybody] if name in ALONE else [everybody]:
                print(f"round {turn + 1}/{rounds}: {name}, {' and '.join(contenders)}", file=sys.stderr, flush=True)
                _drive(name, turn, contenders, findings)


def _drive(name: str, turn: int, contenders: tuple[str, ...], findings: Findings) -> None:
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        output, log = Path(folder, "samples.json"), Path(folder, "log")
        job = job_of(name, turn, str(output), contenders)
        with log.open("wb") as text:
            # It has a session of its own, so the terminal's Ctrl-C reaches only this process, which then ends it in
            # order.
            child = subprocess.Popen(
                [sys.executable, str(HERE / "joblib_driver.py"), job.to_json()],
                env={**os.environ, **ENVIRONMENT},
                stdout=text,
                stderr=text,
                start_new_session=True,
            )
            try:
                child.wait(300)
            except subprocess.TimeoutExpired:
                findings.problems.append(f"{name}: timed out")
            finally:
                if child.poll() is None:
                    child.send_signal(signal.SIGINT)
        if output.exists():
            findings.add(json.loads(output.read_text()))
        else:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            findings.problems.append(f"{name}, {' and '.join(contenders)}: {last[:200]}")
    for command in processes.sweep(grace_s=5):
        findings.problems.append(f"{name}: left a process behind 5 s after it was closed: {command}")


# Report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: the samples it shows, and their unit."""

    key: str
    title: str
    unit: str
    scale: float = 1.0
    made_of: str = ""


ROWS = (
    Row(key="sleeps_s", title="2,000 sleeps of 50 ms, 20 workers", unit="s", made_of="ideal 2000 / 20 x 0.05 s = 5 s"),
    Row(
        key="sleeps_efficiency", title="... efficiency", unit="%", scale=100, made_of="ideal / time; 2 nodes x 10 slots"
    ),
    Row(key="sleeps_batches", title="... batches that joblib made of them", unit=""),
    Row(key="naps_per_s", title="10,000 sleeps of 1 ms, 20 workers", unit="calls/s", made_of="10,000 / time"),
    Row(key="naps_cpu", title="... CPU time beyond the sleeping, each", unit="us", scale=1e6, made_of="all processes"),
    Row(
        key="busy_per_s",
        title="10,000 calls of 1 ms of CPU, a worker for each core",
        unit="calls/s",
        made_of="10,000 / time",
    ),
    Row(key="busy_cpu", title="... CPU time beyond that 1 ms, each", unit="us", scale=1e6, made_of="all processes"),
    Row(key="busy_cpu_workers", title="... ... of the workers", unit="us", scale=1e6),
    Row(key="busy_cpu_client", title="... ... of the client", unit="us", scale=1e6),
    Row(key="grid_first_s", title="Grid search over 200 MB, 4 workers, first", unit="s", made_of="the array crosses"),
    Row(key="grid_again_s", title="... the same array again", unit="s"),
    Row(key="grid_cpu_s", title="... CPU time of that", unit="s", made_of="all processes"),
    Row(key="grid_imported_mib", title="Workers' memory before it", unit="MiB", made_of="sum of PSS; all is imported"),
    Row(key="grid_peak_mib", title="... highest of three searches", unit="MiB", made_of="sum of the workers' PSS"),
    Row(key="grid_mean_mib", title="... mean of three searches", unit="MiB", made_of="sum of the workers' PSS"),
    Row(key="grid_all_peak_mib", title="... highest, of all processes", unit="MiB", made_of="client, agents, workers"),
    Row(key="idle_mib", title="Workers' memory, idle", unit="MiB", made_of="sum of PSS; numpy is imported"),
    Row(
        key="read",
        title="Four workers read 200 MB",
        unit="x array",
        made_of="(sum of PSS while all hold it - idle) / array",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target for skyward's median, or for its ratio to loky."""

    text: str
    key: str
    limit: float
    is_ratio: bool = True
    at_least: bool = False

    def verdict(self, findings: Findings) -> str:
        values = findings.ratios(self.key) if self.is_ratio else findings.values("skyward", self.key)
        if not values:
            return f"  n/a   {self.text}"
        found = median(values)
        met = found >= self.limit if self.at_least else found <= self.limit
        sense = ">=" if self.at_least else "<="
        return f"  {'ok  ' if met else 'MISS'}  {self.text:<66}{found:.3f}, target {sense} {self.limit:g}"


# Source: the issue that asked for them.
TARGETS = (
    Target(text="efficiency of 2,000 sleeps", key="sleeps_efficiency", limit=0.97, is_ratio=False, at_least=True),
    Target(text="throughput of sleeps of 1 ms, ratio to loky", key="naps_per_s", limit=1, at_least=True),
    Target(text="throughput of 1 ms of CPU, ratio to loky", key="busy_per_s", limit=1, at_least=True),
    Target(text="grid search: highest memory of the workers, ratio to loky", key="grid_peak_mib", limit=1),
    Target(text="grid search: mean memory of the workers, ratio to loky", key="grid_mean_mib", limit=1),
    Target(text="reading only: memory over idle, in sizes of the array", key="read", limit=1.1, is_ratio=False),
    Target(text="grid search: time of the first, ratio to loky", key="grid_first_s", limit=1),
    Target(text="grid search: time again, ratio to loky", key="grid_again_s", limit=1),
)


def render(findings: Findings) -> str:
    lines = [f"{'':<52}{'median':>10}{'p10':>10}{'p90':>10}{'n':>4}   made of"]
    for row in ROWS:
        if not any(findings.values(name, row.key) for name in CONTENDERS):
            continue
        lines.append(f"{row.title}{f', {row.unit}' if row.unit else ''}")
        for name in CONTENDERS:
            if values := [value * row.scale for value in findings.values(name, row.key)]:
                lines.append(_line(name, values, row.made_of))
        if ratios := findings.ratios(row.key):
            lines.append(_line("skyward / loky", ratios, "median of neighbours"))
    return "\n".join([*lines, "", "Targets", *(target.verdict(findings) for target in TARGETS)])


def _line(name: str, values: list[float], made_of: str) -> str:
    numbers = "".join(f"{_number(x):>10}" for x in (median(values), percentile(values, 0.1), percentile(values, 0.9)))
    return f"  {name:<50}{numbers}{len(values):>4}   {made_of}".rstrip()


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.1f}" if abs(number) >= 100 else f"{number:.3f}"


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 1 if something went wrong. A missed target does not count as that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(MEASURES), help=f"comma-separated, of: {', '.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to this file")
    parsed = parser.parse_args(arguments)
    only = tuple(parsed.only.split(","))
    if unknown := set(only) - set(MEASURES):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not one of {', '.join(MEASURES)}")
    findings = Findings()
    processes.adopt_orphans()
    try:
        measure(only, parsed.rounds, findings)
    except KeyboardInterrupt:
        findings.problems.append("interrupted: the rounds that were not complete are missing")
    finally:
        processes.sweep(grace_s=0)
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{datetime.date.today().isoformat()}, {parsed.rounds} rounds; load average at the start of each:", end=" ")
    print(f"{', '.join(f'{load:.1f}' for load in findings.load_averages)}\n")
    print(render(findings))
    print("\nProblems" if findings.problems else "\nEvery result was right, and no process was left.")
    for problem in findings.problems:
        print(f"  {problem}")
    if parsed.json is not None:
        parsed.json.write_text(json.dumps({"machine": facts, "samples": findings.samples}, indent=1))
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
