"""The pytest plugin. Loaded by every pytest run in an environment that has skyward: it imports nothing heavy.

    def test_totals(sky_pool):
        assert total(10) >> sky_pool == 45

    @pytest.mark.sky_pool(nodes=1, executor="thread")
    def test_in_threads(sky_pool): ...

    @pytest.mark.sky_pool(concurrency=2)
    def test_survives_a_dead_node(sky_pool, sky_faults):
        future = train(retries=1) > sky_pool
        sky_faults.kill_node(0)
        assert future.result() == 42

Pools are opened when they are first asked for, one for each set of options, and stay open until the session ends.
The defaults are `sky_pool_nodes` and `sky_pool_concurrency` in the ini file (2 and 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..pool.pool import ComputePool
    from .faults import Faults

__all__ = ["sky_faults", "sky_pool", "sky_pools"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("sky_pool_nodes", "nodes of the pool that the sky_pool fixture gives", default="2")
    parser.addini("sky_pool_concurrency", "slots on each node of that pool", default="1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sky_pool(**options): the options of the ComputePool that the sky_pool fixture gives"
    )


@pytest.fixture(scope="session")
def sky_pools(request: pytest.FixtureRequest) -> Iterator[Callable[..., ComputePool]]:
    """`sky_pools(**options)` gives an open pool of this machine with those options of `ComputePool`.

    The same options give the same pool. For fixtures of a wider scope than a function; tests use `sky_pool`.
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
    for left in opened.values():
        left.close(cancel=True)


@pytest.fixture
def sky_pool(request: pytest.FixtureRequest, sky_pools: Callable[..., ComputePool]) -> ComputePool:
    """An open pool of this machine: 2 nodes, or what the marker `sky_pool(**options)` says. Shared by the session."""
    marker = request.node.get_closest_marker("sky_pool")
    return sky_pools(**(marker.kwargs if marker else {}))


@pytest.fixture
def sky_faults(sky_pool: ComputePool) -> Iterator[Faults]:
    """Kills slots and nodes of `sky_pool`; when the test ends, the pool is made whole for the next one."""
    from .faults import Faults

    faults = Faults(sky_pool)
    yield faults
    if sky_pool.is_active:
        faults.wait_until_whole()
