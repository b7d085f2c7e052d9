"""MissingDependency names the missing module in a field, so that a program needs not parse the message."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import skyward

PACKAGE = Path(skyward.__file__).parent


def raising_calls() -> list[tuple[str, ast.Call]]:
    calls = []
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path in (path for path, text in texts.items() if "MissingDependency" in text):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "MissingDependency":
                calls.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", node))
    return calls


def test_every_place_that_raises_it_passes_the_name() -> None:
    calls = raising_calls()
    assert len(calls) > 10
    assert [place for place, call in calls if "name" not in {keyword.arg for keyword in call.keywords}] == []


@pytest.mark.parametrize(
    ("blocked", "call"),
    [
        ("boto3", "from skyward.providers import load; load('aws')().cloud()"),
        ("joblib", "import skyward; skyward.integrations.joblib_backend"),
        ("paramiko", "from skyward.ssh.pure import pure; pure(None)"),
        ("tqdm", "from skyward.training import ProgressCallback; ProgressCallback(use_tqdm=True)"),
        ("s3fs", "from skyward.stores.folders import folder_at; folder_at('s3://bucket/run')"),
    ],
)
def test_it_names_what_is_missing(blocked: str, call: str) -> None:
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from skyward.errors import MissingDependency\n"
        f"try:\n    {call}\nexcept MissingDependency as error:\n    print(error.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == blocked
