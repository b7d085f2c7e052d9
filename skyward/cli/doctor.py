"""`skyward doctor`: describe this machine and its installation, for a bug report."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from .. import _version
from ..node.agent.limit_groups import find_enforcement
from ..state.ray_losses import RayLoss, last_loss
from .host import HostFacts, Support, examine_host
from .packages import Extra, PackageState, examine_extras

HELP = "check this machine and the installed extras"

DESCRIPTION = """\
Reports Python, usable cores and memory, the kernel features that skyward uses, and the installed extras. Says why Ray
did not come up in a pool, if that was so the last time. Changes nothing. Paste the output into a bug report.
"""

EPILOG = """\
example: skyward doctor

exit status: 0 sky.Local() runs here, 1 it does not; the reason is printed
from Python: skyward.cli.doctor.examine()
"""

GIB = 1024**3

# `all` is the union of the others. `bench` and `dev` are for skyward's own developers.
NOT_SHOWN = frozenset({"all", "bench", "dev"})


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts about this machine and this installation.

    Attributes:
        limits: numbers of calls that the kernel enforces here, and why not the others, in words.
        ray_loss: last loss of Ray in a pool of this user; None if a Ray has stood since.
        problems: reasons why `sky.Local()` does not run here, one sentence each; empty where it runs.
    """

    version: str
    host: HostFacts
    limits: str
    core: Extra
    extras: tuple[Extra, ...]
    ray_loss: RayLoss | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        missing = [
            f"{package.name} is {package.state}: pip install --upgrade skyward"
            for package in self.core.packages
            if package.state is not PackageState.INSTALLED
        ]
        return (*self.host.problems, *missing)


def examine() -> Report:
    """Describe this machine and this Python environment, in milliseconds. Import no framework and start no process."""
    core, extras = examine_extras("skyward")
    return Report(
        version=_version.__version__,
        host=examine_host(),
        limits=str(find_enforcement()),
        core=core,
        extras=tuple(e for e in extras if e.name not in NOT_SHOWN),
        ray_loss=last_loss(),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing, because the command has no options."""


def run(_arguments: argparse.Namespace) -> int:
    report = examine()
    print("\n".join(describe(report)))
    return 1 if report.problems else 0


def describe(report: Report) -> list[str]:
    """Format the report as lines for a terminal."""
    installed = [extra for extra in report.extras if extra.is_installed]
    others = [extra for extra in report.extras if not extra.is_installed]
    lines = [
        *describe_host(report),
        *([] if report.ray_loss is None else [row("Ray", describe_loss(report.ray_loss))]),
        "",
        "installed",
        *(row(extra.name, describe_installed(extra)) for extra in (report.core, *installed)),
    ]
    if others:
        lines += ["", "not installed (get one: pip install 'skyward[NAME]')"]
        lines += [row(extra.name, describe_missing(extra)) for extra in others]
    if report.problems:
        return [*lines, "", "sky.Local() does not run on this machine:", *(f"  {p}" for p in report.problems)]
    return [*lines, "", "sky.Local() runs on this machine."]


def describe_host(report: Report) -> list[str]:
    host = report.host
    return [
        row("skyward", report.version),
        row("Python", f"{host.python} at {host.executable}"),
        row("platform", host.platform),
        row("cores", f"{host.usable_cores} usable of {host.cores}"),
        row("memory", describe_memory(host)),
        row("call limits", report.limits),
        row("open files", f"{host.open_files_soft} at most (hard limit {host.open_files_hard})"),
        *(row(support.name, describe_support(support)) for support in host.supports),
    ]


def describe_loss(loss: RayLoss) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(loss.at))
    return f"was not there in pool {loss.pool} at {at}: {loss.reason}"


def row(name: str, value: str) -> str:
    return f"  {name:<13} {value}"


def describe_memory(host: HostFacts) -> str:
    if host.memory_bytes is None:
        return "unknown"
    total = f"{host.memory_bytes / GIB:.1f} GiB"
    limit = f", of which this process may use {host.memory_limit_bytes / GIB:.1f}" if host.memory_limit_bytes else ""
    free = f", {host.memory_available_bytes / GIB:.1f} available" if host.memory_available_bytes is not None else ""
    return total + limit + free


def describe_support(support: Support) -> str:
    return "yes" if support.available else f"no: {support.otherwise}"


def describe_installed(extra: Extra) -> str:
    return ", ".join(f"{package.name} {package.version}" for package in extra.packages) or "needs nothing more"


def describe_missing(extra: Extra) -> str:
    wrong = [package for package in extra.packages if package.state is not PackageState.INSTALLED]
    return ", ".join(
        f"{package.name} {package.version} is too old" if package.version else f"needs {package.name}"
        for package in wrong
    )
