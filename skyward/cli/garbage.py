"""`skyward gc`: remove what dead pools left, on this machine and rented."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["add_options", "run"]

HELP = "remove what dead pools left, end what they rented"

DESCRIPTION = """\
Removes what pools of yours left when they could not close themselves: on this machine processes, sockets, spooled
results; in the accounts that this machine has records of, or that skyward.toml or --provider name, the machines that
they rented, found by their tags. A pool that is open is not touched, nor are the machines of another machine's pools.
A pool cleans up after itself, even when its program was killed: expect to find nothing.
"""

EPILOG = """\
examples:
  skyward gc
  skyward gc --dry-run
  skyward gc --provider aws        an account that no record here names
  skyward gc --cache               environments that pools keep on your hosts for the next pool
  skyward gc --cache --host gpu1   on a host that skyward.toml does not name

exit status: 0 nothing is left (--dry-run: nothing went wrong), 1 something may be; it is named
from Python: skyward.providers.local.collect_garbage() and skyward.providers.reaper.gc()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provider", action="append", default=[], metavar="NAME", help="look there too; aws: its default region"
    )
    parser.add_argument("--local", action="store_true", help="only this machine; asks no provider")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    parser.add_argument(
        "--cache", action="store_true", help="only what this machine and SSH hosts keep for the next pool"
    )
    parser.add_argument("--host", action="append", default=[], metavar="HOST", help="with --cache: there too")


def run(arguments: argparse.Namespace) -> int:
    if arguments.cache:
        if arguments.dry_run or arguments.local:
            arguments.parser.error("--cache goes with --provider and --host only")
        return _clear_caches(arguments.provider, arguments.host)
    if arguments.host:
        arguments.parser.error("--host goes with --cache: pools on hosts of yours leave nothing else there")
    from ..providers.local import collect_garbage

    lines: list[str] = []
    failures: list[Any] = []
    was_asked = False
    if not arguments.local:  # first what costs money
        was_asked, ended, failures = _rented(arguments)
        lines += [f"{'would end' if arguments.dry_run else 'ended'} machine {name}" for name in ended]
    removed = collect_garbage(is_dry_run=arguments.dry_run)
    lines += [f"{'would remove' if arguments.dry_run else 'removed'} {path}" for path in removed]
    if lines:
        print("\n".join(lines))
    elif not failures:
        print(
            "nothing of ours is left on this machine"
            + (", and nothing is rented for it" if was_asked else " (no provider was asked)")
        )
    for failure in failures:
        print(f"skyward: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _rented(arguments: argparse.Namespace) -> tuple[bool, list[str], list[Any]]:
    """Whether there is a provider to ask; what was ended, or would be; what went wrong."""
    from ..pool.config import rented_providers
    from ..state.journal import journals

    providers, wrong = rented_providers(arguments.provider)
    if not providers and not journals():
        return False, [], wrong
    from ..providers import reaper

    if arguments.dry_run:
        machines, failures = reaper.ls(providers)
        orphans = [one for one in machines if one.owner == "dead"]
        return True, [f"{one.instance.id} of pool {one.pool}" for one in orphans], [*wrong, *failures]
    ended, failures = reaper.gc(providers)
    return True, ended, [*wrong, *failures]


def _clear_caches(providers: Iterable[str], hosts: list[str]) -> int:
    """Remove what pools keep for the next pool.

    That is on this machine, on `hosts`, and on the hosts of the SSH providers that skyward.toml mentions or that are
    named.

    Prints what was removed. Returns the exit status: 1 where a host could not be cleared.
    """
    from ..pool.config import mentioned_providers
    from ..providers.ssh import SSH

    outcomes: dict[str, Any] = {"this machine": _here()}
    named = [SSH(hosts=hosts)] if hosts else []
    mentioned, wrong = mentioned_providers(providers)
    for provider in [*named, *mentioned]:
        if isinstance(provider, SSH):
            outcomes |= provider.clear_caches()
    for error in wrong:
        print(f"skyward: {error}", file=sys.stderr)
    failed = bool(wrong)
    for host, cleared in outcomes.items():
        if isinstance(cleared, Exception):
            failed = True
            print(f"skyward: {cleared}", file=sys.stderr)
            continue
        in_use = f"; {len(cleared.kept)} in use or just used, kept" if cleared.kept else ""
        print(f"{host}: {cleared.freed_gib:.2f} GiB removed{in_use}")
    return 1 if failed else 0


def _here() -> object:
    from ..bootstrap.scripts import clear_cache
    from ..ssh.command import run_process

    return clear_cache(lambda command, **options: run_process(["sh", "-c", command], **options))
