"""What to do about a module or a file that a call did not find on its node, and that may well be on this machine."""

from __future__ import annotations

import os

__all__ = ["advise"]


def advise(error: BaseException, node: int) -> str:
    """Say how what is missing gets to a node that shares neither packages nor files with this machine.

    Returns: a sentence; empty where the error is about nothing of the kind.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        from ..bootstrap.preflight import projects_of  # reads what is installed: nothing that every pool needs

        module = error.name.partition(".")[0]
        project = next(iter(projects_of(module)), module)
        return (
            f"Node {node} has packages of its own: give the pool Image(pip=[{project!r}]). A module of yours travels "
            "if its folder is on sys.path, or is named in Image(includes=[...])."
        )
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        path = error.filename
        is_here = os.path.exists(path)
        is_program = not any(mark in path for mark in (os.sep, "."))  # of subprocess.run(["ffmpeg"])
        if is_here or not (is_program or os.path.isabs(path)):
            found = "This machine has it: give" if is_here else "To take a file of this machine along, give"
            return (
                f"Node {node} has files of its own. {found} the pool Image(includes=[{path!r}]). Relative paths are "
                "looked up in the working folder of the node."
            )
    return ""
