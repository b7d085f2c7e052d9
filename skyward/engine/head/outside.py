"""Starts a head from a login on its machine, so that it outlives the login; and its last words.

python -S -E -s -c "...start()" FOLDER < what `main` reads      prints one line of JSON, see `start_apart`
python -S -E -s -c "...ended()" FOLDER WHY                       prints one line of JSON, see `read_last_words`
"""

from __future__ import annotations

import json
import sys

from ...core.ownership import make_private_folder
from ...errors import SkywardError
from ...node.agent.apart import start_apart
from .last_words import read_last_words, write_last_words

# Somebody waits for the imports. A tenth of their time went to the garbage collector; see `process.collect_rarely`.
_BOOT = """
import gc, sys
gc.set_threshold(50_000, 10, 10)
sys.path[:] = sys.argv[1:]
from skyward.engine.head.main import main
sys.exit(main())
"""


def start() -> int:
    """Start a head in a new private folder. Its configuration holds secrets, so no file and no argument has them."""
    order, folder = sys.stdin.buffer.read(), sys.argv[-1]
    try:
        make_private_folder(folder)
    except (OSError, SkywardError) as error:
        sys.stderr.write(f"the head has no folder: {error}")
        return 1
    started = start_apart("head", _BOOT, order, folder)
    if started is None:
        return 1
    sys.stdout.write(json.dumps(started[0]) + "\n")
    return 0


def ended() -> int:
    """Print the last words of a head; before, write them for one that was ended from outside, unless WHY is empty."""
    folder, why = sys.argv[-2:]
    if why:
        write_last_words(folder, why)
    sys.stdout.write(json.dumps(read_last_words(folder)) + "\n")
    return 0
