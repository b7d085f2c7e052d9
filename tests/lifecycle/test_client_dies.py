"""Nothing is left of a client that dies without notice."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox


IDLE = """
with sky.ComputePool(sky.Local(), nodes=2, concurrency=2) as pool:
    pid() @ pool
    (here / "begun").touch()
    time.sleep(600)
"""
WITH_VALUES_THAT_STAY = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    put = pool.put(bytes(1_000_000), nodes=[0, 1])
    kept = sky.compute(bytes)(1_000_000).keep() @ pool
    assert [ref.nodes for ref in (put, *kept)] == [(0, 1)] * 3
    (here / "begun").touch()
    time.sleep(600)
"""
WITH_VALUES_OF_A_TASK = """
def busy(pool):
    while True:
        refs = [pool.put(bytes(1_000_000)), sky.compute(bytes)(1_000_000).keep() >> pool]
        assert sky.compute(len)(sky.compute(bytes)(1_000_000)) >> pool == len(refs[1].get()) == 1_000_000
        (here / "begun").touch()

with sky.ComputePool(sky.Local(), nodes=2, concurrency=2) as pool:
    sky.compute(busy)(pool) >> pool
"""
IN_A_CALL = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    hang() >> pool
"""
IN_A_MAP = """
def slow(x):
    (here / "begun").touch()
    time.sleep(0.05)
    return x

with sky.ComputePool(sky.Local(), nodes=2) as pool:
    pool.map(slow, range(100000))
"""
IN_A_BROADCAST_WITH_DETACHED_CHILDREN = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    hang_with_detached_children() @ pool
"""
WITH_THREAD_SLOTS = """
with sky.ComputePool(sky.Local(), nodes=1, concurrency=2, executor="thread") as pool:
    hang() >> pool
"""
DEAF_TO_SIGNALS = """
@sky.compute
def deaf():
    import signal
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    (here / "begun").touch()
    while True:
        time.sleep(1)

with sky.ComputePool(sky.Local()) as pool:
    deaf() >> pool
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(IDLE, id="idle"),
        pytest.param(WITH_VALUES_THAT_STAY, id="values-that-stay"),
        pytest.param(WITH_VALUES_OF_A_TASK, id="values-of-a-task"),
        pytest.param(IN_A_CALL, id="call"),
        pytest.param(IN_A_MAP, id="map"),
        pytest.param(IN_A_BROADCAST_WITH_DETACHED_CHILDREN, id="detached-grandchildren"),
        pytest.param(WITH_THREAD_SLOTS, id="thread-slots"),
        pytest.param(DEAF_TO_SIGNALS, id="deaf-task"),
    ],
)
def test_a_killed_client_leaves_nothing(sandbox: Sandbox, script: str) -> None:
    client = sandbox.client(script)
    sandbox.waits_for("begun")
    client.kill()
    sandbox.proves_nothing_is_left()
    assert not sandbox.exists("finished")


@pytest.mark.parametrize("event", ["folder", "standby", "agent", "slot"])
def test_a_client_killed_while_it_starts_leaves_nothing(sandbox: Sandbox, event: str) -> None:
    client = sandbox.client("sky.ComputePool(sky.Local(lease_s=1.0), nodes=2).start()\ntime.sleep(600)")
    while not (sandbox.runtime_entries() if event == "folder" else sandbox.pids(event)):
        assert client.process.poll() is None, client.errors
    client.kill()
    sandbox.proves_nothing_is_left()


@pytest.mark.parametrize("event", ["begins", "grown", "given-back", "rests", "returns"])
def test_a_client_killed_while_its_pool_changes_its_size_leaves_nothing(sandbox: Sandbox, event: str) -> None:
    client = sandbox.client(
        f"""
def tell(happened):
    if isinstance(happened, sky.events.PoolScaled):
        (here / f"{{happened.before}}-{{happened.nodes}}").touch()

with sky.ComputePool(sky.Local(lease_s=1.0), nodes=(0, 3), idle_timeout_s=0.5, on_event=tell) as pool:
    if {event!r} == "rests":
        pid() >> pool
    elif {event!r} == "returns":
        pid() >> pool
        while not (here / "1-0").exists():
            time.sleep(0.01)
        (here / "again").touch()
        pid() >> pool
    else:
        pool.scale(3)
        (here / "grown").touch()
    time.sleep(600)
"""
    )
    sandbox.waits_for({"begins": "0-3", "grown": "grown", "rests": "1-0", "returns": "again"}.get(event, "3-0"))
    client.kill()
    sandbox.proves_nothing_is_left()


def test_nodes_whose_agents_are_stopped_end_by_their_lease(sandbox: Sandbox) -> None:
    client = sandbox.client(
        "with sky.ComputePool(sky.Local(lease_s=1.0), nodes=2) as pool:\n    hang_with_detached_children() @ pool"
    )
    sandbox.waits_for("begun")
    started = time.monotonic()  # the lease measures contact, and the last one may be as old as the stop
    for agent in sandbox.pids("agent"):
        os.kill(agent, signal.SIGSTOP)
    client.kill()
    sandbox.proves_nothing_is_left()
    assert time.monotonic() - started > 0.3, "the lease cannot have ended them"


def test_nodes_end_with_the_client_although_a_forked_process_of_it_lives(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
with sky.ComputePool(sky.Local(lease_s=60.0), nodes=2) as pool:
    pid() @ pool
    if not (child := os.fork()):
        time.sleep(600)  # it holds copies of all descriptors
    (here / "child").write_text(str(child))
    (here / "begun").touch()
    hang("hangs") >> pool
"""
    )
    sandbox.waits_for("hangs")
    child = int((sandbox.folder / "child").read_text())
    client.kill()
    sandbox.proves_nothing_is_left(but=child)
    os.kill(child, signal.SIGKILL)


def test_nodes_end_when_the_client_becomes_another_program(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
pool = sky.ComputePool(sky.Local(lease_s=60.0), nodes=2).start()
pid() @ pool
(here / "begun").touch()
os.execv("/bin/sleep", ["sleep", "600"])
"""
    )
    sandbox.waits_for("begun")  # the slots themselves may be gone before anybody looks
    sandbox.proves_nothing_is_left(but=client.pid)
    client.kill()


def test_a_script_that_never_closes_its_pool_exits_promptly_and_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
from skyward.providers import local
local._END_LIMIT_S = 300  # a client that waited for this would not end in time
pool = sky.ComputePool(sky.Local(lease_s=300), nodes=2).start()
print((pid() >> pool) > 0)
future = hang() > pool
say("end")
"""
    )
    client.says("end")
    code, _ = client.ends()
    assert code == 0, client.errors
    sandbox.proves_nothing_is_left()


def test_a_client_that_calls_os_exit_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client("pool = sky.ComputePool(sky.Local()).start()\npid() >> pool\nos._exit(7)")
    assert client.ends()[0] == 7
    sandbox.proves_nothing_is_left()


def test_an_exception_in_the_block_cancels_running_calls_and_is_raised(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
try:
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        futures = [hang(str(i)) > pool for i in range(4)]
        while not (here / "0").exists():
            time.sleep(0.01)
        raise LookupError("mine")
except LookupError as error:
    say(repr(error))
assert all(future.done() for future in futures)
say("closed")
"""
    )
    code, lines = client.ends()
    assert (code, lines) == (0, ["LookupError('mine')", "closed"]), client.errors
    sandbox.proves_nothing_is_left()
    assert not sandbox.exists("finished")
