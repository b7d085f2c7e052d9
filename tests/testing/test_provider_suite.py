"""The fake cloud passes the suite of the real ones."""

from __future__ import annotations

import pytest

from skyward.testing.fake_cloud import FakeCloud, FakeFaults, FakeProvider
from skyward.testing.provider_suite import ProviderSuite
from skyward.testing.virtual_clock import VirtualClock


class TestFakeCloud(ProviderSuite):
    @pytest.fixture
    def provider(self) -> FakeProvider:
        return FakeProvider(api=FakeCloud(VirtualClock()))


class TestFakeCloudWithFaults(ProviderSuite):
    @pytest.fixture(params=range(3))
    def provider(self, request: pytest.FixtureRequest) -> FakeProvider:
        faults = FakeFaults(
            listing_s=25.0, throttled=0.1, lost_answers=0.2, lost_requests=0.1, is_refused_while_pending=True
        )
        return FakeProvider(api=FakeCloud(VirtualClock(skew_s=-5e6), faults=faults, seed=request.param))
