"""Main function of the evaluation process beside training. It runs jobs until its connection closes.

It imports a framework once, when a job's contents do. It ends together with the training process, however that ends,
and kills everything that it started.
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
from ....wire.payloads import decode
from ....wire.tasks import parse
from ..worker import ContentsMissing, Scored, Worker
from .arena import ArenaView
from .packed import MessageKind, PackedJob, unpack

_LOOK_S = 1.0
"""Seconds between two checks whether the training process lives."""


def main() -> None:
    """Run jobs forever. The arguments are the descriptors of the connection and of the arena."""
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
    """Read jobs ahead, also during an evaluation, so that the end of the training process is noticed at any time."""
    parent = os.getppid()
    while os.getppid() == parent:  # no EOF if children of the training process hold the connection and outlive it
        if not connection.poll(_LOOK_S):
            continue
        try:
            connection.recv()  # the kind, which can only be JOB
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):  # the training process has gone
            break
    os.killpg(0, signal.SIGKILL)  # this process leads a group of its own, so its children go too


def _answer(worker: Worker, arena: ArenaView, connection: Connection, body: bytes) -> tuple[MessageKind, bytes]:
    try:
        parsed = parse(body)
        state, packed, contents = decode(parsed, arena.pieces(parsed))
        return MessageKind.DONE, _scored(worker, connection, state, packed, contents)
    except ContentsMissing as missing:
        return MessageKind.MISSING, pickle.dumps(missing.digests)
    except BaseException as error:  # also SystemExit: anything that user code raises is the answer
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
    except Exception as error:  # pickling runs user code
        raise ResultNotPicklable(
            f"eval_fn: the result cannot be sent back ({type(error).__name__}: {error}); return a dictionary of numbers"
        ) from error
    return data
