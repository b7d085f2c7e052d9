"""`skyward gc --cache`: remove what pools keep on machines for the next pool."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["clear"]


def clear(providers: Iterable[str], hosts: list[str]) -> int:
    """On this machine, on the hosts of the SSH providers that the files mention or that are named, and on `hosts`.

    Prints what was removed. Returns the exit status: 1 where a host could not be cleared.
    """
    from ..pool.config import mentioned_providers
    from ..providers.ssh import SSH

    told: dict[str, Any] = {"this machine": _here()}
    named = [SSH(hosts=hosts)] if hosts else []
    mentioned, wrong = mentioned_providers(providers)
    for provider in [*named, *mentioned]:
        if isinstance(provider, SSH):
            told |= provider.clear_caches()
    for error in wrong:
        print(f"skyward: {error}", file=sys.stderr)
    failed = bool(wrong)
    for host, cleared in told.items():
        if isinstance(cleared, Exception):
            failed = True
            print(f"skyward: {cleared}", file=sys.stderr)
            continue
        in_use = f"; {len(cleared.kept)} in use or just used, kept" if cleared.kept else ""
        print(f"{host}: {cleared.freed_gib:.2f} GiB removed{in_use}")
    return 1 if failed else 0


def _here() -> object:
    from ..bootstrap.cache import clear_cache
    from ..ssh.command import run_process

    return clear_cache(lambda command, **options: run_process(["sh", "-c", command], **options))
