"""Measure the lowest possible cost of a call on this machine: `python benchmarks/floor.py`.

The subject is a bare skeleton of a pool: client -> relay -> worker over unix socket pairs, with a small pickled tuple
in each direction. Each row adds one part, so the difference between two rows is the price of that part. skyward can at
best reach the last row. ProcessPoolExecutor is measured in the same rounds. The steps of sending a large array follow.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import pickle
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import cloudpickle
import processes
import workloads
from report import percentile

LENGTH = struct.Struct("!I")


def send(connection: socket.socket, payload: bytes) -> None:
    """Send one frame, its length and then its bytes, in one system call."""
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes:
    """Receive the payload of one frame, or nothing at the end of the stream. Frames here fit into one read."""
    data = connection.recv(65536)
    while data and len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        data += connection.recv(65536)
    return data[LENGTH.size :]


def work(connection: socket.socket) -> None:
    """Act as worker: unpickle a call, run it, send its result. A function by value comes as bytes, unpickled once."""
    functions: dict[bytes, Callable[..., Any]] = {}
    while request := receive(connection):
        identity, function, args = pickle.loads(request)
        if isinstance(function, bytes):
            if function not in functions:
                functions[function] = pickle.loads(function)
            function = functions[function]
        send(connection, pickle.dumps((identity, function(*args)), protocol=5))


def relay_blocking(client: socket.socket, worker: socket.socket) -> None:
    """Relay at the lowest cost: it knows who sends next, which a real relay does not."""
    while request := client.recv(65536):
        worker.sendall(request)
        client.sendall(worker.recv(65536))


def relay_selecting(client: socket.socket, worker: socket.socket) -> None:
    """Relay with a selector that listens to both sides."""
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, worker)
        selector.register(worker, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                if not data:
                    return
                key.data.sendall(data)


def relay_asyncio(client: socket.socket, worker: socket.socket) -> None:
    """Relay on asyncio protocols."""
    asyncio.run(_relay_asyncio(client, worker))


async def _relay_asyncio(client: socket.socket, worker: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    class Forward(asyncio.Protocol):
        other: asyncio.Transport

        def data_received(self, data: bytes) -> None:
            self.other.write(data)

        def connection_lost(self, error: Exception | None) -> None:
            if not ended.done():
                ended.set_result(None)

    left, right = Forward(), Forward()
    # The worker's side connects first. A worker sends only answers, so each side knows the other before data arrives.
    left.other, _ = await loop.connect_accepted_socket(lambda: right, worker)
    right.other, _ = await loop.connect_accepted_socket(lambda: left, client)
    await ended


Relay = Callable[[socket.socket, socket.socket], None]
Call = Callable[[], object]


@contextmanager
def forked(run: Callable[[], None], *unused: socket.socket) -> Iterator[None]:
    """Run a function in a forked process without these descriptors. It ends when its sockets are closed."""
    pid = os.fork()
    if pid == 0:
        for connection in unused:
            connection.close()
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.waitpid(pid, 0)


@contextmanager
def skeleton(relay: Relay | None) -> Iterator[socket.socket]:
    """Run worker and relay as processes. Yields the client's socket."""
    ours, relay_client = socket.socketpair()
    with ExitStack() as stack:
        if relay is None:
            stack.enter_context(forked(partial(work, relay_client), ours))
        else:
            relay_worker, theirs = socket.socketpair()
            stack.enter_context(forked(partial(work, theirs), ours, relay_client, relay_worker))
            stack.enter_context(forked(partial(relay, relay_client, relay_worker), ours, theirs))
            relay_worker.close()
            theirs.close()
        relay_client.close()
        try:
            yield ours
        finally:  # The relay sees the end, and the worker sees the relay's; close() alone would wake no reader thread.
            ours.shutdown(socket.SHUT_RDWR)
            ours.close()


def call_waiting(connection: socket.socket, function: Any) -> Call:
    """Send and wait on the socket in the calling thread."""

    def call() -> object:
        send(connection, pickle.dumps((1, function, ()), protocol=5))
        return pickle.loads(receive(connection))

    return call


def call_with_reader(connection: socket.socket, function: Any) -> Call:
    """Send, and wait for a Future that a reader thread resolves."""
    pending: queue.SimpleQueue[Future[object]] = queue.SimpleQueue()

    def read() -> None:
        while reply := receive(connection):
            pending.get().set_result(pickle.loads(reply))

    threading.Thread(target=read, daemon=True).start()

    def call() -> object:
        future: Future[object] = Future()
        pending.put(future)
        send(connection, pickle.dumps((1, function, ()), protocol=5))
        return future.result()

    return call


def call_through_threads(connection: socket.socket, function: Any) -> Call:
    """Send through a second thread, with a reader thread as above: the cost of an event loop of the client's own."""
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    pending: queue.SimpleQueue[Future[object]] = queue.SimpleQueue()

    def read() -> None:
        while reply := receive(connection):
            pending.get().set_result(pickle.loads(reply))

    def write() -> None:
        while True:
            send(connection, waiting.get())

    for run in (read, write):
        threading.Thread(target=run, daemon=True).start()

    def call() -> object:
        future: Future[object] = Future()
        pending.put(future)
        waiting.put(pickle.dumps((1, function, ()), protocol=5))
        return future.result()

    return call


def by_value(function: Callable[[], None]) -> Callable[[socket.socket], Call]:
    """Pickle a function of __main__ by value at every call. This is necessary because it may have changed."""

    def bind(connection: socket.socket) -> Call:
        def call() -> object:
            send(connection, pickle.dumps((1, cloudpickle.dumps(function), ()), protocol=5))
            return pickle.loads(receive(connection))

        return call

    return bind


def of_main() -> None:
    """Return its argument, as a function of __main__."""


CALLS: dict[str, tuple[Relay | None, Callable[[socket.socket], Call]]] = {
    "2 processes: client, worker": (None, partial(call_waiting, function=workloads.noop)),
    "3 processes: + blocking relay": (relay_blocking, partial(call_waiting, function=workloads.noop)),
    "   relay that selects": (relay_selecting, partial(call_waiting, function=workloads.noop)),
    "   relay on asyncio": (relay_asyncio, partial(call_waiting, function=workloads.noop)),
    "   selects, by value (cloudpickle each call)": (relay_selecting, by_value(of_main)),
    "   selects, Future by a reader thread": (relay_selecting, partial(call_with_reader, function=workloads.noop)),
    "   selects, reader and writer threads": (relay_selecting, partial(call_through_threads, function=workloads.noop)),
    "   asyncio, reader and writer threads": (relay_asyncio, partial(call_through_threads, function=workloads.noop)),
}


def timed(call: Call, count: int) -> list[float]:
    """Return the seconds of each of `count` calls, after an unmeasured tenth of them."""
    for _ in range(count // 10):
        call()
    samples: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return samples


def measure_calls(rounds: int, count: int) -> dict[str, list[list[float]]]:
    """Return samples of every row, by round."""
    samples: dict[str, list[list[float]]] = {name: [] for name in (*CALLS, "ProcessPoolExecutor")}
    for _ in range(rounds):
        for name, (relay, bind) in CALLS.items():
            with skeleton(relay) as connection:
                samples[name].append(timed(bind(connection), count))
        with ProcessPoolExecutor(2) as pool:
            samples["ProcessPoolExecutor"].append(timed(partial(_call_executor, pool), count))
    return samples


def _call_executor(pool: ProcessPoolExecutor) -> None:
    pool.submit(workloads.noop).result()


def array_steps(size_bytes: int) -> dict[str, Callable[[], object]]:
    """Time each step of sending an array alone."""
    import xxhash

    array = workloads.make_array(size_bytes=size_bytes, seed=1)
    filled = _memfd(array)
    raw = array.data.cast("B")

    def copy_into_mapping() -> None:
        with (
            open(_memfd_empty(size_bytes), "r+b", buffering=0) as target,
            mmap.mmap(target.fileno(), size_bytes) as view,
        ):
            view[:] = raw

    def write_by_two_threads() -> None:
        descriptor, half = _memfd_empty(size_bytes), size_bytes // 2
        other = threading.Thread(target=_write_at, args=(descriptor, raw[half:], half))
        other.start()
        _write_at(descriptor, raw[:half], 0)
        other.join()
        os.close(descriptor)

    def map_and_touch() -> None:
        import numpy as np

        view = mmap.mmap(filled, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        workloads.touch(np.frombuffer(view, dtype=np.float64))

    return {
        "ndarray.copy()": array.copy,
        "xxh3_128 of it": lambda: xxhash.xxh3_128(raw).digest(),
        "write() into a new memfd": lambda: os.close(_memfd(array)),
        "write() into a new memfd, 2 threads": write_by_two_threads,
        "write() into a used memfd (it has its pages)": lambda: _write_at(filled, raw, 0),
        "copy into a mapped new memfd": copy_into_mapping,
        "map a full memfd, read every page": map_and_touch,
        "read every page of the array itself": lambda: workloads.touch(array),
    }


def _memfd_empty(size_bytes: int) -> int:
    descriptor = os.memfd_create("floor")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _memfd(array: workloads.Array) -> int:
    descriptor = os.memfd_create("floor")
    _write_at(descriptor, array.data.cast("B"), 0)
    return descriptor


def _write_at(descriptor: int, rest: memoryview, position: int) -> None:
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


def print_calls(samples: dict[str, list[list[float]]]) -> None:
    """Show medians over rounds, beside ProcessPoolExecutor's."""
    reference = median(median(values) for values in samples["ProcessPoolExecutor"])
    print(f"No-op round trip, us\n  {'':<46}{'p50':>8}{'p10..p90 of rounds':>22}{'p99':>9}{'/ executor':>12}")
    for name, by_round in samples.items():
        halves = [median(values) * 1e6 for values in by_round]
        tail = median(percentile(values, 0.99) for values in by_round) * 1e6
        span = f"{percentile(halves, 0.1):.0f}..{percentile(halves, 0.9):.0f}"
        print(f"  {name:<46}{median(halves):>8.0f}{span:>22}{tail:>9.0f}{median(halves) / reference / 1e6:>11.2f}x")


def print_array(size_bytes: int, rounds: int) -> None:
    """Show each step of an array's way, against one copy of the array."""
    processes.warm_memory(8 * size_bytes)
    samples = {
        name: [value for _ in range(rounds) for value in timed(step, 1)]
        for name, step in array_steps(size_bytes).items()
    }
    copy = median(samples["ndarray.copy()"])
    print(f"\nArray of {size_bytes / 1e6:g} MB, ms\n  {'':<46}{'median':>8}{'p10..p90':>22}{'/ copy':>12}")
    for name, values in samples.items():
        span = f"{percentile(values, 0.1) * 1e3:.1f}..{percentile(values, 0.9) * 1e3:.1f}"
        print(f"  {name:<46}{median(values) * 1e3:>8.1f}{span:>22}{median(values) / copy:>11.2f}x")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2_000, help="calls per row and round (default: 2000)")
    parsed = parser.parse_args()
    print_calls(measure_calls(parsed.rounds, parsed.calls))
    print_array(100_000_000, parsed.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
