"""Follow what a pool does: its events, as an iterator and as a function.

python examples/20_watch.py
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import skyward as sky
from skyward import events


@sky.compute
def work(n: int) -> int:
    if n % 10 == 9:
        raise ValueError(f"{n} is unlucky")
    return n * n


def report(event: events.Event) -> None:
    """Called with each event, in order, by a thread of the pool's."""
    match event:
        case events.PoolReady():
            print("ready", flush=True)
        case events.NodeLost():
            print(f"node {event.node} was lost: {event.reason}", flush=True)
        case events.PoolClosed():
            print("closed", flush=True)


def count(stream: Iterator[events.Event], calls: Counter[str]) -> None:
    """Read by a thread of our own, until the pool is closed."""
    for event in stream:
        if isinstance(event, events.TaskEnded):
            calls["done" if event.ok else "failed"] += event.calls


def main() -> None:
    pool = sky.ComputePool(sky.Local(), nodes=2, on_event=report)
    calls: Counter[str] = Counter()
    reader = threading.Thread(target=count, args=(pool.events(), calls))  # before the pool starts: nothing is missed
    reader.start()
    with pool:
        futures = [work(n) > pool for n in range(20)]
        values = [future.result() for future in futures if future.exception() is None]
    reader.join()
    print(f"the sum of {len(values)} squares: {sum(values)}")
    print(f"calls: {calls['done']} done, {calls['failed']} failed")


if __name__ == "__main__":
    main()
