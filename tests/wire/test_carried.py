"""Streams that numbered batches carry, with batches that overtake each other."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.wire.carried import BATCH_BYTES, CarriedStreams, Ended, Open, Opened, StreamBatch

LIMIT_S = 60.0


async def _open_pair() -> tuple[Opened, socket.socket]:
    """Return one end of a socket for the streams, and the other end for the test."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    return Opened(reader, writer, writer.close), theirs


class Carriers:
    """Two ends of the streams. Batches move between them with delays, so calls overtake each other."""

    def __init__(self, dice: random.Random, open_far: Open | None = None) -> None:
        self._dice = dice
        self.there: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.near, self.far = CarriedStreams(), CarriedStreams(open_far or self._open)
        self._moving = [
            asyncio.ensure_future(self._move(one, other))
            for one, other in ((self.near, self.far), (self.far, self.near))
            for _ in range(3)
        ]

    async def _open(self, _: bytes) -> Opened:
        opened, theirs = await _open_pair()
        self.there.put_nowait(theirs)
        return opened

    async def _move(self, one: CarriedStreams, other: CarriedStreams) -> None:
        while True:
            batch = await one.give(1.0)
            assert len(batch.body) <= 2 * BATCH_BYTES
            await asyncio.sleep(self._dice.choice((0.0, 0.0, 0.001, 0.003)))
            await other.take(batch)

    async def begin(self, number: int) -> tuple[asyncio.Task[Ended], socket.socket]:
        opened, theirs = await _open_pair()
        return asyncio.ensure_future(self.near.carry(number, opened.reader, opened.writer)), theirs

    def close(self) -> None:
        for moving in self._moving:
            moving.cancel()


async def _read_all(sock: socket.socket) -> bytes:
    data = b""
    async with asyncio.timeout(LIMIT_S):
        while piece := await asyncio.get_running_loop().sock_recv(sock, 65536):
            data += piece
    return data


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 400_000), min_size=1, max_size=3))
def test_each_stream_brings_its_bytes_in_order_both_ways(seed: int, sizes: list[int]) -> None:
    async def main() -> None:
        dice = random.Random(seed)
        loop, carriers = asyncio.get_running_loop(), Carriers(dice)
        for number, size in enumerate(sizes):
            there, back = dice.randbytes(size), dice.randbytes(size // 2)
            carried, near = await carriers.begin(number)
            far = await asyncio.wait_for(carriers.there.get(), LIMIT_S)
            got = asyncio.ensure_future(_read_all(far))
            answer = asyncio.ensure_future(_read_all(near))
            await asyncio.gather(loop.sock_sendall(near, there), loop.sock_sendall(far, back))
            near.shutdown(socket.SHUT_WR)
            assert await got == there
            far.shutdown(socket.SHUT_WR)
            assert await answer == back
            assert await carried == Ended(0, "")
            near.close()
            far.close()
        carriers.close()

    asyncio.run(main())


def test_a_side_that_has_just_given_waits_for_more_if_it_has_little() -> None:
    async def main() -> None:
        loop, streams = asyncio.get_running_loop(), CarriedStreams()
        began = loop.time()
        opened, theirs = await _open_pair()
        carried = asyncio.ensure_future(streams.carry(1, opened.reader, opened.writer))
        for number in range(1, 6):  # the first opens the stream
            assert (await streams.give(LIMIT_S)).number == number
            theirs.send(b"a")
        assert loop.time() - began >= 0.02
        streams.close("over")
        await carried
        theirs.close()

    asyncio.run(main())


def test_one_call_gets_what_has_come_and_others_wait_for_the_next() -> None:
    async def main() -> None:
        streams = CarriedStreams()
        opened, theirs = await _open_pair()
        first, second = (asyncio.ensure_future(streams.give(LIMIT_S)) for _ in range(2))
        carried = asyncio.ensure_future(streams.carry(1, opened.reader, opened.writer))
        assert (await first).number == 1
        theirs.send(b"a")
        assert (await second).number == 2
        streams.close("over")
        await carried
        theirs.close()

    asyncio.run(main())


def test_a_call_that_waits_briefly_goes_before_those_that_have_time() -> None:
    async def main() -> None:
        streams = CarriedStreams()
        opened, theirs = await _open_pair()
        patient, brief = (asyncio.ensure_future(streams.give(limit_s)) for limit_s in (LIMIT_S, 0.9))
        await asyncio.sleep(0)
        carried = asyncio.ensure_future(streams.carry(1, opened.reader, opened.writer))
        assert (await brief).number == 1
        assert not patient.done()
        theirs.send(b"a")
        assert (await patient).number == 2
        streams.close("over")
        await carried
        theirs.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionRefusedError("no agent"), 69),
        (FileNotFoundError("no agent"), 69),
        (PermissionError("no agent"), None),
    ],
)
def test_an_end_that_cannot_be_opened_is_told(error: OSError, code: int | None) -> None:
    async def refuse(_: bytes) -> Opened:
        raise error

    async def main() -> None:
        carriers = Carriers(random.Random(0), refuse)
        carried, near = await carriers.begin(1)
        assert await carried == Ended(code, "no agent")
        assert await _read_all(near) == b""
        near.close()
        carriers.close()

    asyncio.run(main())


def test_a_side_that_does_not_answer_ends_the_stream() -> None:
    async def main() -> None:
        opened, near = await _open_pair()
        ended = await CarriedStreams().carry(1, opened.reader, opened.writer)
        assert ended.code is None
        near.close()

    asyncio.run(main())


def test_bytes_that_nobody_takes_hold_up_the_reading() -> None:
    async def main() -> None:
        streams = CarriedStreams()
        opened, near = await _open_pair()
        carried = asyncio.ensure_future(streams.carry(1, opened.reader, opened.writer))
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100 * BATCH_BYTES:
                async with asyncio.timeout(0.2):
                    await asyncio.get_running_loop().sock_sendall(near, bytes(BATCH_BYTES))
                sent += BATCH_BYTES
        assert sent < 100 * BATCH_BYTES
        streams.close("the test ends")
        assert await carried == Ended(None, "the test ends")
        near.close()

    asyncio.run(main())


def test_an_empty_batch_takes_no_turn() -> None:
    async def main() -> None:
        streams = CarriedStreams()
        assert await streams.give(0.01) == StreamBatch(0, b"")
        await streams.take(StreamBatch(0, b""))

    asyncio.run(main())


def test_a_stream_that_names_what_it_leads_to_ends_with_its_word() -> None:
    async def main() -> None:
        theirs: asyncio.Queue[socket.socket] = asyncio.Queue()

        async def run(to: bytes) -> Opened:
            opened, other = await _open_pair()
            theirs.put_nowait(other)

            async def ended() -> Ended:
                return Ended(int(to), "said so")

            return opened._replace(ended=ended)

        carriers = Carriers(random.Random(1), run)
        opened, near = await _open_pair()
        carrying = asyncio.ensure_future(carriers.near.carry(1, opened.reader, opened.writer, to=b"3"))
        far = await asyncio.wait_for(theirs.get(), LIMIT_S)
        await asyncio.get_running_loop().sock_sendall(far, b"its output")
        far.close()
        assert await _read_all(near) == b"its output"
        assert await asyncio.wait_for(carrying, LIMIT_S) == Ended(3, "said so")
        near.close()
        carriers.close()

    asyncio.run(main())
