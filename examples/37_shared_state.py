"""Let tasks share values, take work from one queue, and wait for each other.

python examples/37_shared_state.py
"""

from __future__ import annotations

import time

import skyward as sky


@sky.compute
def search(worker: int) -> int:
    """Try learning rates from the queue until it says that there are no more, and keep the best of all workers."""
    best = sky.dict[str, tuple[float, float]]("best")
    tried = 0
    while (rate := sky.queue[float | None]("rates").get(timeout_s=60)) is not None:
        time.sleep(0.02)  # a training
        loss = (rate - 0.03) ** 2
        best.change("loss, rate", lambda present, new=(loss, rate): min(present, new), default=(1.0, 0.0))
        sky.counter("tried").increment()
        tried += 1
    return tried


@sky.compute
def prepare() -> str:
    """Do something once for all tasks: the first that adds the name does it, and the others wait."""
    if sky.set[str]("prepared").add("data"):
        time.sleep(0.05)
        sky.event("data is there").set()
        return "prepared it"
    sky.event("data is there").wait(timeout_s=60)
    return "waited for it"


@sky.compute
def report(line: str) -> int:
    """One task at a time. The lock is free when the task ends, also if it is killed."""
    with sky.lock("report") as fence:
        sky.list[str]("report").append(f"{line}, then the next")
        return fence


@sky.compute
def meet(rounds: int) -> list[int]:
    """Wait for the other node in each round."""
    return [sky.barrier("round", 2).wait(timeout_s=60) for _ in range(rounds)]


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2) as pool:
        workers = [search(number) > pool for number in range(4)]
        rates = pool.queue("rates")
        for rate in (0.1, 0.3, 0.03, 0.01, 0.003, 0.2, 0.05, 0.02):
            rates.put(rate)
        for _ in workers:
            rates.put(None)  # a value like any other: it tells one worker to stop
        print("tried by each worker:", [worker.result() for worker in workers])
        print("tried in all:", pool.counter("tried").value())
        print("best learning rate:", pool.dict("best")["loss, rate"][1])

        print("data:", sorted(prepare() @ pool))

        first, second = report("first") >> pool, report("second") >> pool
        print("report:", list(pool.list("report")), "fencing numbers grow:", first < second)

        mine, yours = meet(3) @ pool
        print("places in three rounds:", [sorted(pair) for pair in zip(mine, yours, strict=True)])


if __name__ == "__main__":
    main()
