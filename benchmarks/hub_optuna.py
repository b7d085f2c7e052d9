"""Compare studies of Optuna in a hub with Optuna's own storages.

    .venv/bin/python benchmarks/hub_optuna.py            # some minutes
    .venv/bin/python benchmarks/hub_optuna.py --rounds 5 --only sqlite

Each storage runs the same study: a trial has three parameters and reports three values, and a random sampler chooses,
so that the time is the storage's. One worker first, then `--workers` processes on one study. The rounds begin with
another storage each, and every study is new. "Memory" is Optuna's storage in the process, the least that there can be.
A hub is `skyward hub serve` in a process of its own; each worker asks it over HTTP. Needs the extras `hpo`, `hub` and
`hub-postgres`, and the programs of PostgreSQL.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import optuna

from skyward import hub
from tests.hub.http.server_processes import ServerProcess, owner_token
from tests.hub.postgres import PostgresServer, run_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optuna.storages import BaseStorage

SQLITE_TARGET, POSTGRESQL_TARGET = 10.0, 3.0
LOCK_S = 600
forked = multiprocessing.get_context("fork")
Make = Callable[[], "BaseStorage"]


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -1, 1)
    trial.suggest_int("n", 1, 10)
    trial.suggest_categorical("c", ["a", "b", "c"])
    for step in range(3):
        trial.report(x * x / (step + 1), step)
    return x * x


def work(make: Make, name: str, trials: int) -> None:
    study = optuna.load_study(study_name=name, storage=make(), sampler=optuna.samplers.RandomSampler())
    study.optimize(objective, n_trials=trials)


def milliseconds_a_trial(make: Make, workers: int, trials: int) -> float:
    """Run a new study and return the time that a trial took, with all workers side by side."""
    storage, name = make(), uuid.uuid4().hex
    study = optuna.create_study(study_name=name, storage=storage, sampler=optuna.samplers.RandomSampler())
    each = max(1, trials // workers)
    began = time.perf_counter()
    if workers == 1:
        study.optimize(objective, n_trials=each)
    else:
        storage.remove_session()
        running = [forked.Process(target=work, args=(make, name, each)) for _ in range(workers)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        if any(process.exitcode for process in running):
            raise SystemExit(f"{make}: a worker failed")
    seconds = time.perf_counter() - began
    numbers = [trial.number for trial in study.get_trials(deepcopy=False)]
    if numbers != list(range(each * workers)):
        raise SystemExit(f"{make}: trials are missing or stand twice")
    return 1000 * seconds / (each * workers)


@contextmanager
def storages(only: str) -> Iterator[dict[str, Make]]:
    """Start the servers, and yield a function for each storage that makes it."""
    made: dict[str, Make] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "sqlite" in only:
            made["hub, SQLite"] = hub_storage(stack, f"sqlite:///{folder}/hub.db", folder / "sqlite")
            made["Optuna, SQLite"] = lambda: rdb(f"sqlite:///{folder}/optuna.db", {"timeout": LOCK_S})
        if "postgresql" in only:
            server = postgresql(stack)
            made["hub, PostgreSQL"] = hub_storage(stack, server.new_database(), folder / "postgresql")
            url = server.new_database().replace("postgresql://", "postgresql+psycopg://")
            made["Optuna, PostgreSQL"] = lambda: rdb(url, {})
        yield made


def rdb(url: str, connect_args: dict[str, int]) -> BaseStorage:
    return optuna.storages.get_storage(optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": connect_args}))


def hub_storage(stack: ExitStack, database_url: str, folder: Path) -> Make:
    folder.mkdir()
    token = owner_token(database_url)
    server = stack.enter_context(ServerProcess(database_url, folder))
    return lambda: hub.optuna_storage(server.url, token)


def postgresql(stack: ExitStack) -> PostgresServer:
    servers = run_server()
    server = next(servers)
    stack.callback(lambda: next(servers, None))
    return server


def report(times: dict[tuple[str, int], list[float]], workers: int) -> bool:
    """Print the table and the targets. Return whether all are reached."""
    print(f"\nms for a trial: median (fastest - slowest)\n{'':22}{'1 worker':>26}{f'{workers} workers':>26}")
    for name in dict.fromkeys(name for name, _ in times):
        cells = "".join(_cell(times.get((name, count))) for count in (1, workers))
        print(f"{name:22}{cells}")
    reached = True
    for database, target in (("SQLite", SQLITE_TARGET), ("PostgreSQL", POSTGRESQL_TARGET)):
        for count in (1, workers):
            ours, theirs = times.get((f"hub, {database}", count)), times.get((f"Optuna, {database}", count))
            if ours and theirs:
                ratio = statistics.median(theirs) / statistics.median(ours)
                reached &= ratio >= target
                verdict = "reached" if ratio >= target else "MISSED"
                print(f"{database}, {count} workers: {ratio:.1f} times as fast; {target:g} asked: {verdict}")
    return reached


def _cell(values: list[float] | None) -> str:
    if not values:
        return f"{'':>26}"
    return f"{f'{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})':>26}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=96, help="trials of a study")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--only", default="sqlite,postgresql")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"python benchmarks/hub_optuna.py --rounds {options.rounds} --trials {options.trials}")
    print(f"{os.cpu_count()} cores of {processor()}, {date.today()}, load average {os.getloadavg()[0]:.1f}")
    print(f"CPython {platform.python_version()}, Optuna {optuna.__version__}")
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    with storages(options.only) as made:
        names = list(made)
        for place in range(options.rounds):
            times["memory", 1].append(milliseconds_a_trial(optuna.storages.InMemoryStorage, 1, options.trials))
            for name in names[place % len(names) :] + names[: place % len(names)]:
                for workers in (1, options.workers):
                    times[name, workers].append(milliseconds_a_trial(made[name], workers, options.trials))
    return 0 if report(times, options.workers) else 1


def processor() -> str:
    """Return the model of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
