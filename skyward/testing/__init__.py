"""Test tools for users: conformance suites, fault injection, a pytest plugin.

    @pytest.fixture(scope="module")
    def pool():
        with sky.ComputePool(MyProvider(), nodes=2, concurrency=2) as pool:
            yield pool

    class TestMyProvider(EngineSuite):
        pass

`EngineSuite` holds for every pool, `ProcessEngineSuite` for those whose slots are processes as well, `ProviderSuite`
for a provider of rented machines, of which `FakeCloud` is one in memory. The plugin gives every test the fixtures
`sky_pool`, `sky_pools` and `sky_faults`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .engine_suite import EngineSuite as EngineSuite
    from .fake_cloud import FakeCloud as FakeCloud
    from .fake_cloud import FakeFaults as FakeFaults
    from .fake_cloud import FakeProvider as FakeProvider
    from .faults import Faults as Faults
    from .integration_suite import IntegrationSuite as IntegrationSuite
    from .process_suite import ProcessEngineSuite as ProcessEngineSuite
    from .provider_suite import ProviderSuite as ProviderSuite
    from .virtual_clock import FastClock as FastClock
    from .virtual_clock import VirtualClock as VirtualClock

# The plugin lives in this package and is loaded by every pytest run, so nothing here is loaded before it is used.
_WHERE = {
    "EngineSuite": "skyward.testing.engine_suite",
    "FakeCloud": "skyward.testing.fake_cloud",
    "FakeFaults": "skyward.testing.fake_cloud",
    "FastClock": "skyward.testing.virtual_clock",
    "FakeProvider": "skyward.testing.fake_cloud",
    "Faults": "skyward.testing.faults",
    "IntegrationSuite": "skyward.testing.integration_suite",
    "ProcessEngineSuite": "skyward.testing.process_suite",
    "ProviderSuite": "skyward.testing.provider_suite",
    "VirtualClock": "skyward.testing.virtual_clock",
}

__all__ = [
    "EngineSuite",
    "FakeCloud",
    "FakeFaults",
    "FakeProvider",
    "FastClock",
    "Faults",
    "IntegrationSuite",
    "ProcessEngineSuite",
    "ProviderSuite",
    "VirtualClock",
]


def __getattr__(name: str) -> _Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'skyward.testing' has no attribute {name!r}")
    return getattr(_import_module(_WHERE[name]), name)
