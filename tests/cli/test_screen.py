"""Tables of the commands."""

from __future__ import annotations

import pytest

from skyward.cli import screen
from skyward.console.words import columns
from skyward.errors import Unreachable
from tests.doctests import run_examples

HEADER = ("pool", "provider", "state", "nodes", "age", "per hour", "so far", "program")
ROWS = [("train-4f2a", "aws", "open", "2/2", "3 m", "$3.63", "-", "train.py (20632)")] * 2


def test_the_examples_run() -> None:
    run_examples(screen)


@pytest.mark.parametrize("width", [30, 40, 60, 72, 100])
def test_a_table_fits_the_width_and_loses_no_cell(width: int) -> None:
    lines = screen.table(HEADER, ROWS, width=width)
    assert max(columns(line) for line in lines) <= width
    assert all(" ".join(lines).count(cell) == 2 for cell in ROWS[0] if cell != "-")


def test_a_complaint_names_what_it_belongs_to_and_the_page_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen.complain(Unreachable("ssh gpu1: timed out; check that it is on"), of="gpu1")
    screen.complain(OSError("disk full"))
    assert capsys.readouterr().err.splitlines() == [
        "skyward: gpu1: ssh gpu1: timed out; check that it is on [unreachable]",
        "skyward: disk full",
    ]
