"""Frames that an agent holds for the next head, and the journal of that head, whatever dies in between."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from skyward.node.agent.held import HeldFrames
from skyward.wire.frames import HAS_FD, Frame, FrameKind
from tests.waiting import open_files

TASK = 2


def item(number: int) -> Frame:
    return Frame(FrameKind.ITEM, 0, 0, TASK, bytes([number]))


@dataclass
class Head:
    """Process of a head. It writes each frame to the journal, and then says so."""

    journal: list[bytes]
    skip: int
    arriving: list[Frame] = field(default_factory=list)
    settled: int = 0
    """Frames that it has written, and that it has not told the agent of."""

    def write(self) -> None:
        frame = self.arriving.pop(0)
        self.settled += 1
        if self.skip:
            self.skip -= 1
        else:
            self.journal.append(frame.body)


@given(steps=st.lists(st.sampled_from(["make", "write", "settle", "kill"]), max_size=60))
def test_each_frame_is_in_the_journal_once_whenever_heads_die(steps: list[str]) -> None:
    held, journal, made = HeldFrames(), list[bytes](), 0
    head = Head(journal, 0)
    for step in [*steps, "kill", *["write"] * 100]:
        if step == "make":
            held.add(item(made))
            head.arriving.append(item(made))
            made += 1
        elif step == "write" and head.arriving:
            head.write()
        elif step == "settle":
            held.settle(TASK, head.settled)
            head.settled = 0
        elif step == "kill":
            first, _ = held.progress(TASK)
            head = Head(journal, len(journal) - first)
            held.send_again(head.arriving.append)
    assert journal == [bytes([number]) for number in range(made)]


def test_a_task_is_forgotten_once_its_end_is_written_down() -> None:
    held = HeldFrames()
    held.grant(TASK, 3)
    read, write = os.pipe()
    before = open_files(os.getpid())
    held.add(Frame(FrameKind.BLOB, HAS_FD, 0, TASK, bytes(32), read))
    held.add(Frame(FrameKind.RESULT, 0, 0, TASK, b""))
    assert held.progress(TASK) == (0, 3)
    held.settle(TASK, 1)
    assert list(held) == []
    assert open_files(os.getpid()) == before, "the descriptor of the blob is closed with it"
    os.close(read)
    os.close(write)
