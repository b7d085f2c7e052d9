"""Run one pool of one peer in a fresh interpreter: start it, measure, write the samples, close it.

`dispatch.py` starts this file once per peer and round. Because it is a process of its own, no peer's import, threads or
leftovers affect another's numbers, and a function of `__main__` really belongs to `__main__`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measures
import processes
import workloads
from measures import Samples, Sizes
from peers import PEERS, Peer, Shape


@dataclass(frozen=True, kw_only=True)
class Job:
    """Task of one driver. `measures` are names of `ORDER`."""

    peer: str
    shape: Shape
    measures: tuple[str, ...]
    sizes: Sizes
    output: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        fields["shape"] = Shape(**fields["shape"])
        sizes = fields["sizes"]
        fields["sizes"] = Sizes(**{**sizes, "chunk_grid": tuple(sizes["chunk_grid"])})
        fields["measures"] = tuple(fields["measures"])
        return cls(**fields)


ORDER = ("first", "memory", "noop", "noop_main", "pipelined", "map", "arrays", "spread")


def noop_of_main() -> None:
    """Do nothing.

    Because this function belongs to `__main__`, no worker can import it by name unless it was forked from this process.
    """


def steps(peer: Peer, job: Job, *, baseline_mib: float) -> dict[str, Callable[[], Samples]]:
    """Return every measure by its name, ready to be called in `ORDER`."""
    kind, sizes = PEERS[job.peer], job.sizes
    return {
        "memory": lambda: measures.idle_memory(baseline_mib),
        "noop": lambda: measures.round_trips(peer, workloads.noop, name="noop", sizes=sizes),
        "noop_main": lambda: measures.round_trips(peer, noop_of_main, name="noop_main", sizes=sizes),
        "pipelined": lambda: measures.pipelined(peer, sizes=sizes),
        "map": lambda: measures.tiny_map(peer, tunes_chunks=kind.tunes_chunks, sizes=sizes),
        "arrays": lambda: measures.arrays(peer, sizes=sizes),
        "spread": lambda: measures.spread(peer, workers=job.shape.workers, sizes=sizes),
    }


def run(job: Job) -> dict[str, str]:
    """Take every requested measure. Returns errors by measure. Samples are on disk as soon as they exist."""
    baseline_mib = processes.pss_mib([os.getpid()])
    samples: Samples = {}
    errors: dict[str, str] = {}
    peer = PEERS[job.peer].make(job.shape)
    try:
        samples.update(measures.first_result(peer))
        _write(job, samples, errors)
        measures.warm_up(peer)
        for name, step in steps(peer, job, baseline_mib=baseline_mib).items():
            if name in job.measures:
                _attempt(name, step, samples, errors)
                _write(job, samples, errors)
    finally:
        peer.close()
    return errors


def _attempt(name: str, step: Callable[[], Samples], samples: Samples, errors: dict[str, str]) -> None:
    try:
        samples.update(step())
    except Exception as error:  # a measure that fails is reported; the others still count
        traceback.print_exc()
        errors[name] = f"{type(error).__name__}: {error}"


def _write(job: Job, samples: Samples, errors: dict[str, str]) -> None:
    draft = Path(job.output + ".draft")
    draft.write_text(json.dumps({"samples": samples, "errors": errors}))
    draft.rename(job.output)


if __name__ == "__main__":
    # `dispatch.py` passes its interruption on as SIGINT, and KeyboardInterrupt closes the pool. The handler is set
    # because a shell may have started this process with SIGINT ignored. SIGTERM is not used: some pools end their
    # workers with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(1 if run(Job.from_json(sys.argv[1])) else 0)
