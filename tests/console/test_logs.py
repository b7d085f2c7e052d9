"""Output kept in files."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import UsageError


def line(text: str, *, rank: int | None = None, call: int = 3, node: int = 0, restart_count: int = 0) -> sky.LogLine:
    return sky.LogLine(
        text=text, stream="stdout", node=node, rank=rank, task="train it", call=call, restart_count=restart_count
    )


def test_each_rank_and_each_start_has_a_file(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path, echo=False)
    for rank in (0, 1):
        files(line(f"hello from {rank}", rank=rank))
        files(line(f"again from {rank}", rank=rank, restart_count=1))
    files.close()
    kept = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert kept == {
        "train_it-3/rank-0.log": "hello from 0\n",
        "train_it-3/rank-1.log": "hello from 1\n",
        "train_it-3/rank-0.restart-1.log": "again from 0\n",
        "train_it-3/rank-1.restart-1.log": "again from 1\n",
    }


def test_plain_calls_share_the_file_of_their_node(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path, echo=False)
    files(line("one", node=0))
    files(line("two", node=1))
    files(line("three", node=0, call=4))
    files.close()
    assert (tmp_path / "node-0.log").read_text() == "[train it] one\n[train it] three\n"
    assert (tmp_path / "node-1.log").read_text() == "[train it] two\n"


def test_lines_are_in_the_file_at_once_and_after_it_was_closed(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path, echo=False)
    files(line("one", rank=0))
    assert (tmp_path / "train_it-3" / "rank-0.log").read_text() == "one\n"
    files.close()
    files.close()
    files(line("two", rank=0))
    files.close()
    assert (tmp_path / "train_it-3" / "rank-0.log").read_text() == "one\ntwo\n"


def test_ranks_beyond_the_limit_of_open_files_lose_nothing(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path, echo=False)
    for word in ("first", "second"):
        for rank in range(100):
            files(line(word, rank=rank))
    files.close()
    kept = [path.read_text() for path in tmp_path.rglob("rank-*.log")]
    assert kept == ["first\nsecond\n"] * 100


def test_with_echo_the_lines_are_printed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sky.LogFiles(tmp_path)
    files(line("hello", rank=1))
    files.close()
    assert capsys.readouterr().out == "[node 0 rank 1] hello\n"


def test_a_name_is_no_path(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path, echo=False)
    odd = sky.LogLine(text="x", stream="stdout", node=0, rank=0, task="../../a b/" + "c" * 200, call=1)
    assert Path(files.path(odd)).resolve().is_relative_to(tmp_path.resolve())
    assert len(Path(files.path(odd)).parent.name) < 100


@pytest.mark.parametrize("folder", ["", None, 3])
def test_a_path_that_is_no_folder_is_refused_by_name(folder: object) -> None:
    with pytest.raises(UsageError, match="folder"):
        sky.LogFiles(folder)  # type: ignore[arg-type]


def test_a_pool_keeps_the_output_of_its_calls(tmp_path: Path) -> None:
    files = sky.LogFiles(tmp_path / "logs", echo=False)
    with sky.ComputePool(sky.Local(), logs=files) as pool:
        sky.compute(name="speak")(print)("hello") >> pool
    assert (tmp_path / "logs" / "node-0.log").read_text() == "[speak] hello\n"
