"""An integration of the tests, in a separate module, because the nodes import it."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from skyward.integrations.base import IntegrationBase
from skyward.values.topology import Rank

__all__ = ["Meeting"]


class Meeting(IntegrationBase):
    """Integration that makes a gang and does nothing else: its ranks need nothing except each other."""

    name: ClassVar[str] = "meeting"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
