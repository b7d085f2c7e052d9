"""Behaviours that users of `joblib.Parallel` may rely on, as observations that JSON can hold.

`test_joblib_behaviours.py` observes them on a pool and compares them with the observations on loky, joblib's own
backend, in `joblib_behaviours.json`. To observe them again, run `python -m tests.integrations.joblib_behaviours`. Loky
sometimes hangs in the ones with a failing call (joblib 1.6). If it does, run it once more.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import math
import multiprocessing
import operator
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from joblib import Memory, Parallel, delayed, parallel_config, wrap_non_picklable_objects
from joblib.parallel import SequentialBackend, ThreadingBackend, get_active_backend

Behaviour = Callable[[Path], Any]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__] = function
    return function


def outcome(run: Callable[[], Any]) -> Any:
    """Return the value of a call, or the type and arguments of its exception."""
    try:
        return run()
    except Exception as error:
        return [type(error).__name__, [str(arg) for arg in error.args]]


def square(x: int) -> int:
    return x * x


def fail_at(x: int, at: int) -> int:
    if x == at:
        raise ZeroDivisionError("here", x)
    return x


# Order and counts -----------------------------------------------------------------------------------------------------


@behaviour
def values_in_order(_: Path) -> Any:
    return Parallel(n_jobs=2)(delayed(divmod)(i, 7) for i in range(50))


@behaviour
def keyword_arguments(_: Path) -> Any:
    return Parallel(n_jobs=2)(delayed(sorted)([3, 1, 2], reverse=i % 2 == 0) for i in range(4))


@behaviour
def no_calls(_: Path) -> Any:
    return [
        Parallel(n_jobs=2)([]),
        list(Parallel(n_jobs=2, return_as="generator")([])),
        list(Parallel(n_jobs=2, return_as="generator_unordered")([])),
    ]


@behaviour
def all_kinds_of_callables(_: Path) -> Any:
    three = 3
    calls = [
        *(delayed(lambda x: x + three)(1), delayed(functools.partial(pow, 2))(5), delayed("a-b".split)("-")),
        *(delayed(operator.methodcaller("upper"))("x"), delayed(int)("12"), delayed(math.sqrt)(4.0)),
    ]
    return Parallel(n_jobs=2)(calls)


@behaviour
def what_is_wrapped_because_it_cannot_be_pickled(_: Path) -> Any:
    one = 1
    local = wrap_non_picklable_objects(lambda x: x + one)
    return Parallel(n_jobs=2)(delayed(local)(i) for i in range(4))


@behaviour
def counters_of_a_parallel_object(_: Path) -> Any:
    found = []
    for batch_size in (1, 4, 7):
        parallel = Parallel(n_jobs=2, batch_size=batch_size, pre_dispatch="all")
        parallel(delayed(square)(i) for i in range(30))
        found.append([parallel.n_dispatched_batches, parallel.n_dispatched_tasks, parallel.n_completed_tasks])
    return found


@behaviour
def number_of_tasks_where_the_input_has_a_length(_: Path) -> Any:
    parallel = Parallel(n_jobs=2)
    parallel([delayed(square)(i) for i in range(5)])
    known = parallel.n_tasks
    parallel(delayed(square)(i) for i in range(5))
    return [known, parallel.n_tasks]


@behaviour
def pre_dispatch_as_number_and_expression(_: Path) -> Any:
    return [
        outcome(lambda given=given: Parallel(n_jobs=2, pre_dispatch=given)(delayed(square)(i) for i in range(9)))  # type: ignore[misc]
        for given in ("all", "n_jobs", "1.5*n_jobs", "2 * n_jobs + 1", 1, 3)
    ]


@behaviour
def wrong_options(_: Path) -> Any:
    def run(**options: Any) -> Any:
        return outcome(lambda: Parallel(**{"n_jobs": 2, **options})(delayed(square)(i) for i in range(3)))

    return [
        *(run(n_jobs=0), run(n_jobs="many"), run(batch_size=0), run(batch_size="some")),
        *(run(return_as="tuple"), run(pre_dispatch="jobs"), run(prefer="gpus"), run(require="luck")),
    ]


@behaviour
def the_input_is_read_as_far_as_pre_dispatch_says(folder: Path) -> Any:
    read: list[int] = []

    def calls() -> Iterator[Any]:
        for i in range(20):
            read.append(i)
            yield delayed(wait_for)(str(folder / "go"), i)

    results = Parallel(n_jobs=2, pre_dispatch=3, batch_size=1, return_as="generator")(calls())
    time.sleep(0.2)
    ahead = len(read)
    (folder / "go").touch()
    return [ahead, list(results), len(read)]


def wait_for(path: str, value: Any) -> Any:
    deadline = time.monotonic() + 30
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


# Generators -----------------------------------------------------------------------------------------------------------


@behaviour
def generators(_: Path) -> Any:
    ordered = Parallel(n_jobs=2, return_as="generator")(delayed(square)(i) for i in range(30))
    first = next(ordered)
    unordered = Parallel(n_jobs=2, return_as="generator_unordered")(delayed(square)(i) for i in range(30))
    return [type(ordered).__name__, first, list(ordered), type(unordered).__name__, sorted(unordered)]


@behaviour
def values_before_an_error_in_a_generator(_: Path) -> Any:
    results = Parallel(n_jobs=2, return_as="generator", batch_size=1, pre_dispatch=1)(
        delayed(fail_at)(i, 5) for i in range(9)
    )
    return ["ZeroDivisionError", ["here", "5"]] in [outcome(lambda: next(results)) for _ in range(7)]


@behaviour
def a_generator_that_is_dropped_warns(folder: Path) -> Any:
    results = Parallel(n_jobs=2, return_as="generator", batch_size=1)(
        delayed(wait_for)(str(folder / "never" if i else folder), i) for i in range(6)
    )
    next(results)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del results
        gc.collect()
    return [[w.category.__name__, "have been cancelled" in str(w.message)] for w in caught if w.category is UserWarning]


@behaviour
def a_parallel_object_runs_one_call_at_a_time(_: Path) -> Any:
    parallel = Parallel(n_jobs=2, return_as="generator")
    results = parallel(delayed(square)(i) for i in range(9))
    return [outcome(lambda: parallel(delayed(square)(i) for i in range(9)))[0], list(results)]


@behaviour
def a_parallel_object_may_be_used_again(_: Path) -> Any:
    with Parallel(n_jobs=2) as parallel:
        first = parallel(delayed(square)(i) for i in range(9))
        second = parallel(delayed(fail_at)(i, 99) for i in range(9))
        return [first, second, outcome(lambda: parallel(delayed(fail_at)(i, 3) for i in range(9)))]


# Errors and time ------------------------------------------------------------------------------------------------------


class Refused(Exception):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.code = code


def refuse(i: int) -> int:
    if i == 3:
        raise Refused("not three", 17)
    return i


@behaviour
def an_exception_as_itself(_: Path) -> Any:
    found = []
    for return_as in ("list", "generator", "generator_unordered"):
        try:
            list(Parallel(n_jobs=2, return_as=return_as)(delayed(refuse)(i) for i in range(9)))
        except Refused as error:
            found.append([list(error.args), error.code])
    return found


@behaviour
def an_exception_of_the_input(_: Path) -> Any:
    def calls() -> Iterator[Any]:
        yield from (delayed(square)(i) for i in range(9))
        raise LookupError("no more")

    def run(pre_dispatch: str | int) -> Any:
        return outcome(lambda: Parallel(n_jobs=2, pre_dispatch=pre_dispatch)(calls()))

    return [run("all"), run(2)]


@behaviour
def timeouts(folder: Path) -> Any:
    found = []
    for return_as in ("list", "generator", "generator_unordered"):
        try:
            list(
                Parallel(n_jobs=2, timeout=0.3, return_as=return_as, batch_size=1)(
                    delayed(wait_for)(str(folder / "never"), i) for i in range(4)
                )
            )
        except multiprocessing.TimeoutError as error:
            found.append(type(error).__name__)
    return found


@behaviour
def a_timeout_that_is_long_enough(_: Path) -> Any:
    return Parallel(n_jobs=2, timeout=60)(delayed(square)(i) for i in range(9))


# Verbosity ------------------------------------------------------------------------------------------------------------


@behaviour
def messages(folder: Path) -> Any:
    def calls(go: Path) -> Iterator[Any]:
        for i in range(12):
            yield delayed(wait_for)(str(go), i)
        go.touch()  # joblib has sent all calls before it asks for one more, and none has ended yet

    found = []
    for verbose in (1, 11, 60):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            Parallel(n_jobs=2, verbose=verbose, batch_size=1, pre_dispatch="all")(calls(folder / f"go-{verbose}"))
        found.append([plain(out.getvalue()), plain(err.getvalue())])
    return found


def plain(text: str) -> list[str]:
    """Return its lines without times and names of backends. At `verbose` 1, the number of lines depends on those."""
    text = re.sub(r"\d+\.\d+(s|min)", "TIME", text)
    return re.sub(r" +", " ", re.sub(r"\w+Backend\b", "BACKEND", text)).splitlines()


# Nesting and contexts -------------------------------------------------------------------------------------------------


def inner(depth: int) -> Any:
    backend, _ = get_active_backend()
    kind = [k.__name__ for k in (ThreadingBackend, SequentialBackend) if isinstance(backend, k)]
    values = Parallel(n_jobs=2)(delayed(square)(i) for i in range(3))
    if depth == 0:
        return [kind, values]
    return [kind, values, Parallel(n_jobs=2)(delayed(inner)(depth - 1) for _ in range(2))]


@behaviour
def nesting(_: Path) -> Any:
    return Parallel(n_jobs=2)(delayed(inner)(2) for _ in range(2))


def in_one_process() -> bool:
    parallel = Parallel(n_jobs=2)
    return set(parallel(delayed(os.getpid)() for _ in range(4))) == {os.getpid()}


@behaviour
def nested_calls_stay_where_they_are(_: Path) -> Any:
    return Parallel(n_jobs=2)(delayed(in_one_process)() for _ in range(3))


@behaviour
def shared_memory_means_threads(_: Path) -> Any:
    seen: list[int] = []
    Parallel(n_jobs=2, require="sharedmem")(delayed(seen.append)(i) for i in range(9))
    return sorted(seen)


@behaviour
def one_job_runs_in_this_process(_: Path) -> Any:
    return [pid == os.getpid() for pid in Parallel(n_jobs=1)(delayed(os.getpid)() for _ in range(3))]


@behaviour
def more_jobs_do_not(_: Path) -> Any:
    pids = Parallel(n_jobs=2, prefer="threads")(delayed(os.getpid)() for _ in range(6))
    return os.getpid() in pids


@behaviour
def options_of_a_context(_: Path) -> Any:
    err = io.StringIO()
    with parallel_config(n_jobs=2, verbose=1), contextlib.redirect_stderr(err):
        values = Parallel()(delayed(square)(i) for i in range(5))
    with parallel_config(backend="threading", n_jobs=2):
        pids = set(Parallel()(delayed(os.getpid)() for _ in range(4)))
    return [values, plain(err.getvalue())[0], pids == {os.getpid()}]


@behaviour
def several_threads(_: Path) -> Any:
    found: dict[str, list[int]] = {}
    backend, _jobs = get_active_backend()

    def run(k: int) -> None:
        with parallel_config(backend=backend):
            found[str(k)] = Parallel(n_jobs=2)(delayed(square)(k * i) for i in range(20))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(found.items()))


# Files ----------------------------------------------------------------------------------------------------------------


def fill(row: Any, value: float) -> None:
    row[:] = value


def describe(x: Any) -> Any:
    return [isinstance(x, np.memmap), bool(x.flags.writeable), list(x.shape), float(x.sum())]


@behaviour
def calls_write_their_results_to_a_mapped_array(folder: Path) -> Any:
    output = np.memmap(folder / "output", np.float64, "w+", shape=(6, 1000))
    Parallel(n_jobs=2)(delayed(fill)(output[i], i) for i in range(6))
    return output.sum(axis=1).tolist()


@behaviour
def arrays_loaded_from_a_file_in_each_mode(folder: Path) -> Any:
    joblib.dump(np.arange(200_000.0).reshape(400, 500), folder / "x")
    found = []
    for mode in ("r", "r+"):
        x = joblib.load(folder / "x", mmap_mode=mode)
        found.append(Parallel(n_jobs=2)(delayed(describe)(part) for part in (x, x[3:5], x.T, x[::7, 1])))
    x = joblib.load(folder / "x", mmap_mode="c")  # not by the file: changed data are not in the file
    found.append([described[1:] for described in Parallel(n_jobs=2)(delayed(describe)(part) for part in (x, x[3:5]))])
    return found


@behaviour
def several_arrays_of_one_file(folder: Path) -> Any:
    joblib.dump({"a": np.ones((300, 400)), "b": [np.full(70_000, 2.0), "text"]}, folder / "parts")
    parts = joblib.load(folder / "parts", mmap_mode="r")
    return Parallel(n_jobs=2)(delayed(describe)(x) for x in (parts["a"], parts["b"][0], parts["a"][5:9, 3]))


@behaviour
def large_arrays(_: Path) -> Any:
    x, y = np.arange(300_000.0), np.ones((500, 400), order="F")
    return Parallel(n_jobs=2)(delayed(total)(x, y, [x, {"y": y}]) for _ in range(4))


def total(*values: Any) -> float:
    x, y, (again, named) = values
    return float(x.sum() + y.sum() + again.sum() + named["y"].sum())


@behaviour
def large_results(_: Path) -> Any:
    found = Parallel(n_jobs=2)(delayed(np.full)((300, 500), float(i)) for i in range(4))
    return [[str(x.dtype), list(x.shape), float(x.sum())] for x in found]


def remembered(log: str, x: int) -> int:
    with open(log, "a") as file:
        file.write("x")
    return x + 1


@behaviour
def a_cached_function_is_called_once_for_each_argument(folder: Path) -> Any:
    memory = Memory(folder / "cache", verbose=0)
    cached = memory.cache(remembered, ignore=["log"])
    log = str(folder / "log")
    first = Parallel(n_jobs=2)(delayed(cached)(log, i) for i in range(4))
    second = Parallel(n_jobs=2)(delayed(cached)(log, i) for i in range(4))
    return [first, second, os.path.getsize(log)]


def observe(backend: str, folder: Path) -> str:
    """Return the observations as JSON, with a line for each."""
    lines = [f'"joblib": {json.dumps(joblib.__version__)}', f'"backend": {json.dumps(backend)}']
    for name, function in BEHAVIOURS.items():
        (folder / name).mkdir()
        with parallel_config(backend=backend):
            lines.append(f"{json.dumps(name)}: {json.dumps(function(folder / name))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


OBSERVED = Path(__file__).with_suffix(".json")

if __name__ == "__main__":
    # The functions travel by the name of this module, as they do in the tests.
    from tests.integrations import joblib_behaviours

    with tempfile.TemporaryDirectory() as name:
        OBSERVED.write_text(joblib_behaviours.observe("loky", Path(name)))
