"""Notices that a machine is about to end."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading

import pytest

from skyward.training.checkpoint import RunTerminated
from skyward.training.checkpoint.termination import Termination


def test_a_sigterm_is_a_notice_and_begins_the_grace_time() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination(grace_s=60.0, option="handle_sigterm")
    termination.open()
    try:
        assert not termination.is_noticed
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.is_noticed
        first = termination.left_s
        assert 0 < termination.left_s <= first <= 60
    finally:
        termination.close()
    termination.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_notice_of_an_earlier_run_is_forgotten() -> None:
    termination = Termination(grace_s=1.0, option="handle_sigterm")
    for _ in range(2):
        termination.open()
        try:
            assert not termination.is_noticed
            os.kill(os.getpid(), signal.SIGTERM)
            assert termination.is_noticed
        finally:
            termination.close()


def test_a_warning_is_given_if_signals_cannot_be_handled(caplog: pytest.LogCaptureFixture) -> None:
    termination = Termination(grace_s=1.0, option="handle_sigterm")
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=termination.open)
        thread.start()
        thread.join(60)
    termination.close()
    assert "handle_sigterm: cannot handle SIGTERM outside a program's main thread" in caplog.text


def test_the_exception_that_ends_a_run_is_pickled_under_its_public_name() -> None:
    assert RunTerminated.__module__ == "skyward.training.checkpoint"
    assert pickle.loads(pickle.dumps(RunTerminated)) is RunTerminated
