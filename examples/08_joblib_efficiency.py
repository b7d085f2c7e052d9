"""How much of the ideal is left when joblib runs 2,000 short tasks on a pool.

python examples/08_joblib_efficiency.py
"""

from __future__ import annotations

import time

from joblib import Parallel, delayed

import skyward as sky

TASKS = 2000
TASK_S = 0.05
NODES = 2
SLOTS_PER_NODE = 10


def work(i: int) -> int:
    time.sleep(TASK_S)  # it waits for something, so 20 slots fit on one machine
    return i


def main() -> None:
    with sky.integrations.JoblibPool(sky.Local(), nodes=NODES, concurrency=SLOTS_PER_NODE) as pool:
        # The first calls start the slots' processes and import joblib there.
        Parallel(batch_size=1)(delayed(work)(i) for i in range(pool.total_slots * 2))

        parallel = Parallel()  # in this block n_jobs is every slot of the pool
        started = time.perf_counter()
        values = parallel(delayed(work)(i) for i in range(TASKS))
        actual_s = time.perf_counter() - started

    assert values == list(range(TASKS))  # in the order of the input
    ideal_s = TASKS / (NODES * SLOTS_PER_NODE) * TASK_S
    print(f"{TASKS} tasks of {TASK_S * 1000:g} ms on {NODES} x {SLOTS_PER_NODE} slots: {actual_s:.2f} s")
    print(f"ideal = tasks / slots x task = {TASKS} / {NODES * SLOTS_PER_NODE} x {TASK_S} s = {ideal_s:.2f} s")
    print(f"efficiency = ideal / actual = {ideal_s / actual_s:.1%}")
    print(f"joblib sent them in {parallel.n_dispatched_batches} batches")


if __name__ == "__main__":
    main()
