"""Calls of the client, as the head runs them: each is a task, a gang or an actor like any other of an engine.

The outcome of a call goes to the client as it arrived: values and failures of the user's are never unpickled here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

from ...calls.named_options import unpack_options
from ...calls.options import CallOptions
from ...core.records import dataclass
from ...errors import InternalError, SkywardError, UsageError
from ...wire.blobs import DIGEST_SIZE, Blob
from ...wire.failures import encode_exception
from ...wire.frames import KEPT, PERMITTED, Frame, FrameKind
from ...wire.task_channel import pieces_of
from ...wire.tasks import CallKind, Mode, TaskHead
from ..builder import PackedCall
from ..direct import DirectEngine
from ..gang import BEFORE_THIS_HEAD, Gang
from ..kept_received import KeptReceived
from ..kept_values import KeptBlob
from ..live_actor import LiveActor
from ..retries import Retries, RetriesLeft
from ..tasks import Received, cannot_send
from ..threads import in_words
from .client_link import ClientLink
from .client_tasks import ClientChunk, ClientGang, ClientTask, GangFuture, Promise
from .fed_inputs import FedInputs
from .kept_calls import CHUNK, CallFacts, CallPosition, KeptCall, KeptCalls, KeptFrame, KeptOrder, facts_of
from .messages import ActorMessage, CallMessage, GangMessage, OpenCall, unpack_call
from .plain import dump_plain, load_plain
from .references import ClientReferences, Place
from .requests import Answer
from .start_permits import StartPermits


@dataclass(slots=True)
class EarlyCall:
    """Call that came before the head has looked at its nodes, which may have it from an earlier head."""

    body: bytes
    message: CallMessage
    packed: PackedCall
    taken: int = 0
    """Number of items that the client has taken meanwhile."""

    def kept(self, told: OpenCall) -> tuple[KeptCall, KeptOrder]:
        """Return the call as `taken_up` takes it. `told`: how far it was with the earlier head."""
        message, head = self.message, TaskHead(*self.message.head)
        call = KeptCall(
            number=told.number,
            name=message.name,
            form=_form_of(message, head),
            state="running",
            count=told.received,
            taken=told.taken + self.taken,
            is_in_doubt=told.is_in_doubt,
            is_preempted=told.is_preempted,
            cleared=frozenset(told.cleared),
            left=None if told.left is None else RetriesLeft(*told.left),
        )
        return call, KeptOrder(self.body, self.packed.function, self.packed.payload.blobs)


@dataclass(eq=False, kw_only=True)
class ClientCalls:
    """Calls of the one client of a head. The handlers of frames are called with the ledger locked."""

    engine: DirectEngine
    link: ClientLink
    references: ClientReferences
    actor_moved: Callable[[int, int | None], object]
    """Tells the client the node of an actor."""
    kept: KeptCalls | None = None
    """Calls that another client may take; None: the pool ends with this client."""
    early: dict[int, EarlyCall] | None = None
    """Calls that wait until the head knows what its nodes have; None: calls begin as they come."""
    early_actors: list[tuple[LiveActor, ActorMessage]] = field(default_factory=list)
    """Actors that wait until then."""
    waiting: list[Callable[[], object]] = field(default_factory=list)
    """Functions to call then."""
    told_of_retry: Callable[[int, tuple[Any, ...]], object] = lambda number, left: None
    """Tells the client the retries that are left to a call."""
    told_of_inputs: Callable[[int, dict[int, tuple[Any, ...]]], object] = lambda number, positions: None
    """Tells the client how far the iterators are of a call that runs."""
    told_to_forbid: Callable[[list[int]], object] = lambda numbers: None
    """Tells the client calls that begin beside the head only once it knows of that."""
    first_fed: int = 0
    """Number of the first call whose client may be there, and feed its iterators."""
    inputs: FedInputs = field(init=False)
    """Iterators of the calls."""
    permits: StartPermits = field(init=False)
    """Permissions of the calls."""
    handlers: dict[int, Callable[[Frame], object]] = field(init=False)
    """Handlers by kind of frame."""

    def __post_init__(self) -> None:
        streams = self.engine.streams
        self.permits = StartPermits(self._task_of, self.told_to_forbid)
        self.inputs = FedInputs(
            self.engine,
            self.told_of_inputs,
            fail=lambda number, error: self.outcome(number, "error", error),
            first_fed=self.first_fed,
        )
        self.handlers = {
            FrameKind.CALL: self._on_call,
            FrameKind.UNCALL: lambda frame: self._cancel(frame.ident),
            FrameKind.CREDIT: self._on_credit,
            FrameKind.CLOSE: self._on_close,
            FrameKind.IN_ITEM: self._on_item,
            FrameKind.IN_END: lambda frame: streams.end_input(frame.ident, frame.kind, frame.lane),
            FrameKind.IN_ERROR: lambda frame: streams.end_input(frame.ident, frame.kind, frame.lane),
            FrameKind.UNHELD: lambda frame: self.references.release(frame.ident),
            FrameKind.FETCH: self._on_fetch,
        }

    def _task_of(self, number: int) -> ClientTask | None:
        task = self.engine.ledger.tasks.get(number)
        return task if isinstance(task, ClientTask) else None

    # From the client ------------------------------------------------------------------------------------------------

    def _on_call(self, frame: Frame) -> None:
        try:
            message, body = unpack_call(frame.body)
            call = PackedCall(
                message.name,
                self.link.function(message.function),
                self.link.payload(body),
                unpack_options(message.options),
            )
            if frame.flags & PERMITTED:
                self.permits.give(frame.ident)
            if self.early is not None:
                self.early[frame.ident] = EarlyCall(frame.body, message, call)
                return
            self._keep(frame, message, call)
            self.begin(frame.ident, message, call)
        except SkywardError as error:
            self.outcome(frame.ident, "error", error)
        except BaseException as error:  # a bug costs one call
            text = f"head: a call could not begin ({in_words(error)}); report this bug"
            self.outcome(frame.ident, "error", InternalError(text))

    def begin(self, number: int, message: CallMessage, call: PackedCall, *, starts: int = 0) -> None:
        """Submit a call that is kept. `starts`: those of a gang that are over."""
        if message.gang is not None:
            gang = self.gang(number, message, message.gang, call)
            gang.past = [BEFORE_THIS_HEAD] * starts
            self.engine.submit_gang(gang)
        else:
            task = self.task(number, message, call)
            if self.inputs.is_gone(task):
                self.inputs.refuse(task)
            else:
                self.engine.submit(task, nodes=message.nodes, after_s=message.after_s)

    def task(self, number: int, message: CallMessage, call: PackedCall) -> ClientTask:
        """Return the task of a call."""
        head = TaskHead(*message.head)
        task_class = ClientChunk if message.handles_loss else ClientTask
        task = task_class(
            id=number,
            name=call.name,
            head=head,
            function=call.function,
            payload=call.payload,
            options=call.options,
            timeout_s=message.timeout_s,
            expected_ns=message.expected_ns,
            may_move=message.may_move,
            actor=head.actor if head.kind == CallKind.ACTOR else 0,
            client=self,
            count=message.calls,
        )
        task.is_permitted = self.permits.take(number)
        if not message.in_bulk:
            task.in_bulk = False
        return task

    def gang(self, number: int, message: CallMessage, more: GangMessage, call: PackedCall) -> Gang:
        """Return a gang."""
        future = GangFuture(self, number)
        options = call.options
        future.gang = ClientGang(
            client=self,
            id=number,
            name=call.name,
            launch=more.launch,
            launch_bytes=more.launch_bytes,
            function=call.function,
            payload=call.payload,
            head=TaskHead(*message.head),
            options=options,
            nodes=message.nodes,
            some_of=more.some_of,
            count=options.nodes if message.nodes is None else None,
            ranks_per_node=more.ranks_per_node,
            future=future,
            retries=Retries(options),
            restarts_left=options.max_restarts,
        )
        return future.gang

    def _cancel(self, number: int) -> None:
        if self.kept is not None:
            self.kept.drop(number)
        if self.early is not None:
            self.early.pop(number, None)
        elif number in self.engine.ledger.gangs:
            self.engine.cancel_gang(number)
        else:
            self.engine.cancel(number)

    def _on_credit(self, frame: Frame) -> None:
        self._take(frame.ident, int.from_bytes(frame.body, "little"))

    def _take(self, number: int, count: int) -> None:
        """Note that the user has read items of a stream, so that more may come."""
        if self.early is not None and number in self.early:
            self.early[number].taken += count
            return
        if self.kept is not None:
            self.kept.taken(number, count)
        self.engine.streams.grant(number, count)

    def _on_close(self, frame: Frame) -> None:
        if self.kept is not None:
            self.kept.drop(frame.ident)
        if self.early is not None:
            self.early.pop(frame.ident, None)
        self.engine.streams.close(frame.ident)

    def _on_item(self, frame: Frame) -> None:
        self.engine.streams.send_item(frame.ident, frame.lane, self.link.payload(frame.body))

    def start_actor(self, answer: Answer, *fields: Any) -> None:
        """Make an actor. The reply comes when it is made."""
        message = ActorMessage(*fields)
        gpus, cpus, memory_gib, need = message.booking
        actor = LiveActor(
            number=message.number,
            name=message.name,
            constructor=self._step(message.constructor),
            ending=self._step(message.ending),
            lanes=message.lanes,
            nodes=message.nodes,
            need=need,
            gpus=gpus,
            cpus=cpus,
            memory_gib=memory_gib,
            max_restarts=message.max_restarts,
            restarts_left=message.restarts_left,
            moved=partial(self.actor_moved, message.number),
            made=Promise(lambda status, value: answer(status, actor.node if status == "ok" else value)),
        )
        if self.early is None:
            self.engine.actors.start(actor)
        else:
            self.early_actors.append((actor, message))

    def _step(self, step: tuple[str, bytes, bytes]) -> PackedCall:
        name, function, payload = step
        return PackedCall(name, self.link.function(function), self.link.payload(payload), CallOptions(name=name))

    def close_actor(self, number: int, *, cancel: bool) -> None:
        """Begin to end an actor."""
        self.once_known(lambda: self.engine.actors.close(number, cancel=cancel))

    def forget_actor(self, number: int) -> None:
        """Close an actor that nobody can call."""
        self.once_known(lambda: self.engine.actors.forget(number))

    def actor_closed(self, answer: Answer, number: int) -> None:
        """Reply when an actor has ended."""
        self.once_known(lambda: self._actor_closed(answer, number))

    def _actor_closed(self, answer: Answer, number: int) -> None:
        actor = self.engine.ledger.actors.get(number)
        if actor is None:
            answer("ok", None)
        else:
            actor.closed = Promise(answer)

    # Calls that other clients take ------------------------------------------------------------------------------------

    def _keep(self, frame: Frame, message: CallMessage, packed: PackedCall) -> None:
        """Keep what comes of a call. Raises UsageError: the journal has no room for it."""
        if self.kept is None:
            return
        gang, head = message.gang, TaskHead(*message.head)
        self.kept.add(
            KeptCall(
                number=frame.ident,
                name=message.name,
                form=_form_of(message, head),
                is_on_one=gang is not None and message.nodes is None and unpack_options(message.options).nodes is None,
                returns="" if gang is None else gang.launch.returns,
            ),
            _order_of(frame.body, head, packed),
        )

    def resume(self, positions: list[CallPosition]) -> list[int]:
        """Let a client go on that knew an earlier process of this head. Return the calls that this one does not know.

        The client gets all frames of the other calls that it does not have.
        """
        assert self.kept is not None
        with self.engine.ledger:
            for number, received, taken, is_begun in positions:
                call = self.kept.get(number)
                if call is None:
                    continue
                if call.form == "stream" and taken > call.first:
                    self._take(number, taken - call.first)
                self.kept.follow(call, self.link, received=received, is_begun=is_begun)
                self.inputs.go_on(number)
            return [position.number for position in positions if self.kept.get(position.number) is None]

    def listed(self) -> list[CallFacts]:
        """Return the calls that are open, and those whose outcome nobody has taken."""
        with self.engine.ledger:
            calls = [call for call in self.kept or () if call.form != CHUNK]
            return [facts_of(call, self._node_of(call.number)) for call in calls]

    def _node_of(self, number: int) -> int | None:
        ledger = self.engine.ledger
        gang = ledger.gangs.get(number)
        if gang is not None:
            return min((task.node for task in gang.tasks.values()), default=None)
        return ledger.node_of(ledger.tasks.get(number))

    def facts(self, number: int) -> CallFacts:
        """Return one of the calls that are listed. Raises UsageError."""
        with self.engine.ledger:
            return facts_of(self._kept_call(number), self._node_of(number))

    def follow(self, number: int) -> None:
        """Let the client have what comes of a call, and what has come of it before. Raises UsageError."""
        with self.engine.ledger:
            call = self._kept_call(number)
            assert self.kept is not None
            self.kept.follow(call, self.link)

    def _kept_call(self, number: int) -> KeptCall:
        call = None if self.kept is None else self.kept.get(number)
        if call is None:
            raise UsageError(f"call={number}: is not open, and its value was taken; choose one of pool.calls()")
        return call

    def leave(self, first_number: int) -> None:
        """Keep what comes of all calls for the next client, whose calls begin with a number. Nobody feeds them."""
        if self.kept is not None:
            self.kept.leave()
        self.inputs.end_before(first_number)

    def change_client(self, link: ClientLink, first_number: int) -> None:
        """Let another client take the calls. Maps and iterators of the former one end, because it fed them.

        Args:
            link: Link to it.
            first_number: First number of its calls.
        """
        assert self.kept is not None
        self.link = link
        self.leave(first_number)
        ledger = self.engine.ledger
        for number in [task.id for task in ledger.tasks.values() if isinstance(task, ClientChunk)]:
            self.engine.cancel(number)
        for call in self.kept:
            if call.form == CHUNK:
                self.kept.drop(call.number)
        self.references.hold_only(
            number
            for call in self.kept
            for frame in call.frames
            if frame.kind == FrameKind.HELD
            for _, _, number in load_plain(frame.body)
        )

    # References -----------------------------------------------------------------------------------------------------

    def refer_again(self, places: list[Place]) -> None:
        """Hold blobs that the client has had references to with an earlier head, before it is known where they are."""
        with self.engine.ledger:
            for place in places:
                digest, size, _ = place
                known = self.references.named(digest)
                blob = known if isinstance(known, KeptBlob) else KeptBlob(digest, size, None, self.engine.values)
                self.references.hold_as((place,), (blob,))

    def put(self, places: list[Place], nodes: tuple[int, ...]) -> None:
        """Hold blobs that the client has sent as the content of a reference, and send them to nodes."""
        try:
            kept = [self._put(digest, size) for digest, size, _ in places]
            self.engine.values.hold(kept, nodes)
        except SkywardError as error:  # the client may use the reference before it hears of that
            self.references.refuse(places, error)
            raise
        self.references.hold_as(places, kept)

    def _put(self, digest: bytes, size: int) -> KeptBlob:
        known, blob = self.references.named(digest), self.link.blob(digest)
        if isinstance(known, KeptBlob):
            if known.source is None and blob is not None and blob.fd >= 0:  # an earlier head had the program's copy
                known.source = blob
            return known
        if blob is None:
            raise self.references.missing(digest, f"a value of {size} bytes")
        if blob.fd < 0:
            raise UsageError(f"put(): the head of the pool has no room for {size} bytes; free memory on its machine")
        return KeptBlob(digest, size, blob, self.engine.values)

    def nodes_of(self, answer: Answer, digests: tuple[bytes, ...]) -> None:
        """Reply with the nodes that have all of these blobs."""
        self.once_known(lambda: answer("ok", self._nodes_of(digests)))

    def _nodes_of(self, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        blobs = tuple(blob for digest in digests if (blob := self.references.named(digest)) is not None)
        return self.engine.values.nodes_of(blobs) if len(blobs) == len(digests) else ()

    def _on_fetch(self, frame: Frame) -> None:
        self.once_known(lambda: self._fetch(frame))

    def once_known(self, action: Callable[[], object]) -> None:
        """Call a function as soon as it is known what the nodes have."""
        if self.early is None:
            action()
        else:
            self.waiting.append(action)

    def _fetch(self, frame: Frame) -> None:
        """Get the bytes of blobs from nodes, and send them to the client."""
        digests = [frame.body[at : at + DIGEST_SIZE] for at in range(0, len(frame.body), DIGEST_SIZE)]
        blobs = tuple(blob for digest in digests if (blob := self.references.named(digest)) is not None)
        if len(blobs) < len(digests):
            for digest in digests:  # somebody waits for each
                unknown = self.references.missing(digest, "a value that the client asks for")
                self._send_fetched(frame.ident, digest, None, unknown)
            return
        for digest, future in zip(digests, self.engine.values.begin_fetch(blobs), strict=True):

            def fetched(done: Any, digest: bytes = digest) -> None:
                error = done.exception()
                blob = None if error is not None else done.result()
                self._send_fetched(frame.ident, digest, blob, error)

            future.add_done_callback(fetched)

    def _send_fetched(self, number: int, digest: bytes, blob: Blob | None, error: BaseException | None) -> None:
        try:
            if blob is not None:
                self.link.tell_of_task(FrameKind.FETCHED, number, digest, (blob,), is_last=True)
                return
        except OSError as failure:
            error = cannot_send("a kept value", failure)
        data, _ = encode_exception(error or InternalError("head: a blob did not come; report this bug"))
        self.link.tell_of_task(FrameKind.FETCHED, number, digest + (data or b""), lane=1)

    # To the client --------------------------------------------------------------------------------------------------

    def sent(self, number: int) -> None:
        """Tell the client that a call was sent to a node. Needs the ledger's lock."""
        if self.kept is None or self.kept.passes(number, KeptFrame(FrameKind.SENT)):
            self.link.tell(FrameKind.SENT, number)

    def retried(self, number: int, left: RetriesLeft) -> None:
        """Note the retries that are left to a call, so that the next head does not begin to count again."""
        if self.kept is None:
            self.told_of_retry(number, tuple(left))
            return
        with self.engine.ledger:
            self.kept.retried(number, left)

    def _tell(
        self,
        kind: int,
        number: int,
        body: bytes = b"",
        blobs: tuple[Blob, ...] = (),
        *,
        lane: int = 0,
        flags: int = 0,
        is_last: bool = False,
        has_failed: bool = False,
    ) -> None:
        """Send a frame of a call, and keep it if another client may want it. Raises OSError."""
        with self.engine.ledger:
            if self.kept is None or self.kept.passes(
                number, KeptFrame(kind, body, blobs, lane, flags, is_last), has_failed=has_failed
            ):
                self.link.tell_of_task(kind, number, body, blobs, lane=lane, flags=flags, is_last=is_last)

    def value(self, kind: int, number: int, received: Received, *, lane: int = 0, is_last: bool = False) -> None:
        """Send a value, a part of one, or an item, as it arrived. `lane` is the rank of a gang."""
        try:
            self._hold(number, received)
            flags = KEPT if isinstance(received, KeptReceived) else 0
            self._tell(kind, number, received.body, _travelling(received), lane=lane, flags=flags, is_last=is_last)
        except OSError as error:
            self.outcome(number, "error", cannot_send("value of a call", error))

    def _hold(self, number: int, received: Received) -> None:
        kept = [blob for blob in received.blobs if isinstance(blob, KeptBlob)]
        if kept:
            with self.engine.ledger:
                self._tell(FrameKind.HELD, number, dump_plain(self.references.hold(kept)))

    def gang_values(self, gang: Gang) -> None:
        """Send the values of a gang's ranks."""
        for rank, received in sorted(gang.values.items()):
            self.value(FrameKind.PART, gang.id, received, lane=rank)
        self.outcome(gang.id, "gang", None)

    def gang_failed(self, gang: Gang) -> None:
        """Send the failures of a gang's ranks."""
        failures = [(at, rank, _plain(failure)) for at, rank, failure in gang.failures]
        self.outcome(gang.id, "gang failed", (failures, gang.past, len(gang.tasks)))

    def outcome(self, number: int, status: str, content: Any) -> None:
        """Send any other end of a call than its value."""
        *parts, last = pieces_of(dump_plain((status, _plain(content))))
        with self.engine.ledger:
            for lane, piece in parts:
                self._tell(FrameKind.OUTCOME, number, piece, lane=lane)
            self._tell(FrameKind.OUTCOME, number, last[1], lane=last[0], is_last=True, has_failed=status != "gang")


def _order_of(body: bytes, head: TaskHead, packed: PackedCall) -> KeptOrder | None:
    """Return what a call needs to begin in another process; None if it needs more: an actor, or a node's value."""
    blobs = (*packed.function.payload.blobs, *packed.payload.blobs)
    if head.kind == CallKind.ACTOR or any(blob.here() is not blob for blob in blobs):
        return None
    return KeptOrder(body, packed.function, packed.payload.blobs)


def _form_of(message: CallMessage, head: TaskHead) -> str:
    if message.gang is not None:
        return "gang"
    if message.handles_loss:
        return CHUNK
    return "stream" if head.mode == Mode.STREAM else "value"


def _travelling(received: Received) -> tuple[Blob, ...]:
    """Return the blobs of a value whose bytes go to the client: those that arrived, and stay on no node."""
    return tuple(blob for blob in received.blobs if not isinstance(blob, KeptBlob) and (blob.fd >= 0 or blob.is_loaded))


def _plain(content: Any) -> Any:
    """Return an exception of skyward as bytes, and everything else as it is."""
    if not isinstance(content, BaseException):
        return content
    data, reason = encode_exception(content)
    if data is None:
        data, _ = encode_exception(InternalError(f"{in_words(content)} (cannot be sent: {reason}); report this bug"))
    return data
