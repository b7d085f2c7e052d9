"""Wait for the end of a test session, however it comes, and take its bed down: `python -m tests.hosts.reaper N PID`.

The reaper inherits the bed's lock. When it is gone too, the next session that claims the number tidies up.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from tests.hosts.bed import take_down


def main() -> None:
    number, session = int(sys.argv[1]), int(sys.argv[2])
    for blocked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(blocked, signal.SIG_IGN)
    # It waits by pidfd and not only by the pipe's end: a process that the session forked may hold the other end of the
    # pipe.
    try:
        pidfd = os.pidfd_open(session)
    except ProcessLookupError:
        take_down(number)
        return
    select.select([sys.stdin.buffer, pidfd], [], [])
    take_down(number)


if __name__ == "__main__":
    main()
