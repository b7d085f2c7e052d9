"""Ray beside the agent of a node: `ray start`, below a watchdog which kills all that Ray leaves.

It ends with Ray, with the node, and with the time that Ray has to start. Standard input brings one line of JSON.
Standard output gets two lines: Ray's folder, and the address of the cluster as JSON; or why there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ...core.process import PACKAGE_ROOT, process_table, set_timer_slack, start_time
from ...node.agent.watchdog import Lease, Starter, guard
from ...node.slot.ports import PortLocks
from ...values.ray_start import AGENTS, start_command
from .settings import HEAD_OPTIONS, OPTIONS, SLACK_S, ray_variables

_ALONE_S, _LOOK_S = 0.5, 1.0
"""Seconds that Ray goes on after its node was last seen, and in which the node is looked for."""
_CONNECT_S: Final = 5.0
"""Longest wait in seconds for a connection to the first node. Ray itself would wait for a minute, and not say why."""
_TAIL: Final = 600
_GIVEN_UP: Final = 2
_OWN: Final = "r"
"""Folder for Ray below ours: Ray opens it to everybody. The name is short, because paths of sockets are."""
_ADDRESS: Final = f"{_OWN}/ray_current_cluster"
"""File with the address of the cluster."""
_DASHBOARD: Final = b"/dashboard/dashboard.py"
"""Part of the command of a process that Ray starts even without a dashboard. It has nothing to do."""


def main() -> int:
    order = json.loads(sys.stdin.buffer.readline())
    pid, started = order["node"]
    if start_time(pid) != started:
        _say("its node has ended")
        return _GIVEN_UP
    lease = Lease(_ALONE_S, starter=Starter(pid, None), check_s=_LOOK_S)
    return guard(lambda: _run(order), lease, order["folder"])


def _run(order: dict[str, Any]) -> int:
    if order["address"] and (why := why_unreachable(order["address"], order["here"])):
        _say(why)
        return _GIVEN_UP
    folder = order["folder"]
    log = Path(folder, "start.log")
    set_timer_slack(SLACK_S)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(order),
            env=ray_variables(folder, PACKAGE_ROOT, os.environ, is_patient=order["is_patient"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        how = f"ended with code {code}" if (code := process.wait(order["limit_s"])) else ""
    except subprocess.TimeoutExpired:
        how = f"did not start within {order['limit_s']:g} s"
    if how:
        _say(f"{how}; it printed: {' '.join(log.read_text(errors='replace')[-_TAIL:].split())}")
        return _GIVEN_UP
    _say(folder, json.dumps({"address": Path(folder, _ADDRESS).read_text().strip()}))
    _wait_for_a_death(_end_dashboard(_left()))
    return 1


def why_unreachable(address: str, here: str) -> str:
    """Return why this node cannot connect to Ray on the first one; empty: it can."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return ""
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return f"did not start: no connection from {here} to {address}, which is Ray on the first node ({why})"


def _left() -> list[int]:
    """Return the processes that `ray start` has left. They are children of the watchdog, as this one is."""
    return [pid for pid, parent, _ in process_table() if parent == os.getppid() and pid != os.getpid()]


def _end_dashboard(left: list[int]) -> list[int]:
    """End the process of the dashboard, and return the others."""
    others = []
    for pid in left:
        with contextlib.suppress(OSError):  # it has ended
            if _DASHBOARD in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                continue
        others.append(pid)
    return others


def _wait_for_a_death(pids: list[int]) -> None:
    """Wait until one of these processes ends.

    `ray start --block` would take 40 MiB to do the same, and stay when a raylet that others took for dead ends itself.
    """
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return
    poll.poll()


def _command(order: dict[str, Any]) -> list[str]:
    locks = PortLocks(order["here"])  # held until this process ends
    return start_command(
        order["python"],
        *([f"--address={order['address']}"] if order["address"] else HEAD_OPTIONS),
        *OPTIONS,
        *(f"--{agent}-port={locks.reserve()}" for agent in AGENTS),
        f"--node-ip-address={order['here']}",
        f"--temp-dir={os.path.join(order['folder'], _OWN)}",
        f"--resources={json.dumps({order['name']: 1})}",
    )


def _say(*lines: str) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())
