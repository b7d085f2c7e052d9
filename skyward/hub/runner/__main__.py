"""Program of a runner: `python -m skyward.hub.runner FOLDER`. Launchers start it."""

from __future__ import annotations

import sys
from pathlib import Path

from .runner import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
