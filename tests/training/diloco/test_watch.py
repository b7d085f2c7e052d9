"""`skyward diloco watch`: a line for each change, and a picture for terminals."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from skyward.errors import UsageError
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.transport import ServerUnreachable
from skyward.training.diloco.watch import screen, watch
from tests.training.diloco.runs import TOKEN, make_model, serving, train, worker_of


def test_each_change_is_a_line_until_the_server_ends() -> None:
    out = io.StringIO()
    with serving(make_model()) as server:
        client = DiLoCoClient(server.address, token=TOKEN)
        worker = worker_of(server, make_model(), None, "b")
        changes: list[Callable[[], Any]] = [
            worker.start,
            worker.force_sync,
            lambda: client.ask("/control/kick", {"worker": "b"}),
            server.stop,
        ]

        def wait(_: float) -> None:
            """Change something between two looks."""
            if changes:
                changes.pop(0)()

        words = watch(client, out=out, patience_s=2.0, sleep=wait)
    name = client.name
    lines = out.getvalue().splitlines()
    assert lines[:2] == [f"{name}: round 0, 0 workers, 31 parameters, not saved", "worker b joined"]
    assert lines[2] == "round 0: loss -, outer gradient 0, cosine -, 1 worker"
    assert lines[3] == "worker b left"
    assert lines[4].startswith(f"{name}: does not answer: ")
    assert len(lines) == 5
    assert words == f"{name} has ended; it was last seen at round 1, 0 workers, 31 parameters, not saved"
    worker.stop()


def test_a_server_that_comes_back_is_followed_on(tmp_path: Any) -> None:
    out = io.StringIO()
    with serving(make_model(), save_dir=tmp_path) as first:
        port, client = int(first.address.rpartition(":")[2]), DiLoCoClient(first.address, token=TOKEN)
        second: list[Any] = []

        def start_again() -> None:
            again = serving(save_dir=tmp_path, port=port)
            second.append((again, again.__enter__()))

        changes: list[Callable[[], Any]] = [
            lambda: train(first, make_model(), "a", 3),
            first.stop,
            start_again,
            lambda: train(second[0][1], make_model(), "a", 3),
            lambda: second.pop()[0].__exit__(None, None, None),
        ]
        words = watch(client, out=out, patience_s=3.0, sleep=lambda _: changes.pop(0)() if changes else None)
    lines = out.getvalue().splitlines()
    assert f"{client.name}: answers again" in lines
    assert [line.partition(":")[0] for line in lines if line.startswith("round ")] == ["round 0", "round 1"]
    assert "round 2, " in words


def test_the_rounds_of_another_training_begin_again() -> None:
    """The other server starts at the same address, and is ahead of the first one when it is seen."""
    out = io.StringIO()
    with serving(make_model()) as first:
        port, client = int(first.address.rpartition(":")[2]), DiLoCoClient(first.address, token=TOKEN)
        second: list[Any] = []

        def start_another() -> None:
            first.stop()
            another = serving(make_model(), port=port)
            second.append(another)
            train(another.__enter__(), make_model(), "a", 6)

        changes: list[Callable[[], Any]] = [
            lambda: train(first, make_model(), "a", 3),
            start_another,
            lambda: second.pop().__exit__(None, None, None),
        ]
        watch(client, out=out, patience_s=3.0, sleep=lambda _: changes.pop(0)() if changes else None)
    lines = [line.partition(":")[0] for line in out.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("round ")] == ["round 0", "round 0", "round 1"]


def test_a_server_that_was_never_there_or_refuses_the_token_is_an_error() -> None:
    with pytest.raises(ServerUnreachable):
        watch(DiLoCoClient("127.0.0.1:1", token=TOKEN), out=io.StringIO())
    with serving(make_model()) as server, pytest.raises(UsageError, match="token: is missing or wrong"):
        watch(DiLoCoClient(server.address, token="another"), out=io.StringIO())


@pytest.mark.parametrize("width", [60, 140])
def test_the_picture_has_workers_curves_and_problems_and_fits(width: int) -> None:
    part = {"norm": 0.5, "cosine": 0.9, "staleness": 0, "is_counted": True}
    rounds: list[dict[str, Any]] = [
        {
            "round": number,
            "fragment": 0,
            "seconds": 4.0,
            "loss": 3.0 - number / 10,
            "gradient_norm": 0.4,
            "workers": {name: part | {"loss": 3.0 - number / 10 + share} for name, share in (("a", 0.1), ("b", -0.1))},
        }
        for number in range(12)
    ]
    workers = [
        {"worker": name, "is_awaited": True, "received_bytes": 5e6, "sent_bytes": 1e7, "silent_s": 3.2}
        for name in ("a", "b\x1b[31m")
    ]
    status = {
        "round": 12,
        "workers": workers,
        "parameters": 31,
        "last": rounds[-1],
        "received_bytes": 10_000_000,
        "sent_bytes": 20_000_000,
        "saved_round": None,
        "save_error": "disk: is full; free some space",
    }
    console = Console(file=io.StringIO(), width=width, height=40, force_terminal=False)
    console.print(screen("127.0.0.1:8512", status, rounds, width=width, height=40))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for words in ("127.0.0.1:8512", "round 12, 2 workers", "loss 1.9", "trains", "disk: is full"):
        assert words in text
    assert ("5.0 MB" in text) == (width > 100)
    assert "\x1b" not in text
