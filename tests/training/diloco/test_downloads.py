"""Frames that go on: only with exactly the bytes that are here, by HTTP and by the channels of a pool."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.downloads import PARTIAL, Download, download_for
from skyward.training.diloco.frames import decode, encode
from skyward.training.diloco.pool_server import PoolServer
from skyward.training.diloco.server_settings import DiLoCoSettings
from skyward.training.diloco.tensors import exchanged, to_wire
from skyward.wire.frames import FrameKind
from skyward.wire.task_channel import TaskChannel
from tests.training.diloco.runs import TOKEN, make_model, serving


class Breaking:
    """Source of bytes that ends."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_into(self, memory: memoryview) -> int:
        piece, self._content = self._content[:3], self._content[3:]
        memory[: len(piece)] = piece
        return len(piece)


def begun(content: bytes, *, tag: str = "x", size: int = 9) -> Download:
    download = Download()
    with pytest.raises(EOFError):
        download.receive(Breaking(content).read_into, status=200, tag=tag, size=size)
    return download


def test_a_body_comes_in_several_answers() -> None:
    download = begun(b"abcd")
    assert download.query == {"tag": "x", "offset": 4}
    with pytest.raises(EOFError, match="1 bytes are missing"):
        download.receive(Breaking(b"efgh").read_into, status=PARTIAL, tag="x", size=5)
    assert download.receive(Breaking(b"i").read_into, status=PARTIAL, tag="x", size=1) == b"abcdefghi"
    assert download.query == {}


def test_another_body_comes_whole() -> None:
    download = begun(b"abcd")
    assert download.receive(Breaking(b"other").read_into, status=200, tag="y", size=5) == b"other"


@pytest.mark.parametrize(("tag", "size"), [("y", 5), ("x", 4), ("", 5)])
def test_a_rest_that_does_not_fit_is_not_joined(tag: str, size: int) -> None:
    download = begun(b"abcd")
    with pytest.raises(EOFError, match="another frame"):
        download.receive(Breaking(bytes(size)).read_into, status=PARTIAL, tag=tag, size=size)
    assert download.query == {}  # the next request asks for all of it


def test_a_body_without_a_tag_or_without_a_byte_is_not_gone_on_with() -> None:
    assert begun(b"abcd", tag="").query == {}
    assert begun(b"").query == {}


def test_a_refusal_is_no_part_of_a_frame() -> None:
    download = begun(b"abcd")
    assert download_for(503, download) is not download
    assert download_for(PARTIAL, download) is download
    assert download.query == {"tag": "x", "offset": 4}


def fetched(server: DiLoCoServer, **query: Any) -> tuple[int, str, bytes]:
    """Return status, tag and body of the parameters by a query."""
    url = f"{server.address}/parameters?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, response.headers["ETag"].strip('"'), response.read()


def test_a_server_sends_the_rest_of_the_frame_that_a_tag_names() -> None:
    with serving(make_model()) as server:
        status, tag, whole = fetched(server)
        assert status == 200
        assert fetched(server, tag=tag, offset=9) == (PARTIAL, tag, whole[9:])
        for query in ({"offset": 9}, {"tag": "y", "offset": 9}, {"tag": tag, "offset": len(whole)}):
            assert fetched(server, **query) == (200, tag, whole)


def test_a_server_that_was_started_again_sends_a_frame_whole(tmp_path: Path) -> None:
    """The tensors may be others, though the round is the same."""
    with serving(make_model(), save_dir=tmp_path) as server:
        _, tag, whole = fetched(server)
    with serving(make_model(), save_dir=tmp_path) as server:
        status, other, again = fetched(server, tag=tag, offset=9)
    assert status == 200
    assert decode(again).arrays == decode(whole).arrays
    assert other != tag


def test_a_server_in_a_program_sends_the_rest_by_a_channel() -> None:
    server = PoolServer(DiLoCoSettings(), is_over=lambda: False, ended=lambda _: None)

    def ask(method: str, path: str, body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send a request, as a task does, and return the head and the body of the answer."""
        sent: list[tuple[FrameKind, bytes, int]] = []
        answered: list[tuple[FrameKind, bytes, int]] = []
        task = TaskChannel("test", lambda *frame: sent.append(frame), node=0)
        program = TaskChannel("test", lambda *frame: answered.append(frame), node=0)
        if body:
            task.send(body)
        for frame in sent:
            program.on_frame(*frame)
        server.answer(program, {"method": method, "target": path, "size": len(body)})
        for frame in answered:
            task.on_frame(*frame)
        head = json.loads(task.receive(0))
        answer = b""
        while len(answer) < head["size"]:
            answer += task.receive(0)
        return head, answer

    try:
        ask("PUT", "/parameters", b"".join(encode(to_wire(exchanged(make_model())), {})))
        head, whole = ask("GET", "/parameters")
        assert (head["status"], head["size"]) == (200, len(whole))
        again, rest = ask("GET", f"/parameters?tag={head['tag']}&offset=9")
        assert again == {**head, "status": PARTIAL, "size": len(whole) - 9}
        assert rest == whole[9:]
    finally:
        assert server.stop(60)
