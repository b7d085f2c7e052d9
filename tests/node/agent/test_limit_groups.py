"""Control groups of calls: where they can be made, and that none is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from skyward.core.cgroups import ControlGroup, groups_of
from skyward.node.agent.limit_groups import Enforcement, GroupPlace, LimitGroups, find_enforcement, remove_groups
from tests.waiting import until


def make(folder: Path, **files: str) -> Path:
    """Make a folder that stands in for a group of version 2. The names of its files have a dot for each `_`."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"cgroup_controllers": "cpu memory pids", "cgroup_subtree_control": "", "cgroup_procs": "", **files}
    for name, text in given.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")
    return folder


def group_of(folder: Path, top: Path) -> ControlGroup:
    return ControlGroup(version=2, folder=str(folder), top=str(top))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return make(tmp_path / "fs", cgroup_procs="1", cgroup_subtree_control="cpu memory")


def test_in_version_2_groups_are_made_beside_the_own_one(top: Path) -> None:
    delegated = make(top / "delegated", cgroup_type="domain")
    own = make(delegated / "own", cgroup_type="domain", cgroup_procs="7", memory_max="max", cpu_max="max 100000")
    found = find_enforcement([group_of(own, top)])
    assert [place.folder for place in found.places] == [str(delegated)]
    assert found.options == ("cpus", "memory_gib")
    assert str(found) == "cpus and memory_gib, by control groups of version 2"


def test_a_group_that_has_limits_is_not_left(top: Path) -> None:
    own = make(top / "own", cgroup_type="domain", cgroup_procs="7", memory_max="1073741824")
    found = find_enforcement([group_of(own, top)])
    assert found.options == ()
    assert str(found).startswith("cpus and memory_gib not enforced: ")


def test_the_top_of_the_hierarchy_may_have_processes_but_that_of_a_container_may_not(top: Path) -> None:
    assert find_enforcement([group_of(top, top)]).options == ("cpus", "memory_gib")
    make(top, cgroup_type="domain", cgroup_procs="1", cgroup_subtree_control="")
    assert find_enforcement([group_of(top, top)]).options == ()


def test_without_control_groups_nothing_is_enforced() -> None:
    found = find_enforcement([])
    assert found.places == ()
    assert str(found) == "cpus and memory_gib not enforced: this system has no control groups"


def test_version_1_beside_version_2_without_controllers_counts(top: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory = ControlGroup(
        version=1, folder=str(tmp_path / "memory"), top=str(tmp_path / "memory"), controllers=frozenset(["memory"])
    )
    unified = make(top / "unified", cgroup_controllers="hugetlb")
    found = find_enforcement([group_of(unified, top), memory])
    assert found.options == ("memory_gib",)
    assert str(found).startswith("memory_gib, by control groups of version 1; cpus not enforced: ")


def test_the_files_of_version_2_are_written(top: Path) -> None:
    place = GroupPlace(version=2, folder=str(make(top / "place")), controllers=("cpu", "memory"))
    groups = LimitGroups("/nodes/a-node", Enforcement(places=(place,)))
    group = groups.join(cpus=2, memory_gib=1)
    assert group is not None
    folder = Path(group.entries[0]).parent
    assert (top / "place/cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (folder / "cpu.max").read_text() == "200000 100000"
    assert (folder / "memory.max").read_text() == str(2**30)
    assert group.exceeded_gib() is None
    (folder / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert group.exceeded_gib() == 1
    assert groups.join(cpus=None, memory_gib=None) is None


def test_a_group_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = GroupPlace(version=1, folder=str(tmp_path / "file"), controllers=("cpu",))
    with pytest.raises(NotADirectoryError):
        LimitGroups("/nodes/a-node", Enforcement(places=(place,))).join(cpus=1, memory_gib=None)


# With the kernel's own groups -----------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2])
def real(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Enforcement]]:
    """Make a group of the kernel in each version, whatever its controllers are here."""
    version: Literal[1, 2] = request.param
    found = next((group for group in groups_of() if group.version == version), None)
    if found is None:
        pytest.skip(f"no control groups of version {version} here")
    folder = Path(found.folder) / f"skyward-test-{os.getpid()}"
    folder.mkdir()
    yield folder, Enforcement(places=(GroupPlace(version=version, folder=str(folder), controllers=()),))
    remove_below(folder)


def remove_below(folder: Path) -> None:
    for below in [path for path in folder.iterdir() if path.is_dir()]:
        remove_below(below)
    folder.rmdir()


def enter(folder: Path) -> subprocess.Popen[bytes]:
    words = f'echo 0 > "{folder}/cgroup.procs" && echo in && exec sleep 100'
    process = subprocess.Popen(["sh", "-c", words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    return process


def ended(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


@pytest.mark.root
def test_groups_of_dead_nodes_are_removed_and_those_with_processes_stay(real: tuple[Path, Enforcement]) -> None:
    folder, enforcement = real
    for name in ("dead", "busy"):
        (folder / f"skyward.{2**22 + 1}.1.{name}" / "1").mkdir(parents=True)
    process = enter(folder / f"skyward.{2**22 + 1}.1.busy" / "1")
    try:
        place = enforcement.places[0]
        wanted = Enforcement(places=(GroupPlace(version=1, folder=place.folder, controllers=("none",)),))
        assert LimitGroups("/nodes/other", wanted).join(cpus=1, memory_gib=None) is None
        left = sorted(path.name.split(".")[-1] for path in folder.glob("skyward.*"))
        assert left == ["busy"]
    finally:
        ended(process)


@pytest.mark.root
def test_the_removal_of_a_node_removes_its_groups(tmp_path: Path) -> None:
    groups = [group for group in groups_of() if "memory" in group.controllers or group.version == 2]
    made = [Path(group.folder) / f"skyward.1.1.{tmp_path.name}" / "3" for group in groups]
    for path in made:
        path.mkdir(parents=True)
    remove_groups(str(tmp_path / "of-another"))
    assert all(path.is_dir() for path in made)
    process = enter(made[0])
    ended(process)
    remove_groups(str(tmp_path))
    until(lambda: not any(path.parent.exists() for path in made))
