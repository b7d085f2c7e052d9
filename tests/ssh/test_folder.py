"""The folder of a connection and the process that holds it: closing the connection removes both."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skyward.ssh.folder import close_folder, collect_garbage, locked, make_folder, record_process
from tests.waiting import until


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return make_folder()


def holder(folder: str, before: str = "") -> subprocess.Popen[bytes]:
    """Start a process like the one that holds a connection: its command line names the folder."""
    process = subprocess.Popen([sys.executable, "-c", f"import signal, time\n{before}\ntime.sleep(60)", folder])
    until(lambda: folder.encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes())  # for a moment it has none
    return process


def test_a_process_started_while_the_connection_closes_is_ended_with_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: no option. A busy machine may take longer than two seconds to start the process.
    monkeypatch.setattr("skyward.ssh.folder._END_S", 60.0)
    with locked(folder, timeout_s=1):
        closing = threading.Thread(target=close_folder, args=(folder, lambda: 0))
        closing.start()
        process = holder(folder)
        record_process(folder, process.pid)
        assert closing.is_alive(), "it waits for who starts a process"
    closing.join(60)
    assert process.wait(60) != 0
    assert not Path(folder).exists()


def test_a_process_started_after_the_connection_was_closed_is_ended_at_once(folder: str) -> None:
    process = holder(folder)
    with locked(folder, timeout_s=1):
        close_folder(folder, lambda: 0)  # it does not wait indefinitely
        with pytest.raises(FileNotFoundError):
            record_process(folder, process.pid)
    assert process.wait(60) != 0


def test_a_waiting_caller_makes_no_connection_after_the_close(folder: str) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            with locked(folder, timeout_s=60):
                pass
        except FileNotFoundError as error:
            raised.append(error)

    with locked(folder, timeout_s=1):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        close_folder(folder, lambda: 0)
    waiting.join(60)
    assert raised


def test_a_process_that_does_not_tidy_up_is_gone_when_closing_returns(folder: str) -> None:
    process = holder(folder, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    record_process(folder, process.pid)
    reaping = threading.Thread(target=process.wait, args=(50,))  # as init does for one without a parent
    reaping.start()
    close_folder(folder, lambda: 0)
    reaping.join(60)
    assert not reaping.is_alive()


def test_leftovers_of_a_killed_connection_are_removed_and_used_ones_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    gone.kill()
    gone.wait()
    alive = holder(str(tmp_path / "held"))
    for name, owner, process in (("left", gone, gone), ("held", gone, alive), ("owned", alive, gone)):
        made = tmp_path / name
        made.mkdir()
        (made / "m.sock").touch()  # that of a process that was killed stays
        (made / "owner").write_text(str(owner.pid))
        (made / "pid").write_text(str(process.pid))
        os.utime(made, (0, 0))
    try:
        assert collect_garbage(str(tmp_path)) == [str(tmp_path / "left")]
        assert sorted(os.listdir(tmp_path)) == ["held", "owned"]
    finally:
        alive.kill()
        alive.wait()
