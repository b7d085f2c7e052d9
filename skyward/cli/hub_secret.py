"""`skyward hub secret`: secrets of projects on this machine, for the jobs that its launcher starts."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .layout import add_command

if TYPE_CHECKING:
    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = "set, list and remove secrets of jobs on this machine"


def add_secrets(actions: _Actions) -> None:
    """Add the actions. They need no hub: a secret never leaves the machine of its launcher."""
    own = actions.add_parser(
        "secret",
        help=_TEXT,
        description=f"{_TEXT[0].upper()}{_TEXT[1:]}. Run it where `skyward hub up` or `skyward hub launcher` runs.",
        epilog="example: skyward hub secret set HF_TOKEN < token.txt\nfrom Python: none, write the files by a tool",
    )
    own.set_defaults(run=None, parser=own)
    group = own.add_subparsers(title="actions", metavar="ACTION")
    put = add_command(
        group, "set", "write a secret, read from the terminal or standard input", "hub secret set HF_TOKEN"
    )
    listing = add_command(group, "list", "list the names of a project's secrets", "hub secret list")
    remove = add_command(group, "remove", "remove a secret", "hub secret remove HF_TOKEN")
    for parser, run in ((put, _set), (listing, _list), (remove, _remove)):
        if parser is not listing:
            parser.add_argument("name", help="name of the variable that jobs get")
        parser.add_argument("--project", default="default", metavar="NAME", help="its project (default: default)")
        parser.add_argument("--data", metavar="DIR", help="folder of the hub or launcher (default: that of `hub up`)")
        parser.set_defaults(run=run)


def _folder(arguments: argparse.Namespace) -> Path:
    from ..hub.http.settings import data_folder
    from ..hub.store.secret_files import FOLDER

    data = Path(arguments.data).absolute() if arguments.data else data_folder()
    return data / "launcher" / FOLDER


def _set(arguments: argparse.Namespace) -> int:
    from ..hub.store.secret_files import write_secret

    # Not an argument: other users of the machine see those, and the shell keeps them.
    value = getpass.getpass(f"{arguments.name}: ") if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    write_secret(_folder(arguments), arguments.project, arguments.name, value)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from ..hub.store.secret_files import secret_names

    print("\n".join(secret_names(_folder(arguments), arguments.project)))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from ..hub.store.secret_files import remove_secret

    remove_secret(_folder(arguments), arguments.project, arguments.name)
    return 0
