"""Starts an agent from a login on its machine, so that it outlives the login; and ends it.

python -S -E -s -c "...start()" < pickled NodeConfig      prints one line of JSON, see `start`
python -S -E -s -c "...end()" PID STARTED FOLDER LIMIT    returns when nothing of the node is left
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import pickle
import platform
import socket
import struct
import sys
import time
from dataclasses import replace
from typing import Any

from ...core.process import start_time
from ...state.volumes import unlinked
from ...wire.tasks import NodeConfig
from .apart import kill_all, start_apart
from .watchdog import remove_node

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
    """Let a node that was told to end exit by itself for LIMIT seconds, then kill the rest and remove its folder.

    Without a start there is no process, as in a start of Ray that failed, and only the folder goes.
    """
    pid, started, folder, limit_s = int(sys.argv[-4]), sys.argv[-3], sys.argv[-2], float(sys.argv[-1])
    deadline = time.monotonic() + limit_s
    while started and start_time(pid) == started and time.monotonic() < deadline:
        time.sleep(0.02)
    if started and start_time(pid) == started:
        kill_all(pid)
    remove_node(folder)
    return 0


def reply_of(text: str) -> dict[str, Any]:
    """Parse the output of `start`. A login shell may print lines ahead of it."""
    reply: dict[str, Any] = json.loads(text.splitlines()[-1])
    return reply
