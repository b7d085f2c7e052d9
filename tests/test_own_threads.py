"""No thread of the package dies of an exception: each thread is listed here, with its treatment of exceptions."""

from __future__ import annotations

import ast
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import skyward as sky
from skyward.engine.threads import in_words, start_thread
from skyward.testing import Faults
from skyward.wire.frames import FrameKind
from tests.channels import Relayed
from tests.engines import engine_of
from tests.waiting import until

PACKAGE = Path(sky.__file__).parent

STARTS_THREADS = {"Thread", "Timer", "start_new_thread", "start_thread"}

LISTED = {
    # A job's runner, and a hub's launcher.
    "hub/runner/reporter.py:Reporter.__init__": "the attempt is given up, and its machines end",
    "hub/runner/attempt_run.py:AttemptRun.open": "printed; the attempt ends once the start of its pool has",
    "hub/runner/attempt_run.py:AttemptRun.drive": "the attempt ends with it, or its page shows no save",
    "hub/runner/attempt_run.py:AttemptRun._run_call": "the attempt ends with it, or its page shows no save",
    "hub/runner/attempt_run.py:AttemptRun._make_way": "printed; the attempt ends when its time to save is over",
    "hub/runner/save_notes.py:NoteCollector.__init__": "the page of the job shows no further saves",
    "hub/runner/save_notes.py:forwarding_notes": "the page of the job shows no further saves",
    "hub/runner/command.py:LineForwarder.__init__": "lines of the command are lost, and it goes on",
    "hub/runner/command.py:run_command": "the command does not hear that it should end, and is killed after its grace",
    "hub/runner/local.py:start_local_launcher": "logged; the order is tried again",
    # A sweep.
    "hub/client/trial.py:_DriverLink.obey": "the next report says that the driver is lost, and the trial ends",
    "hub/search/driver.py:SweepDriver.run": "the sweep fails with it",
    "hub/search/job_trials.py:JobTrials.__init__": "the sweep fails with it",
    # The way to a node of a Ray cluster.
    "bootstrap/ray/stub.py:_pass_on": "the command gets no more input, and its channel is dialled again",
    # The client's engine.
    "engine/reader.py:Reader.start": "goes on; after 50 failures in a row every open call fails",
    "engine/threads.py:start_thread": "tells `failed`",
    "engine/direct_lines.py:DirectLines.take_lent": "the value is sent instead of being copied",
    "engine/link_repair.py:LinkRepair._redial": "the node is lost, and replaced",
    "engine/link_repair.py:LinkRepair.begin_to_replace": "the node is given up",
    "engine/relief.py:Relief.on_notice": "the node is replaced once it is gone",
    "engine/width.py:Width.consider": "the link goes on with one channel",
    "engine/nested_calls.py:NestedCalls.on_call": "one call of a task fails; the thread goes on",
    "engine/nested_calls.py:NestedCalls._find": "one call of a task fails",
    "engine/head_link.py:HeadRepair._let_go": "the head is lost, and another one goes on, or the open calls fail",
    "engine/other_heads.py:OtherHeads._leave": "reported; the head ends with its lease",
    "engine/ray/links.py:RayWays._prepare": "logged; the links stay as they are, and a break prepares them anew",
    "engine/ray/driving.py:RayDriver.start": "the client is told, and starts another Ray",
    "engine/hosted_ray.py:HostedRay.rest": "logged; what is left of Ray ends with its nodes",
    "engine/ray/raiser.py:RayRaiser.begin": "logged; the pool goes on without Ray",
    "engine/ray/raiser.py:RayRaiser._on_carried": "logged; the keeper ends the pool if its program dies",
    "engine/ray/raiser.py:RayRaiser.give_up": "logged; what is left of Ray ends with its nodes",
    "engine/ray/raiser.py:RayRaiser._raise": "logged; the pool goes on without Ray",
    "engine/lender.py:Lender._on_lend": "the head is told, and dials again",
    "engine/lender.py:Lender._ended": "the head is told, and dials again",
    "engine/task_channels.py:_start": "logged; the channel ends",
    "engine/nodes.py:NodeLinks.close": "the link is closed without its last frames",
    "engine/opener.py:Opener.open_all": "raised by the thread that waits",
    "engine/threads.py:run_side_by_side": "the others go on",
    "engine/keeper.py:Keeper._start": "tries again until there is a keeper",
    "wire/lent.py:LentStreams.bind": "the streams end, and their links are made anew",
    "wire/spares.py:_Spares.prepare": "there is no spare file",
    "wire/spares.py:_Spares._drop_later": "closes a descriptor; nothing can raise",
    "wire/huge.py:fill": "raised by the thread that waits",
    "wire/pull.py:pull": "the copy is incomplete, and the call is sent again",
    "pool/streams.py:InputFeed.start": "the call that reads the iterator fails",
    "calls/graphs.py:Graphs.prepare": "logged; the thread goes on with other graphs",
    "pool/scaler.py:PoolScaler.start": "reported; the thread looks again",
    "pool/forwarding.py:ForwardedPort.__init__": "the port takes no more connections; open ones go on",
    "pool/forwarding.py:ForwardedPort._accept": "one connection is closed",
    "pool/forwarding.py:ForwardedPort._relay": "one connection is closed",
    "core/interrupts.py:_Deferring.__call__": "sends a signal; nothing can raise",
    # A head.
    "engine/head/main.py:_run": "the head ends",
    "engine/head/door.py:Door.open": "waits a second and accepts again",
    "engine/head/door.py:Door._accept": "the link is closed, and the client dials again",
    "engine/head/requests.py:Requests._on_request": "the other side gets the error",
    # Displays and events.
    "console/outlet.py:Outlet._start": "reported; the sink gets nothing more",
    "console/announcer.py:Announcer.open": "reported; the function is called with what follows",
    "state/presence.py:Presence.open": "looks again",
    "state/presence.py:Presence.look": "the pool's end reports it",
    "console/terminal.py:Terminal.add": "the view is given up",
    "console/live_view.py:LiveView.__init__": "the view is not shown",
    "console/notebook.py:NotebookView.__init__": "logged; the view stands still",
    # Machines.
    "pool/machines.py:PoolMachines._stand_in": "reported; the machine is ended with the pool",
    "pool/cost.py:Spending._begin_watch": "emits and waits; the pool's machines end with their leases",
    "pool/cost.py:Spending._watch": "closes the pool, whose end reports it",
    "pool/machines.py:PoolMachines.give_back": "reported; the machine is ended with the pool",
    "core/interrupts.py:shielded": "raised by the thread that waits",
    "providers/remote.py:bring_up": "`NodeSetup.go` keeps it for the thread that waits",
    "providers/remote.py:_in_parallel": "the machine ends by its lease, or its host key is pinned",
    "providers/node_setup.py:NodeSetup._holding_lease": "what prepares the machine meets the error too",
    "ssh/pure_process.py:_Server.serve": "one command fails",
    "ssh/pure_process.py:_Server._keep_alive": "the silence is taken for a cut, and the connection is made anew",
    "ssh/pure_process.py:_Server._connect": "one connection is closed",
    "ssh/pure_process.py:_Session.run": "the command ends",
    # On nodes, in the user's processes.
    "node/slot/lanes.py:serve_threads": "the process ends, and its agent tells of its calls",
    "node/slot/answers.py:_Answering.__init__": "one question has no answer; the thread goes on",
    "node/slot/guards.py:SlotGuard._on_interrupt": "sleeps and sends a signal; nothing can raise",
    "node/slot/channels.py:_Channels.__init__": "the task's channels end",
    "node/slot/caller.py:Caller.__init__": "the open calls of the task fail",
    "integrations/torch.py:_leave_within_limit": "the group is left by the end of the process",
    "integrations/joblib.py:SkywardPoolBackend._callbacks": "reported; the thread goes on",
    # The hub.
    "hub/store/writer.py:GroupWriter.__init__": "the waiting operations fail; the thread goes on",
    "hub/store/sealer.py:Sealer.__init__": "logged; the points stay in their tail, and the thread goes on",
    "hub/http/supervisor.py:_Supervisor._fork": "the process outlives a killed supervisor; nothing else fails",
    # The hub's client.
    "hub/client/system.py:SystemSampler.__init__": "logged; no more samples",
    "hub/client/pools.py:PoolRecorder.__init__": "logged; the pool is no longer recorded",
    "hub/client/sender.py:SenderThread.__init__": "logged; the records wait in the spool, and the thread goes on",
    # Training.
    "training/handler_queue.py:HandlerQueue.put": "raised in the training thread by the next call",
    "training/checkpoint/files.py:BackgroundSave.__init__": "raised in the training thread by poll or wait",
    "training/control/channel.py:_on_question": "one question has no answer",
    "training/control/server.py:ControlServer.__init__": "close does not wait for it",
    "training/control/server.py:ControlServer._accept": "one request has no answer",
    "training/diloco/flight.py:Flight.__init__": "kept, and raised when the fragment is applied",
    "training/diloco/pool_server.py:PoolServer.__init__": "logged; requests are answered that the server has ended",
    "training/diloco/server.py:DiLoCoServer.start": "logged; the server ends, or a round waits for its next message",
    "training/diloco/server.py:DiLoCoServer.stop": "logged; the save before the last one stays the newest",
    "training/diloco/worker.py:DiLoCoWorker.start": "logged; heartbeats go on",
    "training/evaluation/dispatchers/process_main.py:main": "the process ends, and the evaluation is given to another",
    "training/evaluation/dispatchers/seats.py:SeatedDispatcher._fill": "the evaluation fails",
    "training/evaluation/dispatchers/seats.py:_Timer.__init__": "the evaluation has no time limit",
    "training/evaluation/members.py:HealthProbes.__init__": "workers that failed are not tried again",
    "training/evaluation/pipeline.py:Lane.put": "logged; the thread goes on",
}


def threads_of(path: Path) -> Iterator[str]:
    """Return `function` for each place that starts a thread."""

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in STARTS_THREADS:
                yield ".".join(where)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    text = path.read_text()
    if any(name in text for name in STARTS_THREADS):
        yield from visit(ast.parse(text), ())


def test_every_thread_of_the_package_is_listed() -> None:
    """Left out are tests' threads, and the agent's loop, whose timers are no threads."""
    found = {
        f"{path.relative_to(PACKAGE)}:{function}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "testing" and path.name != "loop.py"
        for function in threads_of(path)
    }
    assert found - LISTED.keys() == set(), "say what happens when something raises in it, and test it"
    assert LISTED.keys() - found == set(), "these start no thread"


@sky.compute
def number(x: int) -> int:
    return x


def works(pool: sky.ComputePool) -> bool:
    return [number(i) >> pool for i in range(3)] == [f.result(60) for f in [number(i) > pool for i in range(3)]]


class RaisingOnce:
    """Replacement of a method of the package, or of a function in one of its tables, that raises once."""

    def __init__(self, owner: object, name: Any, error: BaseException) -> None:
        self._owner, self._name, self._error = owner, name, error
        self._real: Callable[..., Any] = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        self.has_raised = False

    def __enter__(self) -> Self:
        if isinstance(self._owner, dict):
            self._owner[self._name] = self
        else:
            setattr(self._owner, self._name, self)
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._owner, dict):
            self._owner[self._name] = self._real
        else:
            delattr(self._owner, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_raised:
            self.has_raised = True
            raise self._error
        return self._real(*args, **kwargs)


ERRORS = [OSError(errno.EMFILE, "Too many open files"), SystemExit(3), MemoryError()]


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=1, logs=False)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("called", ["watcher.wait", "ledger.run_deadlines", "reader._read_each", "liveness.is_due"])
def test_the_io_thread_survives_exceptions_of_its_callbacks(
    pool: sky.ComputePool, called: str, error: BaseException
) -> None:
    engine = engine_of(pool)
    owners = {"watcher": engine.ledger.watcher, "liveness": engine.nodes.liveness}
    owner, method = called.split(".")
    with RaisingOnce(owners.get(owner) or getattr(engine, owner), method, error) as raising:
        # With a limit, because the thread looks at deadlines only if there are some.
        futures = [number.with_options(timeout_s=60.0)(i) > pool for i in range(10)]
        assert [future.result(60) for future in futures] == list(range(10))
        engine.ledger.watcher.wake()
        until(lambda: raising.has_raised)
    assert works(pool)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_answer_whose_handler_raises_fails_its_own_call(pool: sky.ComputePool, error: BaseException) -> None:
    engine = engine_of(pool)
    with RaisingOnce(engine.frame_handlers.handlers, FrameKind.RESULT, error):
        futures = [number(i) > pool for i in range(10)]
        outcomes = [future.exception(60) for future in futures]
    assert sum(outcome is not None for outcome in outcomes) <= 1
    assert works(pool)


def test_an_answer_whose_handler_raises_does_not_end_its_caller(pool: sky.ComputePool) -> None:
    handlers = engine_of(pool).frame_handlers.handlers
    with RaisingOnce(handlers, FrameKind.RESULT, SystemExit(3)), pytest.raises(sky.errors.InternalError):
        number(1) >> pool
    assert works(pool)


@pytest.mark.parametrize(
    ("called", "error"), list(zip(["dialler.dial_until", "channel.attach", "nodes.watch"], ERRORS, strict=True))
)
def test_a_link_that_cannot_be_reopened_is_a_lost_node_that_is_replaced(
    called: str, error: BaseException, tmp_path: Path
) -> None:
    provider = Relayed(folder=str(tmp_path))
    with sky.ComputePool(provider, nodes=1, logs=False, console=False) as pool:
        assert works(pool)
        engine = engine_of(pool)
        link = engine.ledger.links[0]
        owners: dict[str, object] = {"dialler": link.dialler, "channel": link.channel, "nodes": engine.nodes}
        owner, method = called.split(".")
        with RaisingOnce(owners[owner], method, error) as raising:
            provider.break_links(0)
            until(lambda: raising.has_raised)
        until(lambda: engine.ledger.links.get(0) not in (None, link))
        assert works(pool)


def test_a_node_whose_replacement_fails_in_an_unforeseen_way_is_given_up() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool:
        assert works(pool)
        source = engine_of(pool).link_repair.source
        assert source is not None
        with RaisingOnce(source, "replace", SystemExit(3)) as raising:
            Faults(pool).kill_node(0)
            until(lambda: raising.has_raised)
            refused = (number(1) > pool.node(0)).exception(60)
        assert isinstance(refused, sky.errors.NodeLost)
        assert works(pool)


def test_a_thread_that_raises_reports_it_to_the_responsible_part() -> None:
    told: list[str] = []

    def leave() -> None:
        raise SystemExit(3)

    start_thread(leave, name="test", failed=lambda error: told.append(in_words(error)))
    until(lambda: told)
    assert told == ["SystemExit: 3"]
