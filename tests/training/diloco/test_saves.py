"""A server on disks that are full: its saves, and deltas that arrive."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from skyward.cli import main
from skyward.training.diloco import DiLoCoServer
from tests.training.diloco.runs import TOKEN, serving, worker_of


def wide_model() -> torch.nn.Module:
    """Return a model with 160 kB of parameters. Their momentum has as much."""
    return torch.nn.Linear(4, 8_000)


def step_rounds(server: DiLoCoServer, model: torch.nn.Module, rounds: int) -> None:
    with worker_of(server, model, None, "a") as worker:
        for _ in range(rounds):
            assert worker.force_sync()


def test_old_saves_make_room_on_a_full_disk(small_disk: Path) -> None:
    """Three saves of 320 kB do not fit on 1 MiB."""
    with serving(wide_model(), save_dir=small_disk) as server:
        step_rounds(server, wide_model(), 6)
        assert server.status()["saved_round"] == 6
        assert server.status()["save_error"] == ""


def test_a_disk_that_stays_full_ends_no_training_and_everyone_hears_of_it(
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
    model, other = wide_model(), small_disk / "of another program"
    with serving(wide_model(), save_dir=small_disk) as server:
        step_rounds(server, model, 1)
        other.write_bytes(bytes(512 * 1024))
        step_rounds(server, model, 2)
        status = server.status()
        assert (status["round"], status["saved_round"]) == (3, 1)
        assert status["save_error"].startswith(f"save_dir='{small_disk}': the server cannot save round 3: [Errno 28]")
        assert status["save_error"].endswith("if the server dies, training goes on from round 1")
        assert "worker a was told: save_dir=" in caplog.text
        assert main(["diloco", "status", "--server", server.address]) == 1
        assert f"skyward: {status['save_error']}\n" in capsys.readouterr().err
        assert main(["diloco", "save", "--server", server.address]) == 1
        assert "No space left on device" in capsys.readouterr().err
        other.unlink()
        step_rounds(server, model, 1)
        assert server.status()["save_error"] == ""
    with serving(wide_model(), save_dir=small_disk) as server:
        assert server.status()["round"] == 4
        assert server.status()["workers"] == []


def test_a_disk_without_room_for_a_delta_loses_no_progress(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    model, other = wide_model(), small_disk / "of another program"
    with serving(model) as server, worker_of(server, model, None, "a", max_sync_retries=0) as worker:
        other.write_bytes(bytes(1000 * 1024))
        weight = model.get_parameter("weight").detach()
        before = weight.clone()
        weight.add_(1.0)
        assert not worker.force_sync()
        assert "HTTP status 507: server: No space left on device" in caplog.text
        assert server.status()["round"] == 0
        other.unlink()
        assert worker.force_sync()
        assert server.status()["round"] == 1
    moved = float((weight - before).mean())
    assert moved == pytest.approx(0.7 * 1.9, rel=1e-3)  # the first step of the outer optimizer
