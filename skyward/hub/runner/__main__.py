"""Program of a runner: `python -m skyward.hub.runner FOLDER`. Launchers start it, or the starter that forks runners."""

from __future__ import annotations

import sys
from pathlib import Path

from .runner import main
from .starter import OPTION, fork_runners

if __name__ == "__main__":
    given = sys.argv[1]
    folder = fork_runners(int(given.removeprefix(OPTION))) if given.startswith(OPTION) else Path(given)
    sys.exit(0 if folder is None else main(folder))
