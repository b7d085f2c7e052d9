"""Help of every command, shell completion, and the catalogue of errors."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.cli import build_parser, main
from skyward.cli.explain import explanation, sections
from skyward.errors import SkywardError
from skyward.providers.aws.failures import NotYet


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:  # argparse has no public way to list subcommands
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


@pytest.mark.parametrize("parser", [*parsers(build_parser())], ids=lambda parser: parser.prog)
def test_every_help_describes_the_command_and_shows_an_example(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert parser.prog in (parser.epilog or ""), "no example"


@pytest.mark.parametrize("parser", [*parsers(build_parser())], ids=lambda parser: parser.prog)
def test_every_option_has_a_help(parser: argparse.ArgumentParser) -> None:
    assert [action.dest for action in parser._actions if not action.help and action.choices is None] == []


@pytest.mark.parametrize("parser", [*parsers(build_parser())], ids=lambda parser: parser.prog)
def test_help_fits_a_narrow_terminal_and_keeps_commands_whole(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = parser.format_help()
    long = [line for line in text.splitlines() if len(line) > 60 and "{" not in line]  # argparse cannot break choices
    commands = [line for line in (parser.epilog or "").splitlines() if line.startswith(("  ", "example: "))]
    assert set(long) <= set(commands)
    assert [command for command in commands if command not in text] == []


def test_the_list_of_errors_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["explain"]) == 0
    narrow = capsys.readouterr().out
    assert max(len(line) for line in narrow.splitlines()) <= 60
    monkeypatch.delenv("COLUMNS")  # not a terminal: a line for each, to search in
    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(sections())


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_commands_and_options() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "skyward", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    complete = (
        'COMP_WORDS=({words}); COMP_CWORD={last}; {function} skyward "{word}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )

    def completions(*words: str) -> list[str]:
        line = complete.format(words=" ".join(words), last=len(words) - 1, function="_shtab_skyward", word=words[-1])
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "doctor" in completions("skyward", "do")
    assert "--dry-run" in completions("skyward", "gc", "--d")


def test_every_error_has_a_page_in_the_catalogue() -> None:
    errors = [
        value for value in vars(sky.errors).values() if isinstance(value, type) and issubclass(value, SkywardError)
    ]
    assert {error.page for error in errors} - set(sections()) == set()
    assert sky.errors.NodeLost("gone").page == "node-lost"


def test_an_error_that_is_not_public_names_the_page_of_the_public_class_above_it() -> None:
    class Drowned(sky.errors.NodeLost):
        pass

    assert Drowned.page == "node-lost"
    assert NotYet.page == "throttled"


def test_explain_takes_the_name_of_a_class_or_of_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert explanation("NodeLost") == explanation("node-lost")
    assert main(["explain", "NodeLots"]) == 1
    assert "choose 'node-lost'" in capsys.readouterr().err


def test_an_error_of_a_command_names_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offers", "--provider", "aws", "--count", "2"]) == 1
    assert "[usage-error]" in capsys.readouterr().err
