"""Facts about a run that its report shows: arguments, versions and the machine, as a file beside the logs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ...node.slot.runtime import instance_info
from .columns import format_value
from .info import arguments_of, versions_of

FILE_NAME = "run_info.json"


def write_run_info(folder: str | os.PathLike[str], args: Any, ranks: Any) -> Path:
    """Write `run_info.json` to a folder, complete or not at all, and return its path.

    It has `arguments` (secrets masked), `versions` and `machine`, each a dict of texts. A resumed run replaces it,
    because it may have other arguments and another machine.

    Args:
        folder: the run's logging_dir; created if it does not exist.
        args: the run's arguments.
        ranks: the ranks of the run, or None.

    Raises:
        OSError: the file cannot be written.
    """
    info = {"arguments": arguments_of(args), "versions": versions_of(), "machine": machine_of(ranks)}
    file = Path(folder) / FILE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(info, indent=1), encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def machine_of(ranks: Any) -> dict[str, str]:
    """Return facts about this process's machine, and about the world of ranks it belongs to."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(terse=True),
        "processor": platform.machine(),
        "CPUs": os.cpu_count(),
        "memory": _memory(),
        "accelerators": _accelerators(),
        "ranks": getattr(ranks, "world_size", None),
    }
    info = instance_info()
    if info is not None:  # a task of a pool: the run may have more machines than this one
        facts["nodes"] = info.total_nodes
        facts["accelerators of all nodes"] = info.total_accelerators or None
    return {name: format_value(value) for name, value in facts.items() if value}


def _memory() -> str | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):  # a system that does not tell
        return format_value(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "gib")
    return None


def _accelerators() -> str | None:
    torch = sys.modules.get("torch")
    # Not `is_available`: this must not be what initializes CUDA in a run on the CPU.
    if torch is None or not torch.cuda.is_initialized():
        return None
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
