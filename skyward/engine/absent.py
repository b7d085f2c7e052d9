"""Advice about modules and files that a call did not find on its node but that may exist on this machine."""

from __future__ import annotations

import os


def advise(error: BaseException, node: int) -> str:
    """Explain how to get a missing module or file to a node that shares neither with this machine.

    Returns:
        The advice; empty if the error is about something else.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        from ..bootstrap.preflight import projects_of  # imported late: few pools need it, and it lists all packages

        module = error.name.partition(".")[0]
        project = next(iter(projects_of(module)), module)
        return (
            f"Node {node} does not share this machine's packages. Add Image(pip=[{project!r}]) to the pool. Your own "
            "modules are sent if their folder is on sys.path or is listed in Image(includes=[...])."
        )
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        path = error.filename
        is_here = os.path.exists(path)
        is_program = not any(mark in path for mark in (os.sep, "."))  # as in subprocess.run(["ffmpeg"])
        if is_here or not (is_program or os.path.isabs(path)):
            condition = "The file exists on this machine: add" if is_here else "To send a file of this machine, add"
            return (
                f"Node {node} does not share this machine's files. {condition} Image(includes=[{path!r}]) to the pool. "
                "Relative paths start at the working folder of the node."
            )
    return ""
