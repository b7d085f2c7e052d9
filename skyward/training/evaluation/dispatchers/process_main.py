"""The process beside the one that trains: it runs jobs until the other side of its socket is closed.

It imports a framework when a job's contents do, once. With the process that trains, however that ends, it ends too,
and all that it started with it.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import sys
import threading

import cloudpickle

from ....errors import ResultNotPicklable
from ....wire.failures import encode_failure
from ....wire.payloads import decode, parse
from ..worker import Scored, Worker
from .arena import ArenaView
from .channel import MessageKind, readable, receive, send
from .packed import ContentsMissing, PackedJob, unpack

__all__ = ["main"]

_LOOK_S = 1.0
"""Seconds between two looks whether the other side lives."""


def main() -> None:
    """Its arguments are the descriptors of its socket and of the arena. Never returns."""
    descriptors = [int(text) for text in sys.argv[1:3]]
    sys.argv = sys.argv[:1]
    for fd in descriptors:
        os.set_inheritable(fd, False)
    sock, arena = socket.socket(fileno=descriptors[0]), ArenaView(descriptors[1])
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, jobs), name="skyward-jobs", daemon=True).start()
    worker = Worker()
    while True:
        kind, body = _answer(worker, arena, sock, jobs.get())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(sock, kind, body)


def _read(sock: socket.socket, jobs: queue.SimpleQueue[bytes]) -> None:
    """Reads on while an evaluation runs: so the end of the other side is noticed at any time."""
    parent = os.getppid()
    while os.getppid() == parent:  # children of the other side may hold the socket, and outlive it
        if not readable([sock.fileno()], _LOOK_S):
            continue
        frame = receive(sock)
        if frame is None:
            break
        jobs.put(frame[1])
    os.killpg(0, signal.SIGKILL)  # it leads a process group of its own


def _answer(worker: Worker, arena: ArenaView, sock: socket.socket, body: bytes) -> tuple[MessageKind, bytes]:
    try:
        parsed = parse(body)
        state, packed, contents = decode(parsed, arena.pieces(parsed))
        return MessageKind.DONE, _scored(worker, sock, state, packed, contents)
    except ContentsMissing as missing:
        return MessageKind.MISSING, pickle.dumps(missing.digests)
    except BaseException as error:  # whatever the user's function raises is the answer
        return MessageKind.FAILED, encode_failure(error)


def _scored(worker: Worker, sock: socket.socket, state: object, packed: PackedJob, contents: dict[str, bytes]) -> bytes:
    parts = unpack(worker, packed, contents)
    send(sock, MessageKind.BEGUN)
    scored: Scored = worker.run(**parts, cache_key=packed.cache_key, state=state)
    try:
        data: bytes = cloudpickle.dumps(scored, protocol=5)
    except Exception as error:  # pickling runs code of the user's
        raise ResultNotPicklable(
            f"eval_fn: what it returned cannot be sent back: {type(error).__name__}: {error}; return a dictionary of "
            "numbers"
        ) from error
    return data
