"""Calls and output that a head keeps for the next client."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.engine.head.journal import BEGUN, OVER, HeadJournal
from skyward.engine.head.kept_calls import KeptCall, KeptCalls, KeptFrame, KeptOrder, facts_of
from skyward.engine.head.kept_output import KeptOutput
from skyward.engine.head.kept_state import store_of
from skyward.engine.retries import RetriesLeft
from skyward.engine.tasks import WireFunction
from skyward.errors import UsageError
from skyward.shared.messages import OK, REFUSED, StoreRequest
from skyward.shared.store import Store
from skyward.wire.blobs import Blob
from skyward.wire.frames import KEPT, FrameKind
from skyward.wire.payloads import Encoded
from skyward.wire.stream import StreamChannel
from tests.waiting import open_files


class Link:
    """Client's link that notes the frames."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def tell_of_task(
        self,
        kind: int,
        task: int,
        body: bytes = b"",
        blobs: tuple[Blob, ...] = (),
        *,
        lane: int = 0,
        flags: int = 0,
        is_last: bool = False,
    ) -> None:
        self.sent.append((kind, body))


def test_a_stream_goes_on_with_the_first_item_that_was_not_taken(tmp_path: Path) -> None:
    calls, link = KeptCalls(HeadJournal(str(tmp_path))), Link()
    calls.add(KeptCall(number=2, name="count", form="stream"))
    assert calls.passes(2, KeptFrame(FrameKind.SENT))
    for number in range(4):
        assert calls.passes(2, KeptFrame(FrameKind.ITEM, bytes([number])))
    calls.taken(2, 3)
    calls.leave()
    assert not calls.passes(2, KeptFrame(FrameKind.ITEM, b"\4")), "nobody follows it"
    (call,) = calls
    calls.follow(call, link)  # type: ignore[arg-type]
    assert link.sent == [(FrameKind.SENT, b""), (FrameKind.ITEM, b"\3"), (FrameKind.ITEM, b"\4")]
    assert calls.passes(2, KeptFrame(FrameKind.RESULT, is_last=True))
    assert facts_of(call, None).state == "done"
    calls.drop(2)
    assert not list(calls)


def test_output_is_bounded_and_the_dropped_lines_are_counted() -> None:
    output = KeptOutput(limit_bytes=10)
    output.put(2, b"12345")
    output.put_before([(2, b"0")])
    output.put(2, b"67890")
    assert output.take() == ([(2, b"12345"), (2, b"67890")], 1)
    assert output.is_empty
    for number in range(4):
        output.put(number, b"12345")
    output.put_before([(9, b"older")])
    assert output.take() == ([(2, b"12345"), (3, b"12345")], 3)


def test_frames_that_the_peer_may_not_have_are_found() -> None:
    channel = StreamChannel(checks_blobs=False)
    for number in range(3):
        channel.queue(FrameKind.LOG, number, b"line")
        channel.queue(FrameKind.EVENT, number, b"event")
    channel.queue(FrameKind.LOG, 9, b"piece", lane=1)
    assert channel.unacknowledged(FrameKind.LOG) == [(0, b"line"), (1, b"line"), (2, b"line")]


# The journal ----------------------------------------------------------------------------------------------------------


@given(contents=st.lists(st.binary(max_size=40), max_size=8), torn=st.integers(0, 60), data=st.data())
def test_a_torn_last_record_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], torn: int, data: st.DataObject
) -> None:
    folder = str(tmp_path_factory.mktemp("journal"))
    journal = HeadJournal(folder)
    places = [journal.append(content) for content in contents]
    marks = [data.draw(st.sampled_from([0, BEGUN, OVER])) for _ in contents]
    for at, mark in zip(places, marks, strict=True):
        journal.mark(at, mark)
    size = max(0, journal.size - torn)
    os.truncate(os.path.join(folder, "journal"), size)
    ends = [*places[1:], journal.size][: len(places)]
    whole = [(mark, content) for mark, content, end in zip(marks, contents, ends, strict=True) if end <= size]
    again = HeadJournal(folder)
    assert [(record.mark, record.content) for record in again.read()] == whole
    again.append(b"next")
    assert again.read()[-1].content == b"next"


def test_a_changed_record_and_all_behind_it_are_dropped(tmp_path: Path) -> None:
    journal = HeadJournal(str(tmp_path))
    for content in (b"first", b"second", b"third"):
        journal.append(content)
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes().replace(b"second", b"sEcond"))
    assert [record.content for record in HeadJournal(str(tmp_path)).read()] == [b"first"]


def test_a_journal_is_closed_with_its_object(tmp_path: Path) -> None:
    journal = HeadJournal(str(tmp_path))
    journal.rewrite([journal.append(b"first")])
    del journal
    assert not [path for path in open_files(os.getpid()) if path.startswith(str(tmp_path))]


def an_order(data: bytes) -> KeptOrder:
    function = WireFunction(b"f" * 16, Encoded(b"function"))
    return KeptOrder(b"frame", function, (Blob.snapshot(memoryview(data)),))


def test_another_process_goes_on_with_the_calls_of_a_killed_one(tmp_path: Path) -> None:
    calls = KeptCalls(HeadJournal(str(tmp_path)))
    calls.note(sessions=1)
    calls.note(sessions=2)
    order = an_order(b"argument")
    for number, form in ((2, "value"), (4, "value"), (6, "stream"), (8, "gang"), (10, "value"), (12, "value")):
        calls.add(KeptCall(number=number, name=f"call{number}", form=form), order)
    for number in (2, 6, 8, 12):
        calls.passes(number, KeptFrame(FrameKind.SENT))
    for retries in (2, 1):
        calls.retried(8, RetriesLeft(retries, 0, 0, 5.0))
    calls.passes(2, KeptFrame(FrameKind.RESULT, b"value", (Blob.snapshot(memoryview(b"large")),), is_last=True))
    for number in range(3):
        calls.passes(6, KeptFrame(FrameKind.ITEM, bytes([number])))
    calls.taken(6, 2)
    calls.passes(8, KeptFrame(FrameKind.PART, b"of one rank"))
    calls.passes(12, KeptFrame(FrameKind.RESULT, is_last=True))
    calls.drop(12)

    alive: list[object] = []  # files of blobs last as long as the blobs, and those of a killed process stay
    for _ in range(2):  # the second one reads the journal that the first one has rewritten
        again, link = KeptCalls(HeadJournal(str(tmp_path))), Link()
        found = {call.number: order for call, order in again.restore()}
        alive += [again, found]
        assert again.state == {"sessions": 2}
        assert {call.number: call.state for call in again} == {
            2: "done",
            4: "waiting",
            6: "running",
            8: "running",
            10: "waiting",
        }
        assert found.keys() == {4, 6, 8, 10}
        assert None not in found.values()
        assert [call.left and call.left.retries for call in again] == [None, None, None, 1, None]
        waiting = found[4]
        assert waiting is not None
        assert (waiting.body, waiting.function.payload.body) == (b"frame", b"function")
        assert [os.pread(blob.open(), 99, 0) for blob in waiting.blobs] == [b"argument"]
        for call in again:
            again.follow(call, link)  # type: ignore[arg-type]
        sent, item, value = (FrameKind.SENT, b""), (FrameKind.ITEM, b"\2"), (FrameKind.RESULT, b"value")
        assert link.sent == [sent, value, sent, item, sent]


def test_a_call_whose_values_stayed_on_nodes_ends_with_its_head(tmp_path: Path) -> None:
    """Otherwise its items would go missing without a word. Small values are in the frames themselves."""
    calls = KeptCalls(HeadJournal(str(tmp_path)))
    for number, form in ((2, "stream"), (4, "stream"), (6, "value"), (8, "value")):
        calls.add(KeptCall(number=number, name=f"call{number}", form=form), an_order(b"argument"))
        calls.passes(number, KeptFrame(FrameKind.SENT))
    for number in (2, 6):
        calls.passes(number, KeptFrame(FrameKind.HELD, b"places"))
    for number in (2, 4):
        calls.passes(number, KeptFrame(FrameKind.ITEM, b"item", flags=KEPT))
    for number in (6, 8):
        calls.passes(number, KeptFrame(FrameKind.RESULT, b"value", flags=KEPT, is_last=True))
    again = KeptCalls(HeadJournal(str(tmp_path)))
    assert {call.number for call, _ in again.restore()} == {2, 4, 6}
    assert [(call.number, call.is_torn, [frame.body for frame in call.frames]) for call in again] == [
        (2, True, [b""]),
        (4, False, [b"", b"item"]),
        (6, True, [b""]),
        (8, False, [b"", b"value"]),
    ]


def test_the_names_of_lost_state_are_refused_for_good(tmp_path: Path) -> None:
    def ask(store: Store, kind: str, name: str, verb: str, *arguments: object) -> tuple[int, object]:
        session = next(sessions)
        store.open(session, 0)
        store.request(session, 1, StoreRequest(kind, name, verb, arguments).fields())
        (answer,), store.answers = store.answers, []
        return answer.status, answer.value

    sessions = itertools.count(1)
    kept = KeptCalls(HeadJournal(str(tmp_path)))
    store = store_of(kept)
    assert ask(store, "counter", "kept", "add", 5) == (OK, 5)
    for amount, count in ((5, 5), (-5, 0)):
        assert ask(store, "counter", "again zero", "add", amount) == (OK, count)
    alive = [kept]
    for _ in range(2):  # the second one reads the journal that the first one has rewritten
        kept = KeptCalls(HeadJournal(str(tmp_path)))
        kept.restore()
        alive.append(kept)
        store = store_of(kept)
        status, why = ask(store, "counter", "kept", "add", 1)
        assert (status, why) == (
            REFUSED,
            ("StateLost", "counter='kept': was lost with the head of the pool; use another name"),
        )
        assert ask(store, "counter", "again zero", "add", 1) == (OK, 1)
        assert ask(store, "counter", "again zero", "add", -1) == (OK, 0)


@given(data=st.data())
def test_a_client_gets_each_frame_once_whatever_dies(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = str(tmp_path_factory.mktemp("journal"))
    calls, made, got, read = KeptCalls(HeadJournal(folder)), 0, list[bytes](), 0
    calls.add(KeptCall(number=2, name="count", form="stream"))
    calls.passes(2, KeptFrame(FrameKind.SENT))
    link, alive = Link(), list[object]()
    for step in data.draw(st.lists(st.sampled_from(["item", "get", "read", "kill"]), max_size=40)):
        if step == "item":
            calls.passes(2, KeptFrame(FrameKind.ITEM, bytes([made])))
            link.sent.append((FrameKind.ITEM, bytes([made])))
            made += 1
        elif step == "get" and link.sent:
            got.append(link.sent.pop(0)[1])
        elif step == "read" and read < len(got):
            read += 1
            if data.draw(st.booleans()):  # otherwise that was on its way when the head died
                calls.taken(2, read - next(iter(calls)).first)
        elif step == "kill":
            alive.append(calls)
            calls, link = KeptCalls(HeadJournal(folder)), Link()
            calls.restore()
            (call,) = calls
            calls.taken(2, read - call.first)
            calls.follow(call, link, received=len(got), is_begun=True)  # type: ignore[arg-type]
    assert [*got, *(body for _, body in link.sent)] == [bytes([number]) for number in range(made)]


def test_a_call_whose_frames_found_no_room_ends_behind_all_that_its_client_has(tmp_path: Path) -> None:
    journal = HeadJournal(str(tmp_path))
    calls = KeptCalls(journal)
    calls.add(KeptCall(number=2, name="count", form="stream"), an_order(b"argument"))
    calls.passes(2, KeptFrame(FrameKind.SENT))
    calls.passes(2, KeptFrame(FrameKind.ITEM, b"0"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size, limits[1]))
    try:
        for _ in range(5):
            calls.passes(2, KeptFrame(FrameKind.ITEM, b"more"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again, link = KeptCalls(HeadJournal(str(tmp_path))), Link()
    ((call, _),) = again.restore()
    assert call.is_torn
    again.passes(2, KeptFrame(FrameKind.OUTCOME, b"lost", is_last=True), has_failed=True)
    again.follow(call, link, received=6, is_begun=True)  # type: ignore[arg-type]
    assert link.sent == [(FrameKind.OUTCOME, b"lost")]


def test_the_journal_holds_only_what_nobody_has_taken(tmp_path: Path) -> None:
    calls = KeptCalls(HeadJournal(str(tmp_path)))
    value = os.urandom(100_000)
    for number in range(2, 200, 2):
        calls.add(KeptCall(number=number, name="call", form="value"), an_order(b"argument"))
        calls.passes(number, KeptFrame(FrameKind.SENT))
        calls.passes(number, KeptFrame(FrameKind.RESULT, value, (Blob.snapshot(memoryview(value)),), is_last=True))
        if number > 2:
            calls.drop(number)
    assert (tmp_path / "journal").stat().st_size < 3_000_000
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    again = KeptCalls(HeadJournal(str(tmp_path)))
    assert again.restore() == []
    assert [call.number for call in again] == [2]


def test_a_full_disk_fails_the_new_call_and_loses_no_other(tmp_path: Path) -> None:
    journal = HeadJournal(str(tmp_path))
    calls = KeptCalls(journal)
    calls.add(KeptCall(number=2, name="first", form="value"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 10, limits[1]))  # half of the next record fits
    try:
        with pytest.raises(UsageError, match="'second': the journal of the pool's head cannot be written"):
            calls.add(KeptCall(number=4, name="second", form="value"))
        calls.passes(2, KeptFrame(FrameKind.SENT))  # needs no room
        assert calls.passes(2, KeptFrame(FrameKind.RESULT, b"value", is_last=True)), "it still reaches the client"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    calls.add(KeptCall(number=6, name="third", form="value"))
    again = KeptCalls(HeadJournal(str(tmp_path)))
    assert [(call.number, call.state) for call, _ in again.restore()] == [(2, "running"), (6, "waiting")]
