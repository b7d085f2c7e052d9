"""`skyward volume`: list and remove the volumes on this machine or on SSH hosts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

HELP = "list and remove volumes, the folders that outlive pools"

DESCRIPTION = """\
Shows and removes the volumes that your pools keep on this machine, or on your SSH hosts. A volume on a rented
machine ends with the machine.
"""

EPILOG = """\
examples:
  skyward volume list
  skyward volume list --host gpu1 --host me@gpu2
  skyward volume remove cache --host gpu1

exit status: 0 done, 1 a volume was not removed, or a machine did not answer
from Python: skyward.bootstrap.volumes.list_volumes() and remove_volume()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, run, text, epilog in (
        ("list", _list, "list volumes", "example: skyward volume list --host gpu1"),
        (
            "remove",
            _remove,
            "delete a volume with its files, or a cache",
            "example: skyward volume remove cache",
        ),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".", epilog=epilog)
        if run is _remove:
            action.add_argument("name", metavar="NAME", help="name of the volume, or URL of the store")
        action.add_argument(
            "--host",
            action="append",
            default=[],
            metavar="HOST",
            help="on this SSH host instead of this machine; repeatable",
        )
        action.set_defaults(run=run, parser=action)


def _list(arguments: argparse.Namespace) -> int:
    from ..bootstrap.volumes import list_volumes

    def show(machine: str, run: Any) -> None:
        volumes = list_volumes(run)
        if not volumes:
            print(f"{machine}: no volumes")
        for volume in volumes:
            use = "in use" if volume.is_in_use else f"last used {volume.used}" if volume.used else "never used"
            print(f"{machine}: {volume.name:20} {volume.size_gib:8.2f} GiB  {use:20} {volume.folder}")

    return _each(arguments.host, show)


def _remove(arguments: argparse.Namespace) -> int:
    from ..bootstrap.volumes import remove_volume

    def remove(machine: str, run: Any) -> None:
        volume = remove_volume(run, arguments.name)
        print(f"{machine}: removed {volume.folder} ({volume.size_gib:.2f} GiB)")

    return _each(arguments.host, remove)


def _each(hosts: list[str], action: Callable[[str, Any], None]) -> int:
    """Run an action on this machine, or on each host. Return the exit status."""
    from ..errors import SkywardError
    from .screen import complain

    failed = False
    for machine, connected in _machines(hosts):
        try:
            with connected as run:
                action(machine, run)
        except SkywardError as error:
            failed = True
            complain(error, of=machine)
    return 1 if failed else 0


def _machines(hosts: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield each machine with a context manager of the function that runs commands there."""
    if not hosts:
        from ..ssh.command import run_process

        yield (
            "this machine",
            contextlib.nullcontext(
                lambda command, **options: run_process(["sh", "-c", command], **options),
            ),
        )
        return
    from ..providers.ssh import SSH

    for target in SSH(hosts=hosts).targets:
        yield str(target), _connected(target)


@contextlib.contextmanager
def _connected(target: Any) -> Iterator[Any]:
    from ..ssh import connect

    with contextlib.closing(connect(target, transport=None)) as connection:
        yield connection.run
