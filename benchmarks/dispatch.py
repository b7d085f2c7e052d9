"""Compare skyward's Local pool with other pools of processes on this machine: `python benchmarks/dispatch.py --help`.

Every round measures every peer once, one after another, each in a process of its own. Each round starts with another
peer, so other load of the machine affects all of them alike. No process of a peer is alive while the next one is
measured. The output holds medians with the 10th and 90th percentile over rounds, skyward's ratio to each peer, a
verdict for each target, and the measurements that failed with their reasons.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import processes
import report
from driver import ORDER, Job
from measures import Samples, Sizes
from peers import PEERS, Shape

HERE = Path(__file__).resolve().parent
MEASURES = ("import", *ORDER)

# One thread per worker for every peer; no telemetry.
ENVIRONMENT = {
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
    "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")))),
    "PYTHONDONTWRITEBYTECODE": "",  # an installed package has bytecode, so this source tree gets it, too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A pool to measure: a peer, a shape, and the measures that make sense for it."""

    peer: str
    title: str
    shape: Shape
    measures: tuple[str, ...]


def variants(names: Sequence[str]) -> dict[str, Variant]:
    """Choose the pools to measure for these peers, by the name of the result row."""
    found: dict[str, Variant] = {}
    for name in names:
        found[name] = Variant(peer=name, title=PEERS[name].title, shape=Shape(), measures=MEASURES)
        if name == "skyward":
            title = f"{PEERS[name].title}, 2 nodes"
            shape = Shape(nodes=2, workers_per_node=1)
            found["skyward_2_nodes"] = Variant(peer=name, title=title, shape=shape, measures=("first", "memory"))
    return found


@dataclass(kw_only=True)
class Findings:
    """Results so far, so that an interrupted run still reports."""

    rounds: dict[str, list[Samples]] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)
    load_averages: list[float] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.problems[text] = self.problems.get(text, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    peers: tuple[str, ...]
    only: tuple[str, ...]
    rounds: int
    limit_s: float
    sizes: Sizes


def installed(names: Sequence[str], findings: Findings) -> list[str]:
    """Return the peers that can be imported. The others are reported."""
    present = []
    for name in names:
        kind = PEERS[name]
        tried = _python(f"import {kind.module}")
        if tried.returncode == 0:
            present.append(name)
        else:
            reason = tried.stderr.strip().splitlines()[-1]
            findings.problem(f"{kind.title}: cannot be imported ({reason}); pip install 'skyward[bench]'")
    return present


def measure(options: Options, findings: Findings) -> None:
    """Run all rounds and fill `findings`."""
    to_measure = variants(installed(options.peers, findings))
    findings.rounds.update({row: [] for row in to_measure})
    for number in range(options.rounds):
        findings.load_averages.append(os.getloadavg()[0])
        order = _rotated(list(to_measure), number)
        for position, row in enumerate(order, 1):
            variant = to_measure[row]
            _progress(f"round {number + 1}/{options.rounds}, {position}/{len(order)}: {variant.title}")
            findings.rounds[row].append(measure_once(variant, options, findings))
    _progress("")


def measure_once(variant: Variant, options: Options, findings: Findings) -> Samples:
    """Run one round of one variant: its import, its pool, and a second pool of 4 workers for the spread."""
    wanted = tuple(name for name in options.only if name in variant.measures)
    samples: Samples = {}
    if "import" in wanted:
        samples["import"] = [import_seconds(PEERS[variant.peer].module)]
    for job_measures, shape in _pools(wanted, variant, options, findings):
        samples.update(_drive(variant, shape, job_measures, options, findings))
    return samples


def _pools(
    wanted: tuple[str, ...], variant: Variant, options: Options, findings: Findings
) -> Iterator[tuple[tuple[str, ...], Shape]]:
    if on_two := tuple(name for name in wanted if name not in ("import", "spread")):
        yield on_two, variant.shape
    if "spread" not in wanted:
        return
    needed = options.sizes.spread_memory_bytes
    if (available := processes.available_memory_bytes()) < needed:
        findings.problem(
            f"{variant.title}, spread: needs {needed / 1e9:.0f} GB of free memory, {available / 1e9:.0f} are"
        )
        return
    yield (
        ("spread",),
        replace(variant.shape, workers_per_node=4, object_store_bytes=2 * options.sizes.spread_bytes + 200_000_000),
    )


def _drive(variant: Variant, shape: Shape, wanted: tuple[str, ...], options: Options, findings: Findings) -> Samples:
    """Run one driver until it ends or times out. Report its errors and the processes it left behind."""
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        output, log = Path(folder, "samples.json"), Path(folder, "log")
        job = Job(peer=variant.peer, shape=shape, measures=wanted, sizes=options.sizes, output=str(output))
        code = run_driver(job, log, limit_s=options.limit_s)
        written = json.loads(output.read_text()) if output.exists() else {"samples": {}, "errors": {}}
        for name, error in written["errors"].items():
            findings.problem(f"{variant.title}, {name}: {error}")
        if code != 0 and not written["errors"]:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            findings.problem(f"{variant.title}: {'timed out' if code is None else f'ended with {code}'}; {last[:200]}")
    for command in processes.sweep(grace_s=5):
        findings.problem(f"{variant.title}: left a process behind 5 s after it was closed: {command}")
    samples: Samples = written["samples"]
    return {name: values for name, values in samples.items() if name != "first" or "first" in wanted}


def run_driver(job: Job, log: Path, *, limit_s: float, environment: Mapping[str, str] = ENVIRONMENT) -> int | None:
    """Run the driver. Returns its exit code, or None if it timed out. The driver ends at most 10 s after this call.

    `environment` takes precedence over this process's environment.
    """
    command = [sys.executable, str(HERE / "driver.py"), job.to_json()]
    with log.open("wb") as output:
        # It has a session of its own, so the terminal's Ctrl-C reaches only this process, which then ends it in order.
        child = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def import_seconds(module: str, environment: Mapping[str, str] = ENVIRONMENT) -> float:
    """Return the seconds of the import statement in an interpreter that has imported nothing else."""
    code = f"import time; begin = time.perf_counter(); import {module}; print(time.perf_counter() - begin)"
    return float(_python(code, environment).stdout.split()[-1])


def _python(code: str, environment: Mapping[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def _rotated(names: list[str], by: int) -> list[str]:
    shift = by % len(names) if names else 0
    return names[shift:] + names[:shift]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Return where and when these numbers were taken."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), platform.machine()
    )
    versions = {}
    for kind in PEERS.values():
        try:
            versions[kind.title] = (
                importlib.metadata.version(kind.distribution) if kind.distribution else "standard library"
            )
        except importlib.metadata.PackageNotFoundError:
            versions[kind.title] = "not installed as a package"
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def print_findings(options: Options, findings: Findings) -> None:
    """Show tables, targets, problems. Problems come last, where they are seen first."""
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{facts['date']}, {options.rounds} interleaved rounds")
    loads = ", ".join(f"{load:.1f}" for load in findings.load_averages)
    print(f"load average at the start of each round: {loads} (this benchmark itself adds about 1)\n")
    sizes = options.sizes
    labels = {
        "map_items": f"{sizes.map_items:,}",
        "array_mb": f"{sizes.array_bytes / 1e6:g}",
        "spread_mb": f"{sizes.spread_bytes / 1e6:,g}",
    }
    print(report.render(rows_of(findings), labels=labels))
    print("\nProblems" if findings.problems else "\nAll measurements are complete.")
    for text, times in findings.problems.items():
        print(f"  {text}{f' ({times} times)' if times > 1 else ''}")


def rows_of(findings: Findings) -> report.Rows:
    """Arrange the findings as report.py reads them."""
    titles = {row: variant.title for row, variant in variants(tuple(PEERS)).items()}
    return {row: report.Row(title=titles[row], rounds=tuple(rounds)) for row, rounds in findings.rounds.items()}


def as_json(options: Options, findings: Findings) -> str:
    """Write every sample, for other statistics than ours."""
    return json.dumps({"machine": machine(), "options": asdict(options), "findings": asdict(findings)}, indent=1)


def parse(arguments: Sequence[str]) -> tuple[Options, Path | None]:
    """Read the options and open the file for the samples."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only",
        type=_names_of(MEASURES),
        default=MEASURES,
        metavar="NAMES",
        help=f"comma-separated, of: {', '.join(MEASURES)}",
    )
    parser.add_argument(
        "--peers",
        type=_names_of(tuple(PEERS)),
        default=tuple(PEERS),
        metavar="NAMES",
        help=f"comma-separated, of: {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds; published numbers take at least 5 (default: 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to this file")
    parser.add_argument(
        "--spread-mb", type=int, default=1_000, help="size of the array sent to 4 workers (default: 1000)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300, help="end a pool that takes longer than this (default: 300)"
    )
    parsed = parser.parse_args(arguments)
    sizes = Sizes(spread_bytes=parsed.spread_mb * 1_000_000)
    return Options(
        peers=parsed.peers, only=parsed.only, rounds=parsed.rounds, limit_s=parsed.limit_s, sizes=sizes
    ), parsed.json


class _names_of:
    """Parser of a comma-separated choice of `allowed`."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        if unknown := [name for name in names if name not in self._allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(self._allowed)}")
        return names


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write. Ctrl-C ends all processes and prints the measurements so far."""
    options, output = parse(arguments)
    findings = Findings()
    processes.adopt_orphans()
    try:
        measure(options, findings)
    except KeyboardInterrupt:
        findings.problem("interrupted: the rounds that were not complete are missing")
    finally:
        processes.sweep(grace_s=0)
    print_findings(options, findings)
    if output is not None:
        output.write_text(as_json(options, findings))
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
