"""`skyward hpo`: start sweeps on a hub, follow and stop them."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.printable import printable
from .layout import add_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HELP = "search for good parameters on a hub"

DESCRIPTION = """\
A sweep runs trials of a function with parameters that it chooses: one job of the hub with one pool, whose slots the
trials take in turn. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the hub; `skyward hub up` prints them.
"""

EPILOG = """\
examples:
  skyward hpo start --config sweep.yaml
  skyward hpo list
  skyward hpo results digits --top 5
  skyward hpo stop digits

sweep.yaml:
  name: digits
  function: train.py:objective          # takes a trial; trial["lr"] is a parameter
  search_space:
    lr: {type: log_uniform, min: 1e-5, max: 1e-1}
    optimizer: {type: choice, values: [adam, sgd]}
  strategy: bayesian                    # or grid, random, gp, cma-es, qmc, nsga-ii, pbt
  objective: {metric: loss, direction: minimize}
  max_trials: 50
  pruner: {type: asha, min_steps: 1}
  job: {nodes: 4, max_duration_s: 3600}
  on: pool                              # or jobs: each trial is a job

exit status: 0 success, 1 the hub refuses or does not answer
from Python: skyward.hub.sweep(), skyward.hub.sweeps()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    start = add_command(
        actions, "start", "start a sweep, or go on with the one of that name", "hpo start --config sweep.yaml"
    )
    start.add_argument("--config", required=True, metavar="FILE", help="YAML file; see `skyward hpo --help`")
    start.add_argument("--name", metavar="NAME", help="name of the sweep (default: the file's)")
    start.add_argument("--on", choices=["pool", "jobs"], help="trials as calls to one pool, or each as a job")
    start.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    start.set_defaults(run=_start)
    listing = add_command(actions, "list", "list sweeps, the newest first", "hpo list --json")
    listing.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="greatest number (default: 50)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    show = _with_sweep(add_command(actions, "show", "show a sweep with its best trial", "hpo show digits"), _show)
    show.add_argument("--json", action="store_true", help="print JSON")
    results = _with_sweep(
        add_command(actions, "results", "list trials, the best first", "hpo results digits --top 5"), _results
    )
    results.add_argument("--top", type=int, default=20, metavar="N", help="greatest number (default: 20)")
    results.add_argument("--json", action="store_true", help="print JSON")
    _with_sweep(
        add_command(actions, "stop", "stop a sweep: its trials end at their next report", "hpo stop digits"), _stop
    )


def _with_sweep(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser.add_argument("sweep", help="name or number of the sweep")
    parser.add_argument("--project", metavar="NAME", help="project of the hub (default: the token's)")
    parser.set_defaults(run=run)
    return parser


def _start(arguments: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..hub.search.sweeps import start_sweep
    from .job import function_of

    form = _read(Path(arguments.config))
    name = arguments.name or form.pop("name", None) or Path(arguments.config).stem
    form.pop("name", None)
    place, job = form.pop("function", None), form.pop("job", None) or {}
    if not isinstance(place, str):
        raise UsageError(f"function={place!r}: is no function of a file; write such as train.py:objective")
    if not isinstance(job, dict):
        raise UsageError(f"job={job!r:.60}: is no object; write options of hub.submit, such as {{nodes: 4}}")
    # YAML 1.1 reads a bare `on` as true.
    written = next((form.pop(key) for key in ("on", True) if key in form), "pool")
    sweep = start_sweep(
        function_of(place), str(name), form, on=arguments.on or written, project=arguments.project, job=job
    )
    print(sweep.name)
    return 0


def _read(path: Path) -> dict[Any, Any]:
    from ..errors import MissingDependency, UsageError

    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingDependency("yaml: is not installed; pip install pyyaml", name="yaml") from None
    try:
        form = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"config={str(path)!r}: cannot be read ({error}); see `skyward hpo --help`") from error
    if not isinstance(form, dict):
        raise UsageError(f"config={str(path)!r}: is no object; see `skyward hpo --help`")
    return form


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.search.sweeps import sweep_rows
    from .screen import table

    rows = sweep_rows(project=arguments.project, limit=arguments.limit)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        [printable(row["name"]), row["status"], row["config"]["strategy"], str(row["trials"]), _best(row), _time(row)]
        for row in rows
    ]
    print("\n".join(table(["name", "status", "strategy", "trials", "best", "started (UTC)"], cells)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..hub.search.sweeps import sweep_row

    _, row = sweep_row(arguments.sweep, project=arguments.project)
    if arguments.json:
        print(json.dumps(row, indent=2))
        return 0
    goals = zip(row["metrics"], row["directions"], strict=True)
    facts = {
        "name": row["name"],
        "number": row["id"],
        "status": row["status"],
        "owner": row["owner"],
        "strategy": row["config"]["strategy"],
        "objective": ", ".join(f"{direction} {metric}" for metric, direction in goals),
        "trials": ", ".join(f"{count} {state}" for state, count in sorted(row["counts"].items())) or "none",
        "started": f"{_time(row)} UTC",
        "job": row["job"] or "-",
        "jobs": _jobs_of(row, arguments.project) or "-",
        "run": row["run"] or "-",
    }
    best = row["best"]
    if best is not None:
        facts |= {"best": f"{_best(row)} (trial {best['number']})", "params": _params(best["params"])}
    for name, fact in facts.items():
        print(f"{name:<9} {printable(str(fact))}")
    return 0


def _jobs_of(row: Mapping[str, Any], project: str | None) -> str:
    """Return how many jobs of its trials are in which state; empty if they are calls to one pool."""
    from ..hub.client.jobs import job_rows

    counts = Counter(job["status"] for job in job_rows(project=project, limit=50_000, sweep=row["id"]))
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _results(arguments: argparse.Namespace) -> int:
    from ..hub.search.sweeps import sweep_row
    from .screen import table

    sweep, row = sweep_row(arguments.sweep, project=arguments.project)
    sign = -1.0 if row["directions"][0] == "maximize" else 1.0
    ranks = {"completed": 0, "pruned": 1, "running": 2}
    trials = sorted(
        sweep.trials,
        key=lambda trial: (ranks.get(trial.state, 3), sign * (trial.value or 0.0), trial.number),
    )[: arguments.top]
    if arguments.json:
        names = ("number", "state", "values", "params", "run", "error", "stopped_by")
        print(json.dumps([{name: getattr(trial, name) for name in names} for trial in trials], indent=2))
        return 0
    cells = [
        [
            str(trial.number),
            trial.state,
            " ".join(f"{value:.6g}" for value in trial.values) or "-",
            printable(trial.error or _params(trial.params)),
        ]
        for trial in trials
    ]
    print("\n".join(table(["trial", "state", *row["metrics"][:1], "parameters"], cells)))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from ..hub.search.sweeps import sweep_row

    sweep_row(arguments.sweep, project=arguments.project)[0].stop()
    return 0


def _best(row: Mapping[str, Any]) -> str:
    return "-" if row["best"] is None else f"{float(row['best']['values'][0]):.6g}"


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={f'{value:.6g}' if isinstance(value, float) else value}" for name, value in params.items())


def _time(row: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["created_at"] / 1000))
