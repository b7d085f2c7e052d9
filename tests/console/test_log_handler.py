"""Log records of the client reach standard error, unless the program that embeds skyward handles them itself.

Each case runs in its own process, because pytest has handlers on the root logger, and our handler defers to them.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

LOG = """
import logging, sys
from skyward.console.log_handler import install_handler

{setup}
install_handler()
install_handler()
{late}
logging.getLogger("skyward.engine.link_repair").warning("node %d could not be replaced\\x1b[2J", 3)
logging.getLogger("skyward").info("unimportant")
"""
SHOWN = "skyward: node 3 could not be replaced\n"


def stderr_of(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    return done.stderr


def logged(setup: str = "", late: str = "") -> str:
    return stderr_of(LOG.format(setup=setup, late=late))


def test_a_record_is_one_message_on_standard_error_without_other_handlers() -> None:
    assert logged() == SHOWN


@pytest.mark.parametrize(
    "setup",
    [
        'logging.getLogger("skyward").addHandler(logging.NullHandler())',
        'logging.getLogger("skyward").setLevel(logging.CRITICAL)',
        "logging.disable(logging.ERROR)",
    ],
)
def test_a_program_can_silence_the_records(setup: str) -> None:
    assert logged(setup) == ""


def test_a_program_can_route_the_records() -> None:
    setup = 'logging.getLogger("skyward.engine").addHandler(logging.FileHandler("/dev/stderr", mode="a"))'
    assert logged(setup) == "node 3 could not be replaced\x1b[2J\n"


def test_basic_config_shows_each_record_once_although_it_comes_late() -> None:
    expected = "WARNING:skyward.engine.link_repair:node 3 could not be replaced\x1b[2J\n"
    assert logged("logging.basicConfig()") == expected
    assert logged(late="logging.basicConfig()") == expected


def test_a_handler_that_the_record_does_not_reach_does_not_hide_it() -> None:
    assert logged('logging.basicConfig()\nlogging.getLogger("skyward").propagate = False') == SHOWN


def test_a_pool_shows_records_although_its_console_is_off() -> None:
    script = """
        import skyward as sky

        def fail(event):
            raise ValueError("not today")

        if __name__ == "__main__":
            with sky.ComputePool(sky.Local(), console=False, on_event=fail) as pool:
                pass
    """
    said = stderr_of(textwrap.dedent(script))
    assert said.startswith("skyward: on_event= raised an error on a PoolStarted;")
    assert said.endswith("\nValueError: not today\n")
