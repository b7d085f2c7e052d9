"""The order of a copy from a CUDA device. Recorders stand for the streams, because there is no such device here."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyward.training.snapshot import SnapshotPool


def test_a_copy_waits_for_training_and_training_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            done.append(f"{self.name} waits for {event.what}")

    class Event:
        what = ""

        def record(self, stream: Stream) -> None:
            self.what = f"what {stream.name} has done"
            done.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            done.append("the host waits")

    @contextmanager
    def on(stream: Stream) -> Any:
        done.append(f"{stream.name} begins")
        yield
        done.append(f"{stream.name} ends")

    device = torch.device("cuda", 0)
    training = Stream("training")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, sources, non_blocking: done.append(f"copied, waits: {not non_blocking}")
    )
    buffer: Any = object()
    source: Any = SimpleNamespace(device=device, record_stream=lambda stream: done.append(f"kept for {stream.name}"))
    # `take` needs tensors on a device, and this machine has none.
    SnapshotPool()._copy_from(device, [buffer], [source])
    assert done == [
        "side waits for training",
        "side begins",
        "copied, waits: False",
        "kept for side",
        "side ends",
        "recorded on side",
        "training waits for what side has done",
    ], "the host never waits here, and a step after the copy cannot overtake it"
