"""The one list of the names of this package, from which `__init__.py` loads them when they are first used."""

from .engine_suite import EngineSuite as EngineSuite
from .fake_cloud import FakeCloud as FakeCloud
from .fake_cloud import FakeFaults as FakeFaults
from .fake_cloud import FakeProvider as FakeProvider
from .faults import Faults as Faults
from .integration_suite import IntegrationSuite as IntegrationSuite
from .process_suite import ProcessEngineSuite as ProcessEngineSuite
from .provider_suite import ProviderSuite as ProviderSuite
from .queued import QueuedProvider as QueuedProvider
from .virtual_clock import FastClock as FastClock
from .virtual_clock import VirtualClock as VirtualClock

__all__: list[str]
