"""The view of a pool in a notebook that cannot show it."""

from __future__ import annotations

import pytest

from skyward.console.notebook import NotebookView
from skyward.events import Event, PoolClosed, PoolReady
from tests.waiting import until


class Failures:
    """View that shows nothing and remembers that it was closed."""

    is_closed = False

    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def raises() -> None:
    raise RuntimeError("no counts")


def test_a_view_that_fails_is_logged_once_and_stops_no_close(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    shown = NotebookView("train-1", raises, failures=failures, is_quiet=True)
    shown.emit(PoolReady(pool="train-1", seconds=1.0))
    until(lambda: len(caplog.records) == 1)
    shown.emit(PoolClosed(pool="train-1", seconds=2.0))
    shown.close()
    assert failures.is_closed
    assert [record.getMessage() for record in caplog.records] == ["the notebook's view of pool train-1 stopped"]
