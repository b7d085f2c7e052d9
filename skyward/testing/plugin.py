"""Pytest plugin. Every pytest run in an environment with skyward loads it, so it imports nothing heavy.

    def test_totals(sky_pool):
        assert total(10) >> sky_pool == 45

    @pytest.mark.sky_pool(nodes=1, executor="thread")
    def test_in_threads(sky_pool): ...

    @pytest.mark.sky_pool(concurrency=2)
    def test_survives_a_dead_node(sky_pool, sky_faults):
        future = train(retries=1) > sky_pool
        sky_faults.kill_node(0)
        assert future.result() == 42

    def test_logs_its_loss(sky_hub):
        mlflow.set_tracking_uri(sky_hub.url)

A pool opens on its first use and stays open until the session ends; each set of options has one pool. The ini file sets
the defaults `sky_pool_nodes` and `sky_pool_concurrency` (2 and 1). Each test that takes `sky_hub` has an empty hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..pool.pool import ComputePool
    from .faults import Faults
    from .hub import HubServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("sky_pool_nodes", "number of nodes of the sky_pool fixture's pool", default="2")
    parser.addini("sky_pool_concurrency", "number of slots on each node of that pool", default="1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sky_pool(**options): options of the ComputePool that the sky_pool fixture opens"
    )


@pytest.fixture(scope="session")
def sky_pools(request: pytest.FixtureRequest) -> Iterator[Callable[..., ComputePool]]:
    """Return a function `sky_pools(**options)` that opens a pool of this machine with options of `ComputePool`.

    Equal options return the same pool. Use it in fixtures with a wider scope than a function; tests use `sky_pool`.

    Example:
        @pytest.fixture(scope="module")
        def pool(sky_pools):
            return sky_pools(nodes=3)
    """
    from ..pool.pool import ComputePool
    from ..providers.local import Local

    opened: dict[str, ComputePool] = {}
    defaults = {field: int(request.config.getini(f"sky_pool_{field}")) for field in ("nodes", "concurrency")}

    def pool(**options: Any) -> ComputePool:
        options = {**defaults, **options}
        key = repr(sorted(options.items()))
        if key not in opened or not opened[key].is_active:
            opened[key] = ComputePool(Local(), **options).start()
        return opened[key]

    yield pool
    for pool_left_open in opened.values():
        pool_left_open.close(cancel=True)


@pytest.fixture
def sky_pool(request: pytest.FixtureRequest, sky_pools: Callable[..., ComputePool]) -> ComputePool:
    """Open a pool of this machine with 2 nodes, or with the options of the marker `sky_pool(**options)`.

    The session shares it between tests with equal options.

    Example:
        def test_totals(sky_pool):
            assert total(10) >> sky_pool == 45
    """
    marker = request.node.get_closest_marker("sky_pool")
    return sky_pools(**(marker.kwargs if marker else {}))


@pytest.fixture
def sky_faults(sky_pool: ComputePool) -> Iterator[Faults]:
    """Return a tool that kills slots and nodes of `sky_pool`. After the test it waits until the pool is complete again.

    Example:
        def test_survives_a_dead_node(sky_pool, sky_faults):
            future = train(retries=1) > sky_pool
            sky_faults.kill_node(0)
            assert future.result() == 42
    """
    from .faults import Faults

    faults = Faults(sky_pool)
    yield faults
    if sky_pool.is_active:
        faults.wait_until_whole()


@pytest.fixture
def sky_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start an empty hub for this test, and point skyward's and MLflow's clients to it by the environment.

    It takes about 0.1 s. Needs the extra `hub`.

    Example:
        def test_logs_its_loss(sky_hub):
            train()
            assert [run.status for run in hub.runs("metrics.loss < 1")] == ["completed"]
    """
    from .hub import HubServer

    with HubServer(tmp_path / "sky_hub") as server:
        monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
        yield server
