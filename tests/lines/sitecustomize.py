"""Lets each line that a program of the tests prints be one write, as on a terminal.

Without a buffer it would be two, and lines of the pool's tasks, or of another process, could come between them.
"""

import sys

sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # standard error is like that
