"""Check the English that people read: `python -m tests.words [PATH...]`. Part of `make lint`.

Docstrings, comments and error messages of Python files, names of tests, and the prose of Markdown files. The rules are
in CONTRIBUTING.md, Words. A line that must break one, such as a quotation, ends with `# words: ok`, or in Markdown with
`<!-- words: ok -->`. An error message also has a reason behind it: `# words: ok, schedule/reasons.py says what to do`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from skyward import errors
from tests.message_texts import MessageTexts

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "skyward"
HELD = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks", "changes", "docs", "guides", "skyward", "tests")
# Not rewritten yet. Nothing may be added.
NOT_YET: tuple[str, ...] = ()

LONGEST, AVERAGE = 40, 16.0  # words in a sentence; on average over a page or a room
FEW = 5  # sentences of which no average is taken

TURNS = {
    r"\bany more\b": "write 'no longer', or leave it out",
    r"\bbut for\b": "write 'except'",
    r"\bas ever\b": "write 'as usual', or leave it out",
    r"\banew\b": "write 'again'",
    r"\bso many\b": "name the number",
    r"\bof (?:ours|its own accord)\b": "name it",
    r"\b(?:thereof|hereby|whereof|therein|wherein|whereby|thereby|whereupon)\b": "use a plain word",
    r"(?:^|[.:;!?] )\**(?:What(?! to do\b)|That which|Those (?:that|who)|Whoever|Whatever) (?![^.:;!]*\?)": (
        "begin with a noun"
    ),
    r", for (?:it|they|he|there|then|that|this|these|its|their|no|nothing|otherwise|only) ": "write 'because'",
    r"\b(?:is|are|was|were) asked (?:of|for of)\b": "say who queries whom",
    r"\b(?:has|have|had) it not\b": "say what is missing",
    r"\bthe same (?:goes|holds) for\b": "say it of both at once",
    r"\bthat it is\b(?= *[.;])": "leave it out",
    r"\bit (?:is|was) (?:told|said) (?:so|that)\b": "say who reports what",
    r"\bmay not be\b": "write 'must not be' or 'might not be'",
    r"\bin (?:the )?case (?:that|of which)\b": "write 'if'",
    r"\bin order to\b": "write 'to'",
    r"\bcomes? to nothing\b": "say what happens",
    r"\bmade whole\b": "write 'repaired' or 'completed'",
    r"\bone another's\b": "write 'each other's'",
}
# Names of tests are sentences too. Those of the shipped suites are public, so they stay.
NAMES = {
    r"(?:what|whatever|who|whoever|whose|those)_": "begin with a noun",
    r".*_(?:anew|any_more|as_ever|but_for|for_ever|of_ours|so_many|one_anothers)(?:_|$)": "use a plain word",
    r".*_(?:is|are|was|were)_(?:said|asked_for|asked_of)(?:_|$)": "say who reports what",
}
_NAMES = tuple((re.compile(f"test_{turn}"), advice) for turn, advice in NAMES.items())
_TURNS = tuple((re.compile(turn, re.IGNORECASE if turn.islower() else 0), advice) for turn, advice in TURNS.items())
_BAD_STARTS = re.compile(
    r"(?:Of|Those|As|That|What|Which|Who|Whose|It|Its|They|Their|This|These|He|And|But|Or|So|Told|Only|Not|Whether)\b"
)
# Errors that people read. Not the others of Python: it or a protocol sets their text (KeyError, EOFError), or our own
# code catches them. Private errors are not here either: their handlers write the message.
_READ = frozenset(
    {
        *errors.__all__,
        *("Refusal", "HttpRefusal"),  # of the hub, whose clients raise the text as HubError
        *("kind", "failure"),  # variables that hold a class of error
        *("BrokenPipeError", "ConnectionError", "NameError", "OSError", "PermissionError", "RuntimeError"),
        *("TimeoutError", "TypeError", "ValueError"),
    }
)
# Files whose messages are not ours.
_FOREIGN = (
    "hub/http/mlflow/*.py",  # MLflow's own words, which its clients match
    "testing/*_suite.py",  # what the tests of the suites raise
)
_EXCUSE = re.compile(r"# words: ok(?:, \S.*)?$")
_SHAPE = re.compile(r"\S.*?: \S.*; \S", re.DOTALL)
_NO_ADVICE = re.compile(r"; (?:it (?:is|was|has)|there (?:is|are|was)|got|given|they are) [^;]*$")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|approx|resp)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'`*]*\s+")
_DRAWN = re.compile(r"[│├└─→]|\S {3,}\S|--+>")  # a line of a diagram or of a table
_SECTION = re.compile(r"^\s*(Args|Attributes|Examples?|Raises|Returns|Yields): +\S", re.MULTILINE)
_QUOTED = r"(?:[^\\]|\\.)*?"
# A third of the time that Python's tokenizer takes, which is written in Python.
_STRING_OR_COMMENT = re.compile(
    rf'"""{_QUOTED}"""|\'\'\'{_QUOTED}\'\'\'|"{_QUOTED}"|\'{_QUOTED}\'|(#[^\n]*)', re.DOTALL
)
_BODIES = frozenset({"body", "cases", "finalbody", "handlers", "orelse"})
_SPAN = re.compile(r"``[^`]+``|`[^`]+`|https?://\S+")
_WORD = re.compile(r"[A-Za-z0-9_{}][\w{}.'/=-]*")


@dataclass(frozen=True, slots=True)
class Prose:
    path: Path
    line: int
    text: str
    kind: str  # "docstring", "comment", "message", "name" (of a test), "page"


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.problem}"


def sentences(text: str) -> list[list[str]]:
    """Words of each sentence. A span of code counts as one word; code blocks and lists of arguments end a sentence."""
    words = []
    text = "\n".join("" if _DRAWN.search(line) else line for line in text.split("\n"))
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n\s+(?=[\w*, ]+: )|\n\s*>>> .*|:\n", text):
        plain = _ABBREVIATION.sub("eg", _SPAN.sub("CODE", paragraph))
        words += [_WORD.findall(part) for part in _SENTENCE_END.split(plain)]
    return [sentence for sentence in words if len(sentence) > 1]


def python_prose(path: Path) -> Iterator[Prose]:
    source = path.read_text()
    excused = {number for number, line in enumerate(source.splitlines(), 1) if _EXCUSE.search(line)}
    tree = ast.parse(source)
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and node.body[0].end_lineno not in excused:
                yield Prose(path, node.body[0].lineno, text, "docstring")
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.is_relative_to(TESTS):
                yield Prose(path, node.lineno, node.name, "name")
    yield from _comments(path, source, excused)
    if path.is_relative_to(PACKAGE) and not any(path.match(f"{PACKAGE}/{pattern}") for pattern in _FOREIGN):
        yield from _messages(path, tree, excused)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements in it. No expression holds one, and there are ten times as many of them."""
    yield node
    for name in _BODIES.intersection(node._fields):
        for child in getattr(node, name):
            yield from _statements(child)


def _messages(path: Path, tree: ast.Module, excused: set[int]) -> Iterator[Prose]:
    """Texts of the errors that a file makes. One that is only passed on is checked where it is written."""
    texts = MessageTexts(tree)
    for call in sorted((call for name in _READ for call in texts.calls[name]), key=lambda call: call.lineno):
        message = next((argument for argument in call.args if not ast.unparse(argument).startswith("Reason.")), None)
        statement = texts.statement(call)
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if message is None or not excused.isdisjoint(lines):
            continue
        for text in texts.of(message):
            if re.search("[a-z]", text.replace("{}", "")) and not text.rstrip().endswith((":", ";")):  # "": no text
                yield Prose(path, call.lineno, text, "message")


def _comments(path: Path, source: str, excused: set[int]) -> Iterator[Prose]:
    """Comments, with the lines of one block joined."""
    block: list[str] = []
    lines = source.split("\n")
    began = last = at = 0
    number = 1
    for found in _STRING_OR_COMMENT.finditer(source):
        if found[1] is None:
            continue
        number += source.count("\n", at, found.start())
        at = found.start()
        text = found[1].lstrip("#: ").strip()
        if number in excused or re.match(r"(?:type|noqa|ruff|pragma|mypy|words)\b|-\*-|!", text):
            continue
        if block and lines[number - 1].lstrip().startswith("#") and number == last + 1:
            block.append(text)
        else:
            if block:
                yield Prose(path, began, " ".join(block), "comment")
            block, began = [text], number
        last = number
    if block:
        yield Prose(path, began, " ".join(block), "comment")


def page_prose(path: Path) -> Iterator[Prose]:
    """Paragraphs and list items. Code, tables, headings, images and HTML are left out."""
    lines, began, fenced = path.read_text().splitlines(), 1, False
    paragraph: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            fenced = not fenced
        ends = not stripped or fenced or bool(re.match(r"```|~~~|#|\||<|!\[|===|:::|---", stripped))
        item = re.match(r"(?:[-*+]|\d+\.) ", stripped)
        if (ends or item) and paragraph:
            yield Prose(path, began, " ".join(paragraph), "page")
            paragraph = []
        if not ends and not stripped.endswith("<!-- words: ok -->"):
            if not paragraph:
                began = number
            paragraph.append(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", stripped[item.end() :] if item else stripped))


def problems(prose: Prose) -> Iterator[Finding]:
    flat = " ".join(prose.text.split())
    plain = _SPAN.sub("CODE", flat)
    for turn, advice in _TURNS:
        for match in turn.finditer(plain):
            yield Finding(prose.path, prose.line, f"{match.group().strip(' .:;!?,')!r}: {advice}")
    if prose.kind == "docstring" and _BAD_STARTS.match(flat):
        start = flat.partition(" ")[0]
        advice = "begin with a verb or a complete noun phrase"
        yield Finding(prose.path, prose.line, f"a docstring begins with {start!r}: {advice}")
    if prose.kind == "docstring" and (section := _SECTION.search(prose.text)):
        yield Finding(prose.path, prose.line, f"{section[1]!r}: begin its text on the next line, indented")
    if prose.kind == "message":
        shown = flat if len(flat) < 60 else flat[:57] + "..."
        if not _SHAPE.match(flat):
            yield Finding(prose.path, prose.line, f"{shown!r}: write 'field=value: problem; what to do'")
        elif _NO_ADVICE.search(flat):
            yield Finding(prose.path, prose.line, f"{shown!r}: the part behind '; ' says what to do")
    else:
        for sentence in sentences(prose.text):
            if len(sentence) > LONGEST:
                begin = " ".join(sentence[:6])
                yield Finding(prose.path, prose.line, f"{begin!r}...: {len(sentence)} words; split it")


def bad_names(prose: Prose) -> Iterator[Finding]:
    for turn, advice in _NAMES:
        if turn.match(prose.text):
            yield Finding(prose.path, prose.line, f"{prose.text!r}: {advice}")


def averages(group: str, prose: list[Prose]) -> Iterator[str]:
    read = [part for part in prose if part.kind not in ("message", "name")]
    lengths = [len(sentence) for part in read for sentence in sentences(part.text)]
    if len(lengths) > FEW and mean(lengths) > AVERAGE:
        yield f"{group}: {mean(lengths):.1f} words a sentence; at most {AVERAGE:g}"


_CHECKS = {"name": bad_names}


def files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for suffix in ("*.py", "*.pyi", "*.md") for file in path.rglob(suffix))


def main(arguments: list[str]) -> int:
    given = [Path(argument).resolve() for argument in arguments] or [ROOT / name for name in HELD]
    left_out = () if arguments else tuple(ROOT / name for name in NOT_YET)
    groups: dict[str, list[Prose]] = {}
    for file in (file for path in given for file in files_of(path)):
        if any(file.is_relative_to(path) for path in left_out):
            continue
        place = file if file.suffix == ".md" else file.parent
        prose = page_prose(file) if file.suffix == ".md" else python_prose(file)
        groups.setdefault(str(place.relative_to(ROOT)), []).extend(prose)
    found = [
        str(finding)
        for group in groups.values()
        for prose in group
        for finding in _CHECKS.get(prose.kind, problems)(prose)
    ]
    found += [line for group, prose in groups.items() for line in averages(group, prose)]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    if found:
        sys.stdout.write(f"{len(found)} to mend; the rules are in CONTRIBUTING.md, Words\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
