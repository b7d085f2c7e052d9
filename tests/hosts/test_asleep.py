"""A client sleeps for longer than all leases, as a laptop does: it is stopped with its keeper and its connections."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.hosts.bed import ROOT
from tests.hosts.faults import Place, client_processes, nothing_runs_on
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

GO = "/root/go"

PROGRAM = """
import json, sys, time
import skyward as sky
from tests.engines import hosted_pool, permitted_calls

what, host, config, index = sys.argv[1:]

@sky.compute(timeout_s=600)  # such calls wait in the scheduler, not on the node
def wait(number):
    import os, time
    with open("/root/ran-" + what, "a") as ledger:
        ledger.write(f"{number} ")
    while not os.path.exists("/root/go"):
        time.sleep(0.01)
    return number

def outcome(future):
    try:
        return future.result(60)
    except sky.errors.NodeLost as error:
        return str(error)

provider = sky.SSH(hosts=[host], config_file=config, lease_s=6.0)
options = {"concurrency": 2, "image": sky.Image(pip_index_url=index), "logs": False}
if what == "detached":
    options |= {"name": "asleep", "detached_for_s": 600.0}
with (hosted_pool if what == "headed" else sky.ComputePool)(provider, **options) as pool:
    futures = [wait(number) > pool for number in range(4)]
    while sum(future.running() for future in futures) < 2:
        time.sleep(0.01)
    while what == "headed" and permitted_calls(pool) > 2:
        time.sleep(0.01)
    print("runs", flush=True)
    sys.stdin.readline()  # it is woken first
    print(json.dumps([outcome(future) for future in futures]), flush=True)
    try:
        print(json.dumps(wait(4) >> pool), flush=True)
    except sky.errors.NodeLost as error:
        print(json.dumps(str(error)), flush=True)
print("left", flush=True)
"""


def ran(place: Place, what: str) -> list[int]:
    """Return the calls that began, in their order."""
    texts = [host.path(f"/root/ran-{what}") for host in place.hosts]
    return [int(number) for path in texts if path.exists() for number in path.read_text().split()]


def put_to_sleep(clients: Iterable[subprocess.Popen[str]], runtime: Path) -> list[int]:
    """Stop clients, then what belongs to them: a keeper may just start a command, and a connection may just end."""
    for client in clients:
        client.send_signal(signal.SIGSTOP)
    asleep = [client.pid for client in clients]
    while new := [pid for found in client_processes(runtime).values() for pid in found if pid not in asleep]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        asleep += new
    return asleep


def test_a_client_that_slept_beyond_all_leases_loses_what_was_not_detached_and_nothing_else(
    place: Callable[[int], Place], runtime: Path, tmp_path: Path
) -> None:
    here = place(2)
    own, detached = here.hosts
    script = runtime / "client.py"
    script.write_text(PROGRAM)
    clients = {
        what: subprocess.Popen(
            [sys.executable, script, what, host.name, here.bed.ssh_config, here.index.simple],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(runtime), "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
            start_new_session=True,
        )
        for what, host in (("direct", own), ("headed", own), ("detached", detached))
    }
    outputs = {what: client.stdout for what, client in clients.items() if client.stdout is not None}
    try:
        assert [output.readline() for output in outputs.values()] == ["runs\n"] * 3
        asleep = put_to_sleep(clients.values(), runtime)
        nothing_runs_on([own])  # all leases are over
        for host in here.hosts:
            host.write(GO, "")
        until(lambda: len(ran(here, "detached")) == 4)  # the pool goes on
        for pid in asleep:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for client in clients.values():
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.close()
        told = {
            what: (json.loads(output.readline()), json.loads(output.readline())) for what, output in outputs.items()
        }
        assert [output.readline() for output in outputs.values()] == ["left\n"] * 3
        assert [client.wait(60) for client in clients.values()] == [0] * 3
        nothing_runs_on(here.hosts)
    finally:
        for pid in [pid for found in client_processes(runtime).values() for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for client in clients.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            client.wait()
            outputs[next(what for what, each in clients.items() if each is client)].close()
    began = {what: ran(here, what) for what in clients}
    own.run("sh", "-c", "rm -f /root/go /root/ran-*")
    detached.run("sh", "-c", "rm -f /root/go /root/ran-* /tmp/skyward-0/*.ended")
    assert told["detached"] == ([0, 1, 2, 3], 4)
    assert sorted(began["detached"]) == [0, 1, 2, 3, 4], "each ran once"
    calls, later = told["headed"]
    assert ["the head of the pool is gone" in str(outcome) for outcome in calls[:2]] == [True, True], calls
    assert calls[2:] == [2, 3], "the program knows that they had not begun"
    assert later == 4, "the head goes on in the program, and another node took the place"
    assert sorted(began["headed"]) == [0, 1, 2, 3, 4]
    calls, later = told["direct"]
    assert [str(outcome).startswith("node 0 was lost") for outcome in calls[:2]] == [True, True], calls
    assert later == 4, "another node took its place"
    assert sorted(began["direct"]) == sorted({0, 1, 4, *(number for number in calls if isinstance(number, int))})
