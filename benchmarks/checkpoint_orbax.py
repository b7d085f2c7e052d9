"""Asynchronous saves by Orbax, in an environment that has it. checkpoint.py runs this file and sends it requests.

Argument: sizes of float32 arrays, as JSON. Lines in: `save FOLDER`, `load FOLDER`. Lines out: JSON with seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that the library prints is no answer
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    sizes = json.loads(sys.argv[1])
    random = np.random.default_rng(0)
    state = {name: jax.device_put(random.standard_normal(size, dtype=np.float32)) for name, size in sizes.items()}
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    print(json.dumps({"version": ocp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        what, _, folder = line.rstrip("\n").partition(" ")
        begin = time.perf_counter()
        if what == "save":
            checkpointer.save(folder, args=ocp.args.StandardSave(state))
            blocked = time.perf_counter() - begin
            checkpointer.wait_until_finished()
            _flush(Path(folder))  # the other methods do this themselves
            answer = {"blocked": blocked, "durable": time.perf_counter() - begin}
        else:
            jax.block_until_ready(checkpointer.restore(folder, args=ocp.args.StandardRestore(state)))
            answer = {"loaded": time.perf_counter() - begin}
        print(json.dumps(answer), file=answers, flush=True)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    main()
