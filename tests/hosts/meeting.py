"""An integration of the tests, in a module of its own: the nodes import it."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from skyward.integrations.base import IntegrationBase
from skyward.values.topology import Rank

__all__ = ["Meeting"]


class Meeting(IntegrationBase):
    """Makes a gang and does nothing else: its ranks need nothing but one another."""

    name: ClassVar[str] = "meeting"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
