"""`skyward explain`: show what an error means and what to do."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from pathlib import Path

from ..errors import SkywardError, UsageError

HELP = "explain an error, and what to do about it"

DESCRIPTION = """\
Shows the page of an error: what it means, why it happens, and what to do. CODE is the name of the error's class, as a
traceback shows it (NodeLost), or its page (node-lost). Without CODE, lists all errors.
"""

EPILOG = """\
examples:
  skyward explain
  skyward explain node-lost
  skyward explain NodeLost

from Python: skyward.cli.explain.explanation()
"""

# A wheel holds a copy of the page beside this file; a checkout has it in docs/.
_PAGES = (Path(__file__).with_name("errors.md"), Path(__file__).resolve().parents[2] / "docs" / "errors.md")


_ENDLESS = 100_000  # columns of a file or a pipe


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="name of an error, such as NodeLost or node-lost")


def run(arguments: argparse.Namespace) -> int:
    if arguments.code:
        print(explanation(arguments.code))
        return 0
    wide = shutil.get_terminal_size((_ENDLESS, 0)).columns
    width = max(len(page) for page in sections())
    for page, text in sections().items():
        line = f"{page:<{width}}  {_first_sentence(text)}"
        print(textwrap.fill(line, wide, subsequent_indent=" " * (width + 2)))
    return 0


def explanation(code: str) -> str:
    """Look up the page of an error.

    Args:
        code: name of the error's class (`NodeLost`) or of its page (`node-lost`).

    Returns:
        The page as text, with its name in front.

    Raises:
        UsageError: no error has this name.

    Example:
        >>> print(explanation("NodeLost").splitlines()[0])  # doctest: +ELLIPSIS
        node-lost: ...
    """
    page = SkywardError.page_of(code.strip())
    pages = sections()
    if page not in pages:
        from difflib import get_close_matches

        near = get_close_matches(page, pages, n=1, cutoff=0.4)
        hint = f"choose {near[0]!r}, or " if near else ""
        raise UsageError(f"code={code!r}: no error has this name; {hint}run `skyward explain` for a list")
    return f"{page}: {pages[page]}"


def sections() -> dict[str, str]:
    """Read the catalogue of errors.

    Returns:
        Text of each error's section, by the name of its page.
    """
    path = next(path for path in _PAGES if path.exists())
    plain = path.read_text(encoding="utf-8").replace("**", "")
    parts = re.split(r"^##+ +`?([A-Za-z][\w-]*)`?.*$", plain, flags=re.MULTILINE)
    known = {error.page for error in _errors(SkywardError)}
    named = {SkywardError.page_of(name): text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    return {page: text for page, text in named.items() if page in known}


def _errors(root: type[SkywardError]) -> list[type[SkywardError]]:
    return [root, *(error for child in root.__subclasses__() for error in _errors(child))]


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].removeprefix("Meaning.").split())
    return re.split(r"(?<=[.!?]) ", paragraph, maxsplit=1)[0]
