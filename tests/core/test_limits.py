"""Limits of this process come from its control group and its own `ulimit`, not from the machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.core.limits import file_limit, memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


def proc(folder: Path, *, groups: str, mounts: str) -> str:
    (folder / "proc").mkdir()
    (folder / "proc/cgroup").write_text(groups)
    (folder / "proc/mountinfo").write_text(mounts)
    return str(folder / "proc")


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_bytes(str(tmp_path)) <= MACHINE


def test_the_smallest_limit_of_all_parent_groups_counts_in_version_2(tmp_path: Path) -> None:
    inner = tmp_path / "fs/outer/inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{300 * MIB}\n")
    mounts = f"41 31 0:38 / {tmp_path}/fs rw,relatime - cgroup2 cgroup2 rw\n"
    assert memory_bytes(proc(tmp_path, groups="0::/outer/inner\n", mounts=mounts)) == 300 * MIB


def test_version_1_beside_an_empty_version_2_counts(tmp_path: Path) -> None:
    inner = tmp_path / "fs/memory/job"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text(f"{200 * MIB}\n")
    (inner.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "fs/unified").mkdir()
    mounts = (
        f"35 31 0:32 / {tmp_path}/fs/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        f"36 31 0:33 / {tmp_path}/fs/devices rw,relatime - cgroup cgroup rw,devices\n"
        f"41 31 0:38 / {tmp_path}/fs/unified rw,relatime - cgroup2 cgroup2 rw\n"
    )
    assert memory_bytes(proc(tmp_path, groups="5:devices:/\n4:memory:/job\n0::/\n", mounts=mounts)) == 200 * MIB


def test_in_a_container_the_group_begins_at_the_mount(tmp_path: Path) -> None:
    """The group's path starts at the machine's root group, which the container does not see."""
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs/memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    mounts = f"35 31 0:32 /docker/abc {tmp_path}/fs ro,relatime - cgroup cgroup rw,memory\n"
    assert memory_bytes(proc(tmp_path, groups="4:memory:/docker/abc\n", mounts=mounts)) == 100 * MIB


def test_the_limits_of_the_process_count_too() -> None:
    script = f"""
import resource
from skyward.core.limits import file_limit, memory_bytes, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 80))
assert file_limit() == 50
raise_file_limit()
assert file_limit() == 80
resource.setrlimit(resource.RLIMIT_AS, ({700 * MIB}, {700 * MIB}))
assert memory_bytes() == {700 * MIB}, memory_bytes()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_nodes_on_one_machine_share_the_memory_for_blobs() -> None:
    script = f"""
import resource
from skyward.core.limits import default_blob_limit
for limit_mib, parts in ((800, (200, 100, 64, 64)), (100, (25, 25, 25, 25))):
    resource.setrlimit(resource.RLIMIT_DATA, (limit_mib * {MIB}, resource.RLIM_INFINITY))
    assert tuple(default_blob_limit(nodes) // {MIB} for nodes in (1, 2, 4, 50)) == parts
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.root
def test_a_real_control_group_counts() -> None:
    group = Path("/sys/fs/cgroup/memory") / f"skyward-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    script = "from skyward.core.limits import memory_bytes; print(memory_bytes())"
    try:
        join = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        told = subprocess.run([*join, sys.executable, "-c", script], check=True, capture_output=True, text=True)
        assert int(told.stdout) == 200 * MIB
    finally:
        group.rmdir()


def test_a_process_without_a_limit_of_files_may_open_many() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert file_limit() in (soft, 1 << 20)
