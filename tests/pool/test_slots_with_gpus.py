"""Slots, ranks and calls on a node with eight GPUs. A stand-in for `nvidia-smi` lists them; nothing computes there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward as sky
from skyward.errors import SlotLost
from skyward.integrations.base import IntegrationBase, integrate
from skyward.integrations.torch import TorchIntegration
from skyward.values.devices import Grant
from skyward.values.topology import Rank
from tests.engines import engine_of
from tests.stand_in_gpus import GPUS, MIG, install_smi
from tests.waiting import until

Seen = tuple[str | None, list[int], int, int]
"""CUDA_VISIBLE_DEVICES, indexes of the call's own devices, number of visible ones, process."""


class Plain(IntegrationBase):
    """Integration whose gang is only processes."""

    name: ClassVar[str] = "plain-ranks"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class LikeTorchrun(Plain):
    """Integration of a framework that chooses devices by LOCAL_RANK."""

    name: ClassVar[str] = "like-torchrun"
    sees_neighbours: ClassVar[bool] = TorchIntegration.sees_neighbours

    def environment(self, rank: Rank) -> dict[str, str]:
        return {"LOCAL_RANK": str(rank.local_rank)}


def seen() -> Seen:
    info = sky.instance_info()
    assert info is not None
    own = [device.index for device in info.devices]
    return os.environ.get("CUDA_VISIBLE_DEVICES"), own, info.accelerators, os.getpid()


def seen_together(folder: str, me: int, count: int) -> Seen:
    """Run at once with other calls, so that each has a slot of its own."""
    Path(folder, str(me)).touch()
    until(lambda: len(os.listdir(folder)) == count)
    return seen()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def opened(folder: Path, gpus: Any = GPUS, **options: Any) -> Iterator[sky.ComputePool]:
    image = sky.Image(env={"PATH": install_smi(folder, gpus), **options.pop("env", {})})
    with sky.ComputePool(sky.Local(), image=image, **options) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def _no_choice_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    with opened(tmp_path_factory.mktemp("smi"), concurrency=4) as pool:
        yield pool


@pytest.fixture
def granted(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that sends a call with a grant, as the scheduler does."""
    engine = engine_of(pool)
    submit = engine.submit

    def send(call: sky.PendingCompute[Any], **fields: Any) -> Any:
        def with_grant(task: Any, **where: Any) -> None:
            task.grant = Grant(**fields)
            submit(task, **where)

        monkeypatch.setattr(engine, "submit", with_grant)
        try:
            return call > pool
        finally:
            monkeypatch.setattr(engine, "submit", submit)

    return send


def test_slots_divide_the_devices_of_their_node(pool: sky.ComputePool, tmp_path: Path) -> None:
    calls = [sky.compute(seen_together)(str(tmp_path), me, 4) > pool for me in range(4)]
    answers = sorted(call.result(timeout=60)[:3] for call in calls)
    assert answers == [(f"{a},{a + 1}", [a, a + 1], 2) for a in (0, 2, 4, 6)]


def test_one_slot_has_all_devices_and_the_users_environment(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        assert (sky.compute(seen)() >> pool)[:3] == (None, list(range(8)), 8)
        info = sky.compute(sky.instance_info)() >> pool
        assert info is not None
        assert info.devices[7].name == "NVIDIA H100 80GB HBM3"
        assert (info.total_accelerators, info.accelerator and info.accelerator.count) == (8, 8)


def test_a_call_runs_in_a_process_that_sees_only_its_devices(granted: Callable[..., Any]) -> None:
    first = granted(sky.compute(seen)(), devices=(5, 2)).result(60)
    assert first[:3] == ("5,2", [5, 2], 2)
    again = granted(sky.compute(seen)(), devices=(5, 2)).result(60)
    assert again == first, "the process is used again"
    assert granted(sky.compute(seen)(), devices=()).result(60)[:3] == ("-1", [], 0)
    assert granted(sky.compute(seen)(), devices=(2, 3)).result(60)[:3] == ("2,3", [2, 3], 2)


def test_a_process_that_may_hold_memory_of_a_device_ends_before_another_gets_it(
    granted: Callable[..., Any],
) -> None:
    holder = granted(sky.compute(seen)(), devices=(7,)).result(60)[3]

    def is_alive(pid: int) -> bool:
        return os.path.exists(f"/proc/{pid}")

    assert is_alive(holder)
    assert not granted(sky.compute(is_alive)(holder), devices=(6, 7)).result(60)


def test_calls_with_and_without_grants_share_the_slots(granted: Callable[..., Any], pool: sky.ComputePool) -> None:
    futures: list[tuple[Any, Any]] = []
    for number in range(24):
        if number % 3:
            futures.append((None, sky.compute(seen)() > pool))
        else:
            devices = (number % 8, (number + 1) % 8)
            futures.append((devices, granted(sky.compute(seen)(), devices=devices)))
    for devices, future in futures:
        variable, own, count, _ = future.result(120)
        assert count == 2
        assert variable == ",".join(map(str, own))
        assert devices is None or own == list(devices)
    sent = [sky.compute(seen)() > pool for _ in range(50)]
    assert {tuple(future.result(60)[1]) for future in sent} <= {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_a_lost_call_with_a_grant_leaves_its_slot_to_others(granted: Callable[..., Any], pool: sky.ComputePool) -> None:
    with pytest.raises(SlotLost):
        granted(sky.compute(die)(), devices=(1,)).result(60)
    assert granted(sky.compute(seen)(), devices=(1,)).result(60)[:3] == ("1", [1], 1)
    assert (sky.compute(seen)() >> pool)[2] == 2


def test_a_waiting_call_with_a_grant_can_be_cancelled(
    granted: Callable[..., Any], pool: sky.ComputePool, tmp_path: Path
) -> None:
    blockers = [sky.compute(seen_together)(str(tmp_path), me, 5) > pool for me in range(4)]
    until(lambda: len(os.listdir(tmp_path)) == 4)
    waiting = granted(sky.compute(seen)(), devices=(3,))
    assert waiting.cancel()
    (tmp_path / "4").touch()
    for blocker in blockers:
        blocker.result(60)
    assert (sky.compute(seen)() >> pool)[2] == 2


def test_ranks_of_a_gang_get_their_equal_share(pool: sky.ComputePool) -> None:
    gang: Any = sky.compute(integrate(seen, Plain(processes_per_node=4, returns="ranks")))
    assert [answer[:3] for answer in gang() >> pool] == [
        ("0,1", [0, 1], 2),
        ("2,3", [2, 3], 2),
        ("4,5", [4, 5], 2),
        ("6,7", [6, 7], 2),
    ]
    auto: Any = sky.compute(integrate(seen, Plain(processes_per_node="auto", returns="ranks")))
    assert [answer[0] for answer in auto() >> pool] == list("01234567")


def test_a_framework_that_counts_by_local_rank_finds_the_ranks_own_device_there(pool: sky.ComputePool) -> None:
    def own_by_local_rank() -> tuple[str, int, int]:
        info = sky.instance_info()
        assert info is not None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        return visible[int(os.environ["LOCAL_RANK"])], info.devices[0].index, len(visible)

    for ranks in (4, 8):
        gang: Any = sky.compute(integrate(own_by_local_rank, LikeTorchrun(processes_per_node=ranks, returns="ranks")))
        answers = gang() >> pool
        assert [int(name) for name, _, _ in answers] == [own for _, own, _ in answers]
        assert {count for _, _, count in answers} == {8}


def test_instances_of_mig_are_named_by_identifier(tmp_path: Path) -> None:
    with opened(tmp_path, MIG, concurrency=3) as pool:
        folder = tmp_path / "met"
        folder.mkdir()
        calls = [sky.compute(seen_together)(str(folder), me, 3) > pool for me in range(3)]
        assert {call.result(60)[0] for call in calls} == {"MIG-00000000-0", "MIG-00000000-1", "1"}


def test_the_users_choice_restricts_the_node(tmp_path: Path) -> None:
    with opened(tmp_path, env={"CUDA_VISIBLE_DEVICES": "6,3"}, concurrency=2) as pool:
        folder = tmp_path / "met"
        folder.mkdir()
        calls = [sky.compute(seen_together)(str(folder), me, 2) > pool for me in range(2)]
        assert sorted(call.result(60)[:3] for call in calls) == [("3", [1], 1), ("6", [0], 1)]


def test_calls_get_the_gpus_that_they_ask_for(pool: sky.ComputePool, tmp_path: Path) -> None:
    ask = sky.compute(seen_together)
    two, half, other_half, none = (
        ask.with_options(gpus=gpus)(str(tmp_path), me, 4) > pool for me, gpus in enumerate((2, 0.5, 0.5, 0))
    )
    assert len(two.result(timeout=60)[1]) == 2
    assert half.result(timeout=60)[1] == other_half.result(timeout=60)[1], "shares are packed on few devices"
    assert not set(two.result()[1]) & set(half.result()[1])
    assert (none.result(timeout=60)[1:3]) == ([], 0)
    # Plain calls have their shares again once nothing is booked.
    together = tmp_path / "plain"
    together.mkdir()
    plain = [ask(str(together), me, 4) > pool for me in range(4)]
    assert sorted(call.result(timeout=60)[1] for call in plain) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_call_says_that_it_waits_for_gpus(pool: sky.ComputePool, tmp_path: Path) -> None:
    def hold(folder: str) -> None:
        Path(folder, "began").touch()
        until(Path(folder, "go").exists, within_s=60)

    seven = sky.compute(hold).with_options(gpus=7)(str(tmp_path)) > pool
    until((tmp_path / "began").exists)
    waiting = sky.compute(seen).with_options(gpus=2)() > pool
    assert waiting.why_waiting == "waits for 2 GPUs: 1 free"
    (tmp_path / "go").touch()
    seven.result(timeout=60)
    assert len(waiting.result(timeout=60)[1]) == 2
    with pytest.raises(sky.errors.UsageError, match="no node can ever hold 9 GPUs"):
        pool.submit(sky.compute(seen).with_options(gpus=9))


def test_ranks_share_the_gpus_of_their_gang(pool: sky.ComputePool) -> None:
    gang: Any = sky.compute(integrate(seen, Plain(processes_per_node="auto", returns="ranks"))).with_options(gpus=4)
    own = [devices for _, devices, _, _ in gang() >> pool]
    assert [len(devices) for devices in own] == [1, 1, 1, 1]
    assert len({devices[0] for devices in own}) == 4


@sky.actor
class Holder:
    def seen(self) -> Seen:
        return seen()

    def die(self) -> None:
        die()


Holders: Any = Holder
"""The class as its decorator made it, which mypy does not see."""


def test_an_actor_holds_its_gpus_for_life_and_calls_share_the_others(pool: sky.ComputePool, tmp_path: Path) -> None:
    with Holders.with_options(gpus=2, max_restarts=1)() >> pool as holder:
        variable, own, visible, _ = holder.seen() >> pool
        assert (variable, visible) == (",".join(map(str, own)), 2)
        plain = [sky.compute(seen_together)(str(tmp_path), me, 4) > pool for me in range(4)]
        devices = [index for call in plain for index in call.result(timeout=60)[1]]
        assert len(set(devices)) == 4, "each slot has its share of the other six"
        assert not set(devices) & set(own)
        with pytest.raises(sky.errors.ActorLost):
            holder.die() >> pool
        assert [(holder.seen() >> pool)[at] for at in (0, 1)] == [variable, own], "a restart keeps the booking"

        waiting = Holders.with_options(gpus=7)() > pool
        assert waiting.why_waiting == "waits for 7 GPUs: 6 free, actors hold 2"
        assert (sky.compute(seen)() >> pool)[1], "a waiting actor keeps nobody waiting"
    large = waiting.result(timeout=60)
    assert len((large.seen() >> pool)[1]) == 7
    assert (sky.compute(seen).with_options(gpus=1)() >> pool)[1]
    large.close()
    with Holders.with_options(gpus=0)() >> pool as blind:
        assert (blind.seen() >> pool)[:3] == ("-1", [], 0)
    with pytest.raises(sky.errors.UsageError, match="'Holder': no node can ever hold 9 GPUs; the nodes have 1 x"):
        Holders.with_options(gpus=9)() >> pool
    again = tmp_path / "again"
    again.mkdir()
    plain = [sky.compute(seen_together)(str(again), me, 4) > pool for me in range(4)]
    assert sorted(call.result(timeout=60)[1] for call in plain) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_calls_run_without_gpus_while_an_actor_has_them_all(tmp_path: Path) -> None:
    with opened(tmp_path, concurrency=2, nodes=1) as pool:
        assert (sky.compute(seen)() >> pool)[1] == [0, 1, 2, 3], "its process may hold memory of these devices"
        with Holders.with_options(gpus=8)() >> pool as holder:
            assert len((holder.seen() >> pool)[1]) == 8
            assert [(sky.compute(seen)() >> pool)[1] for _ in range(3)] == [[], [], []]
            with pytest.raises(sky.errors.SlotLost):
                sky.compute(die)() >> pool
        assert (sky.compute(seen)() >> pool)[1] in ([0, 1, 2, 3], [4, 5, 6, 7])
