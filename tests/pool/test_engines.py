"""The option `engine`: illegal ones, and what carries the calls. Ray itself is in tests/hosts/test_ray.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.console.plain import PlainLines
from skyward.errors import PoolClosed, UsageError
from skyward.pool.engines import RAY_AFTER_S, Way, did_not_come_up
from skyward.testing import FakeProvider

SSH = sky.SSH(hosts=["gpu1", "gpu2"])
RAY: dict[str, Any] = {"provider": SSH, "nodes": 2, "engine": "ray"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "dask"}, "engine='dask': not supported; use one of 'auto', 'direct', 'ray'"),
        (
            {"provider": sky.Local()},
            "engine='ray': not supported with local, so far only with sky.SSH(hosts=[...]) and",
        ),
        ({"any_of": [SSH, sky.Local()], "provider": None}, "engine='ray': not supported with ssh or local"),
        ({"nodes": 1}, "engine='ray': joins several nodes, and this pool has one; set nodes=2"),
        ({"nodes": (0, 1)}, "engine='ray': joins several nodes, and this pool has one; set nodes=2"),
        (
            {"nodes": 1, "name": "a", "detached_for_s": 60, "engine": "direct"},
            "engine='direct': a detached pool has its scheduler on its node; omit engine",
        ),
    ],
)
def test_an_engine_that_the_pool_cannot_have_is_refused_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        sky.ComputePool(**{**RAY, **options})
    assert str(refused.value).startswith(message)
    assert (refused.value.field, refused.value.value) == ("engine", options.get("engine", "ray"))


def test_a_file_may_name_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[pools.lab]\nprovider = { type = "ssh", hosts = ["a", "b"] }\nengine = "ray"\nnodes = '
    (tmp_path / "skyward.toml").write_text(f"{text}2\n")
    assert sky.ComputePool.named("lab").spec.nodes == 2
    (tmp_path / "skyward.toml").write_text(f"{text}1\n")
    with pytest.raises(UsageError, match=r"skyward\.toml: \[pools\.lab\] engine='ray': joins several nodes"):
        sky.ComputePool.named("lab")


def way_of(**options: Any) -> tuple[Way, float]:
    life = sky.ComputePool(**{"provider": SSH, "nodes": 2, **options})._life  # no public name tells before the start
    return life.way, life.ray_after_s


@pytest.mark.parametrize(
    "on",
    [
        {"provider": SSH},
        {"provider": sky.AWS()},
        {"provider": sky.AWS(), "region": ["us-east-1", "us-west-2"]},
        {"provider": None, "any_of": [SSH, sky.AWS()]},
        {"image": sky.Image(container="debian")},
    ],
)
def test_auto_is_ray_later_for_a_pool_that_may_have_2_nodes(on: dict[str, Any]) -> None:
    assert way_of(**on) == way_of(engine="auto", **on) == (Way.RAY_OR_LENT, RAY_AFTER_S)
    assert way_of(engine="ray", **on) == (Way.RAY, 0.0)
    assert way_of(engine="ray", idle_timeout_s=60, on_idle="close", **on) == (Way.RAY, 0.0)
    assert way_of(engine="direct", **on) == (Way.DIRECT, 0.0)
    assert way_of(nodes=(1, 2), **on) == (Way.RAY_OR_LENT, RAY_AFTER_S)
    assert way_of(engine="ray", nodes=(1, 2), **on) == (Way.RAY, 0.0)
    assert way_of(nodes=(0, 2), **on) == way_of(idle_timeout_s=60, **on) == (Way.RAY_OR_LENT, RAY_AFTER_S)


def test_a_detached_pool_of_several_nodes_needs_ray_at_once() -> None:
    assert way_of(name="a", detached_for_s=60) == (Way.RAY, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"provider": sky.Local()},
        {"provider": sky.AWS(), "nodes": 1},
        {"provider": FakeProvider(api=None)},
        {"provider": None, "any_of": [SSH, sky.Local()]},
        {"nodes": 1},
    ],
)
def test_auto_is_direct_where_ray_is_not_supported(options: dict[str, Any]) -> None:
    assert way_of(**options) == (Way.DIRECT, 0.0)


def test_a_direct_pool_says_so_while_it_is_open() -> None:
    pool = sky.ComputePool(sky.Local(), nodes=2, engine="auto", logs=False)
    with pool:
        assert pool.engine == "direct"
    with pytest.raises(PoolClosed):
        _ = pool.engine


def test_the_error_without_ray_names_another_engine_and_the_reason() -> None:
    text = "engine='ray': Ray did not come up; set engine=\"auto\" to do without it, or remove the cause: no such port"
    assert str(did_not_come_up("no such port")) == text
    cut = did_not_come_up("network: no answer", is_cut=True)
    assert isinstance(cut, UsageError)
    assert (cut.field, cut.value) == ("engine", "ray")
    assert "omit detached_for_s to do without it" in str(did_not_come_up("no such port", is_detached=True))


def test_an_engine_that_comes_or_goes_is_one_line() -> None:
    told = [
        events.EngineUp(engine="ray", seconds=11.5),
        events.EngineLost(engine="ray", reason="Ray on the head's\nmachine has ended"),
    ]
    up = "train: Ray carries the calls between nodes, after 12 s"
    lost = "train: Ray is not there, so this program carries the calls: Ray on the head's machine has ended"
    assert [PlainLines("train", is_quiet=False).take(event) for event in told] == [[up], [lost]]
    assert [PlainLines("train", is_quiet=True).take(event) for event in told] == [[], [lost]]
