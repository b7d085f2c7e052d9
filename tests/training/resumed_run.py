"""A run with loggers that is killed and resumed: python -m tests.training.resumed_run FOLDER PART.

Part `whole` runs from 0 to 12, evaluates at each fourth step and saves at the sixth. Part `first` says "ready" behind
step 9 and waits to be killed. Part `second` resumes, with loggers that are told another folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from skyward.training.callbacks import JsonLogger, ResumableSummaryWriter, TBLogger
from tests.training.events import without_tensorflow
from tests.training.producer import Producer


def main(folder: Path, part: str) -> None:
    without_tensorflow()
    logs = folder / ("logs" if part != "second" else "other")
    run = Producer([JsonLogger(), TBLogger(ResumableSummaryWriter(logs / "tb"))], logging_dir=logs, max_steps=12)
    if part == "second":
        run.resume(json.loads((folder / "checkpoint.json").read_text()))
    run.begin()
    while run.state.global_step < 12:
        step = run.state.global_step + 1
        # Losses of the first part behind its checkpoint are wrong ones: they must not be seen again.
        run.step(loss=100.0 if part == "first" and step > 6 else 1 / step, learning_rate=1e-3)
        if step % 4 == 0:
            run.evaluate(eval_loss=2 / step, as_hugging_face_does=True)
        if step == 6 and part == "first":
            (folder / "checkpoint.json").write_text(json.dumps(run.save()))
        if step == 9 and part == "first":
            os.write(1, b"ready\n")
            time.sleep(60)
    run.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
