"""Two ends of a channel whose frames pass through a list."""

from __future__ import annotations

import pytest

from skyward.wire.frames import FrameKind
from skyward.wire.task_channel import WINDOW_BYTES, TaskChannel

Frames = list[tuple[FrameKind, bytes, int]]


def pair() -> tuple[TaskChannel, Frames, TaskChannel, Frames]:
    """Return two ends, each with the frames that it sends."""
    one: Frames = []
    two: Frames = []
    left = TaskChannel("test", lambda *frame: one.append(frame), node=0)
    right = TaskChannel("test", lambda *frame: two.append(frame), node=0)
    return left, one, right, two


def carry(frames: Frames, end: TaskChannel) -> None:
    while frames:
        end.on_frame(*frames.pop(0))


def test_a_message_that_was_given_up_half_way_is_not_delivered() -> None:
    left, sent, right, answers = pair()
    with pytest.raises(TimeoutError, match="took nothing within"):
        left.send(bytes(2 * WINDOW_BYTES), timeout_s=0.0)
    carry(sent, right)
    carry(answers, left)
    left.send(b"next")
    carry(sent, right)
    assert right.receive(0.0) == b"next"


def test_a_small_message_is_sent_whole_or_not_at_all() -> None:
    left, sent, _, _ = pair()
    left.send(bytes(WINDOW_BYTES // 2))
    with pytest.raises(TimeoutError):
        left.send(bytes(WINDOW_BYTES // 2 + 1), timeout_s=0.0)
    left.send(bytes(WINDOW_BYTES // 2))
    assert sum(len(body) for _, body, _ in sent) == WINDOW_BYTES


def test_a_message_is_acknowledged_when_it_is_received() -> None:
    left, sent, right, answers = pair()
    left.send(b"one")
    carry(sent, right)
    carry(answers, left)
    assert not left.flush(0.0)
    assert right.receive() == b"one"
    carry(answers, left)
    assert left.flush(0.0)
