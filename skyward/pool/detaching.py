"""Detached pools: which pools may be, their record for later clients, and the way back to them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..core.records import dataclass
from ..errors import SkywardError, Unreachable, UsageError
from ..events import Emit, ignore
from ..providers import load
from ..providers.base import DetachableProvider, MachineGone, Provider, as_detachable
from ..state import detached
from ..state.detached import DetachedPool
from ..values.image import Image
from ..values.machine import Machine, PoolSpec
from ..wire.frames import PROTOCOL_VERSION

if TYPE_CHECKING:
    from ..engine.head.kept_calls import CallFacts
    from ..engine.head.messages import HeadConfig
    from ..engine.head.place import NodeHead
    from ..engine.hosted import HostedEngine
    from ..engine.log_router import LineSink
    from ..engine.ray.raiser import RayRaiser
    from .machines import PoolMachines

_log = logging.getLogger(__name__)

_DIAL_S = 20.0
_WARNING_S = 600.0


@dataclass(kw_only=True)
class Detachment:
    """State of a detached pool in one of its clients.

    Args:
        for_s: Seconds that it goes on without a client.
        key: Secret by which its head knows its clients.
        known: Record of a pool that runs; None until a new pool is recorded.
        was_known: Whether another process has started the pool.
        takes_over: Whether to take the pool from a client that is still there.
        leaves: Whether the end of this client leaves the pool to another one.
    """

    for_s: float
    key: str = field(repr=False)
    known: DetachedPool | None = None
    was_known: bool = False
    takes_over: bool = False
    leaves: bool = False
    cannot_scale: str = ""
    """Why this client launches no nodes of the pool; empty: it does."""
    _head: NodeHead | None = None
    _engine: HostedEngine | None = None
    _machines: PoolMachines | None = None
    """Machines of a pool that this process has opened; None before it runs, and after its end."""
    _source: DetachableProvider | None = None
    _goes_alone: bool = False
    """Whether the head reaches all nodes without this process."""
    _is_lost: bool = False
    """Whether the head is gone, and the end of the pool on record."""
    _was_let_go: bool = False
    """Whether the pool goes on alone, with those nodes that this process has let go."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, known: DetachedPool, *, takes_over: bool) -> Detachment:
        """Return the state of a client that attaches."""
        return cls(for_s=known.detached_for_s, key=known.key, known=known, was_known=True, takes_over=takes_over)

    @property
    def warning_s(self) -> float:
        """Seconds before its end at which the pool warns."""
        return min(_WARNING_S, self.for_s / 2)

    @staticmethod
    def blueprint(spec: PoolSpec) -> bytes:
        """Return by what later clients launch nodes; nothing for one node, which is never replaced."""
        if spec.most_nodes == 1:
            return b""
        from .blueprint import pack_blueprint

        return pack_blueprint(spec)

    def begin(self, name: str) -> None:
        """Prepare a start. Raises UsageError if another detached pool has the name."""
        self._is_lost = self._was_let_go = False
        self.leaves = self.was_known  # until it has the pool, this process may end nothing of it
        if not self.was_known:
            self.known = None
            _refuse_second(name)

    def engine(
        self, config: HeadConfig, machine: Machine, lines: LineSink | None, emit: Emit, raiser: RayRaiser | None
    ) -> HostedEngine:
        """Return the engine of this client."""
        self._goes_alone = raiser is None
        from ..engine.head.place import KnownHead, NodeHead
        from ..engine.hosted import HostedEngine

        if self.known is None:
            self._head = NodeHead(machine)
        else:
            self._head = KnownHead(machine, socket_path=self.known.socket_path, process=self.known.process)
        self._engine = HostedEngine(
            config,
            self._head,
            lines=lines,
            emit=emit,
            raiser=raiser,
            attaches=self.was_known,
            takes_over=self.takes_over,
            left=self._leave,
            lost=self._lose,
        )
        return self._engine

    def _leave(self) -> None:
        """Note that the pool goes on without this client."""
        self.leaves = True

    def _lose(self, why: str) -> None:
        """Record that the pool has ended, because its head is gone."""
        with self._lock:
            self._is_lost = True
            if self.known is not None:
                detached.end(self.known, f"because its head was lost ({why})")

    def go_on(
        self,
        name: str,
        pool: str,
        provider: Provider,
        machines: PoolMachines,
        spec: PoolSpec,
        options: dict[str, Any],
    ) -> None:
        """Record a new pool, which goes on alone once its head reaches all nodes. Raises UsageError."""
        self.leaves = False
        source, head = as_detachable(provider), self._head
        assert source is not None
        assert head is not None
        machine, *others = machines
        self.known = DetachedPool(
            name=name,
            pool=pool,
            began=time.time(),
            detached_for_s=self.for_s,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            key=self.key,
            socket_path=head.socket_path,
            process=head.process,
            lease_s=machine.lease_s,
            provider={"type": provider.name, **source.fields()},
            machine=source.describe(machine),
            options=options,
            others=tuple(map(source.describe, others)),
            image=_facts_of(spec.image) if spec.most_nodes > 1 else {},
            spending=machines.spending,
        )
        detached.record(self.known)
        with self._lock:
            self._machines, self._source = machines, source
        if spec.most_nodes > 1 and spec.code is not None:
            detached.keep_code(self.known, spec.code.to_bytes())
        if self._goes_alone or not others:  # an elastic pool of one node has no Ray yet, and needs none
            self.go_alone()

    def take_up(self, provider: Provider, machines: PoolMachines, engine: HostedEngine) -> None:
        """Go on with a pool that another client has left. Replace what it has lost, and scale it, if its code is here.

        Otherwise `cannot_scale` says why not.
        """
        self.leaves = False
        known, source = self.known, as_detachable(provider)
        assert known is not None
        assert source is not None
        if not known.may_have_several:
            return  # the first node is never replaced
        from .blueprint import unpack_blueprint

        there = engine.nodes.agent_pids().keys()
        if known.is_elastic:  # others were given back, and the client before died before their machines had ended
            self.known = replace(known, others=tuple(other for other in known.others if other["node"] in there))
        with self._lock:
            self._machines, self._source, self._was_let_go = machines, source, True
        try:
            machines.rebuild_by(unpack_blueprint(known, *engine.blueprint()))
        except UsageError as error:
            self.cannot_scale = str(error)
            lost = {place["node"] for place in known.others} - there
            if lost:
                _log.warning("lost nodes %s are not replaced: %s", ", ".join(map(str, sorted(lost))), error)
            return
        source.resume(known.pool, [known.machine, *known.others])
        for machine in [machine for machine in machines if known.is_elastic and machine.node not in there]:
            _give_up(machines, machine.node)
        self.changed()
        engine.replace_lost()

    def go_alone(self, *, needs_record: bool = False) -> None:
        """Let the pool go on when this process dies, because its head reaches all nodes. Idempotent.

        Args:
            needs_record: Whether nothing is let go that cannot be recorded, which raises UsageError then.
        """
        with self._lock:
            self._goes_alone = True
            if self._machines is None or self._head is None or not self._may_record:
                return
            record = self._record if needs_record else self._record_if_there_is_room
            record(self._machines)
            self._machines.leave_keeper()
            if not self._was_let_go:
                self._was_let_go = True
                self._head.outlive_client()
                self._machines.outlive_client()

    @property
    def _may_record(self) -> bool:
        """Return whether the pool goes on, and this process has it."""
        return not (self.leaves or self._is_lost)

    def changed(self) -> None:
        """Record the machines that are there now, from their launch on, so that the next client counts their cost."""
        with self._lock:
            if self._machines is not None and self._may_record:
                self._record_if_there_is_room(self._machines)

    def given_back(self, machine: Machine) -> None:
        """Strike a machine off the record that an elastic pool has given back, and that has ended."""
        with self._lock:
            if self._machines is not None and self._may_record:
                self._record_if_there_is_room(self._machines, without=machine)

    def _record_if_there_is_room(self, machines: PoolMachines, *, without: Machine | None = None) -> None:
        try:
            self._record(machines, without=without)
        except UsageError as error:  # the disk is full
            _log.warning("the next program may not find all nodes: %s", error)

    def _record(self, machines: PoolMachines, *, without: Machine | None = None) -> None:
        """Record how the next client reaches the nodes, and tell the head for how long the budget lasts.

        A node that this client does not reach stays on record. Needs the lock.
        """
        assert self._source is not None
        assert self._engine is not None
        assert self.known is not None
        struck = None if without is None else (without.peer.private_ip, without.socket_path)
        before = [other for other in self.known.others if (other["address"], other["socket_path"]) != struck]
        others = [machine for machine in machines if machine.node != self.known.machine["node"]]
        places = {place["node"]: place for place in before}
        places |= {machine.node: self._source.describe(machine) for machine in others}
        in_order = tuple(places[node] for node in sorted(places))
        self.known = replace(self.known, others=in_order, spending=machines.spending)
        lasts_s = machines.lasts_alone_s
        if lasts_s is not None and not self.cannot_scale:  # else the cost here may be that of an old file
            self._engine.limit(lasts_s)  # an earlier limit holds until the head has it
        detached.record(self.known)

    def extend(self, seconds: float) -> None:
        """Record that the pool goes on for longer."""
        self.for_s += seconds
        with self._lock:
            if self.known is not None and not self._is_lost:
                self.known = replace(self.known, detached_for_s=self.for_s)
                detached.record(self.known)

    def ended(self, why: str) -> None:
        """Record the end of the pool."""
        with self._lock:
            self._machines = None
        if self.known is not None and not self._is_lost:
            detached.end(self.known, why)


def check_detached(
    for_s: float | None,
    *,
    name: str | None,
    provider: Provider,
    least: int,
    ends_idle: bool,
) -> None:
    """Raise UsageError unless a pool of these options can be detached.

    Args:
        for_s: Seconds that it goes on without a client; None: it is not detached.
        name: Name that its user gave it.
        provider: Source of its machines.
        least: Fewest nodes that it may have.
        ends_idle: Whether it rests or closes as a whole when it is idle.
    """
    if for_s is None:
        return

    def refuse(problem: str) -> UsageError:
        return UsageError(f"detached_for_s={for_s!r}: {problem}", field="detached_for_s", value=for_s)

    if not name:
        raise refuse('needs a name, by which clients attach; set name="train", for example')
    if hasattr(provider, "entries"):
        raise refuse("not supported with several sources, regions or accelerators so far; name one of each, or omit it")
    if as_detachable(provider) is None:
        raise refuse(
            f"not supported with {provider.name}, so far only with sky.SSH(hosts=[...]) and sky.AWS(); use one of "
            "them, or omit it"
        )
    if not least:
        text = "the scheduler of a detached pool is on its first node, so it always has one; set min to 1 or more"
        raise UsageError(f"min={least}: {text}", field="min", value=least)
    if ends_idle:
        raise refuse("a detached pool neither rests nor closes when it is idle; omit idle_timeout_s and on_idle")


def _refuse_second(name: str) -> None:
    """Raise UsageError if there is a detached pool of that name already."""
    there = detached.living(name)
    if there is None:
        return
    from ..console.words import duration

    age = duration(time.time() - there.began)
    raise UsageError(
        f"name={name!r}: a detached pool of that name was opened {age} ago; attach to it with "
        f"sky.ComputePool.attach({name!r}), end it with `skyward down {name}`, or choose another name",
        field="name",
        value=name,
    )


def attachable(name: str) -> DetachedPool:
    """Return the record of the pool that a user names. Raises UsageError."""
    known = detached.find(name)
    if abs(known.protocol - PROTOCOL_VERSION) > 1:
        raise UsageError(
            f"pool={name!r}: its head runs skyward {known.version}, which does not fit {__version__} of this program; "
            f"install skyward=={known.version} here",
            field="name",
            value=name,
        )
    return known


def provider_of(known: DetachedPool) -> Any:
    """Return the provider of a detached pool."""
    fields = dict(known.provider)
    return load(fields.pop("type"))(**fields)


def reach(known: DetachedPool, provider: Provider, emit: Emit = ignore) -> Machine:
    """Log in to the machine of the head of a detached pool. Raises UsageError: it is gone; NodeError; ProviderError."""
    source = as_detachable(provider)
    assert source is not None
    try:
        return source.reach(known.machine, emit)
    except MachineGone as error:
        why = f"or earlier: {error}, as when {_own_end(known)}"
        raise detached.refuse_ended(detached.end(known, why)) from error


def _own_end(known: DetachedPool) -> str:
    """Return when a detached pool ends by itself, in words."""
    from ..console.words import duration

    budget = ", or its budget lasts no longer" if known.options.get("budget_usd") else ""
    return f"no client came for {duration(known.detached_for_s)}{budget}"


def reach_all(known: DetachedPool, provider: Provider, emit: Emit = ignore) -> list[Machine]:
    """Log in to the machines of a detached pool, that of the head first.

    The others may be lost, and a pool goes on without them. So those that cannot be reached are left out.

    Raises:
        UsageError: The machine of the head is gone, and the pool with it.
        NodeError, ProviderError: The machine of the head cannot be reached.
    """
    source = as_detachable(provider)
    assert source is not None
    reached: dict[int, Machine] = {}

    def reach_one(place: dict[str, Any]) -> None:
        try:
            reached[place["node"]] = source.reach(place, emit)
        except (MachineGone, SkywardError, OSError) as error:
            _log.warning("node %d: cannot be reached, which harms only what it is needed for: %s", place["node"], error)

    from ..engine.threads import run_side_by_side

    first = reach(known, provider, emit)
    run_side_by_side([partial(reach_one, place) for place in known.others])
    return [first, *(reached[node] for node in sorted(reached))]


@dataclass(frozen=True, kw_only=True)
class Glance:
    """Work of a detached pool, as a process sees it that does not attach.

    Args:
        calls: The calls that are open, or whose outcome nobody has taken.
        client: The client that has the pool: host, pid, program and since; empty if there is none.
        left_s: Seconds that the pool goes on without a client.
        is_ending: Whether the pool has warned of its end; see `skyward.events.DetachmentWarning`.
        lost: Nodes that were lost, and not replaced.
        more_calls: Number of further such calls.
    """

    calls: tuple[CallFacts, ...]
    client: dict[str, Any]
    left_s: float
    is_ending: bool
    lost: tuple[int, ...]
    more_calls: int


def glance(name: str) -> Glance:
    """Look at a detached pool without attaching to it.

    Raises:
        UsageError: There is none of that name, or it has ended.
        NodeError, ProviderError: Its machine cannot be reached.
    """
    from ..engine.dialler import CommandEnds, Dialler, Forgotten
    from ..engine.head.kept_calls import CallFacts

    known = attachable(name)
    provider = provider_of(known)
    machine = reach(known, provider)
    try:
        assert machine.login is not None
        argv = machine.login.channel_to(known.socket_path)
        dialler = Dialler(
            lambda: CommandEnds(argv),
            role="look",
            pool=known.pool,
            node=0,
            peer="head",
            is_known=True,
            attach_key=known.key,
        )
        ends, facts = dialler.dial(_DIAL_S)
        ends.close()
    except Forgotten as error:
        raise has_ended(known, machine) from error
    finally:
        _let_go(provider, machine)
    calls = tuple(CallFacts(**call) for call in facts["calls"])
    return Glance(
        calls=calls,
        client=facts["client"],
        left_s=facts["left_s"],
        is_ending=facts.get("is_ending", False),  # heads of an older version do not say it
        lost=tuple(facts.get("lost", ())),
        more_calls=facts.get("more_calls", 0),
    )


def has_ended(known: DetachedPool, machine: Machine) -> UsageError:
    """Record that a pool has ended while no client was there, and return the error that says so."""
    words = _last_words(known, machine)
    why = words.get("why", "or earlier, because its machine stopped or its head was killed again and again")
    return detached.refuse_ended(detached.end(known, why, at=time.time() - words.get("age_s", 0.0)))


def _last_words(known: DetachedPool, machine: Machine, why: str = "") -> dict[str, Any]:
    """Return what the head of a pool has said at its end; see `read_last_words`. `why`: say it for the head."""
    from ..node.agent.outside import reply_of

    assert machine.login is not None
    try:
        done = machine.login.run("engine.head.outside", "ended", (known.process[2], why), timeout_s=_DIAL_S)
        return reply_of(done.text) if done.code == 0 else {}
    except (SkywardError, TimeoutError, OSError):  # it was reached a moment ago; only the words suffer
        return {}


def end_detached(known: DetachedPool) -> str:
    """End a detached pool that has no client on this machine, and return what was done, in words.

    Raises:
        NodeError, ProviderError: Its machine cannot be reached. It ends by itself when its time is over.
    """
    provider = provider_of(known)
    machines = reach_all(known, provider)
    try:
        login = machines[0].login
        assert login is not None
        login.run("node.agent.outside", "end", (*known.process, "0"), timeout_s=_DIAL_S)
        _last_words(known, machines[0], detached.DOWN)
    except BaseException as error:
        _let_go(provider, *machines)
        if isinstance(error, TimeoutError):
            text = f"pool {known.pool!r}: the machine of its head does not answer within {_DIAL_S:g} s; try again later"
            raise Unreachable(f"{text}, or wait until it ends by itself", is_final=False) from error
        raise
    _told_to_end(machines)
    provider.terminate(machines)
    detached.end(known, detached.DOWN)
    unreached = 1 + len(known.others) - len(machines)
    rest = f"; {unreached} could not be reached, and end by themselves" if unreached else ""
    return f"ended its head and its {_nodes(len(machines))}{rest}"


def _nodes(count: int) -> str:
    return "node" if count == 1 else f"{count} nodes"


def _told_to_end(machines: list[Machine]) -> None:
    from ..engine.opener import ask_to_end

    ask_to_end(machines, _DIAL_S)


def _give_up(machines: PoolMachines, node: int) -> None:
    try:
        machines.give_up(node)
    except SkywardError as error:
        _log.warning("node %d: cannot end its old machine, which ends by itself: %s", node, error)


def _let_go(provider: Provider, *machines: Machine) -> None:
    source = as_detachable(provider)
    assert source is not None
    source.leave(list(machines))


def _facts_of(image: Image) -> dict[str, Any]:
    """Return the fields of an image that Ray's environment needs, as plain data."""
    return {
        "python": image.python_version,
        "pip_index_url": image.pip_index_url,
        "pip_extra_index_url": list(image.pip_extra_index_url),
        "bootstrap_timeout_s": image.bootstrap_timeout_s,
    }
