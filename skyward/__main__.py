"""Entry point of `python -m skyward`, which is the `skyward` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
