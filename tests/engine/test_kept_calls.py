"""Calls and output that a head keeps for the next client."""

from __future__ import annotations

from skyward.engine.head.kept_calls import KeptCall, KeptCalls, KeptFrame, facts_of
from skyward.engine.head.kept_output import KeptOutput
from skyward.wire.blobs import Blob
from skyward.wire.frames import FrameKind
from skyward.wire.stream import StreamChannel


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


def test_a_stream_goes_on_with_the_first_item_that_was_not_taken() -> None:
    calls, link = KeptCalls(), Link()
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
