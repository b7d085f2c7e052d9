"""Starts an agent from a login on its machine, so that it outlives the login; and ends it.

    python -S -E -s -c "...start()" < pickled NodeConfig      prints one line of JSON, see `start`
    python -S -E -s -c "...end()" PID STARTED FOLDER LIMIT    returns when nothing of the node is left

The starter is not the agent's parent, and the agent holds none of its descriptors: the agent writes to a file in the
node's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import pickle
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from ...core.process import PACKAGE_ROOT, processes_below, start_time
from ...state.volumes import unlinked
from ...wire.tasks import NodeConfig
from .watchdog import remove_node

_START_LIMIT_S = 30.0
_END_LIMIT_S = 1.0
_LOG_TAIL = 4000
_SIOCGIFADDR = 0x8915
_BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from skyward.node.agent.main import main
sys.exit(main())
"""


def start() -> int:
    """Start an agent and print {pid, started, socket, root, address, interface, ...} as one line of JSON.

    `pid` and `started` together name the watchdog for good, `root` is the folder of this package, `unlinked` has the
    volumes without a link, and the agent adds its accelerators: to find them again may take seconds. The node's folder
    must exist: once `undo` has removed it, no agent may start in it. If the agent does not come up, nothing of it is
    left, the exit code is 1, and standard error ends with the agent's own output.
    """
    config: NodeConfig = pickle.loads(sys.stdin.buffer.read())
    config = _with_address(config)
    if not os.path.isdir(config.folder):
        sys.stderr.write(f"the node's folder {config.folder} was removed, so nobody waits for this agent")
        return 1
    os.makedirs(config.cwd, mode=0o700, exist_ok=True)
    started = start_apart("agent", _BOOT, pickle.dumps(config), config.folder, lines=2)
    if started is None:
        return 1
    reply, accelerators = started
    reply |= {"address": config.address, "interface": config.interface, "machine": platform.machine()}
    reply |= json.loads(accelerators)
    reply |= {"unlinked": unlinked(config.folder)} if config.volumes else {}
    sys.stdout.write(json.dumps(reply) + "\n")
    return 0


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
    _kill_all(process.pid)
    process.wait()
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


# Out of the log-in session ------------------------------------------------------------------------------------------


def _out_of_the_session() -> list[str]:
    """Return a command prefix that lets a process outlive the login.

    Nearly everywhere a session of its own is enough. Only where logind kills what a user leaves behind, a process must
    be in a systemd unit outside the login's.
    """
    if not _logind_kills() or shutil.which("systemd-run") is None:
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


# Its address --------------------------------------------------------------------------------------------------------


def _with_address(config: NodeConfig) -> NodeConfig:
    """Add the address for the other nodes: the given one, or the one at which this login arrived."""
    address = config.address or _address_of_log_in() or _address_of_default_route() or "127.0.0.1"
    return replace(config, address=address, interface=config.interface or _interface_of(address))


def _address_of_log_in() -> str:
    """Return the address at which the login arrived: the machine's own, even behind address translation."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    try:
        address = ipaddress.ip_address(words[2])
    except (IndexError, ValueError):  # "UNKNOWN", from an sshd that serves a pipe
        return ""
    if address.version == 6:
        return str(address.ipv4_mapped or _address_beside(address))
    return str(address)


def _address_beside(address: ipaddress.IPv6Address) -> str:
    """Return an IPv4 address of the network card with this IPv6 address; empty if it has none."""
    wanted = address.packed.hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:  # no IPv6, or not Linux
        for line in file:
            digits, *_, name = line.split()
            if digits == wanted:
                return _address_of(name)
    return ""


def _address_of_default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # no default route
        probe.connect(("192.0.2.1", 9))  # sends nothing, but makes the kernel choose a route (RFC 5737)
        return str(probe.getsockname()[0])
    return ""


def _interface_of(address: str) -> str:
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # no IPv4 address
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


# The end ------------------------------------------------------------------------------------------------------------


def end() -> int:
    """Let a node that was told to end exit by itself for LIMIT seconds, then kill the rest and remove its folder."""
    pid, started, folder, limit_s = int(sys.argv[-4]), sys.argv[-3], sys.argv[-2], float(sys.argv[-1])
    deadline = time.monotonic() + limit_s
    while start_time(pid) == started and time.monotonic() < deadline:
        time.sleep(0.02)
    if start_time(pid) == started:
        _kill_all(pid)
    remove_node(folder)
    return 0


def _kill_all(pid: int) -> None:
    """Kill the watchdog and all below it. The watchdog first: it would notice the other deaths and wait for more."""
    below = processes_below(pid)
    for victim in (pid, *below):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # exited meanwhile, or not ours
            os.kill(victim, signal.SIGKILL)


def reply_of(text: str) -> dict[str, Any]:
    """Parse the output of `start`. A login shell may print lines ahead of it."""
    reply: dict[str, Any] = json.loads(text.splitlines()[-1])
    return reply
