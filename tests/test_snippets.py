"""Code in guides and sentences is correct: blocks run, and the names, arguments and commands in it exist."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward
from skyward.cli import build_parser
from skyward.hub.http.settings import read_settings
from tests.few_modules import LEAN
from tests.test_docs import BLOCK, PAGES, ROOT

EXAMPLES = {path.read_text() for path in (ROOT / "examples").glob("*.py")}  # test_examples runs these

HUB = """
import atexit, json, subprocess, sys, tempfile
from skyward import hub
hub_folder = tempfile.TemporaryDirectory()  # a guide that named something else so would remove the hub's data
command = [sys.executable, "-m", "skyward", "hub", "up", "--data", hub_folder.name, "--port", "0", "--json"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
atexit.register(lambda: (server.terminate(), server.wait()))
started = json.loads(server.stdout.readline())
hub.connect(started["url"], token=started["token"])
"""
"""A hub with its launcher, as its user starts one."""

# Names that a guide leaves to its reader.
PRELUDES = {
    "03_broadcast": """
from typing import Any
import skyward as sky
class Model:
    state_dict = dict
TEXT, model = ["to be", "or not"], Model()
prepare = count_words = evaluate = sky.compute(lambda *_: 0.0)
""",
    "actors": "import skyward as sky",
    "hub": """
import torch
from skyward.training import Trainer, TrainingArguments
trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments("out"), train_dataset=[])
""",
    "hub_commands": HUB,
    "hub_costs": HUB,
    "hub_jobs": HUB,
    "hub_lab": HUB,
    "hub_sweeps": HUB,
    "hub_waits": HUB,
    "joblib": """
import skyward as sky
from joblib import Parallel, delayed
def work(number): return number
""",
    "notebooks": "import atexit\natexit.register(lambda: pool.close())",
    "scikit-learn": """
import skyward as sky
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import cross_val_score
model, x, y = DummyClassifier(), [[1]] * 20, [0, 1] * 10
""",
    "security": "import skyward as sky",
    "when_things_die": "import skyward as sky",
}


def guides() -> dict[str, list[re.Match[str]]]:
    """Return the blocks of each guide that are not an example."""
    pages = [page for page in PAGES if page.parent.name == "guides"]
    blocks = {page.stem: [*BLOCK.finditer(page.read_text())] for page in pages}
    rest = {name: [block for block in found if block[1] not in EXAMPLES] for name, found in blocks.items()}
    return {name: found for name, found in rest.items() if found}


@pytest.mark.parametrize("name", guides())
def test_blocks_of_a_guide_run_one_after_the_other_and_print_the_shown_output(name: str, tmp_path: Path) -> None:
    blocks = guides()[name]
    code = [PRELUDES.get(name, ""), *(f"{block[1]}\nprint('--', flush=True)" for block in blocks)]
    (tmp_path / "guide.py").write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LEAN), "SKYWARD_HUB_SPOOL": str(tmp_path / "spool")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.split("--\n")
    for block, shown in zip(blocks, printed, strict=False):
        assert block[2] is None or block[2] == shown


def snippets(text: str) -> Iterator[str]:
    """Yield code in sentences and tables, and indented blocks."""
    yield from re.findall(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    prose = re.sub(r"^```.*?^```|^    [^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"``(.+?)``|`([^`]+)`", prose):
        yield " ".join((span[0] or span[1]).split())


def right_columns(text: str) -> str:
    """Leave out the first column of each table."""
    return re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)


def parsed(code: str) -> ast.Module | None:
    """Parse code, also a lone decorator or the head of a block."""
    code = inspect.cleandoc(code)
    for completed in (code, f"{code}\ndef f(): ...", f"{code} ...", f"{code}\n    ..."):
        with contextlib.suppress(SyntaxError):
            return ast.parse(completed)
    return None


MODULES = ("skyward.training.callbacks", "skyward.training.checkpoint", "skyward.training", "skyward")
PUBLIC: dict[str, Any] = {
    name: getattr(importlib.import_module(module), name, None)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if name[0].isupper()
}
PUBLIC["Trainer"] = None  # Lightning has one too
OTHERS = ("toml", "observers")  # skyward.toml is a file, skyward.observers a group of entry points
ROOTS = {"sky": skyward, "skyward": skyward, "hub": skyward.hub, "pool": skyward.ComputePool}


def meaning(node: ast.expr) -> Any:
    """Return the public object that an expression names. None: some other name.

    Raises:
        AttributeError: The object has no such attribute.
    """
    if isinstance(node, ast.Attribute):
        owner = meaning(node.value)
        if owner is None or node.attr in OTHERS or node.attr in getattr(owner, "__annotations__", ()):
            return None
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(f"{owner.__name__}.{node.attr}")  # a module that nobody has imported yet
        return getattr(owner, node.attr)
    return (ROOTS | PUBLIC).get(node.id) if isinstance(node, ast.Name) else None


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        try:
            named = meaning(node.func if isinstance(node, ast.Call) else node)  # type: ignore[arg-type]
        except AttributeError as error:
            yield str(error)
            continue
        if not isinstance(node, ast.Call) or not callable(named):
            continue
        parameters = inspect.signature(named).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            yield from (f"{ast.unparse(node)}: {word.arg}=" for word in node.keywords if word.arg not in parameters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_sentences_names_public_objects_and_their_arguments(page: Path) -> None:
    text = page.read_text()
    trees = [parsed(code) for code in snippets(right_columns(text) if page.name == "coming_from.md" else text)]
    assert [fault for tree in trees if tree is not None for fault in faults(tree)] == []


def commands(text: str) -> Iterator[list[str]]:
    for code in (*snippets(text), *re.findall(r"^```(?:console|sh|)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
        for line in code.splitlines():
            if found := re.match(r"(?:\$ )?skyward ([^:`]*)$", line.strip()):
                with contextlib.suppress(ValueError):  # an apostrophe in the output of a command
                    yield shlex.split(found[1], comments=True)


@functools.cache
def whole_parser() -> argparse.ArgumentParser:
    return build_parser()


def unknown(words: list[str]) -> str | None:
    """Return the first word of a command line that names no subcommand and no option."""
    parser, options = whole_parser(), set()
    for word in words:
        below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        options |= {option for action in parser._actions for option in action.option_strings}
        if word in ("--", "..."):
            return None
        if word.startswith("-"):
            if word not in options:
                return word
        elif below:
            names = word.split(",")
            if not set(names) <= set(below[0]):
                return word
            parser = below[0][names[0]]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_of_skyward_exist_with_their_options(page: Path) -> None:
    assert [words for words in commands(page.read_text()) if unknown(words)] == []


def pool_files() -> dict[str, str]:
    """Return the blocks that are a skyward.toml, indented ones too."""
    found: dict[str, str] = {}
    for page in PAGES:
        fenced = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        blocks = [inspect.cleandoc(block) for block in (*fenced, *snippets(page.read_text()))]
        found |= {f"{page.name}-{n}": block for n, block in enumerate(blocks) if re.search(r"^\[pools\.", block, re.M)}
    return found


@pytest.mark.parametrize("text", pool_files().values(), ids=pool_files())
def test_a_shown_configuration_of_pools_is_legal(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skyward.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for name in re.findall(r"^\[pools\.(\w+)\]", text, re.MULTILINE):
        assert skyward.ComputePool.named(name).name == name


def test_the_shown_configuration_of_a_hub_is_legal(tmp_path: Path) -> None:
    text = re.search(r"^```yaml\n(.*?)^```", (ROOT / "guides" / "hub_team.md").read_text(), re.DOTALL | re.MULTILINE)
    assert text is not None
    (tmp_path / "hub.yaml").write_text(text[1])
    settings = read_settings(tmp_path / "hub.yaml", {"HUB_DATABASE_PASSWORD": "secret"})
    assert (settings.server.workers, settings.storage.bucket) == (4, "team-runs")
