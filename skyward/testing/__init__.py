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

# The plugin lives in this package and is loaded by every pytest run, so nothing here is loaded before it is used.
from .._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)
