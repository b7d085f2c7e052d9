"""Boot script of a rented machine. `tests/hosts` runs it on real hosts; here are faults that cannot be made there."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from skyward.providers.user_data import LEASE_FILE, boot_script
from tests.waiting import lines_of, until


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("lease_s", "text"), [("0", ""), ("600", "the pool has ended")])
def test_a_machine_whose_disk_and_service_manager_hang_powers_itself_off(
    tmp_path: Path, lease_s: str, text: str
) -> None:
    script = boot_script(lease_s=600)
    watchdog = script.partition("watchdog <<'END'\n")[2].partition("END\n")[0]
    harmless = watchdog.replace(LEASE_FILE, str(tmp_path / "lease")).replace("/proc/sysrq-trigger", "sysrq")
    assert "/proc/sysrq" not in harmless
    assert "/run/" not in harmless
    for name in ("sync", "systemctl", "poweroff"):
        program(tmp_path / name, f"echo {name} >>{tmp_path}/called; exec /bin/sleep 100")
    program(tmp_path / "sleep", "exec /bin/sleep 0.05")  # time passes quickly
    program(tmp_path / "watchdog", harmless)
    (tmp_path / "lease").write_text(text)
    process = subprocess.Popen(
        [tmp_path / "watchdog", lease_s],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        until(lambda: lines_of(tmp_path / "sysrq") == ["o"])
        until(lambda: sorted(lines_of(tmp_path / "called")) == ["poweroff", "sync", "systemctl"])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_machine_that_boots_again_starts_its_watchdog_again(tmp_path: Path) -> None:
    folder = tmp_path / "per-boot"
    script = boot_script(lease_s=600, notices="#!/bin/sh\n").replace("/var/lib/cloud/scripts/per-boot", str(folder))
    first, _, _ = script.partition("mkdir -p /run/skyward")  # the rest is for a machine of its own
    program(tmp_path / "part-001", first)
    subprocess.run([tmp_path / "part-001"], check=True)
    assert (folder / "skyward").read_text() == (tmp_path / "part-001").read_text()
    assert os.access(folder / "skyward", os.X_OK)
    subprocess.run([folder / "skyward"], check=True)
