"""Text from a task or another machine cannot control the reader's terminal."""

from __future__ import annotations

import re
import string
from pathlib import Path
from random import Random

import pytest

import skyward as sky
from skyward import events
from skyward.cli import main
from skyward.console.panel import panel_lines, status_line
from skyward.console.plain import PlainLines
from skyward.console.state import PoolState
from skyward.console.style import Style
from skyward.core.printable import coloured, printable, printable_lines
from skyward.errors import BootstrapFailed
from skyward.state.outputs import OutputFile

HOSTILE = [
    ("\x1b[2J\x1b[H", ""),
    ("\x1b[?25l\x1b[?1049h\x1b[1;5r\x1b[!p\x1b[6n\x1b[>4;2m\x1b[?4m", ""),
    ("\x1b]0;title\x07\x1b]52;c;Y2xpcA==\x1b\\", ""),
    ("\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\", "text"),
    ("\x1bPq#0;2;0;0;0\x1b\\\x1b_G\x1b\\\x1b^x\x1b\\\x1bXy\x1b\\", ""),
    ("\x1bc\x1b7\x1b8\x1bD\x1bM\x1b(0\x1b#8\x1b=\x1bN", ""),
    ("\x9b2J\x9d0;title\x9c\x90q\x9c\x85\x84\x8d", ""),
    ("a\x00\x05\x07\x08\x0b\x0c\x0e\x0f\x11\x13\x7fb", "ab"),
    ("evil\b\b\b\bgood", "evilgood"),
    ("\u202egnp.exe\u2066", "gnp.exe"),
    ("\x1b", ""),
    ("\x1b[", ""),
    ("\x1b]0;never ended", "0;never ended"),
    ("\x1b\x1b[2J[2J", "[2J"),
    ("\x1b[3\x072J", "32J"),
    ("\x1b[\x1b[2J2J", "2J"),
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_control_sequences_are_dropped(text: str, shown: str) -> None:
    assert coloured(text) == printable_lines(text) == printable(text) == shown


def test_colours_are_kept_and_end_with_their_line() -> None:
    assert coloured("\x1b[1;38;2;255;0;0mred") == "\x1b[1;38;2;255;0;0mred\x1b[0m"
    assert coloured("\x1b[4:3mcurly\x1b[0m") == "\x1b[4:3mcurly\x1b[0m"
    assert printable("\x1b[31mred\x1b[0m") == "red"


def test_plain_text_is_unchanged() -> None:
    text = "größe\t世界 🌍 👩\u200d🔬 e\u0301 \u00a0 עברית"
    assert coloured(text) == printable_lines(text) == text
    assert printable_lines("one\n  two\r\n") == "one\n  two\n"


def test_of_any_mixture_only_colours_are_left() -> None:
    random = Random(4)
    pieces = [*(text for text, _ in HOSTILE), *"\x1b[]0123456789;:mJHhl?\\\x07\x9b\x9c\x08 ", string.ascii_letters]
    harmless = re.compile(r"(?:\x1b\[[0-9;:]*m|[^\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e])*")
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(12)))
        assert harmless.fullmatch(coloured(text)), repr(text)
        assert "\x1b" not in printable_lines(text)


def test_names_and_reasons_of_other_machines_are_harmless_in_every_view() -> None:
    bad = "\x1b]0;title\x07\x1b[2J\x9b2Jwords\x08\r"
    pool, plain = PoolState(bad), PlainLines(bad, is_quiet=False)
    shown: list[str] = []
    told = [
        events.PoolStarted(at=1.0, pool=bad, provider=bad, nodes=2),
        events.InstanceLaunched(at=1.0, node=0, instance=bad, instance_type=bad, price_usd_per_hour=1.0, is_spot=True),
        events.PhaseStarted(at=2.0, node=0, phase=bad, detail=bad),
        events.PhaseOutput(at=2.0, node=0, phase=bad, text=bad),
        events.PhaseFailed(at=2.0, node=1, phase=bad, seconds=1.0, reason=bad),
        events.LinkLost(at=3.0, node=0, reason=bad),
        events.NodeLost(at=4.0, node=0, reason=bad),
        events.PoolClosed(at=5.0, pool=bad, seconds=1.0, reason=bad),
    ]
    for event in told:
        shown += plain.take(event)
        pool.take(event)
        shown += panel_lines(pool, None, width=100, height=4, now=5.0, style=Style(has_colour=False))
        shown.append(status_line(pool, 5.0))
    assert shown
    for line in shown:
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line), repr(line)


def test_error_messages_quote_no_control_sequences() -> None:
    error = BootstrapFailed("node 0: \x1b[2Jpip\x07 failed:\n  no torch")
    error.add_note("\x1b]0;title\x07its output")
    assert str(error) == "node 0: pip failed:\n  no torch"
    assert error.__notes__ == ["its output"]


def test_lines_of_tasks_keep_their_colours_and_their_last_state() -> None:
    lines: list[str] = []

    def write() -> None:
        print("\x1b[2J\x1b[?25l\x1b[32mgreen\x1b[0m\x1b]0;title\x07 and \x9b2Jplain")
        print("10%\r50%\r\x1b[K100%")
        raise ValueError("as it goes")

    with (
        sky.ComputePool(sky.Local(), logs=lambda line: lines.append(line.text)) as pool,
        pytest.raises(ValueError, match="as it goes") as caught,
    ):
        sky.compute(write)() >> pool
    notes = "\n".join(caught.value.__notes__)
    assert lines == ["\x1b[32mgreen\x1b[0m and plain\x1b[0m", "100%"]
    assert "Last output of the task:\ngreen and plain\n100%" in notes


def test_kept_output_of_older_versions_is_harmless_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keep = OutputFile("train-1")
    keep(sky.LogLine(text="\x1b[2J\x1b[31mred\x1b]0;title\x07", stream="stdout", node=0, rank=None, task="f"))
    keep.close()
    assert main(["logs", "train-1"]) == 0
    assert capsys.readouterr().out == "[node 0] \x1b[31mred\x1b[0m\n"
