"""Displays in pieces: whole ones arrive, and nothing of others."""

from __future__ import annotations

import json
import random

import pytest

from skyward.values.displays import MAX_DISPLAY, Display
from skyward.wire.displays import DisplayJoiner, pieces

FIGURE = Display(
    data={"text/plain": "é" * 1000, "image/png": "A" * 100_000, "application/json": [1, {"a": None}]},
    metadata={"image/png": {"width": 10}},
    name="one",
    is_update=True,
)


@pytest.mark.parametrize("size", [100, 4000, 1 << 20])
def test_a_display_arrives_as_it_was_sent(size: int) -> None:
    bodies = list(pieces(FIGURE, size))
    assert max(map(len, bodies)) <= size
    joiner = DisplayJoiner()
    *early, last = [joiner.add(0, body) for body in bodies]
    assert early == [None] * len(early)
    assert last == FIGURE


def test_pieces_of_several_displays_may_come_mixed() -> None:
    joiner = DisplayJoiner()
    waiting = [(node, pieces(FIGURE, 5000)) for node in range(64)]
    chance = random.Random(1)
    arrived = 0
    while waiting:
        node, bodies = pair = chance.choice(waiting)
        body = next(bodies, None)
        if body is None:
            waiting.remove(pair)
        else:
            arrived += joiner.add(node, body) == FIGURE
    assert arrived == 64


@pytest.mark.parametrize("missing", [0, 5, -1])
def test_a_display_that_lacks_a_piece_is_not_shown(missing: int) -> None:
    joiner = DisplayJoiner()
    bodies = list(pieces(FIGURE, 5000))
    del bodies[missing]
    assert [joiner.add(0, body) for body in bodies] == [None] * len(bodies)
    assert [joiner.add(0, body) for body in pieces(FIGURE, 5000)][-1] == FIGURE


def joined(fields: object) -> Display | None:
    """Send any JSON in place of a display."""
    body = json.dumps(fields).encode()
    return DisplayJoiner().add(0, bytes(8) + bytes(4) + (1).to_bytes(4, "little") + body)


def test_forms_that_a_notebook_would_run_and_content_of_other_types_are_left_out() -> None:
    display = joined(
        {
            "data": {"text/plain": "text", "application/javascript": "alert(1)", "text/html": ["no text"]},
            "metadata": {"text/plain": {"width": 3, "isolated": True, "height": "x"}, "image/png": 3},
            "name": "",
            "is_update": False,
        }
    )
    assert display == Display(data={"text/plain": "text"}, metadata={"text/plain": {"width": 3}})


@pytest.mark.parametrize("fields", [None, [], {}, {"data": 1, "metadata": 2, "name": "", "is_update": 0}, "x" * 100])
def test_objects_other_than_displays_are_dropped(fields: object) -> None:
    assert joined(fields) is None


def test_more_than_a_display_may_have_is_dropped() -> None:
    joiner = DisplayJoiner()
    large = Display(data={"text/plain": "x" * (6 * MAX_DISPLAY)})
    assert not any(joiner.add(0, body) for body in pieces(large))
    assert joiner.add(0, b"short") is None


def test_a_mask_is_applied_to_texts_and_to_json() -> None:
    display = Display(data={"text/html": "<b>key</b>", "application/json": {"key": "key"}, "image/png": "key="})
    assert display.masked(lambda text: text.replace("key", "***")).data == {
        "text/html": "<b>***</b>",
        "application/json": {"***": "***"},
        "image/png": "key=",
    }
    assert "application/json" not in display.masked(lambda text: text.replace('"', "")).data
    assert (display.text, display.size) == ("<text/html, application/json, image/png>", 10)
