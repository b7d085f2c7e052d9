"""Settings of a server: the same checks, whichever way it is started."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from skyward import integrations
from skyward.errors import CheckpointSaveFailed, UsageError
from skyward.training.diloco import DelayedNesterov, DiLoCoServer, OuterSGD
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.pool_servers import SeatedServer
from skyward.training.diloco.server_settings import DiLoCoSettings
from tests.training.diloco.runs import TOKEN, make_model, serving


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match=rf"port={port}: must be from 0 to 65535"):
        DiLoCoServer(port=port)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"min_workers": 0}, "min_workers=0: must be a whole number >= 1"),
        ({"num_workers": 1, "min_workers": 2}, "num_workers=1: must be a whole number >= 2"),
        ({"save_every_n_rounds": 0}, "save_every_n_rounds=0: "),
        ({"outer_lr": 0}, "outer_lr=0: must be a finite number > 0"),
        ({"outer_lr": "0.7"}, "outer_lr='0.7': must be a finite number"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: must be a finite number in"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout=nan: must be a finite number >= 0"),
        ({"dn_buffer_size": 2}, "dn_buffer_size=2: is for asynchronous updates"),
        ({"async_mode": True, "min_workers": 2, "num_workers": 2}, "min_workers=2: each update is a round"),
        ({"async_mode": True, "weighting": "tokens"}, "weighting='tokens': each update is applied alone"),
        ({"weighting": "size"}, "weighting='size': is unknown"),
    ],
)
def test_an_illegal_setting_is_refused_by_each_way_to_start_a_server(options: dict[str, Any], problem: str) -> None:
    for start in (DiLoCoServer, integrations.diloco, DiLoCoSettings):
        with pytest.raises(UsageError) as refused:
            start(**options)
        assert problem in str(refused.value)


def test_an_optimizer_that_is_given_takes_no_rates() -> None:
    with pytest.raises(UsageError, match=r"dn_buffer_size=2: the outer_optimizer ignores it"):
        DiLoCoSettings(outer_optimizer=OuterSGD(), async_mode=True, dn_buffer_size=2)
    with pytest.raises(UsageError, match=r"outer_lr=0\.5.*: the outer_optimizer ignores them"):
        DiLoCoSettings(outer_optimizer=OuterSGD(), outer_lr=0.5)


def test_rates_and_workers_choose_the_optimizer() -> None:
    plain = DiLoCoSettings(outer_lr=1.0, outer_momentum=0.0).make_outer()
    assert isinstance(plain, OuterSGD)
    assert (plain.lr, plain.momentum, plain.nesterov) == (1.0, 0.0, False)
    delayed = DiLoCoSettings(num_workers=None, async_mode=True).for_call(3).make_outer()
    assert isinstance(delayed, DelayedNesterov)
    assert (delayed.lr, delayed.momentum, delayed.every) == (0.7, 0.9, 3)
    assert DiLoCoSettings(num_workers=5).for_call(3).num_workers == 5


class StallingSGD(OuterSGD):
    """Optimizer whose state can be written only once a gate is open, as on a disk that has stalled."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def state_dict(self) -> dict[str, Any]:
        assert self._gate.wait(60)
        return super().state_dict()


class FailingSGD(OuterSGD):
    """Optimizer whose state cannot be written any longer once a flag is set."""

    is_disk_full = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().state_dict()


def test_a_last_save_that_stalls_keeps_its_owner_and_holds_up_nobody_forever(tmp_path: Path) -> None:
    """The next server of that name waits for it, because both save in one folder."""
    with serving(make_model(), save_dir=tmp_path):
        pass  # it leaves a save with a model
    gate = threading.Event()
    former = SeatedServer("train", DiLoCoSettings(save_dir=tmp_path, outer_optimizer=StallingSGD(gate)))
    former.made(1)
    try:
        with pytest.raises(TimeoutError, match="still writes its last state after 0 s"):
            former.stop(0)
        assert not former.has_ended
        successor = SeatedServer("train", DiLoCoSettings(save_dir=tmp_path), former=former)
        assert not successor.has_ended
    finally:
        gate.set()
    successor.made(1)
    assert former.has_ended
    successor.stop(60)
    assert successor.has_ended


def test_a_server_whose_last_save_fails_says_so_to_whoever_stops_it(tmp_path: Path) -> None:
    outer = FailingSGD()
    server = DiLoCoServer(make_model(), port=0, token=TOKEN, save_dir=tmp_path, outer_optimizer=outer)
    with pytest.raises(CheckpointSaveFailed, match=r"the last state could not be saved: \[Errno 28\]"), server:
        outer.is_disk_full = True
        problem = DiLoCoClient(server.address, token=TOKEN).ask("/control/stop", {})["problem"]
        assert problem == "its last state could not be saved: [Errno 28] No space left on device"
        server.wait()
        assert not server.stop(timeout_s=60)
        assert not server.stop(timeout_s=60)


def test_the_error_of_a_block_has_a_note_of_a_last_save_that_fails(tmp_path: Path) -> None:
    outer = FailingSGD()
    server = DiLoCoServer(make_model(), port=0, save_dir=tmp_path, outer_optimizer=outer)
    with pytest.raises(LookupError) as caught, server:
        outer.is_disk_full = True
        raise LookupError
    (note,) = caught.value.__notes__
    assert note.startswith(f"save_dir='{tmp_path}': the last state could not be saved: [Errno 28]")


def test_a_server_whose_last_save_stalls_is_not_waited_for_forever(tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    server = DiLoCoServer(make_model(), port=0, save_dir=tmp_path, outer_optimizer=StallingSGD(gate))
    server.start()
    gate.clear()
    try:
        assert not server.stop(timeout_s=0)
    finally:
        gate.set()
    assert server.stop(timeout_s=60)
