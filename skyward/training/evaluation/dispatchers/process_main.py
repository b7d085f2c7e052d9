"""The process beside the one that trains: it runs jobs until the other side of its connection is closed.

It imports a framework when a job's contents do, once. With the process that trains, however that ends, it ends too,
and all that it started with it.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

import cloudpickle

from ....errors import ResultNotPicklable
from ....wire.failures import encode_failure
from ....wire.payloads import decode, parse
from ..worker import ContentsMissing, Scored, Worker
from .arena import ArenaView
from .packed import MessageKind, PackedJob, unpack

__all__ = ["main"]

_LOOK_S = 1.0
"""Seconds between two looks whether the other side lives."""


def main() -> None:
    """Its arguments are the descriptors of its connection and of the arena. Never returns."""
    descriptors = [int(text) for text in sys.argv[1:3]]
    sys.argv = sys.argv[:1]
    for fd in descriptors:
        os.set_inheritable(fd, False)
    connection, arena = Connection(descriptors[0]), ArenaView(descriptors[1])
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, jobs), name="skyward-jobs", daemon=True).start()
    worker = Worker()
    while True:
        kind, body = _answer(worker, arena, connection, jobs.get())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.send(kind)
        connection.send_bytes(body)


def _read(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Reads on while an evaluation runs: so the end of the other side is noticed at any time."""
    parent = os.getppid()
    while os.getppid() == parent:  # children of the other side may hold the connection, and outlive it
        if not connection.poll(_LOOK_S):
            continue
        try:
            connection.recv()  # its kind: there is only one
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):  # the other side has gone
            break
    os.killpg(0, signal.SIGKILL)  # it leads a process group of its own


def _answer(worker: Worker, arena: ArenaView, connection: Connection, body: bytes) -> tuple[MessageKind, bytes]:
    try:
        parsed = parse(body)
        state, packed, contents = decode(parsed, arena.pieces(parsed))
        return MessageKind.DONE, _scored(worker, connection, state, packed, contents)
    except ContentsMissing as missing:
        return MessageKind.MISSING, pickle.dumps(missing.digests)
    except BaseException as error:  # whatever the user's function raises is the answer
        return MessageKind.FAILED, encode_failure(error)


def _scored(
    worker: Worker, connection: Connection, state: object, packed: PackedJob, contents: dict[str, bytes]
) -> bytes:
    parts = unpack(worker, packed, contents)
    connection.send(MessageKind.BEGUN)
    connection.send_bytes(b"")
    scored: Scored = worker.run(**parts, cache_key=packed.cache_key, state=state)
    try:
        data: bytes = cloudpickle.dumps(scored, protocol=5)
    except Exception as error:  # pickling runs code of the user's
        raise ResultNotPicklable(
            f"eval_fn: what it returned cannot be sent back: {type(error).__name__}: {error}; return a dictionary of "
            "numbers"
        ) from error
    return data
