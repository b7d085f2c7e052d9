"""Names with an underscore stay in the module that defines them; a test that needs one says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "skyward").rglob("*.py"))
NOT_OURS = {
    "_exit": "os._exit",
    "_replace": "the public method of named tuples",
    "_clear": "atexit has no other name for it",
    "_registry": "weakref.finalize has no other list of its finalizers",
    "_metrics": "TensorFlow's trainer has no other name for its metrics",
}
"""Names that we define somewhere too, where they are used as another library's."""
PRIVATE_MODULES = {"_lazy", "_version"}
"""Private to the package, not to a module."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NOT_OURS


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return nodes_in(path.read_text(encoding="utf-8"))


def nodes_in(source: str) -> list[ast.AST]:
    """Return the nodes that may hold a private name. All nodes of a thousand files would keep the collector busy."""
    return [node for node in ast.walk(ast.parse(source)) if may_be_private(node)]


def may_be_private(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name.startswith("_")
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.startswith("_")
        case ast.Call(func=ast.Attribute(attr="setattr")) | ast.ImportFrom():
            return True
    return False


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return every private name that a module defines: functions, classes, variables, attributes."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(filter(is_private, names))


@cache
def ours() -> frozenset[str]:
    return frozenset(name for path in MODULES for name in defined_in(path))


def foreign_uses(nodes: Sequence[ast.AST], own: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each use of a private name of the package that is not in `own`."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from imported_by(node)
        elif isinstance(node, ast.Call):
            yield from patched_by(node, own)
        elif isinstance(node, ast.Attribute) and is_foreign(node, own):
            yield node.lineno, ast.unparse(node)


def is_foreign(node: ast.Attribute, own: AbstractSet[str]) -> bool:
    is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return not is_of_self and node.attr in ours() and node.attr not in own


def imported_by(node: ast.ImportFrom) -> Iterator[tuple[int, str]]:
    if node.level or (node.module or "").startswith("skyward"):
        for alias in node.names:
            if is_private(alias.name) and alias.name not in PRIVATE_MODULES:
                yield node.lineno, f"import {alias.name}"


def patched_by(node: ast.Call, own: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    """Return the names patched by `monkeypatch.setattr`, in both forms: by a path, and by an object and a name."""
    match node.args:
        case [ast.Constant(value=str(path)), *_] if path.startswith("skyward.") and is_private(path.rpartition(".")[2]):
            yield node.lineno, path
        case [_, ast.Constant(value=str(name)), *_] if is_private(name) and name in ours() and name not in own:
            yield node.lineno, name


def test_no_module_uses_a_private_name_of_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in MODULES
        for line, text in foreign_uses(nodes_of(path), defined_in(path))
    ]
    assert found == []


def has_comment(lines: list[str], number: int) -> bool:
    """Return whether there is a comment on the line or right above it."""
    return " # " in lines[number - 1] or lines[number - 2].lstrip().startswith("#")


def test_a_test_that_uses_a_private_name_says_why() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    theirs = {name for path in paths for name in defined_in(path)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in foreign_uses(nodes_of(path), theirs)
        if not has_comment(path.read_text(encoding="utf-8").splitlines(), line)
    ]
    assert found == []


def test_uses_are_found() -> None:
    name = min(ours())
    source = f"from skyward.pool.pool import {name}\nthing.{name}\nself.{name}\n"
    source += "monkeypatch.setattr('skyward.pool.pool._x', 1)\n"
    assert [line for line, _ in foreign_uses(nodes_in(source), set())] == [1, 2, 4]
    assert [line for line, _ in foreign_uses(nodes_in(source), {name})] == [1, 4]
