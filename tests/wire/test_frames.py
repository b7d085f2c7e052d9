"""Frames in a byte stream that is cut at any point."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import InternalError
from skyward.wire.frames import HAS_FD, HEADER, MAX_BODY, Frame, FrameKind, FrameParser, pack

FRAMES = [
    Frame(FrameKind.HELLO, 0, 0, 0, b""),
    Frame(FrameKind.TASK, 0, 7, 1 << 63, b"body"),
    Frame(FrameKind.RESULT, 1, 65535, 2, bytes(range(256)) * 3),
]
STREAM = b"".join(pack(f.kind, f.ident, f.body, flags=f.flags, lane=f.lane) for f in FRAMES)


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_cut_at_any_byte_yields_the_same_frames(cut: int) -> None:
    parser = FrameParser()
    assert [*(parser.feed(STREAM[:cut])), *parser.feed(STREAM[cut:])] == FRAMES
    assert not parser.is_mid_frame


def test_a_stream_byte_by_byte_yields_the_same_frames() -> None:
    parser = FrameParser()
    assert [frame for i in range(len(STREAM)) for frame in parser.feed(STREAM[i : i + 1])] == FRAMES


@settings(max_examples=100, deadline=None)
@given(
    frames=st.lists(
        st.builds(
            Frame,
            kind=st.integers(0, 255),
            flags=st.integers(0, 0x7F),
            lane=st.integers(0, 0xFFFF),
            ident=st.integers(0, (1 << 64) - 1),
            body=st.binary(max_size=300),
            fd=st.just(-1),
        ),
        max_size=10,
    ),
    cuts=st.lists(st.integers(1, 500), min_size=1),
)
def test_any_frames_cut_anywhere_arrive_unchanged(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(pack(f.kind, f.ident, f.body, flags=f.flags, lane=f.lane) for f in frames)
    parser, got, at, turn = FrameParser(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += parser.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert got == frames


def test_the_end_of_a_stream_within_a_frame_is_noticed() -> None:
    parser = FrameParser()
    assert list(parser.feed(STREAM[:-1])) == FRAMES[:-1]
    assert parser.is_mid_frame


def test_descriptors_go_in_order_to_the_frames_that_carry_one() -> None:
    parser = FrameParser()
    data = (
        pack(FrameKind.BLOB, 1, b"a", flags=HAS_FD)
        + pack(FrameKind.TASK, 2, b"b")
        + pack(FrameKind.BLOB, 3, b"c", flags=HAS_FD)
    )
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    try:
        parser.add_fds(fds)
        assert [(f.ident, f.fd) for f in parser.feed(data)] == [(1, fds[0]), (2, -1), (3, fds[1])]
    finally:
        for fd in fds:
            os.close(fd)


def test_an_impossible_frame_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(InternalError, match="exceeds the limit"):
        list(FrameParser().feed(HEADER.pack(MAX_BODY + 1, 1, 0, 0, 0)))
    (largest,) = FrameParser().feed(pack(1, 1, bytes(MAX_BODY)))
    assert len(largest.body) == MAX_BODY
