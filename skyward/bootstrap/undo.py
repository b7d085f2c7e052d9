"""What was begun on a machine and is not wanted any more, whatever came of it: ended by the name of its node's folder.

All that is run for a node carries that name in its environment, see `marked`; so does its agent.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..errors import ProviderError
from .payload import script
from .runner import Runner, text_of

__all__ = ["VARIABLE", "marked", "undo"]

VARIABLE = "SKYWARD_NODE"
_LIMIT_S = 20.0


def marked(command: str, folder: str) -> str:
    """The same line of sh, which must `exec`, so that `undo` finds what it becomes and starts."""
    return f"{VARIABLE}={shlex.quote(folder)}; export {VARIABLE}; {command}"


def undo(run: Runner, folders: Sequence[str]) -> None:
    """Leave nothing of the nodes with folders of these names: kill what runs, remove the folders. Idempotent.

    What was sent to the machine and has not begun yet finds no folder, and ends by itself.

    Raises ProviderError if the machine's shell does not answer, and what `run` raises.
    """
    text = script(("node.sh", "undo.sh"), {"nodes": " ".join(folders)})
    done = run("exec sh -s", input=text, timeout_s=_LIMIT_S)
    if not any(line.startswith("\1end ") for line in text_of(done.stdout).splitlines()):
        raise ProviderError(
            f"the shell there ended with code {done.code} before {', '.join(folders)} were removed: "
            f"{text_of(done.stderr).strip()}"
        )
