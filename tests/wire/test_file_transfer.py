"""Transfer of files between two processes: the node's own program, and this one as its client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from skyward.wire.file_transfer import FileStream, PeerRefused, receive_files, send_files
from skyward.wire.file_tree import FileRefused, part_of, select
from tests.waiting import open_files, until

BOOT = "import sys; from skyward.node.agent.file_server import serve; sys.exit(serve())"
LARGE = 8 * 2**20


class Server:
    """The program that runs on a node, with its working folder in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.stream = FileStream(cast(BinaryIO, self.process.stdout), cast(BinaryIO, self.process.stdin))
        self.stream.wait_for_greeting()

    def end(self, by: signal.Signals | None = None) -> None:
        if by is not None:
            self.process.send_signal(by)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(60)
        self.process.stdout.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    served = Server(folder)
    try:
        yield served
    finally:
        served.end()


def upload(source: Path, there: Path, into: str) -> dict[str, int]:
    with server(there) as node:
        selection = select(str(source), "/")
        node.stream.send({"op": "receive", "into": into, "kind": selection.kind})
        return send_files(node.stream, selection.entries)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(LARGE))
    path.chmod(0o640)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


class Stop(Exception):
    pass


@pytest.mark.parametrize("by", [signal.SIGKILL, None], ids=["the node's end is killed", "the client's end is gone"])
def test_an_interrupted_file_has_no_name_yet_and_continues(large: Path, there: Path, by: signal.Signals | None) -> None:
    node = Server(there)
    target = there / "copy.bin"
    part = Path(part_of(str(target)))

    def stop(_: int) -> None:
        node.stream.flush()
        if part.exists() and part.stat().st_size >= LARGE // 4:
            until(lambda: part.stat().st_size >= LARGE // 4)
            raise Stop

    node.stream.send({"op": "receive", "into": "copy.bin", "kind": "file"})
    with pytest.raises(Stop):
        while True:  # the node may be slower than this end, so that all is sent before a quarter has arrived there
            send_files(node.stream, select(str(large), "/").entries, stop)
            node.end()
            target.unlink()
            node = Server(there)
            node.stream.send({"op": "receive", "into": "copy.bin", "kind": "file"})
    node.end(by)
    assert [path.name for path in there.iterdir()] == [part.name]

    counts = upload(large, there, "copy.bin")
    assert counts["copied"] == 1
    assert counts["bytes"] <= LARGE * 3 // 4
    assert target.read_bytes() == large.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in there.iterdir()] == ["copy.bin"]


def test_an_incomplete_file_with_other_content_is_not_continued(large: Path, there: Path) -> None:
    Path(part_of(str(there / "copy.bin"))).write_bytes(b"something else" * 100_000)
    assert upload(large, there, "copy.bin") == {"files": 1, "copied": 1, "bytes": LARGE}
    assert (there / "copy.bin").read_bytes() == large.read_bytes()


def test_two_uploads_of_one_file_at_once_leave_one_whole_file(large: Path, there: Path) -> None:
    with server(there) as one, server(there) as two:
        selection = select(str(large), "/")
        both = False

        def begin_the_other(_: int) -> None:
            nonlocal both
            if not both:
                both = True
                send_files(two.stream, selection.entries)

        for node in (one, two):
            node.stream.send({"op": "receive", "into": "copy.bin", "kind": "file"})
        send_files(one.stream, selection.entries, begin_the_other)
    assert (there / "copy.bin").read_bytes() == large.read_bytes()
    assert [path.name for path in there.iterdir()] == ["copy.bin"]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "", "a//b", "."])
def test_names_that_lead_out_of_the_folder_are_refused_on_both_sides(there: Path, name: str) -> None:
    with server(there) as node:  # a client that lies
        node.stream.send({"op": "receive", "into": "into", "kind": "folder"})
        node.stream.send({"entries": [[name, 0, 0o644]]})
        node.stream.flush()
        with pytest.raises(PeerRefused, match="leads out of the folder"):
            node.stream.receive()
    assert list(there.iterdir()) == []
    read, write = os.pipe()  # a node that lies
    with open(read, "rb") as reader, open(write, "wb") as writer, open(os.devnull, "wb") as null:
        text = json.dumps({"entries": [[name, 0, 0o644]]}).encode()
        writer.write(struct.pack("<I", len(text)) + text)
        writer.flush()
        with pytest.raises(FileRefused, match="leads out of the folder"):
            receive_files(FileStream(reader, null), "into", "folder", str(there))
    assert list(there.iterdir()) == []


def test_links_are_refused_on_both_sides(tmp_path: Path, there: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("a")
    (there / "elsewhere").mkdir()
    (there / "to").mkdir()
    (there / "to" / "sub").symlink_to(there / "elsewhere")
    with pytest.raises(PeerRefused, match="is a symbolic link there"):
        upload(source, there, "to")
    (there / "to" / "sub").unlink()
    (there / "to" / "sub").mkdir()
    (there / "to" / "sub" / "a").symlink_to(there / "elsewhere" / "a")
    with pytest.raises(PeerRefused, match="is a symbolic link there"):
        upload(source, there, "to")
    assert list((there / "elsewhere").iterdir()) == []
    (source / "link").symlink_to("/etc/passwd")
    with pytest.raises(FileRefused, match="link is a symbolic link; replace it by its target"):
        select(str(source), "/")


def test_modes_empty_folders_and_read_only_folders_arrive(tmp_path: Path, there: Path) -> None:
    source = tmp_path / "source"
    (source / "closed").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "closed" / "run").write_text("x")
    (source / "closed" / "run").chmod(0o750)
    (source / "closed").chmod(0o555)
    assert upload(source, there, "to") == {"files": 1, "copied": 1, "bytes": 1}
    modes = {p.name: p.stat().st_mode & 0o777 for p in (there / "to").rglob("*")}
    assert modes == {"closed": 0o555, "empty": (source / "empty").stat().st_mode & 0o777, "run": 0o750}
    (source / "closed" / "run").chmod(0o700)
    assert upload(source, there, "to") == {"files": 1, "copied": 0, "bytes": 0}
    assert (there / "to" / "closed" / "run").stat().st_mode & 0o777 == 0o700
    for folder in (source, there / "to"):
        (folder / "closed").chmod(0o755)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, there: Path, large: Path) -> None:
    boot = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n{BOOT}"
    node = Server(there)
    node.end()
    node.process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{boot}", str(there)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    node.stream = FileStream(cast(BinaryIO, node.process.stdout), cast(BinaryIO, node.process.stdin))
    node.stream.wait_for_greeting()
    node.stream.send({"op": "receive", "into": "copy.bin", "kind": "file"})
    with pytest.raises(PeerRefused, match="File too large"):
        send_files(node.stream, select(str(large), "/").entries)
    node.end()
    assert list(there.iterdir()) == []


def test_a_node_stops_comparing_files_when_its_client_is_gone(tmp_path: Path, there: Path) -> None:
    with (there / "huge").open("wb") as file:
        file.truncate(2**40)  # of holes: reading them takes minutes
    node = Server(there)
    node.stream.send({"op": "receive", "into": "huge", "kind": "file"})
    node.stream.send({"entries": [["huge", 2**40, 0o644]]})
    node.stream.flush()
    until(lambda: str(there / "huge") in open_files(node.process.pid))
    node.end()
    assert node.process.returncode == 1
