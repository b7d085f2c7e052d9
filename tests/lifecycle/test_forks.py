"""A client that forks: the pool stays the parent's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox


OS_FORK = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    before = pid() @ pool
    child = os.fork()
    if child == 0:
        try:
            pid() >> pool
        except sky.errors.PoolClosed:
            say("closed for the child")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pid() @ pool == before
    say("open for the parent")
say("done")
"""
MULTIPROCESSING = """
import multiprocessing

def work(queue):
    try:
        queue.put(pid() >> pool)
    except sky.errors.PoolClosed:
        queue.put("closed")

with sky.ComputePool(sky.Local(), nodes=2) as pool:
    before = pid() @ pool
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    say(queue.get() + " for the child")
    child.join()
    assert child.exitcode == 0
    assert pid() @ pool == before
    say("open for the parent")
say("done")
"""
CHILD_OUTLIVES_THE_POOL = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    child = os.fork()
    if child == 0:
        say("closed for the child")
        (here / "said").touch()
        while not (here / "may_end").exists():
            time.sleep(0.01)
        os._exit(0)
    pid() @ pool
    while not (here / "said").exists():
        time.sleep(0.01)
    say("open for the parent")
(here / "may_end").touch()
os.waitpid(child, 0)
say("done")
"""
CHILD_HAS_ITS_OWN = """
with sky.ComputePool(sky.Local(), nodes=1) as pool:
    before = pid() >> pool
    child = os.fork()
    if child == 0:
        with sky.ComputePool(sky.Local(), nodes=1) as own:
            assert (pid() >> own) != before
            assert (pid() >> sky) != before
        say("closed for the child")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (pid() >> pool) == before
    say("open for the parent")
say("done")
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(OS_FORK, id="os.fork"),
        pytest.param(MULTIPROCESSING, id="multiprocessing"),
        pytest.param(CHILD_OUTLIVES_THE_POOL, id="child-outlives-the-pool"),
        pytest.param(CHILD_HAS_ITS_OWN, id="child-has-its-own"),
    ],
)
def test_a_fork_of_the_client_leaves_the_pool_to_its_parent(sandbox: Sandbox, script: str) -> None:
    client = sandbox.client(script)
    code, lines = client.ends()
    assert (code, lines) == (0, ["closed for the child", "open for the parent", "done"]), client.errors
    assert client.errors == ""
    sandbox.proves_nothing_is_left()


def test_nodes_end_when_the_client_is_killed_although_its_fork_lives(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    if os.fork() == 0:
        (here / "forked").touch()
        time.sleep(600)
    time.sleep(600)
"""
    )
    sandbox.waits_for("forked")
    client.kill()
    (child,) = [p for p in sandbox.processes() if "client0.py" in p.command]
    sandbox.proves_nothing_is_left(but=child.pid)
