"""A subcommand with commands of its own, as `skyward train` has: without one of them it shows its help."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_group"]


def add_group(
    subcommands: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    summary: str,
    description: str,
    epilog: str,
    members: str,
) -> _SubParsersAction[argparse.ArgumentParser]:
    """Adds `skyward <name>`, and gives what its own commands are added to.

    summary: the line about it in `skyward --help`. members: what its own help calls them, such as "actions".
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = subcommands.add_parser(name, help=summary, description=description, epilog=epilog, formatter_class=layout)

    def show(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show)
    return parser.add_subparsers(title=members, metavar=members.removesuffix("s").upper())
