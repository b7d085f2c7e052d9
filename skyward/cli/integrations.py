"""`skyward integrations`: list the frameworks, from the integrations' own classes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .packages import version_of

if TYPE_CHECKING:
    from ..integrations.base import IntegrationBase

HELP = "list supported frameworks and their setup"

DESCRIPTION = """\
Lists the integrations, the framework that each needs, and whether it is installed here. With NAME, describes that
integration: its options, the environment variables of its ranks, and what a node must have.
"""

EPILOG = """\
examples:
  skyward integrations
  skyward integrations torch

from Python: skyward.cli.integrations.describe()
"""

_LINE = 80

PAGE_HEAD = """\
# Integrations

`skyward integrations --markdown` writes this page from the integrations' own classes; do not edit it. The
[guides](../guides) show each integration in an example that runs.

A decorator goes below `@sky.compute` and makes the call a gang. A gang is a set of new processes, the ranks. They start
together on all nodes (`@ pool`) or on one (`>> pool`). Environment variables that you set yourself keep their values
where the framework leaves a choice.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """Integration of one framework.

    Attributes:
        variables: names in a rank's environment; empty for integrations that are not decorators.
    """

    name: str
    extra: str
    packages: tuple[str, ...]
    signature: str
    doc: str
    variables: tuple[str, ...]

    @property
    def summary(self) -> str:
        paragraph = self.doc.partition("\n\n")[0].replace("\n", " ")
        return paragraph.partition("; use it bare")[0].partition(". ")[0].rstrip(".")

    @property
    def installed(self) -> str:
        """Installed versions of the packages that the integration needs, or that one is missing."""
        return ", ".join(f"{package} {_version(package)}" for package in self.packages)


def describe() -> list[Description]:
    """Describe all integrations, sorted by name. Import no framework."""
    from .. import integrations

    descriptions = []
    for name, extra in sorted(integrations.REGISTRY.items(), key=lambda entry: entry[0].lower()):
        value = getattr(integrations, name)
        integration = _integration_of(value) if name.islower() and not name.endswith("_backend") else None
        descriptions.append(
            Description(
                name=name,
                extra=extra,
                packages=integration.packages if integration else _packages_of_extra(extra),
                signature=_signature(value),
                doc=inspect.cleandoc(value.__doc__ or ""),
                variables=tuple(_variables(integration)) if integration else (),
            )
        )
    return descriptions


def _integration_of(decorator: Callable[..., Any]) -> IntegrationBase:
    from ..integrations.base import integrations_of

    return cast("IntegrationBase", integrations_of(decorator(lambda: None))[0])


def _packages_of_extra(extra: str) -> tuple[str, ...]:
    return {"sklearn": ("scikit-learn", "joblib")}.get(extra, (extra,))


def _signature(value: Callable[..., Any]) -> str:
    """Format the options of a decorator, without the decorated function."""
    shown = []
    for option in inspect.signature(value).parameters.values():
        if option.kind is inspect.Parameter.POSITIONAL_ONLY:
            continue
        default = "" if option.default is inspect.Parameter.empty else f" = {option.default!r}"
        shown.append(f"{option.name}: {option.annotation}{default}")
    line = f"({', '.join(shown)})"
    return line if len(line) <= _LINE else "(\n" + "".join(f"    {option},\n" for option in shown) + ")"


def _variables(integration: IntegrationBase) -> list[str]:
    """List the environment variables of the second of two nodes' ranks, in an environment that is otherwise empty."""
    from ..values.topology import Peer, Rank

    peers = tuple(Peer(node=node, private_ip=f"10.0.0.{node + 1}") for node in range(2))
    rank = Rank(
        rank=1,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node=1,
        node_rank=1,
        nodes=2,
        head_addr=peers[0].private_ip,
        head_port=20000,
        local_addr=peers[1].private_ip,
        peers=peers,
        interface="eth0",
    )
    before = dict(os.environ)
    os.environ.clear()
    try:
        return sorted(integration.environment(rank))
    finally:
        os.environ.update(before)


def _version(package: str) -> str:
    return version_of(package.partition(">")[0].partition("=")[0].partition("[")[0].strip()) or "(not installed)"


# Showing ------------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this integration in full")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/integrations.md")


def run(arguments: argparse.Namespace) -> int:
    described = describe()
    if arguments.markdown:
        print(markdown(described), end="")
        return 0
    if arguments.name is None:
        width = max(len(d.name) for d in described)
        for one in described:
            print(f"{one.name:<{width}}  {one.summary}")
            print(f"{'':<{width}}  {one.installed}; pip install 'skyward[{one.extra}]'")
        return 0
    wanted = arguments.name.removeprefix("sky.integrations.").lower()
    for one in described:
        if one.name.lower() == wanted:
            print(_in_full(one))
            return 0
    from ..errors import UsageError

    names = ", ".join(description.name for description in described)
    raise UsageError(f"integrations: {arguments.name!r} does not exist; choose one of {names}")


def _in_full(one: Description) -> str:
    variables = f"\n\nEnvironment variables of a rank: {', '.join(one.variables)}." if one.variables else ""
    return (
        f"sky.integrations.{one.name}{one.signature}\n\n{one.doc}{variables}\n\n"
        f"Here: {one.installed}. pip install 'skyward[{one.extra}]'"
    )


def markdown(described: list[Description]) -> str:
    """Format the page docs/integrations.md. It is the same on every machine."""
    rows = [f"| [`{d.name}`](#{d.name.lower()}) | {d.summary} | `{d.extra}` |" for d in described]
    parts = [PAGE_HEAD, "\n".join(["| | | extra |", "|---|---|---|", *rows]) + "\n"]
    for one in described:
        parts.append(f"## {one.name}\n\n```text\nsky.integrations.{one.name}{one.signature}\n\n{one.doc}\n```\n")
        if one.variables:
            names = ", ".join(f"`{name}`" for name in one.variables)
            parts.append(f"Environment variables of a rank: {names}.\n")
    return "\n".join(parts)
