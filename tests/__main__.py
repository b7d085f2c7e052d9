"""Every test, in three processes side by side: `python -m tests`. With arguments, `python -m pytest` with these.

The tests that need hosts (tests/hosts/) mostly wait: for machines to start, for links that are cut, for leases to run
out. Those of frameworks mostly import them. One after the other, they took 34 minutes on two cores. What two of
them print comes when all are done.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent

FRAMEWORKS = ("tests/acceptance", "tests/integrations", "tests/training")
PARTS = {
    "all others": ("-m", "not hosts", *(f"--ignore={path}" for path in FRAMEWORKS)),
    "tests of frameworks": ("-m", "not hosts", *FRAMEWORKS),
    "tests that need hosts": ("-m", "hosts"),
}
SHOWN_AT_ONCE = "all others"


def started(arguments: tuple[str, ...], output: BinaryIO | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "--durations=15", "--durations-min=5", *arguments]
    error = None if output is None else subprocess.STDOUT
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=error)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status. Ctrl-C reaches it as it does us: it ends by itself, after its fixtures' clean-up."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def main(arguments: list[str]) -> int:
    if arguments:
        return ended(started(tuple(arguments), None))
    began = time.monotonic()
    with contextlib.ExitStack() as files:
        outputs = {name: files.enter_context(tempfile.TemporaryFile()) for name in PARTS if name != SHOWN_AT_ONCE}
        parts = {name: started(chosen, outputs.get(name)) for name, chosen in PARTS.items()}
        codes = {name: ended(process) for name, process in parts.items()}
        for name, output in outputs.items():
            output.seek(0)
            sys.stdout.write(f"\n== {name}, which ran beside these\n{output.read().decode(errors='replace')}")
    failed = [name for name, code in codes.items() if code]
    minutes = (time.monotonic() - began) / 60
    sys.stdout.write(f"\n== {minutes:.1f} minutes; {'failed: ' + ', '.join(failed) if failed else 'all passed'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
