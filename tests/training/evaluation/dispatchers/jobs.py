"""Jobs for the tests of dispatchers: a model is a list with one number, so that no framework is needed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from skyward.training.evaluation import Content, Job

__all__ = ["NoteLoading", "doubled", "ends_badly", "hang", "job_of", "kill_me", "load", "make", "sleep_on", "waits_for"]

BUILT: list[int] = []


def make() -> list[Any]:
    BUILT.append(os.getpid())
    return [None]


def load(model: list[Any], state: Any) -> None:
    model[0] = state


def doubled(model: list[Any], payload: Any) -> dict[str, Any]:
    return {"value": 2 * model[0] + payload, "pid": os.getpid(), "built": len(BUILT)}


def hang(model: list[Any], payload: Any) -> dict[str, Any]:
    threading.Event().wait(payload)
    return {"value": model[0]}


def kill_me(model: list[Any], payload: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def waits_for(model: list[Any], payload: str) -> dict[str, Any]:
    """Report the begin in a file, and end when another file exists."""
    folder = Path(payload)
    (folder / f"begun-{model[0]}").write_text(str(os.getpid()))
    while not (folder / f"end-{model[0]}").exists():
        time.sleep(0.005)
    return {"value": model[0], "pid": os.getpid()}


def sleep_on(model: list[Any], seconds: float) -> dict[str, float]:
    """Return a number of the state when the time is over."""
    time.sleep(seconds)
    return {"value": float(model[0]["w"][0])}


def ends_badly(model: list[Any], payload: object) -> Any:
    """End in the way that the weights choose."""
    step = int(model[0]["w"][0])
    if step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2:
        raise KeyError("no such label")
    if step == 3:
        threading.Event().wait()
    return [1] if step == 4 else {"value": step}


def job_of(state: Any, eval_fn: Any = doubled, payload: Any = 1, **options: Any) -> Job:
    """Make a job with its own contents."""
    parts = {"factory": make, "load": load, "eval_fn": eval_fn, "payload": payload}
    contents: dict[str, Any] = {name: Content(options.pop(name, value), name) for name, value in parts.items()}
    chosen: dict[str, Any] = {"cache_key": "model", "step": 1, "snapshot_id": "one", **options}
    return Job(**contents, state=state, **chosen)


class NoteLoading:
    """Object that writes a line each time it is unpickled. With `path=None` it refuses to be unpickled."""

    def __init__(self, path: Path | None, data: bytes) -> None:
        self.path, self.data = path, data

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path is None:
            raise RuntimeError("no")
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
