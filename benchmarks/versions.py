"""Compare this checkout's dispatch with another's: `python benchmarks/versions.py ../before --rounds 10`.

Run this before you land a change on the path of a call, with a `git worktree` of the commit before it. Each round
measures both checkouts, each in a process of its own, and the order changes from round to round. Each row shows both
medians over the rounds, their ratio (1.05: this checkout takes 5 % more), and the 95 % bootstrap interval of the
rounds' ratios. A figure is worse if it is slower by more than 3 %, unless its interval includes 1 and ends below 1.1.
Noise of the machine affects both alike, so a real difference shows in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import processes
from dispatch import ENVIRONMENT, HERE, import_seconds, machine, run_driver
from driver import Job
from measures import Samples, Sizes
from peers import Shape
from report import METRICS, Metric

FIGURES: tuple[Metric, ...] = (
    *(m for m in METRICS if m.key in ("import", "first", "noop_p50", "main_p50", "pipelined")),
    *(
        Metric(key=sample, title=title, unit="us", scale=1e6, sample=sample)
        for sample, title in (
            ("noop_cpu", "CPU time of a no-op round trip"),
            ("noop_main_cpu", "CPU time of a no-op of __main__"),
            ("pipelined_cpu", "CPU time of a pipelined no-op"),
        )
    ),
    *(m for m in METRICS if m.key in ("map", "in_first", "in_repeat", "out_first", "out_repeat")),
)
MEASURES = ("first", "noop", "noop_main", "pipelined", "map", "arrays")
_ALLOWED, _NOISE = 1.03, 1.10
_SIZES = replace(Sizes(), map_repeats=1, array_samples=2)
_RESAMPLES = 2000


def main() -> int:
    """Measure and print. Returns exit code 1 if a figure is worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="the checkout to compare with; it runs in this environment")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of both checkouts (default: 10)")
    parsed = parser.parse_args()
    checkouts = {"before": parsed.before.resolve(), "now": HERE.parent}
    rounds: dict[str, list[Samples]] = {name: [] for name in checkouts}
    loads = []
    processes.adopt_orphans()
    for number in range(parsed.rounds):
        loads.append(os.getloadavg()[0])
        for name in list(checkouts) if number % 2 else list(checkouts)[::-1]:
            print(f"round {number + 1}/{parsed.rounds}: {name}", file=sys.stderr, flush=True)
            rounds[name].append(_measure(checkouts[name]))
    facts = machine()
    print(
        f"{facts['cores']} cores of {facts['cpu']}, Python {facts['python']}, {facts['date']}, {parsed.rounds} rounds"
    )
    print(f"load average at the start of each round: {', '.join(f'{load:.1f}' for load in loads)}\n")
    print(f"{'':52}{'before':>10}{'now':>10}   ratio  95 %")
    worse = [not _print_row(figure, rounds) for figure in FIGURES]
    return int(any(worse))


def _measure(checkout: Path) -> Samples:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(HERE), str(checkout)))}
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        output, log = Path(folder, "samples.json"), Path(folder, "log")
        job = Job(peer="skyward", shape=Shape(), measures=MEASURES, sizes=_SIZES, output=str(output))
        if run_driver(job, log, limit_s=120, environment=environment) != 0:
            raise SystemExit(f"{checkout}: {log.read_text(errors='replace')[-2000:]}")
        samples: Samples = json.loads(output.read_text())["samples"]
    return {**samples, "import": [import_seconds("skyward", environment)]}


def _print_row(figure: Metric, rounds: dict[str, list[Samples]]) -> bool:
    """Print one row. Returns whether the figure is no worse."""
    before, now = ([_cost(figure, samples) for samples in rounds[name]] for name in ("before", "now"))
    ratios = [b / a for a, b in zip(before, now, strict=True)]
    ratio = median(ratios)
    low, high = _interval(ratios)
    holds = ratio <= _ALLOWED or (low <= 1 and high < _NOISE)
    shown = [figure.scale / c if figure.higher_is_better else c * figure.scale for c in (median(before), median(now))]
    title = figure.title.format(map_items=f"{_SIZES.map_items:,}", array_mb=f"{_SIZES.array_bytes / 1e6:g}")
    print(
        f"{f'{title}, {figure.unit}':52}{shown[0]:10,.1f}{shown[1]:10,.1f}   {ratio:5.3f}  "
        f"[{low:.3f}, {high:.3f}]{'' if holds else '  WORSE'}"
    )
    return holds


def _cost(figure: Metric, samples: Samples) -> float:
    """Return the figure of one round, so that less is better. For a map, use the chunks that skyward chooses."""
    value = figure.reduce(samples["map/auto" if figure.sample == "map" else figure.sample])
    return 1 / value if figure.higher_is_better else value


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median over resampled rounds."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


if __name__ == "__main__":
    sys.exit(main())
