"""Links through a command: what its end tells about the agent."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from skyward.engine.dialler import CommandEnds, Dialler, Forgotten
from skyward.engine.opener import ask_to_end
from skyward.wire.frames import FrameKind, pack
from skyward.wire.stream import MAGIC
from tests.engine.parts import machine

_STUB = """
[ -e known ] && exit 69
touch known
cat greeting
exec sleep 60
"""
"""An agent that greets once and is gone at the second call, whose command ends without reading its input."""


def test_agent_is_gone_if_the_stub_says_so_before_it_reads_the_hello(tmp_path: Path) -> None:
    (tmp_path / "greeting").write_bytes(MAGIC + pack(FrameKind.WELCOME, body=json.dumps({"received": 0}).encode()))
    connect = partial(CommandEnds, ("sh", "-c", f"cd {tmp_path}\n{_STUB}"))
    dialler = Dialler(connect, role="client", pool="pool", node=0)
    ends, facts = dialler.dial(20.0)
    ends.close()
    assert facts == {"received": 0}
    with pytest.raises(Forgotten):
        dialler.dial(20.0)


def test_an_agent_that_has_ended_is_asked_once_to_end(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    ask_to_end([machine(channel=("sh", "-c", f"echo >> {asked}; exit 69"))], 20.0)
    assert asked.read_text() == "\n"
