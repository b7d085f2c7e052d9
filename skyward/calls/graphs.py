"""Graphs of calls: calls whose arguments are calls that have not run.

`train(prepare(raw)) >> pool` runs `prepare` first. Its value stays on the node that computed it, and the call that
takes it prefers that node, so the bytes need not move. A pending call is one step of a send, however often it is used
there: twice as an argument, in two calls of a group, or on every node under `@`.

One thread begins the steps whose arguments are there, in the program or in the task that sends the graph. Packing
arguments takes time and may import modules of the user's, so the I/O thread must not do it. All state of a graph
belongs to that thread, except the futures.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

from ..core import interrupts
from ..core.records import dataclass
from ..errors import PoolClosed, UsageError
from ..values.ref import Ref, Spliced, held_by
from .futures import Future
from .pending import PendingCompute
from .undecoded import Undecoded, raise_error

_log = logging.getLogger(__name__)

Send = Callable[[PendingCompute[Any]], Future[Any]]
"""Function that sends a call whose arguments are values."""
_SHOWN = 6
"""Most calls of a path that an error names."""


def calls_in(value: Any) -> Iterator[PendingCompute[Any]]:
    """Yield the pending calls in a value: itself, or within lists, tuples and dictionaries."""
    if type(value) is PendingCompute:
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from calls_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from calls_in(item)


def has_calls(value: Any) -> bool:
    """Return whether there are pending calls in a value, as `calls_in` finds them."""
    return next(calls_in(value), None) is not None


@dataclass(eq=False)
class _Step:
    """Call of a graph that waits for others. `future` is that of its value, or for a root of the call to send."""

    call: PendingCompute[Any]
    is_root: bool = False
    needs: list[_Step] = field(default_factory=list)
    users: list[_Step] = field(default_factory=list)
    is_needed: bool = False
    """Whether a root that has begun needs it, or is it."""
    waits: int = 0
    """Number of needed steps that have no value yet."""
    readers: int = 0
    """Number of steps that still have to read the value."""
    future: Future[Any] = field(default_factory=Future)
    value: Ref[Any] | None = None
    has_ended: bool = False

    @property
    def path(self) -> str:
        """Names of the calls from the one that was sent to this one."""
        names, step = [self.call.name], self
        while step.users:
            step = step.users[0]
            names.append(step.call.name)
        names.reverse()
        if len(names) > _SHOWN:
            names[_SHOWN // 2 : -_SHOWN // 2] = ["..."]
        return " <- ".join(names)


@dataclass(frozen=True, eq=False)
class GraphRoot:
    """Call of a send whose graph has not begun.

    `future` is that of the same call with values in place of calls. It fails before `begin` if another root has begun a
    call that both need, and that call failed. `begin` may be called once, and `abandon` after it or instead. Neither
    takes a lock, so a finalizer may call them.
    """

    future: Future[PendingCompute[Any]]
    begin: Callable[[], object]
    abandon: Callable[[], object]
    """Function that cancels the calls that only this root needs. The future stays open."""


class Graphs:
    """Graphs that one pool, or one task, sends. Thread-safe."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._open = 0
        self._is_closed = False

    def resolve(self, calls: Sequence[PendingCompute[Any]], send: Send) -> list[Future[PendingCompute[Any]]]:
        """Run the calls among the arguments of `calls`, each once.

        Args:
            calls: Calls of one send.
            send: Function that sends a call to the nodes of that send.

        Returns:
            A future for each of `calls`: the same call with the values in place.

        Raises:
            UsageError: A call contains itself, by a list or dictionary that was changed later.
            PoolClosed: The pool is closed.
        """
        roots = self.prepare(calls, send)
        for root in roots:
            root.begin()
        return [root.future for root in roots]

    def prepare(self, calls: Sequence[PendingCompute[Any]], send: Send) -> list[GraphRoot]:
        """Prepare what `resolve` runs. Each root must be begun or abandoned: until then the pool does not close."""
        run = _GraphRun(calls, send, self._inbox.put, self._ended)
        with self._changed:
            if self._is_closed:
                raise PoolClosed("pool: closed; make calls inside its `with` block")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="skyward-graphs", daemon=True)
                self._thread.start()
            self._open += 1
        post = self._inbox.put
        return [
            GraphRoot(step.future, partial(post, partial(run.begin, step)), partial(post, partial(run.end, step)))
            for step in run.roots
        ]

    def _ended(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            event = self._inbox.get()
            if event is None:
                if self._inbox.empty():
                    return
                self._inbox.put(None)  # behind the outcomes of steps that were cancelled since
                continue
            try:
                event()
            except BaseException:  # a call's own errors are the run's; one more graph must not stop all others
                _log.exception("graph of calls: error in its own thread; please report this bug")
            del event  # it may hold large arrays while the thread waits for the next

    def wait_idle(self) -> None:
        """Wait until the last call of every graph was sent."""
        with self._changed:
            interrupts.wait_for(lambda slice_s: self._changed.wait_for(lambda: not self._open, slice_s))

    def close(self) -> None:
        """End the thread, once all calls of the pool have ended."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._inbox.put(None)
            thread.join(_JOIN_S)


_JOIN_S = 5.0


class _GraphRun:
    """One send of calls with calls among their arguments. All methods run in the thread of `Graphs`."""

    def __init__(
        self,
        calls: Sequence[PendingCompute[Any]],
        send: Send,
        post: Callable[[Callable[[], None]], object],
        on_end: Callable[[], object],
    ) -> None:
        self._send = send
        self._post = post
        self._on_end = on_end
        self._steps: dict[int, _Step] = {}
        self.roots = [self._root(call) for call in calls]
        self._link_steps()
        self._left = len(self.roots)

    def _root(self, call: PendingCompute[Any]) -> _Step:
        root = _Step(call, is_root=True)

        def stop(_: int) -> None:
            self._post(partial(self.end, root))

        root.future = Future(stop)
        return root

    def _link_steps(self) -> None:
        waiting = list(self.roots)
        while waiting:  # not recursive: a chain may be longer than Python's stack
            step = waiting.pop()
            for call in calls_in((step.call.args, step.call.kwargs)):
                needed = self._steps.get(id(call))
                if needed is None:
                    needed = self._steps[id(call)] = _Step(call)
                    waiting.append(needed)
                if needed not in step.needs:
                    step.needs.append(needed)
                    needed.users.append(step)
            step.waits = len(step.needs)
        for step in self._steps.values():
            step.readers = len(step.users)
        self._refuse_circles()

    def _refuse_circles(self) -> None:
        waits = {step: step.waits for step in self._steps.values()}
        ready = [step for step, count in waits.items() if not count]
        for step in ready:  # it grows meanwhile
            for user in step.users:
                if user in waits:
                    waits[user] -= 1
                    if not waits[user]:
                        ready.append(user)
        if len(ready) < len(waits):
            name = next(step for step, count in waits.items() if count).call.name
            raise UsageError(f"{name}(): is an argument of itself; pass the value of another call")

    # Steps ----------------------------------------------------------------------------------------------------------

    def begin(self, root: _Step) -> None:
        """Start the steps that a root needs and whose arguments are there."""
        begun, waiting = list[_Step](), [root]
        while waiting:
            step = waiting.pop()
            if not step.is_needed:
                step.is_needed = True
                begun.append(step)
                waiting += reversed(step.needs)
        for step in begun:
            if not step.waits:
                self._start(step)

    def _start(self, step: _Step) -> None:
        if step.has_ended:
            return
        try:
            call = self._with_values(step.call)
            if step.is_root:
                self.end(step)
                resolved, step.future = step.future, Future()  # as in `_stop`
                resolved.settle(call)
            else:
                step.future = self._send(call.keep())
                step.future.add_done_callback(lambda _: self._post(partial(self._done, step)))
        except BaseException as error:
            self._fail(step, partial(raise_error, error))
        for needed in step.needs:
            needed.readers -= 1
            if not needed.readers:
                needed.value = None  # the call that was sent holds it now

    def _done(self, step: _Step) -> None:
        if step.has_ended:
            return
        try:
            step.value = step.future.result()
        except BaseException as error:
            self._fail(step, partial(raise_error, error))
            return
        step.future = Future()  # the other one holds the value too
        self.end(step)
        for user in step.users:
            user.waits -= 1
            if user.is_needed and not user.waits:
                self._start(user)

    def _fail(self, step: _Step, raise_it: Callable[[], Any]) -> None:
        """Fail all roots that need a step. Steps that only they need are not begun."""
        failing, path = [step], step.path
        while failing:
            step = failing.pop()
            if step.has_ended:
                continue
            self.end(step)
            failing += step.users
            if step.is_root:
                step.future.settle_error(Undecoded(partial(_raise_with_path, raise_it, path)))

    def end(self, step: _Step) -> None:
        """Forget a step that has ended or that nobody needs now."""
        if step.has_ended:
            return
        step.has_ended = True
        if step.is_root:
            self._left -= 1
            if not self._left:
                self._stop()
                self._on_end()

    def _stop(self) -> None:
        """Cancel the steps that nobody needs now.

        Newest first: otherwise a waiting call would start in the slot of a cancelled one.
        """
        for step in reversed(self._steps.values()):
            if not step.has_ended:
                step.has_ended = True
                step.future.cancel()
        # Steps and roots refer to each other, and hold values: without the cycle those are freed at once.
        for step in [*self._steps.values(), *self.roots]:
            step.users = []
        self.roots, self._steps = [], {}

    # Values ---------------------------------------------------------------------------------------------------------

    def _with_values(self, call: PendingCompute[Any]) -> PendingCompute[Any]:
        """Return a call whose arguments are values."""
        made: dict[int, Any] = {}
        args = tuple(self._valued(argument, made, is_argument=True) for argument in call.args)
        kwargs = {name: self._valued(argument, made, is_argument=True) for name, argument in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)

    def _valued(self, value: Any, made: dict[int, Any], *, is_argument: bool = False) -> Any:
        if type(value) is PendingCompute:
            return self._value_of(value, made, is_argument=is_argument)
        if type(value) in (list, tuple):
            if has_calls(value):
                return type(value)(self._valued(item, made) for item in value)
        elif type(value) is dict and has_calls(value):
            return {key: self._valued(item, made) for key, item in value.items()}
        return value

    def _value_of(self, call: PendingCompute[Any], made: dict[int, Any], *, is_argument: bool) -> Any:
        ref = self._steps[id(call)].value
        assert ref is not None
        if call.is_kept and not is_argument:
            return ref
        # One object for one call, so that the function sees one object too.
        if id(call) not in made:
            made[id(call)] = Spliced(held_by(ref).pickled)
        return made[id(call)]


def _raise_with_path(raise_it: Callable[[], Any], path: str) -> None:
    try:
        raise_it()
    except BaseException as error:
        error.add_note(f"Graph of calls: {path}, which failed")
        raise
