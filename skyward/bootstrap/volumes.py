"""Listing and removal of volumes on a machine, through anything that runs a shell command there."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ProviderError, UsageError
from ..values.volume import Volume
from .scripts import Runner, script

_LIMIT_S = 600.0
"""Longest time for counting or deleting the files of large volumes, in seconds."""


@dataclass(frozen=True, kw_only=True)
class StoredVolume:
    """Volume on a machine's disk: its name, or the URL of a store that is cached there.

    `used` is the day of its last use, or empty.
    """

    name: str
    folder: str
    size_gib: float
    used: str
    is_in_use: bool


def list_volumes(run: Runner) -> list[StoredVolume]:
    """Return this user's volumes and caches of object stores on a machine.

    Raises:
        ProviderError: The machine's shell does not answer, or lacks `flock`.
        Exception: Any error of `run`.
    """
    return [_stored(text) for kind, text in _asked(run, "list") if kind == "volume"]


def remove_volume(run: Runner, name: str) -> StoredVolume:
    """Delete a volume, or the cache of an object store, unless a pool uses it. Returns what it was.

    Raises:
        UsageError: There is no volume of that name, or a pool uses it.
        ProviderError: The files cannot be deleted, or the machine's shell does not answer.
        Exception: Any error of `run`.
    """
    Volume(name)
    for kind, text in _asked(run, "remove", name):
        if kind == "removed":
            return _stored(text)
        if kind == "missing":
            raise UsageError(f"volume={name!r}: there is no such volume; see `skyward volume list`", field="name")
        if kind == "used":
            raise UsageError(f"volume={name!r}: a pool uses it; close that pool first", field="name")
    raise ProviderError(f"volume={name!r}: its files cannot be deleted; check who owns them")


def _asked(run: Runner, action: str, name: str = "") -> list[tuple[str, str]]:
    order = script(("node.sh", "volumes.sh"), {"action": action, "name": name})
    done = run("exec sh -s", input=order, timeout_s=_LIMIT_S)
    facts = [line[1:].partition(" ") for line in done.text.splitlines() if line.startswith("\1")]
    answers = [(kind, text) for kind, _, text in facts]
    refusal = next((text for kind, text in answers if kind == "refused"), None)
    if refusal is not None:
        raise ProviderError(f"volumes: {refusal}")  # words: ok, volumes.sh says what to do
    if ("end", "ok") not in answers:
        raise ProviderError(
            f"volumes: the shell exited with code {done.code} ({done.error_text}); log in there, and run `sh -c true`"
        )
    return answers


def _stored(text: str) -> StoredVolume:
    size, used, state, name, folder = text.split(" ", 4)
    return StoredVolume(
        name=name,
        folder=folder,
        size_gib=int(size) / 2**20,
        used="" if used == "-" else used,
        is_in_use=state == "used",
    )
