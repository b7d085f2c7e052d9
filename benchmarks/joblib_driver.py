"""Run `joblib.Parallel` on skyward's Local pool and on loky, joblib's own: one measure in a fresh interpreter.

`joblib_bench.py` starts this file. A measure of time opens both pools and alternates between them, so other load of the
machine affects both alike. A measure of memory opens one pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import joblib
import processes
import workloads
from joblib import Parallel, delayed
from measures import Samples

Block = Callable[[], contextlib.AbstractContextManager[Any]]
"""Return a context manager within which joblib runs on one contender."""

GRID = {"var_smoothing": [1e-9, 1e-8, 1e-7, 1e-6]}
FOLDS = 3
COLUMNS = 50


@dataclass(frozen=True, kw_only=True)
class JoblibJob:
    """Task of one driver. `measure` is a name of `MEASURES`, `turn` the number of the round."""

    contenders: tuple[str, ...]
    measure: str
    turn: int
    nodes: int
    workers_per_node: int
    repeats: int
    calls: int
    call_s: float
    array_bytes: int
    output: str

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def to_json(self) -> str:
        return json.dumps(asdict(self))


# Contenders -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def skyward_pool(job: JoblibJob) -> Iterator[Block]:
    import skyward as sky

    pool_kind = sky.integrations.ScikitLearnPool if job.measure.startswith("grid") else sky.integrations.JoblibPool
    with pool_kind(sky.Local(), nodes=job.nodes, concurrency=job.workers_per_node, logs=False) as pool:
        yield lambda: sky.integrations.joblib_backend(pool)


@contextlib.contextmanager
def loky_pool(job: JoblibJob) -> Iterator[Block]:
    from joblib.externals.loky import get_reusable_executor

    try:
        yield lambda: joblib.parallel_config(backend="loky", n_jobs=job.workers)
    finally:
        get_reusable_executor().shutdown(kill_workers=True)


CONTENDERS: dict[str, Callable[[JoblibJob], contextlib.AbstractContextManager[Block]]] = {
    "skyward": skyward_pool,
    "loky": loky_pool,
}


def alternate(job: JoblibJob, blocks: dict[str, Block], once: Callable[[], Samples]) -> dict[str, Samples]:
    """Run `once` on each contender, `job.repeats` times. Each repeat begins with another contender."""
    found: dict[str, Samples] = {name: {} for name in blocks}
    for repeat in range(job.repeats):
        names = list(blocks) if (job.turn + repeat) % 2 == 0 else list(reversed(blocks))
        for name in names:
            with blocks[name]():
                for key, values in once().items():
                    found[name].setdefault(key, []).extend(values)
    return found


# Many calls -----------------------------------------------------------------------------------------------------------


def many_calls(job: JoblibJob, blocks: dict[str, Block]) -> dict[str, Samples]:
    """Make equal calls. Measure seconds, batches, and the processor time of all processes beyond the calls' own."""
    function = workloads.spin if job.measure == "busy" else workloads.nap
    work_s = job.calls * job.call_s if job.measure == "busy" else 0.0
    workers: list[int] = []
    for block in blocks.values():
        with block():
            workers += warm_up(job)  # the other contender's processes are idle

    def once() -> Samples:
        parallel = Parallel()
        client_s, workers_s = time.process_time(), processes.cpu_seconds(workers)
        used_s, begin = used_seconds(), time.perf_counter()
        values = parallel(delayed(function)(i, job.call_s) for i in range(job.calls))
        seconds = time.perf_counter() - begin
        used_s = used_seconds() - used_s
        client_s, workers_s = time.process_time() - client_s, processes.cpu_seconds(workers) - workers_s
        assert values == list(range(job.calls)), "a value is wrong or out of its place"
        return {
            f"{job.measure}_s": [seconds],
            f"{job.measure}_per_s": [job.calls / seconds],
            f"{job.measure}_efficiency": [job.calls / job.workers * job.call_s / seconds],
            f"{job.measure}_batches": [float(parallel.n_dispatched_batches)],
            f"{job.measure}_cpu": [(used_s - work_s) / job.calls],
            f"{job.measure}_cpu_workers": [(workers_s - work_s) / job.calls],
            f"{job.measure}_cpu_client": [client_s / job.calls],
        }

    return alternate(job, blocks, once)


def warm_up(job: JoblibJob) -> list[int]:
    """Make every worker import numpy and run some calls. Returns their process ids."""
    pids, _ = read_everywhere(job, workloads.make_array(size_bytes=8 * 100, seed=1))
    Parallel(batch_size=1)(delayed(workloads.nap)(i, 0.02) for i in range(4 * job.workers))
    return pids


def used_seconds() -> float:
    """Return the processor time so far of this process, its ended threads included, and of all its descendants."""
    return time.process_time() + processes.cpu_seconds(processes.descendants(os.getpid()))


def everybody() -> list[int]:
    return [os.getpid(), *processes.descendants(os.getpid())]


# A large array --------------------------------------------------------------------------------------------------------


def reading(job: JoblibJob, blocks: dict[str, Block]) -> dict[str, Samples]:
    """Weigh workers that only read an array. The result is the memory over idle, in sizes of the array."""
    (name, block), *_ = blocks.items()
    with block():
        warm_up(job)
        _, idle_mib = read_everywhere(job, workloads.make_array(size_bytes=8 * 100, seed=2))
        array = workloads.make_array(size_bytes=job.array_bytes, seed=3)
        weights = [read_everywhere(job, array)[1] for _ in range(job.repeats)]
    array_mib = array.nbytes / 2**20
    return {name: {"idle_mib": [idle_mib], "read": [(weight - idle_mib) / array_mib for weight in weights]}}


def read_everywhere(job: JoblibJob, array: workloads.Array) -> tuple[list[int], float]:
    """Make every worker read the array and hold it. Returns the process ids, and their memory (PSS) in MiB meanwhile.

    Raises:
        AssertionError: A worker read something else.
    """
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        arrived, go = Path(folder, "arrived"), Path(folder, "go")
        arrived.mkdir()
        # It is a generator: the calls run while this thread weighs the processes.
        results = Parallel(batch_size=1, return_as="generator")(
            delayed(workloads.read_and_hold)(array, str(arrived), str(go)) for _ in range(job.workers)
        )
        deadline = time.monotonic() + 60
        while len(os.listdir(arrived)) < job.workers and time.monotonic() < deadline:
            time.sleep(0.005)
        memory_mib = processes.pss_mib([int(name) for name in os.listdir(arrived)])
        go.touch()
        pids, totals = zip(*results, strict=True)
    assert len(set(pids)) == job.workers, f"{len(set(pids))} of {job.workers} workers took part"
    assert set(totals) == {float(array.sum())}, "a worker read something else"
    return sorted(pids), memory_mib


class Search:
    """Grid search over an array of the job's size. Its results must be the same every time."""

    def __init__(self, job: JoblibJob) -> None:
        import numpy as np

        random = np.random.default_rng(0)
        rows = job.array_bytes // 8 // COLUMNS
        self.x = random.standard_normal((rows, COLUMNS))
        self.y = (self.x[:, 0] + random.standard_normal(rows) > 0).astype(np.int64)
        self._scores: dict[int, list[float]] = {}

    def run(self, *, rows: int | None = None) -> float:
        """Search in the first `rows`. Returns the seconds."""
        from sklearn.model_selection import GridSearchCV
        from sklearn.naive_bayes import GaussianNB

        x, y = self.x[:rows], self.y[:rows]
        search = GridSearchCV(GaussianNB(), GRID, cv=FOLDS, refit=False)
        begin = time.perf_counter()
        search.fit(x, y)
        seconds = time.perf_counter() - begin
        scores = search.cv_results_["mean_test_score"].tolist()
        assert self._scores.setdefault(len(x), scores) == scores, f"other scores than before: {scores}"
        return seconds


def grid_time(job: JoblibJob, blocks: dict[str, Block]) -> dict[str, Samples]:
    """Search twice: the first time the array crosses to the workers, the second time it is there."""
    search = Search(job)
    for block in blocks.values():
        with block():
            warm_up(job)
            for _ in range(3):  # every worker has imported scikit-learn
                search.run(rows=5000)

    def once() -> Samples:
        search.x = search.x + 0.0  # another array, which no worker has seen
        processes.warm_memory(3 * job.array_bytes)
        first_s = search.run()
        used_s, again_s = used_seconds(), search.run()
        used_s = used_seconds() - used_s
        return {"grid_first_s": [first_s], "grid_again_s": [again_s], "grid_cpu_s": [used_s]}

    return alternate(job, blocks, once)


def grid_memory(job: JoblibJob, blocks: dict[str, Block]) -> dict[str, Samples]:
    """Weigh the workers and all processes together during searches, and the workers afterwards."""
    (name, block), *_ = blocks.items()
    search = Search(job)
    with block():
        pids = warm_up(job)
        for _ in range(3):
            search.run(rows=5000)
        imported_mib = processes.pss_mib(pids)
        with Watch(pids) as watch:
            for _ in range(job.repeats):
                search.run()
    return {
        name: {
            "grid_imported_mib": [imported_mib],
            "grid_peak_mib": [max(watch.workers_mib)],
            "grid_mean_mib": [sum(watch.workers_mib) / len(watch.workers_mib)],
            "grid_all_peak_mib": [max(watch.all_mib)],
        }
    }


class Watch:
    """Scale that weighs the workers and all processes repeatedly while the block lasts."""

    def __init__(self, pids: list[int]) -> None:
        self.workers_mib: list[float] = []
        self.all_mib: list[float] = []
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._weigh)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _weigh(self) -> None:
        while not self._over.wait(0.02):
            workers = processes.pss_mib(self._pids)
            self.workers_mib.append(workers)
            others = [pid for pid in everybody() if pid not in self._pids]
            self.all_mib.append(workers + processes.pss_mib(others))


MEASURES: dict[str, Callable[[JoblibJob, dict[str, Block]], dict[str, Samples]]] = {
    "sleeps": many_calls,
    "naps": many_calls,
    "busy": many_calls,
    "grid_time": grid_time,
    "grid_memory": grid_memory,
    "reading": reading,
}


def main() -> None:
    fields: dict[str, Any] = json.loads(sys.argv[1])
    job = JoblibJob(**{**fields, "contenders": tuple(fields["contenders"])})
    processes.adopt_orphans()  # daemons of a pool count too
    with contextlib.ExitStack() as stack:
        blocks = {name: stack.enter_context(CONTENDERS[name](job)) for name in job.contenders}
        samples = MEASURES[job.measure](job, blocks)
    Path(job.output).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
