"""Control groups in which calls with `cpus=` or `memory_gib=` run, so that the kernel enforces these numbers.

A node makes its groups below one folder of its own in each hierarchy, named `skyward.PID.START.NODE`. In version 1 that
is below the agent's own group. In version 2 a group with processes can have no such groups below it, so it is below the
nearest ancestor without processes that this user may write to. The agent leaves no group that has limits itself, so
limits of a container or a systemd unit hold for calls, too.

The agent removes a group when its process is gone. The removal of the node's folder includes the rest, by
`remove_groups`. The next node on the machine removes those of nodes whose processes all died at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from ...core.cgroups import ControlGroup, groups_of
from ...core.process import start_time
from ...core.records import dataclass
from .limit_files import WANTED, enforced, kills, kills_file, room, settings

_PROCESSES = "cgroup.procs"
_BELOW = "cgroup.subtree_control"
_PREFIX = "skyward"
_REMOVE_LIMIT_S = 1.0
"""Seconds for killed processes to leave their groups."""


@dataclass(frozen=True, kw_only=True)
class GroupPlace:
    """Folder of a hierarchy below which this process may make groups with these controllers."""

    version: Literal[1, 2]
    folder: str
    controllers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Enforcement:
    """Places for groups. `why_not` says in words why there is none for some of the numbers."""

    places: tuple[GroupPlace, ...] = ()
    why_not: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of calls that the kernel enforces here: of "cpus" and "memory_gib"."""
        return enforced([name for place in self.places for name in place.controllers])

    def __str__(self) -> str:
        versions = " and ".join(f"version {version}" for version in sorted({place.version for place in self.places}))
        words = f"{' and '.join(self.options)}, by control groups of {versions}" if self.places else ""
        return "; ".join(part for part in (words, self.why_not) if part)


def find_enforcement(groups: Sequence[ControlGroup] | None = None) -> Enforcement:
    """Look for the places where this process may make groups. It changes nothing.

    Args:
        groups: Groups of this process; None: ask the system.
    """
    known = groups_of() if groups is None else groups
    places: list[GroupPlace] = []
    for group in known:
        taken = {name for place in places for name in place.controllers}
        place = _place_in(group, [name for name in WANTED if name not in taken])
        if place is not None:
            places.append(place)
    missing = set(enforced(WANTED)).difference(Enforcement(places=tuple(places)).options)
    return Enforcement(places=tuple(places), why_not=_why_not(sorted(missing), known))


def _why_not(missing: Sequence[str], groups: Sequence[ControlGroup]) -> str:
    if not missing:
        return ""
    names = " and ".join(missing)
    if not groups:
        return f"{names} not enforced: this system has no control groups"
    if os.geteuid() == 0:
        return f"{names} not enforced: the control groups here are read-only or have limits of their own (a container?)"
    advice = "run as root, or by `systemd-run --user --scope`"
    return f"{names} not enforced: this user may not make control groups here; {advice}"


def _place_in(group: ControlGroup, wanted: Sequence[str]) -> GroupPlace | None:
    if group.version == 1:
        controllers = tuple(name for name in wanted if name in group.controllers)
        is_open = bool(controllers) and os.access(group.folder, os.W_OK)
        return GroupPlace(version=1, folder=group.folder, controllers=controllers) if is_open else None
    for folder in group.upwards():
        controllers = tuple(name for name in wanted if name in _words(folder, "cgroup.controllers"))
        if not controllers:
            return None
        if _may_use(folder, controllers):
            return GroupPlace(version=2, folder=folder, controllers=controllers)
        if _is_limited(folder):
            return None
    return None


def _may_use(folder: str, controllers: Sequence[str]) -> bool:
    """Return whether this process may make groups there, enter them, and give them these controllers."""
    if not all(os.access(os.path.join(folder, name), os.W_OK) for name in (".", _PROCESSES)):
        return False
    if set(controllers) <= set(_words(folder, _BELOW)):
        return True
    is_root = not os.path.exists(os.path.join(folder, "cgroup.type"))
    return os.access(os.path.join(folder, _BELOW), os.W_OK) and (is_root or not _words(folder, _PROCESSES))


def _is_limited(folder: str) -> bool:
    limits = (_words(folder, "cpu.max"), _words(folder, "memory.max"))
    return any(words and words[0] != "max" for words in limits)


def _words(folder: str, name: str) -> list[str]:
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read().split()
    except OSError:  # this group has no such file
        return []


# Groups of a node -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class LimitGroup:
    """Control group of one process, or of the ranks of a gang, in each hierarchy."""

    folders: tuple[tuple[GroupPlace, str], ...]
    memory_gib: float | None
    users: int = 0
    """Processes that were ordered and have not ended."""

    @property
    def entries(self) -> tuple[str, ...]:
        """Files to which a process writes 0 to enter."""
        return tuple(os.path.join(folder, _PROCESSES) for _, folder in self.folders)

    @property
    def options(self) -> tuple[str, ...]:
        """Options of calls that are enforced, as in `Enforcement`."""
        return enforced([name for place, _ in self.folders for name in place.controllers])

    def make_room(self) -> None:
        """Let the next call have all of its memory, although values of earlier ones still count for the group."""
        for place, folder in self.folders:
            if self.memory_gib is None or "memory" not in place.controllers:
                continue
            with contextlib.suppress(OSError), open(os.path.join(folder, "memory.stat")) as file:
                for setting in room(place.version, place.controllers, memory_gib=self.memory_gib, stat=file.read()):
                    # EBUSY: it uses more than that now; the next value tries again.
                    with contextlib.suppress(OSError):
                        _write(folder, setting.file, setting.text)

    def exceeded_gib(self) -> float | None:
        """Return the memory limit if the kernel has killed a process at it, else None."""
        for place, folder in self.folders:
            if self.memory_gib is not None and "memory" in place.controllers:
                with contextlib.suppress(OSError), open(os.path.join(folder, kills_file(place.version))) as file:
                    if kills(file.read()):
                        return self.memory_gib
        return None


class LimitGroups:
    """Groups of one node. Only the agent's thread uses it; no method waits.

    Args:
        folder: Folder of the node.
        enforcement: Places for groups.
    """

    def __init__(self, folder: str, enforcement: Enforcement) -> None:
        pid = os.getpid()
        self._name = f"{_PREFIX}.{pid}.{start_time(pid)}.{os.path.basename(folder)}"
        self._enforcement = enforcement
        self._shared: dict[str, LimitGroup] = {}
        self._made = 0
        self._left: list[str] = []
        """Folders of groups whose process is gone, but not what it started."""

    def join(self, *, cpus: float | None, memory_gib: float | None, shared_as: str = "") -> LimitGroup | None:
        """Return a group with these limits for one more process; None without limits, or where none can be had.

        Args:
            cpus: Processors; None for no limit.
            memory_gib: Memory; None for no limit.
            shared_as: Name of a group that processes share; empty for one of its own.

        Raises:
            OSError: The kernel refused the group. None is left.
        """
        if cpus is None and memory_gib is None:
            return None
        group = self._shared.get(shared_as) if shared_as else None
        if group is None:
            if not self._made:
                for place in self._enforcement.places:
                    _remove_ended(place.folder)
            self._made += 1
            group = self._make(str(self._made), cpus, memory_gib)
            if group is None:
                return None
            if shared_as:
                self._shared[shared_as] = group
        group.users += 1
        return group

    def _make(self, name: str, cpus: float | None, memory_gib: float | None) -> LimitGroup | None:
        folders: list[tuple[GroupPlace, str]] = []
        try:
            for place in self._enforcement.places:
                limits = list(settings(place.version, place.controllers, cpus=cpus, memory_gib=memory_gib))
                if not limits:
                    continue
                parent = os.path.join(place.folder, self._name)
                os.makedirs(parent, exist_ok=True)
                if place.version == 2:
                    for folder in (place.folder, parent):
                        _enable(folder, place.controllers)
                folder = os.path.join(parent, name)
                os.mkdir(folder)
                folders.append((place, folder))
                for setting in limits:
                    _write(folder, setting.file, setting.text, is_optional=setting.is_optional)
        except OSError:
            for _, folder in folders:
                with contextlib.suppress(OSError):  # the first error says more
                    os.rmdir(folder)
            raise
        return LimitGroup(folders=tuple(folders), memory_gib=memory_gib) if folders else None

    def leave(self, group: LimitGroup) -> None:
        """Forget one process of a group, which is gone, and remove the group after the last."""
        group.users -= 1
        if not group.users:
            self._shared = {name: other for name, other in self._shared.items() if other is not group}
            self._left += [folder for _, folder in group.folders]
        self._left = [folder for folder in self._left if not _removed(folder)]


def _enable(folder: str, controllers: Iterable[str]) -> None:
    missing = set(controllers).difference(_words(folder, _BELOW))
    if missing:
        _write(folder, _BELOW, " ".join(f"+{name}" for name in sorted(missing)))


def _write(folder: str, name: str, text: str, *, is_optional: bool = False) -> None:
    try:
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    except OSError as error:
        # Version 1 refuses more processors than an ancestor has. Then that one's limit holds for the group, too.
        is_wider = error.errno == errno.EINVAL and name == "cpu.cfs_quota_us"
        if not is_wider and not (is_optional and isinstance(error, FileNotFoundError | PermissionError)):
            raise


# The end --------------------------------------------------------------------------------------------------------------


def remove_groups(folder: str) -> None:
    """Remove the groups of a node whose processes are gone. Idempotent.

    Args:
        folder: Folder of the node.
    """
    node = os.path.basename(folder)
    left = [path for path, _, owner in _groups_of_nodes(_all_folders()) if owner == node]
    deadline = time.monotonic() + _REMOVE_LIMIT_S
    while left and time.monotonic() < deadline:
        left = [path for path in left if not _tree_removed(path)]
        if left:
            time.sleep(0.005)  # dead processes leave their groups a moment later


def _all_folders() -> list[str]:
    groups = [group for group in groups_of() if group.version == 2 or group.controllers.intersection(WANTED)]
    return [folder for group in groups for folder in group.upwards()]


def _remove_ended(folder: str) -> None:
    """Remove the groups of nodes whose processes all died at once. The kernel keeps those that have processes."""
    for path, is_alive, _ in list(_groups_of_nodes([folder])):
        if not is_alive:
            _tree_removed(path)


def _groups_of_nodes(folders: Iterable[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield the path of each node's groups, whether its agent lives, and the name of the node."""
    for folder in folders:
        for name in _names(folder):
            parts = name.split(".", 3)
            if len(parts) == 4 and parts[0] == _PREFIX and parts[1].isdecimal():
                yield os.path.join(folder, name), start_time(int(parts[1])) == parts[2], parts[3]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # gone meanwhile, or not readable
        return []


def _tree_removed(path: str) -> bool:
    for name in _names(path):
        if os.path.isdir(os.path.join(path, name)):
            _removed(os.path.join(path, name))
    return _removed(path)


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:  # it has processes
        return False
    return True
