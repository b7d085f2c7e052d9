"""Every test, in two processes side by side: `python -m tests [arguments for both]`.

The tests that need hosts (tests/hosts/) mostly wait: for machines to start, for links that are cut, for leases to
run out. They take as long as all others together and leave the processor to them. Theirs is printed when both are done.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5
"""pytest's exit status where the arguments chose none."""


def part(marker: str, output: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "--durations=15", "--durations-min=5", "-m", marker, *sys.argv[1:]]
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT if output else None)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status. Ctrl-C reaches it as it does us: it ends by itself, after its fixtures' clean-up."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        on_hosts, others = part("hosts", said.fileno()), part("not hosts")
        codes = [ended(others), ended(on_hosts)]
        said.seek(0)
        sys.stdout.write("\n== the tests that need hosts, which ran beside these\n")
        sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.write(f"\n== all tests: {(time.monotonic() - began) / 60:.1f} minutes\n")
    return next((code for code in codes if code not in (0, NO_TESTS)), 0 if 0 in codes else NO_TESTS)


if __name__ == "__main__":
    sys.exit(main())
