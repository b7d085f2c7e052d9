"""Remote compute for Python: decorate a function, choose where it runs at the call site, get its value back.

    import skyward as sky

    @sky.compute
    def double(x: int) -> int:
        return 2 * x

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        print(double(21) >> pool)    # one node; `@ pool` all nodes; `> pool` a future; `a & b` in parallel

Names are loaded when they are first used: `import skyward` imports nothing heavy.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from ._version import __version__

_MODULES = {
    "skyward.accelerators": ("Accelerator",),
    "skyward.allocation": ("AllocationStrategy",),
    "skyward.cluster.future": ("Future",),
    "skyward.calls": (
        "CallOptions",
        "ComputeFunction",
        "PendingCompute",
        "PendingComputeGroup",
        "compute",
        "gather",
    ),
    "skyward.image": ("DEFAULT_IMAGE", "Image"),
    "skyward.logs": ("LogFiles",),
    "skyward.machine": ("LogLine",),
    "skyward.output": ("silent", "stderr", "stdout"),
    "skyward.pool": ("ComputePool",),
    "skyward.providers.aws": ("AWS",),
    "skyward.providers.local": ("Local",),
    "skyward.providers.ssh": ("SSH", "SSHHost"),
    "skyward.secret": ("Secret",),
    "skyward.slot.runtime": ("instance_info", "is_head", "once"),
    "skyward.slot.sharding": ("shard",),
    "skyward.topology": ("InstanceInfo",),
}
_SUBMODULES = ("accelerators", "errors", "events", "integrations", "training")

_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted((*_WHERE, *_SUBMODULES))]  # noqa: PLE0604  # all are strings


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _import_module(f"skyward.{name}")
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'skyward' has no attribute {name!r}")
    value = getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
