"""Demo of skyward on this machine: `make demo`, or `python examples/demo.py`.

Four parts, with real data: hello from two nodes, a network trained on two nodes at once, a grid search of 105 fits,
and a training that makes way for an urgent job. Each part is one of the numbered examples beside this file. The
trainings are recorded as runs of a hub, whose link is printed last. It ends with 1 if anything is not as it should be.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skyward as sky
from skyward import hub

# The examples beside this file. The nodes find them too: they get this process's sys.path.
hello = importlib.import_module("01_hello")
torch_ddp = importlib.import_module("06_torch_ddp")
grid_search = importlib.import_module("07_grid_search")
making_way = importlib.import_module("48_making_way")

EPOCHS = 12
WANTED_ACCURACY = 0.95
FITS = 105
RECORDS = Path(__file__).parent.parent / ".make" / "demo"
"""Folder of the demo's hub and runs: nothing outside the checkout changes."""
COMMAND = Path(sys.executable).with_name("skyward")
"""The command of this environment, by its path: `make demo` puts nothing on the user's PATH."""
EPOCH = re.compile(r"epoch +(\d+)  loss ([\d.]+)")


class NotAsExpected(Exception):
    """The demo saw something that it should not have seen."""


def expect(claim: bool, otherwise: str) -> None:
    if not claim:
        raise NotAsExpected(otherwise)


def say(text: str = "") -> None:
    print(f"   {text}".rstrip(), flush=True)


@contextlib.contextmanager
def part(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    started = time.perf_counter()
    yield
    say(f"({time.perf_counter() - started:.1f} s)")


# 1 --------------------------------------------------------------------------------------------------------------------


def greet() -> None:
    started = time.perf_counter()
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        greetings = hello.hello("there") @ pool
        waited_s = time.perf_counter() - started
    for greeting in greetings:
        say(greeting)
    expect([f"node {i} of 2" in text for i, text in enumerate(greetings)] == [True, True], "a node did not answer")
    say(f"{waited_s:.1f} s from no pool at all to the second answer")


# 2 --------------------------------------------------------------------------------------------------------------------


@sky.compute
@sky.integrations.torch(backend="gloo")
def averaged_gradient() -> float:
    """Rank 0 has a gradient of 1, rank 1 one of 2; what is left of them after a step's backward pass."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.item()


def train() -> str:
    """Train, record it as a run, and return the run's id."""
    say("PyTorch's DistributedDataParallel over gloo: two processes, each with half of the data.")
    lines: list[sky.LogLine] = []
    options: dict[str, Any] = {"epochs": EPOCHS, "learning_rate": 3e-3}

    with hub.start_run("digits on two nodes", "demo") as run:
        run.log_params(options)

        def show(line: sky.LogLine) -> None:
            lines.append(line)
            say(f"   node {line.node}, rank {line.rank} | {line.text}")
            if epoch := EPOCH.match(line.text):
                run.log_metrics({"loss": float(epoch[2])}, step=int(epoch[1]))

        with sky.ComputePool(provider=sky.Local(), nodes=2, logs=show) as pool:
            gradients = averaged_gradient() @ pool
            say(f"after a backward pass with the gradients 1 and 2, the ranks hold {gradients[0]} and {gradients[1]}")
            say("1,347 images of digits to learn from, 450 for the test. What follows is printed by rank 0, live:")
            results = torch_ddp.train(**options) @ pool
        accuracy, ranks = results[0]
        run.log_metrics({"test/accuracy": accuracy}, step=EPOCHS)
        run.log_text("output/train.log", "".join(f"{line.text}\n" for line in lines))
    epochs = [line for line in lines if line.text.startswith("epoch")]
    expect(gradients == [1.5, 1.5], "the ranks did not average their gradients")
    expect(ranks == 2, f"the world had {ranks} ranks, not 2")
    expect(len(epochs) == EPOCHS, f"{len(epochs)} loss lines for {EPOCHS} epochs")
    expect({line.rank for line in epochs} == {0}, "a rank that is not the head printed")
    expect(accuracy >= WANTED_ACCURACY, f"the test accuracy is {accuracy:.3f}; it should be at least {WANTED_ACCURACY}")
    say(f"test accuracy {accuracy:.3f} on {ranks} ranks (at least {WANTED_ACCURACY} was wanted)")
    return run.id


# 3 --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedScore:
    """Scores as the model does, and leaves a byte in a file: what the progress bar counts, in whichever process."""

    path: str

    def __call__(self, model: Any, x: Any, y: Any) -> float:
        with open(self.path, "ab") as file:
            file.write(b".")
        return float(model.score(x, y))


@contextlib.contextmanager
def progress(label: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """A bar on a terminal; elsewhere a line for each quarter. On standard error, gone when it ends."""
    is_terminal = sys.stderr.isatty()
    ended = threading.Event()
    started = time.perf_counter()

    def draw() -> None:
        quarter = 0
        while not ended.wait(0.2):
            done, elapsed_s = count(), time.perf_counter() - started
            if is_terminal:
                width = max(10, min(40, shutil.get_terminal_size().columns - len(label) - 30))
                bar = ("#" * (width * done // total)).ljust(width, ".")
                sys.stderr.write(f"\r   {label} [{bar}] {done:3d}/{total}  {elapsed_s:3.0f} s ")
                sys.stderr.flush()
            elif 4 * done // total > quarter:
                quarter = 4 * done // total
                print(f"   {label} {done:3d}/{total} fits  {elapsed_s:3.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if is_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def searched(label: str, x: Any, y: Any) -> tuple[Any, float]:
    """The search of example 7, fitted wherever joblib runs now, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder, "fits")
        ticks.touch()
        search = grid_search.make_search().set_params(scoring=CountedScore(str(ticks)))
        started = time.perf_counter()
        with progress(label, FITS, lambda: ticks.stat().st_size):
            search.fit(x, y)
        return search, time.perf_counter() - started


def search_a_grid() -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    slots = max(1, (os.cpu_count() or 2) // 2)
    say("21 candidates (random forests, gradient boosting, support vector machines) x 5 folds = 105 fits.")
    with sky.integrations.ScikitLearnPool(sky.Local(), nodes=2, concurrency=slots) as pool:
        there, there_s = searched("on the pool    ", x, y)
    say(f"on the pool, {pool.nodes} nodes with {slots} slot{'s' * (slots > 1)} each: {there_s:5.1f} s")
    here, here_s = searched("without skyward", x, y)
    say(f"without skyward, joblib's own processes: {here_s:5.1f} s")

    expect(len(there.cv_results_["params"]) * there.n_splits_ == FITS, "the search did not make 105 fits")
    best = {name.removeprefix("model__"): value for name, value in there.best_params_.items()}
    say(f"best: {best}, accuracy {there.best_score_:.3f}")
    is_equal = {
        "best_params_": there.best_params_ == here.best_params_,
        "cv_results_, all but the times,": grid_search.without_times(there.cv_results_)
        == grid_search.without_times(here.cv_results_),
    }
    for what, claim in is_equal.items():
        say(f"{what} {'equal' if claim else 'DIFFER from'} those of the search without skyward")
    expect(all(is_equal.values()), "the pool's search differs from the one without skyward")


# 4 --------------------------------------------------------------------------------------------------------------------


def make_way(server: Any) -> None:
    if server is None:
        say("Jobs need the hub: pip install 'skyward[hub]'.")
        return
    say("Jobs of the hub: a training of low priority, and an urgent call for the same machine.")
    with making_way.machines(server, RECORDS / "launcher"):
        expect(making_way.show(say), "the training did not go on where it stopped")


# The run in a hub -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording() -> Iterator[Any]:
    """Start a hub if the extra `hub` is installed, and send runs there. Without it, a run is a folder."""
    with contextlib.ExitStack() as stack:
        server = None
        with contextlib.suppress(ImportError):
            from skyward.testing.hub import HubServer

            server = stack.enter_context(HubServer(RECORDS / "hub"))
        hub.connect(server and server.url, token=server and server.token, spool=RECORDS / "runs")
        stack.callback(hub.disconnect)
        yield server


def sign_in_link(server: Any, page: str) -> str:
    """Return a link that signs in once and leads to a page."""
    answers = []
    for method, path in (("GET", "/v1/me"), ("POST", "/v1/users/{user}/link")):
        user = answers[0]["user"] if answers else ""
        request = urllib.request.Request(server.url + path.format(user=user), method=method, headers=server.headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            answers.append(json.load(answer))
    return f"{answers[1]['link']}&to={page}"


def show_run(server: Any, run_id: str) -> None:
    """Print where the run can be seen. On a terminal, keep the hub until Ctrl-C."""
    page = f"/runs/{run_id}"
    if server is None:
        print("\nThe training was recorded. See its curves: pip install 'skyward[hub]', then")
        print(f"   {COMMAND} hub up --runs {RECORDS / 'runs'}")
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        print("\nThe training was recorded as a run of a hub. The link works once; the hub stays until Ctrl-C:")
        print(f"   {sign_in_link(server, page)}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    print("\nThe hub keeps the run of the training. This command starts it, and prints a link:")
    print(f"   {COMMAND} hub up --data {RECORDS / 'hub'}")


# ----------------------------------------------------------------------------------------------------------------------


def main() -> int:
    print(f"skyward {sky.__version__} on this machine: {os.cpu_count()} cores, Python {platform.python_version()}.")
    print("The nodes here are processes of this machine. On machines of a cloud the same lines would run.")
    started = time.perf_counter()
    with recording() as server:
        status, run_id = show_parts(server)
        if status == 0:
            print(
                f"\nAll of it in {time.perf_counter() - started:.0f} s. The code is in examples/, explained in guides/."
            )
            show_run(server, run_id)
    return status


def show_parts(server: Any) -> tuple[int, str]:
    """Run all parts, and return the exit status and the id of the run."""
    try:
        with part("1. Hello from two nodes"):
            greet()
        with part("2. Train one network on two nodes"):
            run_id = train()
        with part("3. A grid search on two nodes, equal to the last bit"):
            search_a_grid()
        with part("4. A training that makes way for an urgent job, equal to the last bit"):
            make_way(server)
    except NotAsExpected as error:
        print(f"\nThis is not as it should be: {error}", file=sys.stderr)
        return 1, ""
    except KeyboardInterrupt:
        print("\nStopped; the nodes are gone.", file=sys.stderr)
        return 130, ""
    return 0, run_id


if __name__ == "__main__":
    sys.exit(main())
