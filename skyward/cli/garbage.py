"""`skyward gc`: remove the remains of dead pools, on this machine and at providers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

HELP = "clean up after dead pools; terminate their machines"

DESCRIPTION = """\
Cleans up after pools that could not close themselves. On this machine, it removes their processes, sockets and
spooled results. At providers, it finds the machines that they rented by their tags, and terminates them. It checks the
accounts on record here, and those that skyward.toml or --provider name. Open pools, detached pools that go on, and
pools of other machines are left alone. A pool cleans up after itself even when its program is killed, so expect to
find nothing.
"""

EPILOG = """\
examples:
  skyward gc
  skyward gc --dry-run
  skyward gc --provider aws        also check an account that is not on record here
  skyward gc --cache               remove cached environments, here and on your SSH hosts
  skyward gc --cache --host gpu1   also on a host that is not in skyward.toml

exit status: 0 everything is gone (--dry-run: no failure), 1 something might remain and is named
from Python: skyward.providers.local.collect_garbage() and skyward.providers.reaper.gc()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provider", action="append", default=[], metavar="NAME", help="look there too; aws: its default region"
    )
    parser.add_argument("--local", action="store_true", help="only this machine; asks no provider")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    parser.add_argument(
        "--cache",
        action="store_true",
        help="remove only the caches that this machine and SSH hosts keep for the next pool",
    )
    parser.add_argument(
        "--host", action="append", default=[], metavar="HOST", help="with --cache: also on this host; repeatable"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.cache:
        if arguments.dry_run or arguments.local:
            arguments.parser.error(
                "--cache: cannot be combined with --dry-run or --local; use it with --provider and --host"
            )
        return _clear_caches(arguments.provider, arguments.host)
    if arguments.host:
        arguments.parser.error(
            "--host: needs --cache, because pools leave nothing but caches on your hosts; add --cache"
        )
    from ..providers.local import collect_garbage
    from .screen import complain

    lines: list[str] = []
    failures: list[Any] = []
    was_asked = False
    if not arguments.local:  # first, because rented machines cost money
        was_asked, ended, failures = _rented(arguments)
        lines += [f"{'would end' if arguments.dry_run else 'ended'} machine {name}" for name in ended]
    removed = collect_garbage(is_dry_run=arguments.dry_run)
    lines += [f"{'would remove' if arguments.dry_run else 'removed'} {path}" for path in removed]
    if lines:
        print("\n".join(lines))
    elif not failures:
        print(
            "nothing to clean up on this machine"
            + (", and no machine is rented for it" if was_asked else " (no provider was checked)")
        )
    for failure in failures:
        complain(failure)
    return 1 if failures else 0


def _rented(arguments: argparse.Namespace) -> tuple[bool, list[str], list[Any]]:
    """Clean up at providers. Return whether there were any, the names of (to be) terminated machines, and failures."""
    from ..pool.config import rented_providers
    from ..pool.fleet import goes_on
    from ..state.journal import journals

    providers, wrong = rented_providers(arguments.provider)
    if not providers and not journals():
        return False, [], wrong
    from ..providers import reaper

    if arguments.dry_run:
        machines, failures = reaper.ls(providers)
        orphans = [one for one in machines if one.owner == "dead" and not goes_on(one.pool)]
        return True, [f"{one.instance.id} of pool {one.pool}" for one in orphans], [*wrong, *failures]
    ended, failures = reaper.gc(providers, goes_on=goes_on)
    return True, ended, [*wrong, *failures]


def _clear_caches(providers: Iterable[str], hosts: list[str]) -> int:
    """Remove the caches on this machine, on `hosts` and on the hosts of SSH providers; print what was removed.

    The SSH providers are those that `providers` names and those in skyward.toml.

    Returns:
        Exit status: 1 where a host could not be cleared.
    """
    from ..pool.config import mentioned_providers
    from ..providers.ssh import SSH
    from .screen import complain

    outcomes: dict[str, Any] = {"this machine": _here()}
    named = [SSH(hosts=hosts)] if hosts else []
    mentioned, wrong = mentioned_providers(providers)
    for provider in [*named, *mentioned]:
        if isinstance(provider, SSH):
            outcomes |= provider.clear_caches()
    for error in wrong:
        complain(error)
    failed = bool(wrong)
    for host, cleared in outcomes.items():
        if isinstance(cleared, Exception):
            failed = True
            complain(cleared)
            continue
        in_use = f"; {len(cleared.kept)} in use or just used, kept" if cleared.kept else ""
        print(f"{host}: {cleared.freed_gib:.2f} GiB removed{in_use}")
    return 1 if failed else 0


def _here() -> object:
    from ..bootstrap.scripts import clear_cache
    from ..ssh.command import run_process

    return clear_cache(lambda command, **options: run_process(["sh", "-c", command], **options))
