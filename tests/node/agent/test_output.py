"""Assignment of output to tasks: pipes are split exactly at markers, and dropped lines are counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.node.agent.output import DISPLAYS, LogBuffer, OutputReader
from skyward.node.slot.stdio import MARKER_SIZE, display_piece, marker

TOKEN = bytes(range(16))


@dataclass
class Pipe:
    """A slot's pipe. The test plays the slot."""

    current: int = 0
    drained: int = 0
    got: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fd, self.write_end = os.pipe()
        self.reader = OutputReader(fd, TOKEN, lambda: self.current, self.count)

    def count(self, size: int) -> None:
        self.drained += size

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.write_end, data) :]

    def read(self) -> None:
        for task, data, is_display in self.reader.read():
            self.got[task] = self.got.get(task, b"") + (b"<%s>" % data if is_display else data)

    def close(self) -> None:
        self.reader.close()
        os.close(self.write_end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_text_before_a_marker_belongs_to_its_task(pipe: Pipe) -> None:
    pipe.write(b"one\n" + marker(TOKEN, 1) + b"two" + marker(TOKEN, 2))
    pipe.read()
    assert pipe.got == {1: b"one\n", 2: b"two"}
    assert pipe.drained == len(b"one\ntwo"), "markers are not output"


def test_text_without_a_marker_belongs_to_the_running_task(pipe: Pipe) -> None:
    pipe.current = 7
    pipe.write(b"so far")
    pipe.read()
    assert pipe.got == {7: b"so far"}
    pipe.write(b", so good" + marker(TOKEN, 7))
    pipe.current = 8
    pipe.read()
    assert pipe.got == {7: b"so far, so good"}


def test_a_marker_with_another_token_is_output(pipe: Pipe) -> None:
    forged = marker(bytes(16), 9)
    pipe.write(b"a" + forged + b"b" + marker(TOKEN, 1))
    pipe.read()
    assert pipe.got == {1: b"a" + forged + b"b"}


@pytest.mark.parametrize("cut", range(1, MARKER_SIZE))
def test_a_marker_that_arrives_in_two_pieces_is_a_marker(pipe: Pipe, cut: int) -> None:
    """A read of a full pipe may end anywhere."""
    end = marker(TOKEN, 0x1E021E021E021E02)
    pipe.write(b"text" + end[:cut])
    pipe.current = 2  # the task has ended meanwhile, and the next one runs
    pipe.read()
    pipe.write(end[cut:] + b"next")
    pipe.read()
    assert pipe.got == {0x1E021E021E021E02: b"text", 2: b"next"}


def test_text_that_only_looks_like_a_marker_comes_at_the_end(pipe: Pipe) -> None:
    pipe.current = 1
    pipe.write(b"text\x1e")
    pipe.read()
    os.close(pipe.write_end)
    pipe.read()
    assert pipe.got == {1: b"text\x1e"}
    assert pipe.reader.is_closed
    pipe.write_end = os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize("cut", [1, 10, 17, 18, 19, 26, 27, 28, 29, 527])
def test_a_display_stands_between_the_lines_of_its_task(pipe: Pipe, cut: int) -> None:
    content = bytes(range(250)) * 2
    piece = display_piece(TOKEN, 1, content)
    pipe.current = 1
    pipe.write(b"before\n" + piece[:cut])
    pipe.read()
    pipe.write(piece[cut:] + piece + b"after\n")
    pipe.read()
    assert pipe.got == {1: b"before\n<%s><%s>after\n" % (content, content)}
    assert pipe.drained == len(b"before\nafter\n") + 2 * len(content), "it is output"


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.binary(max_size=200) | st.just(b"\x1e\x02" * 9) | st.just(b"\x1e"), max_size=20),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
def test_pieces_of_any_size_give_the_same_output(texts: list[bytes], cuts: list[int]) -> None:
    pipe = Pipe()
    try:
        data = b"".join(text + marker(TOKEN, task) for task, text in enumerate(texts, 1))
        ends = [sum(len(t) + MARKER_SIZE for t in texts[:n]) for n in range(1, len(texts) + 1)]
        at = turn = 0
        while at < len(data):
            piece = data[at : at + cuts[turn % len(cuts)]]
            pipe.current = next((task for task, end in enumerate(ends, 1) if at + len(piece) < end), 0)
            if any(end - MARKER_SIZE <= at + len(piece) < end for end in ends):
                pipe.current = 999  # its marker is being written: the page names the next task already
            pipe.write(piece)
            at, turn = at + len(piece), turn + 1
            if pipe.current != 999:
                pipe.read()
        pipe.read()
        assert pipe.got == {task: text for task, text in enumerate(texts, 1) if text}
    finally:
        pipe.close()


def test_a_flood_is_split_while_it_is_written(pipe: Pipe) -> None:
    """The writer sends more than the pipe holds and goes on meanwhile. Reads cut markers anywhere."""
    lines = [b"%d " % task * (task % 5000) for task in range(1, 2001)]

    def write() -> None:
        for task, line in enumerate(lines, 1):
            pipe.current = task
            pipe.write(line)
            pipe.write(marker(TOKEN, task))
            pipe.current = 0

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        pipe.read()
    writer.join()
    pipe.read()
    assert pipe.got == {task: line for task, line in enumerate(lines, 1) if line}


class TestLogBuffer:
    def test_all_output_comes_in_order_while_there_is_room(self) -> None:
        buffer = LogBuffer(100)
        items = [(1, 0, b"a\n"), (2, 1, b"b\n"), (1, 0, b"c")]
        for item in items:
            buffer.add(*item)
        assert buffer
        assert list(buffer.take()) == items
        assert not buffer
        assert list(buffer.take()) == []

    def test_the_oldest_output_is_dropped_and_its_lines_are_counted(self) -> None:
        buffer = LogBuffer(10)
        for number in range(10):
            buffer.add(number, 0, b"%d\n\n\n" % number)
        (_, stream, note), *kept = buffer.take()
        assert kept == [(8, 0, b"8\n\n\n"), (9, 0, b"9\n\n\n")]
        assert stream == 1
        assert b"24 lines of output were dropped" in note
        buffer.add(1, 0, b"more\n")
        assert list(buffer.take()) == [(1, 0, b"more\n")], "told once"

    def test_one_huge_piece_is_kept_and_cut(self) -> None:
        buffer = LogBuffer(10)
        huge = os.urandom(200_000)
        buffer.add(1, 0, huge)
        pieces = list(buffer.take())
        assert len(pieces) > 1
        assert b"".join(text for _, _, text in pieces) == huge

    def test_displays_weigh_less_than_lines_and_are_not_cut(self) -> None:
        buffer = LogBuffer(1000)
        piece = bytes(1500)
        for _ in range(10):
            buffer.add(1, DISPLAYS, piece)
        buffer.add(1, 0, b"line\n")
        assert [item for item in buffer.take() if item[1] == 1] == []
        for _ in range(20):
            buffer.add(1, DISPLAYS, piece)
        (_, stream, note), *kept = buffer.take()
        assert stream == 1
        assert b"lines of output were dropped" in note
        assert kept == [(1, DISPLAYS, piece)] * 10

    @pytest.mark.parametrize("pieces", [[b"".join(b"%d\n" % n for n in range(10))], [b"%d\n" % n for n in range(10)]])
    def test_the_last_whole_lines_stay_when_it_is_trimmed(self, pieces: list[bytes]) -> None:
        buffer = LogBuffer(1000)
        for piece in pieces:
            buffer.add(1, 0, piece)
        buffer.trim(7)
        (_, _, note), *kept = buffer.take()
        assert b"7 lines of output were dropped" in note
        assert b"".join(text for _, _, text in kept) == b"7\n8\n9\n"

    def test_nothing_but_the_count_stays_of_a_longer_line(self) -> None:
        buffer = LogBuffer(1000)
        buffer.add(1, 0, b"a line that is too long\n")
        buffer.trim(7)
        assert [text[:18] for _, _, text in buffer.take()] == [b"[skyward: 1 lines "]
