"""Limits of calls on SSH hosts, enforced by control groups."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.core.cgroups import groups_of
from skyward.node.agent.limit_groups import find_enforcement
from tests.providers.conftest import Hosts
from tests.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", autouse=True)
def enforcement() -> None:
    found = find_enforcement()
    if found.options != ("cpus", "memory_gib"):
        pytest.skip(f"no control groups can be made here: {found}")


def groups_of_node(node: str) -> list[Path]:
    places = {above for group in groups_of() for above in (Path(group.folder), Path(group.folder).parent)}
    return [path for place in places for path in place.glob(f"skyward.*.*.{node}")]


Where = tuple[str, tuple[str, ...], int, int, int]


def where() -> Callable[[], Where]:
    """Return a function that travels by value.

    It returns the name of the node's folder, the enforced options, and its agent, watchdog and standby.
    """

    def here() -> Where:
        def parent(pid: int) -> int:
            with open(f"/proc/{pid}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        info = sky.instance_info()
        agent = parent(os.getppid())  # the zygote's
        with open("/proc/self/cgroup") as file:
            node = file.read().partition("/skyward.")[2].split("/")[0].split(".", 2)[2]
        return node, info.enforced if info else (), agent, parent(agent), parent(parent(agent))

    return here


def test_a_host_enforces_limits_and_keeps_no_group(sshds: Hosts) -> None:
    with sky.ComputePool(sshds.ssh("host0"), logs=False) as pool:
        node, enforced, *_ = sky.compute(where()).with_options(cpus=1, memory_gib=0.3)() >> pool
        assert enforced == ("cpus", "memory_gib")
        assert groups_of_node(node)
        with pytest.raises(sky.errors.OutOfMemory, match=r"memory_gib=0.2"):
            sky.compute(lambda: len(bytearray(300 << 20))).with_options(memory_gib=0.2)() >> pool
    until(lambda: not groups_of_node(node))


def test_the_next_node_of_a_host_removes_groups_of_one_that_died_at_once(sshds: Hosts) -> None:
    limited = sky.compute(where()).with_options(memory_gib=0.3, retries=2)
    with sky.ComputePool(sshds.ssh("host0"), logs=False) as pool:
        node, _, *pids = limited() >> pool
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # none of them sees another die
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        limited() >> pool
        until(lambda: not groups_of_node(node))
