"""Starts an agent on a machine that somebody is logged in to, so that it outlives the log-in; and ends it.

    python -S -E -s -c "...start()" < pickled NodeConfig      prints one line of JSON, see `start`
    python -S -E -s -c "...end()" PID STARTED FOLDER LIMIT    returns when nothing of the node is left

Who started the agent is not its parent and holds none of its descriptors: what it writes goes to a file in the
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

from ...core.process import PACKAGE_ROOT, start_time
from ...wire.tasks import NodeConfig
from .facts import node_facts
from .watchdog import processes_below

__all__ = ["end", "reply_of", "start"]

_START_LIMIT_S = 30.0
_END_LIMIT_S = 1.0
_LOG_NAME = "agent.log"
_LOG_TAIL = 4000
_SIOCGIFADDR = 0x8915
_BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from skyward.node.agent.main import main
sys.exit(main())
"""


def start() -> int:
    """Standard output gets {pid, started, socket, root, address, interface, ...}; see `node_facts` for the others.

    The node's folder is there; once it is removed, no agent is started in it. `pid` and `started` name the watchdog for
    good; `root` is the folder that holds this package. When the agent does
    not come up, nothing of it is left, the exit code is 1, and standard error ends with what it wrote.
    """
    config: NodeConfig = pickle.loads(sys.stdin.buffer.read())
    config = _with_address(config)
    if not os.path.isdir(config.folder):
        sys.stderr.write(f"the node's folder {config.folder} was removed: nobody waits for this agent any more")
        return 1
    os.makedirs(config.cwd, mode=0o700, exist_ok=True)
    log = os.open(os.path.join(config.folder, _LOG_NAME), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    process = subprocess.Popen(
        [*_out_of_the_session(), sys.executable, "-S", "-E", "-s", "-c", _BOOT, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",
        env=_environment(),
        start_new_session=True,
    )
    line = _first_line(process, pickle.dumps(config))
    if not line.startswith(os.sep):
        sys.stderr.write(f"the agent {line or _end_of(process, log)}")
        _kill_all(process.pid)
        process.wait()
        shutil.rmtree(config.folder, ignore_errors=True)
        return 1
    said = {"pid": process.pid, "started": start_time(process.pid), "socket": line, "root": PACKAGE_ROOT}
    said |= {"address": config.address, "interface": config.interface, "machine": platform.machine()}
    said |= node_facts(dict(config.env))
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def _first_line(process: subprocess.Popen[bytes], order: bytes) -> str:
    """What the agent says once it listens; empty if it does not get so far."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, and the empty line below says so
        process.stdin.write(order)
        process.stdin.close()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(_START_LIMIT_S * 1000) else b""
    return line.decode().strip()


def _end_of(process: subprocess.Popen[bytes], log: int) -> str:
    """How one ended, or did not, that never said that it listens."""
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs; its log says how far it came
        code = process.wait(_END_LIMIT_S)
    how = f"said nothing for {_START_LIMIT_S:.0f} s"
    if code is not None:
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return f"{how} while it started; it wrote:\n{_tail(log)}"


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")


# Out of the log-in session ------------------------------------------------------------------------------------------


def _out_of_the_session() -> list[str]:
    """What to put before a command so that the end of the log-in does not end it.

    A session of its own is enough nearly everywhere. Where logind is told to kill what a user leaves behind, only
    a unit of systemd outside the log-in's stays.
    """
    if not _logind_kills() or shutil.which("systemd-run") is None:
        return []
    if os.getuid() == 0:
        prefix = ["systemd-run", "--scope", "--quiet", "--collect"]
    else:
        prefix = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
        # Without it the user's own systemd ends with the last log-in, and all its units with it.
        _succeeds(["loginctl", "enable-linger"])
    return prefix if _succeeds([*prefix, "true"]) else []


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False, env=_environment()).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # the program is not here or hangs: go without it
        return False


def _environment() -> dict[str, str]:
    """A log-in that went past PAM does not know where the user's own systemd is."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}


def _logind_kills() -> bool:
    name, path = "org.freedesktop.login1", "/org/freedesktop/login1"
    try:
        asked = subprocess.run(
            ["busctl", "get-property", name, path, f"{name}.Manager", "KillUserProcesses"],
            capture_output=True,
            timeout=5,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):  # no systemd, or one that hangs: it ends nothing
        return False
    return asked.stdout.split() == [b"b", b"true"]


# Its address --------------------------------------------------------------------------------------------------------


def _with_address(config: NodeConfig) -> NodeConfig:
    """With the address at which the other nodes find it: the one that is given, or that this log-in came to."""
    address = config.address or _address_of_log_in() or _address_of_default_route() or "127.0.0.1"
    return replace(config, address=address, interface=config.interface or _interface_of(address))


def _address_of_log_in() -> str:
    """Behind address translation too this is the machine's own, not the one that was dialled."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    try:
        address = ipaddress.ip_address(words[2])
    except (IndexError, ValueError):  # "UNKNOWN": of an sshd that was started on a pipe
        return ""
    if address.version == 6:
        return str(address.ipv4_mapped or _address_beside(address))
    return str(address)


def _address_beside(address: ipaddress.IPv6Address) -> str:
    """The IPv4 address of the network card that has this one; empty: there is none."""
    wanted = address.packed.hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:  # no IPv6, or not Linux
        for line in file:
            found, *_, name = line.split()
            if found == wanted:
                return _address_of(name)
    return ""


def _address_of_default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # no route at all
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks the kernel which way it would go (RFC 5737)
        return str(probe.getsockname()[0])
    return ""


def _interface_of(address: str) -> str:
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


# The end ------------------------------------------------------------------------------------------------------------


def end() -> int:
    """Give the node LIMIT seconds to end by itself, as it was told; kill what is left then, and remove its folder."""
    pid, started, folder, limit_s = int(sys.argv[-4]), sys.argv[-3], sys.argv[-2], float(sys.argv[-1])
    deadline = time.monotonic() + limit_s
    while start_time(pid) == started and time.monotonic() < deadline:
        time.sleep(0.02)
    if start_time(pid) == started:
        _kill_all(pid)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _kill_all(pid: int) -> None:
    """The watchdog first, for it would see the others end and take its time; then what was below it."""
    below = processes_below(pid)
    for each in (pid, *below):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile, or not ours
            os.kill(each, signal.SIGKILL)


def reply_of(text: str) -> dict[str, Any]:
    """What `start` printed."""
    said: dict[str, Any] = json.loads(text.splitlines()[-1])
    return said
