"""The client's side of a pool's Ray: it starts Ray on the nodes, and starts another when it is lost.

The head has the driver, and says what it lacks. Only the client has logins on the nodes. Ray is replaced, never
repaired: a new one has new ports, folders and keys. A node that left Ray joins it again by a new start there.

The Ray of a detached pool outlives its client, and the head keeps its keys in memory. So the next client starts Ray on
a node that lacks it. If the head was killed while no client was there, these keys are lost. Then the client replaces
all of a Ray that does not carry all links.

Every wait has a limit. If Ray does not come up, the pool goes on over the channels that the client lends, or ends if it
was told to need Ray.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...core.records import dataclass
from ...errors import MissingDependency, PoolClosed, ProviderError, SkywardError, Unreachable
from ...events import Emit, EngineLost, EngineUp
from ...node.agent.outside import reply_of
from ...node.agent.watchdog import beside
from ...values.image import Image
from ...values.machine import Machine, NodeLogin
from ..threads import report, run_side_by_side, start_thread
from .links import ray_name
from .reach import why_cut
from .settings import RAY_VERSION

if TYPE_CHECKING:  # only pools on Ray need cryptography
    from .keys import Authority

_log = logging.getLogger(__name__)

_NAME: Final = "ray"
_START_S: Final = 60.0
"""Longest time in seconds for Ray to start on a node, which takes 4 to 26 s. After a failure anywhere it is doubled."""
_MORE_S: Final = 10.0
"""Seconds for a login beyond what it runs."""
_END_S: Final = 10.0
_ASK_S: Final = 10.0
_TRIES: Final = 3
"""Starts in a row that may fail before somebody is told. A raylet sometimes aborts in its start."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds between two starts that fail."""


class _Ask(Protocol):
    """Asks the head; see `Requests.ask`."""

    def __call__(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any: ...


@dataclass(frozen=True)
class _Companion:
    """Ray's processes on a node: the outermost, its start, and the folder."""

    login: NodeLogin
    pid: int
    started: str
    folder: str


@dataclass
class _Ray:
    """One Ray, from its start to its end. `authority`: None if another client has raised it, and its keys are lost."""

    authority: Authority | None
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    address: str = ""
    has_head: threading.Event = field(default_factory=threading.Event)
    """Set when the head of Ray runs, or will not."""
    companions: dict[int, _Companion] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    """Starts in a row that failed, by node."""
    again_at: dict[int, float] = field(default_factory=dict)
    """Earliest time of the next start, by node and by the monotonic clock."""
    has_carried: bool = False
    starting: set[int] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when it is to start on no further node."""


class RayRaiser:
    """Owner of a pool's Ray, for the life of the pool. Thread-safe.

    Args:
        image: Image of the pool, whose package index has Ray.
        emit: Takes events.
        failed: Called once with the reason if Ray does not come up, because the pool needs it, and with whether nodes
            cannot connect to each other. None: the pool goes on without Ray, and one event says why.
        after_s: Seconds until Ray is raised. A pool that is open for less does not need it.
        on_up: Called in a thread of its own when Ray carries all links, each time. The event follows its return.
        pause_s: Seconds between the first two starts that fail.
        is_detached: Whether the pool goes on without this client. Its Ray waits longer for a silent node then, because
            nobody may be there to start it again, and the head keeps the keys.
    """

    def __init__(
        self,
        image: Image,
        *,
        emit: Emit,
        failed: Callable[[str, bool], object] | None = None,
        on_up: Callable[[], object] = lambda: None,
        after_s: float = 0.0,
        pause_s: float = 2.0,
        is_detached: bool = False,
    ) -> None:
        self._emit, self._failed, self._on_up, self._is_detached = emit, failed, on_up, is_detached
        self.fresh: Callable[[], RayRaiser] = lambda: RayRaiser(
            image,
            emit=emit,
            failed=failed,
            on_up=on_up,
            after_s=after_s,
            pause_s=pause_s,
            is_detached=is_detached,
        )
        """Makes another one with the same options, which has begun nothing."""
        self._after_s, self._first_pause_s = after_s, pause_s
        self._image = Image(
            pip=(f"ray=={RAY_VERSION}",),
            pip_index_url=image.pip_index_url,
            pip_extra_index_url=image.pip_extra_index_url,
            python=image.python_version,
            bootstrap_timeout_s=image.bootstrap_timeout_s,
        )
        self._machines: Mapping[int, Machine] = {}
        self._head = 0
        self._ask: _Ask | None = None
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified when `_is_up` or `_is_given_up` has changed."""
        self._ray: _Ray | None = None
        self._missing: tuple[int, ...] = ()
        """Nodes that Ray does not carry, as the head last said."""
        self._stop, self._is_lost = threading.Event(), threading.Event()
        self._why = ""
        self._python = ""
        """Interpreter with Ray on the head's machine."""
        self._began_at = 0.0
        self._is_up = self._was_up = False
        self._is_given_up = self._is_cut = False
        self._is_first = True
        """Whether no earlier client has raised one."""
        self.has_begun = False
        """Whether `begin` was called."""
        self._has_ended = True
        """Whether its thread does not run."""
        self._starts = 0
        """Starts on nodes that are under way, those of a Ray that was lost included."""
        self._start_s = _START_S
        """Time limit of the next start in seconds."""
        self.verbs: dict[str, Callable[..., object]] = {"ray_carries": self._on_carried, "ray_is_lost": self._on_lost}
        """Verbs of the head."""
        self.slow_verbs: dict[str, Callable[..., object]] = {"ray_lacks": self._on_lacking}
        """Verbs of the head that take time."""

    @property
    def is_up(self) -> bool:
        """Return whether Ray carries the links to all nodes but the head's."""
        return self._is_up

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the Ray that stands, which the head of a detached pool keeps for the next client; else none."""
        ray = self._ray
        if not self._is_detached or ray is None or ray.authority is None or not ray.address:
            return ()
        return ray.token, *ray.authority.own_pair

    @property
    def _is_settled(self) -> bool:
        """Return whether Ray carries all links, and the head knows its processes."""
        return self._is_up and self._ray is not None and not self._ray.starting

    @property
    def _may_give_up(self) -> bool:
        """Return whether Ray has never carried all links. A pool that had it gets it again."""
        return self._is_first and not self._was_up

    @property
    def _is_at_rest(self) -> bool:
        """Return whether no thread of this object starts or ends anything."""
        return self._has_ended and not self._starts

    # For the engine -------------------------------------------------------------------------------------------------

    def begin(self, machines: Mapping[int, Machine], head: int, ask: _Ask, *, attaches: bool = False) -> None:
        """Raise Ray in the background, unless there is that of an earlier client.

        Args:
            machines: Machines of the pool by node, as they are at any time.
            head: Node of the head.
            ask: Asks the head.
            attaches: Whether an earlier client has raised one.
        """
        self.has_begun = True
        self._machines, self._head, self._ask = machines, head, ask
        self._is_first = not attaches
        is_adopted = attaches and self._adopt()
        self._has_ended = False
        start_thread(lambda: self._run(is_adopted=is_adopted), name="skyward-ray", failed=report)

    def stop(self) -> None:
        """Raise Ray no more. Returns at once."""
        self._stop.set()
        self._is_lost.set()
        with self._changed:
            if self._ray is not None:
                self._ray.ended.set()
            self._changed.notify_all()

    def move(self, head: int) -> None:
        """Raise another Ray, because the pool has another head. Returns at once.

        Args:
            head: Node of that head.
        """
        with self._changed:
            self._head, ray = head, self._ray
            if ray is not None:
                ray.ended.set()
        if ray is not None:
            self._lose(ray, "the head of the pool is gone")

    def give_up(self, why: str) -> None:
        """End Ray for good, because nothing is left to raise it on. Returns at once."""
        self.has_begun = True
        start_thread(self.close, name="skyward-ray-end", failed=report)
        self._emit(EngineLost(engine=_NAME, reason=why))

    def forget(self, node: int) -> None:
        """Forget Ray's processes on a node that was given back. They end with it."""
        with self._lock:
            if self._ray is not None:
                self._ray.companions.pop(node, None)

    def why_needed(self, limit_s: float) -> str:
        """Return why the head still needs the client's channels, after at most this time; empty: it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled or self._has_ended or self._stop.is_set(), limit_s)
            if self._is_settled:
                return ""
            why = f" ({self._why})" if self._why else ""
            nodes = ", ".join(map(str, self._missing))
        return f"Ray does not reach node {nodes}{why}" if nodes else f"Ray does not stand{why}"

    def close(self) -> None:
        """End Ray on all nodes. Where it cannot be reached, it ends with its node."""
        self.stop()
        with self._changed:  # a start that is interrupted removes its folder
            self._changed.wait_for(lambda: self._is_at_rest, _END_S)
        self._end()

    def leave(self) -> None:
        """Leave Ray to the next client. A start that is interrupted removes its folder first: it needs the logins."""
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: self._is_at_rest, 2 * _END_S)

    # Verbs of the head ----------------------------------------------------------------------------------------------

    def _on_carried(self, nodes: Collection[int], missing: Collection[int]) -> None:
        """Learn which nodes Ray's links lead to, and which other links there are."""
        with self._changed:
            ray, was_up = self._ray, self._is_up
            self._missing = tuple(missing)
            if ray is None:
                return
            ray.has_carried |= bool(nodes)
            self._is_up = is_up = bool(ray.address) and not missing
            if was_up and not is_up:
                self._began_at = time.monotonic()
            self._was_up |= is_up
            self._changed.notify_all()
        if is_up and not was_up:
            up = EngineUp(engine=_NAME, seconds=time.monotonic() - self._began_at)
            start_thread(lambda: self._tell_up(up), name="skyward-ray-up", failed=report)

    def _tell_up(self, up: EngineUp) -> None:
        """Say that Ray carries all links, after what depends on it: who reads it may end the program of a pool."""
        self._on_up()
        if self._is_up:  # otherwise its loss was told meanwhile
            self._emit(up)

    def _on_lacking(self, node: int) -> None:
        """Start Ray on a node that it should reach and does not."""
        ray, machine = self._ray, self._machines.get(node)
        if ray is None or machine is None or not ray.address or self._stop.is_set():
            return
        if ray.authority is None:
            self._lose(ray, f"node {node} left it, and the keys to let it in again are lost")
            return
        if time.monotonic() >= ray.again_at.get(node, 0.0):
            self._start(ray, machine)

    def _on_lost(self, folder: str, why: str) -> None:
        """Learn that the Ray with this folder on the head's machine is lost. Word of an earlier one may come late."""
        ray = self._ray
        head = None if ray is None else ray.companions.get(self._head)
        if ray is not None and head is not None and head.folder == folder:
            self._lose(ray, why)

    def _lose(self, ray: _Ray, why: str) -> None:
        with self._changed:
            if self._ray is not ray:
                return
            self._why, self._is_up = why, False  # from now on another one is raised
        self._is_lost.set()

    # Its thread -----------------------------------------------------------------------------------------------------

    def _run(self, *, is_adopted: bool) -> None:
        """Raise Ray again and again. One that never came up is given up."""
        try:
            if is_adopted:
                self._is_lost.wait()
                if not self._stop.is_set():
                    self._emit(EngineLost(engine=_NAME, reason=self._why))
            if not self._stop.wait(self._after_s if self._is_first else 0.0):
                self._end()  # what an earlier client has left
                self._raise_again_and_again(was_ever_of_use=is_adopted)
        finally:
            self._note_end()

    def _note_end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _raise_again_and_again(self, *, was_ever_of_use: bool) -> None:
        failures = 0
        while failures < _TRIES or was_ever_of_use:
            self._is_lost.clear()
            if self._stop.is_set():
                return
            was_of_use = self._raise_until_lost() and not self._may_give_up
            failures = 0 if was_of_use else failures + 1
            was_ever_of_use |= was_of_use
            if self._stop.is_set():
                return
            self._end()
            is_over = self._may_give_up and (self._is_given_up or failures == _TRIES)
            if is_over and self._failed is not None:
                self._note_end()  # first: it closes the pool, which waits for that
                self._failed(self._why, self._is_cut)
            elif is_over or was_of_use or failures == _TRIES:
                self._emit(EngineLost(engine=_NAME, reason=self._why))
            if is_over:
                return
            self._stop.wait(self._pause_s(failures))

    def _adopt(self) -> bool:
        """Take the Ray of an earlier client, and return whether it is of use: it carries all links, or can."""
        self._began_at = time.monotonic()
        assert self._ask is not None
        try:
            told = self._ask("ray_there", timeout_s=_ASK_S)
        except (SkywardError, TimeoutError) as error:  # what there is of it ends with the nodes
            self._why = str(error)
            return False
        self._is_first = not told["address"]  # there was only one node
        ray = _Ray(None, address=told["address"])
        if keys := told.get("keys"):  # heads of an older version keep none
            with contextlib.suppress(MissingDependency):  # as if they were lost
                ray.token, ray.authority = keys[0], _authority(*keys[1:])
        for node, (pid, started, folder) in told["companions"].items():
            machine = self._machines.get(node)
            if machine is not None and machine.login is not None:
                ray.companions[node] = _Companion(machine.login, pid, started, folder)
        ray.has_head.set()
        with self._changed:
            self._ray = ray
            self._is_up = self._was_up = ray.has_carried = bool(told["carries"])
            self._changed.notify_all()
        return ray.has_carried or ray.authority is not None

    def _raise_until_lost(self) -> bool:
        """Raise Ray, and wait until it is lost. Return whether it has carried anything; `_why` says how it ended."""
        self._began_at = time.monotonic()
        try:
            ray = _Ray(_authority())
            self._raise(ray)
        except (SkywardError, TimeoutError, OSError) as error:
            self._why = str(error)
            return False
        while self._may_give_up and not self._is_lost.wait(self._image.bootstrap_timeout_s + _START_S):
            if len(self._machines) > 1:  # one node has nobody to reach, until the pool grows
                self._end_tries(
                    "it does not reach all nodes; let their private addresses reach each other on all ports"
                )
        self._is_lost.wait()
        return ray.has_carried

    def _end_tries(self, why: str) -> None:
        """Let the thread end, unless Ray has carried the links to all nodes before."""
        if self._may_give_up:
            self._why, self._is_given_up = why, True
            self._is_lost.set()

    def _raise(self, ray: _Ray) -> None:
        """Start Ray on all nodes, and the driver. Returns when the head of Ray runs, and the driver was told of it."""
        with self._lock:
            self._ray = ray
            if self._stop.is_set():
                ray.ended.set()
        machines = [machine for machine in list(self._machines.values()) if machine.login is not None]
        if self._may_give_up and (why := why_cut(machines, ray.ended)):
            self._is_cut = True
            self._end_tries(why)
            raise ProviderError(why)
        start_thread(
            lambda: run_side_by_side([lambda each=machine: self._start(ray, each) for machine in machines]),  # type: ignore[misc]
            name="skyward-ray-nodes",
            failed=report,
        )
        while not ray.has_head.wait(1.0):
            if ray.ended.is_set():
                return
        if not ray.address:
            raise ProviderError(self._why or "Ray: did not start; open the pool again")
        companion, here = ray.companions[self._head], self._machines[self._head].peer.private_ip
        assert self._ask is not None
        self._ask("ray_stands", self._python, companion.folder, here, ray.address, timeout_s=_ASK_S)
        if keys := self.keys:
            with contextlib.suppress(KeyError):  # the head of an older version
                self._ask("ray_keys", *keys, timeout_s=_ASK_S)

    def _start(self, ray: _Ray, machine: Machine) -> None:
        """Start Ray on a node, unless another thread is at it, or it has ended. Notes a failure."""
        node = machine.node
        with self._lock:
            if node in ray.starting or ray.ended.is_set():
                return
            ray.starting.add(node)
            self._starts += 1
        try:
            self._start_once(ray, machine)
        except (SkywardError, TimeoutError, OSError) as error:
            is_away = isinstance(error, Unreachable)  # its machine may be lost, and will be replaced then
            self._start_s = 2 * _START_S  # a machine may be busy for long
            with self._lock:
                failures = ray.failures[node] = ray.failures.get(node, 0) + (not is_away)
                ray.again_at[node] = time.monotonic() + self._pause_s(failures)
            if ray.ended.is_set():
                return  # that is why it failed
            if node == self._head:
                self._why = str(error)
            elif failures == _TRIES and not is_away:
                self._end_tries(str(error))
                if not self._is_given_up:
                    _log.warning("node %d: Ray does not run there, so its link stays as it is: %s", node, error)
        else:
            ray.failures[node] = 0
        finally:
            with self._changed:
                ray.starting.discard(node)
                self._starts -= 1
                self._changed.notify_all()
            if node == self._head:
                ray.has_head.set()

    def _start_once(self, ray: _Ray, machine: Machine) -> None:
        login, name = machine.login, beside(machine.folder) + os.urandom(1).hex()
        assert login is not None
        companion = _Companion(login, 0, "", os.path.join(os.path.dirname(machine.folder), name))
        try:
            companion = self._start_in(ray, machine, login, name)
            with self._lock:
                is_current = self._ray is ray
                if is_current:
                    ray.companions[machine.node] = companion
            if not is_current:
                self._end_one(companion)
                return
            self._tell_companions()
        except BaseException:
            self._end_one(companion)
            raise

    def _start_in(self, ray: _Ray, machine: Machine, login: NodeLogin, folder: str) -> _Companion:
        node, here = machine.node, machine.peer.private_ip
        python, folder = login.prepare(self._image, folder, stop=ray.ended)
        is_head = node == self._head
        if is_head:
            self._python = python
        else:
            while not ray.has_head.wait(1.0):
                if ray.ended.is_set():
                    break
            if not ray.address:
                raise PoolClosed("Ray: has no head; open the pool again")
            self._end_one(ray.companions.pop(node, None))
        assert ray.authority is not None  # one without is not joined
        pair, limit_s = ray.authority.pair_for(here), self._start_s
        order = {
            "python": python,
            "address": "" if is_head else ray.address,
            "here": here,
            "name": ray_name(machine),
            "node": [login.watchdog, login.started],
            "limit_s": limit_s,
            "is_patient": self._is_detached,
            "secrets": [ray.token, ray.authority.certificate, *pair],
        }
        done = login.run(
            "engine.ray.outside",
            "start",
            (folder,),
            input=json.dumps(order).encode(),
            timeout_s=limit_s + _MORE_S,
            mark=os.path.basename(folder),
            stop=ray.ended,
        )
        if done.code:
            text = f"node {node}: {done.error_text}; mend that, and open the pool again"
            raise ProviderError(text, retryable=True)
        reply = reply_of(done.text)
        if is_head:
            ray.address = reply["address"]
        return _Companion(login, reply["pid"], reply["started"], folder)

    def _tell_companions(self) -> None:
        """Tell the head what the next client needs to end Ray."""
        assert self._ask is not None
        with self._telling:  # so that the last one told is the newest
            with self._lock:
                companions = {} if self._ray is None else dict(self._ray.companions)
            known = {node: (each.pid, each.started, each.folder) for node, each in companions.items()}
            self._ask("ray_runs", known, timeout_s=_ASK_S)

    def _pause_s(self, failures: int) -> float:
        return min(_LONGEST_PAUSE_S, self._first_pause_s * 2.0 ** max(0, min(failures, 10) - 1))

    # The end ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        with self._changed:
            ray, self._ray = self._ray, None
            self._is_up = False
            self._changed.notify_all()
            companions = list(ray.companions.values()) if ray else []
            if ray is not None:
                ray.ended.set()
        if companions and not self._stop.is_set():
            self._tell_end()
        run_side_by_side([lambda each=companion: self._end_one(each) for companion in companions])  # type: ignore[misc]

    def _tell_end(self) -> None:
        """Tell the head that Ray ends. A link over a Ray that dies takes seconds to break, and calls would wait."""
        assert self._ask is not None
        with contextlib.suppress(KeyError, SkywardError, TimeoutError):  # an older head; or it is gone itself
            self._ask("ray_ends", timeout_s=_ASK_S)

    def _end_one(self, companion: _Companion | None) -> None:
        if companion is None:
            return
        words = str(companion.pid), companion.started, companion.folder, "0"
        try:
            companion.login.run("node.agent.outside", "end", words, timeout_s=_END_S)
        except (SkywardError, TimeoutError, OSError):  # it ends with its node
            return


def _authority(*pair: str) -> Authority:
    """Return a new authority, or that with a certificate and a key. Raises MissingDependency."""
    try:
        from .keys import Authority, KeyPair
    except ImportError as error:
        text = "cryptography: not installed; run `pip install 'skyward[ssh]'`, which pools on Ray need for their keys"
        raise MissingDependency(text, name="cryptography") from error
    return Authority(KeyPair(*pair) if pair else None)
