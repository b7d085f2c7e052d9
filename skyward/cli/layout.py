"""Parsers whose help fits the terminal, and whose errors name the command."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from typing import Any

_OWN_LINE = re.compile(r"(?:exit status|from Python): ")
_AS_IT_IS = re.compile(r"\s|examples?:|$")


class _Layout(argparse.HelpFormatter):
    """Help as wide as the terminal. Prose is filled; indented lines and examples, to be copied, stay as they are."""

    # argparse has no public way. Its own RawDescriptionHelpFormatter overrides the same method, but fills nothing, so a
    # narrow terminal breaks its lines anywhere.
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs: list[str] = []
        for line in text.splitlines():
            goes_on = bool(paragraphs) and not _AS_IT_IS.match(paragraphs[-1])
            if goes_on and not _AS_IT_IS.match(line) and not _OWN_LINE.match(line):
                paragraphs[-1] += f" {line}"
            else:
                paragraphs.append(line)
        return "\n".join(line if _AS_IT_IS.match(line) else _filled(line, width) for line in paragraphs)


def _filled(paragraph: str, width: int) -> str:
    return textwrap.fill(paragraph, max(width, 1), break_long_words=False, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Parser with this layout, as are the parsers of its subcommands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Layout, **options})

    def parse_args(  # type: ignore[override]  # the overloads of typeshed cannot be met
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse a command line. Words that a command does not take are an error of that command, with its usage."""
        arguments, rest = self.parse_known_args(args, namespace)
        if rest:
            arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}; {_advice(arguments.parser, rest[0])}")
        return arguments


def _advice(command: argparse.ArgumentParser, word: str) -> str:
    from ..core.spellings import suggestion  # only for a message

    option, options = word.partition("=")[0], command._option_string_actions
    if option in options:
        return f"write {option} after the command: {command.prog} {option}"
    near = suggestion(option, options) if option.startswith("-") else None
    return f"did you mean {near}?" if near else f"{command.prog} --help lists its arguments"


def add_command(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, example: str
) -> argparse.ArgumentParser:
    """Add one action of a command, with its help and an example, which begins with the command."""
    own = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example: skyward {example}"
    )
    own.set_defaults(parser=own)
    return own
