"""Test tools for users: conformance suites, fault injection, a pytest plugin.

    @pytest.fixture(scope="module")
    def pool():
        with sky.ComputePool(MyProvider(), nodes=2, concurrency=2) as pool:
            yield pool

    class TestMyProvider(EngineSuite):
        pass

`EngineSuite` covers every pool, and `ProcessEngineSuite` those whose slots are processes. `ProviderSuite` covers
providers of rented machines; `FakeCloud` is such a provider in memory. The machines of `QueuedProvider` are here, and
wait in a queue. The plugin gives every test the fixtures `sky_pool`, `sky_pools` and `sky_faults`.
"""

# Every pytest run imports this package for its plugin, so nothing else here is imported before its first use.
from .._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)
