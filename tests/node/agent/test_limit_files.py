"""Limits of a control group as the text of the kernel's files."""

from __future__ import annotations

from typing import Literal

import pytest

from skyward.node.agent.limit_files import WANTED, enforced, kills, room, settings


def files(version: Literal[1, 2], *, cpus: float | None = None, memory_gib: float | None = None) -> dict[str, str]:
    return {file: text for file, text, _ in settings(version, WANTED, cpus=cpus, memory_gib=memory_gib)}


def test_version_2_has_one_file_for_the_processors_and_no_swap() -> None:
    assert files(2, cpus=1.5, memory_gib=0.5) == {
        "cpu.max": "150000 100000",
        "memory.max": str(2**29),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
    }


def test_version_1_has_a_period_and_a_quota_and_counts_swap_with_memory() -> None:
    assert files(1, cpus=2, memory_gib=0.5) == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "200000",
        "memory.limit_in_bytes": str(2**29),
        "memory.memsw.limit_in_bytes": str(2**29),
    }


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_that_is_not_asked_for_is_not_written(version: Literal[1, 2]) -> None:
    assert files(version) == {}
    assert all(name.startswith("cpu") for name in files(version, cpus=1))
    assert list(settings(version, ("memory",), cpus=1, memory_gib=None)) == []


def test_the_least_quota_is_the_one_that_the_kernel_accepts() -> None:
    assert files(2, cpus=0.001)["cpu.max"] == "1000 100000"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 1\n", 1),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        ("oom_kill_disable 0\nunder_oom 0\n", 0),
        ("", 0),
    ],
    ids=["version 2", "version 1", "an old kernel", "an empty file"],
)
def test_kills_are_counted(text: str, count: int) -> None:
    assert kills(text) == count


def test_values_that_have_left_the_process_are_added_to_its_memory() -> None:
    stat = f"cache 7\nrss 8\nshmem {2**28}\nmapped_file 9\n"
    version_1 = [(file, text) for file, text, _ in room(1, WANTED, memory_gib=0.5, stat=stat)]
    both = [("memory.limit_in_bytes", str(3 * 2**28)), ("memory.memsw.limit_in_bytes", str(3 * 2**28))]
    assert version_1 == [*both, both[0]]
    assert ("memory.max", str(2**29)) in [(file, text) for file, text, _ in room(2, WANTED, memory_gib=0.5, stat="")]


def test_controllers_enforce_the_options_of_calls() -> None:
    assert enforced(["memory", "cpu", "pids"]) == ("cpus", "memory_gib")
    assert enforced([]) == ()
