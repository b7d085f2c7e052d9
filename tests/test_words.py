"""The check of the words finds messages that do not say what to do, however their text is put together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import words
from tests.message_texts import MessageTexts

HELPER = """
def check(nodes):
    if nodes < 1:
        raise refusal("nodes", nodes, {problem})

def refusal(field, value, problem, *, hint=""):
    message = f"{{field}}={{value!r}}: {{problem}}"
    return UsageError(message + hint, field=field)
"""


def found(path: Path, source: str) -> list[str]:
    path.write_text(source)
    return [str(finding.problem) for prose in words.python_prose(path) for finding in words.problems(prose)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(words, "PACKAGE", tmp_path)
    return tmp_path / "module.py"


def test_a_message_is_followed_through_helpers_parameters_and_variables(path: Path) -> None:
    assert found(path, HELPER.format(problem='"must be at least 1; set nodes=1 or more"')) == []
    (problem,) = found(path, HELPER.format(problem='"must be at least 1" if nodes else "is zero; set nodes=1"'))
    assert "'nodes={}: must be at least 1'" in problem


def test_an_excuse_stands_on_a_line_of_the_message(path: Path) -> None:
    line = 'raise NodeLost(f"node {node} is gone")'
    assert len(found(path, line)) == 1
    assert found(path, f"{line}  # words: ok, its handler says what to do") == []


def test_a_text_that_is_only_passed_on_counts_where_it_is_written(path: Path) -> None:
    assert found(path, "raise UsageError(str(error))") == []


def test_a_function_that_calls_itself_ends() -> None:
    tree = ast.parse("def why(depth):\n    return why(depth - 1) if depth else 'no room'\nraise OSError(why(3))")
    raised = tree.body[-1]
    assert isinstance(raised, ast.Raise)
    assert isinstance(raised.exc, ast.Call)
    assert set(MessageTexts(tree).of(raised.exc.args[0])) == {"{}", "no room"}
