"""Control of a running training: look at it, save, stop or abort it, from another process.

    from skyward.training.control import find

    run = find("my-run")          # by the id that TrainerControlCallback(job_id=) gave it
    print(run.status().global_step)
    run.save_and_stop(wait_s=60)

Standard library only, and nothing of it is loaded before it is used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_MODULES = {
    "skyward.control": ("COMMANDS", "Client", "CommandState", "RunStatus"),
    "skyward.training.control.client": ("find", "runs"),
    "skyward.training.control.endpoint": ("Endpoint", "sweep"),
    "skyward.training.control.callback": ("TrainerControlCallback",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)  # noqa: PLE0605  # all are strings


def __getattr__(name: str) -> _Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
