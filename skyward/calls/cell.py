"""Code of a notebook's cell as a call: `%%skyward pool` sends it to a node, where `run_source` runs it."""

from __future__ import annotations

import ast
from typing import Any


def names_read(source: str) -> set[str]:
    """Return the names that some code reads, wherever they are defined. Raises SyntaxError.

    >>> sorted(names_read("y = x + abs(z)"))
    ['abs', 'x', 'z']
    """
    nodes = ast.walk(ast.parse(source))
    return {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}


def run_source(source: str, filename: str, outputs: tuple[str, ...], /, **names: Any) -> tuple[Any, dict[str, Any]]:
    """Run code as IPython runs a cell, and return the value of its last expression with some of its variables.

    Args:
        source: of the cell.
        filename: its name in tracebacks.
        outputs: variables to return.
        names: variables that the code starts with.

    Raises:
        NameError: the code has not set a variable of `outputs`.

    Example:
        >>> run_source("y = 2 * x" + chr(10) + "y + 1", "<cell>", ("y",), x=3)
        (7, {'y': 6})
    """
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    variables: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(tree, filename, "exec"), variables)
    value = None
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), variables)
    missing = [name for name in outputs if name not in variables]
    if missing:
        raise NameError(f"--out={missing[0]}: is not defined at the end of the cell; set it there")
    return value, {name: variables[name] for name in outputs}
