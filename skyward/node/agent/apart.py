"""Starts a process from a login on its machine, so that it outlives the login.

The starter is not the parent of what goes on. That holds none of its descriptors, and writes to a file in its folder.

Agents, heads and Ray are started this way, and their starters import little, because somebody waits for them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import Any

from ...core.process import PACKAGE_ROOT, processes_below, start_time

_START_LIMIT_S = 30.0
_END_LIMIT_S = 1.0
_LOG_TAIL = 4000


def start_apart(
    name: str, boot: str, order: bytes, folder: str, *, lines: int = 1, limit_s: float = _START_LIMIT_S
) -> tuple[dict[str, Any], str] | None:
    """Start a process that outlives this login.

    Args:
        name: Name of the process, for errors and its log.
        boot: Its program, which gets `sys.path` as arguments.
        order: Its standard input.
        folder: Its folder, which exists.
        lines: Number of lines that it prints once it listens, 1 or 2. The first is the path of its socket.
        limit_s: Longest time for its first line.

    Returns:
        {pid, started, socket, root} and the second line. None if it did not come up: then nothing of it is left, and
        standard error says why.
    """
    log = os.open(os.path.join(folder, f"{name}.log"), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    process = subprocess.Popen(
        [*_out_of_the_session(), sys.executable, "-S", "-E", "-s", "-c", boot, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",
        env=_environment(),
        start_new_session=True,
    )
    line, *more = _first_lines(process, order, lines, limit_s)
    if line.startswith(os.sep):
        known = {"pid": process.pid, "started": start_time(process.pid), "socket": line, "root": PACKAGE_ROOT}
        return known, "".join(more)
    sys.stderr.write(f"the {name} {line or _end_of(process, log, limit_s)}")
    kill_all(process.pid)
    process.wait()
    from .watchdog import remove_node  # only here: a start that goes well need not wait for it

    remove_node(folder)
    return None


def _first_lines(process: subprocess.Popen[bytes], order: bytes, count: int, limit_s: float) -> list[str]:
    """Read the first lines of a process, which it prints once it listens; empty if it fails before."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has died; the empty line below tells
        process.stdin.write(order)
        process.stdin.close()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(limit_s * 1000):
        return [""]
    return [process.stdout.readline().decode().strip() for _ in range(count)]


def _end_of(process: subprocess.Popen[bytes], log: int, limit_s: float) -> str:
    """Describe the end of a process that never listened."""
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs; its log says how far it came
        code = process.wait(_END_LIMIT_S)
    how = f"printed nothing for {limit_s:.0f} s"
    if code is not None:
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return f"{how} while it started; its output:\n{_tail(log)}"


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")


def kill_all(pid: int) -> None:
    """Kill a watchdog and all below it. The watchdog first: it would notice the other deaths and wait for more."""
    below = processes_below(pid)
    for victim in (pid, *below):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # exited meanwhile, or not ours
            os.kill(victim, signal.SIGKILL)


# Out of the log-in session ------------------------------------------------------------------------------------------


def _out_of_the_session() -> list[str]:
    """Return a command prefix that lets a process outlive the login.

    Nearly everywhere a session of its own is enough. Only where logind kills what a user leaves behind, a process must
    be in a systemd unit outside the login's.
    """
    if not _logind_kills():
        return []
    import shutil  # only here: it takes as long as the rest

    if shutil.which("systemd-run") is None:
        return []
    if os.getuid() == 0:
        prefix = ["systemd-run", "--scope", "--quiet", "--collect"]
    else:
        prefix = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
        # Without lingering, the user's own systemd exits with the last login, and ends all its units.
        _succeeds(["loginctl", "enable-linger"])
    return prefix if _succeeds([*prefix, "true"]) else []


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False, env=_environment()).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # the program is missing or hangs: do without it
        return False


def _environment() -> dict[str, str]:
    """Return the environment with the address of the user's systemd, which logins that bypass PAM do not set."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}


def _logind_kills() -> bool:
    name, path = "org.freedesktop.login1", "/org/freedesktop/login1"
    try:
        answer = subprocess.run(
            ["busctl", "get-property", name, path, f"{name}.Manager", "KillUserProcesses"],
            capture_output=True,
            timeout=5,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):  # systemd is missing or hangs, so it kills nothing
        return False
    return answer.stdout.split() == [b"b", b"true"]
