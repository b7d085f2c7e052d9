"""`%%skyward`: the cell magic that runs a cell of a notebook on a pool. `%load_ext skyward` makes it known."""

from __future__ import annotations

import itertools
import linecache
import shlex
import sys
from collections.abc import Callable
from typing import Any

from ..calls.active import Target
from ..calls.cell import names_read, run_source
from ..calls.compute import compute
from ..core.user_lines import drop_our_frames
from ..errors import UsageError

_USAGE = "write %%skyward [POOL] [--each] [--out NAME,NAME]"

_numbers = itertools.count(1)


def register(shell: Any) -> None:
    """Make `%%skyward` known to an IPython shell."""

    def skyward(line: str, cell: str) -> Any:
        """Run this cell on a pool: %%skyward [POOL] [--each] [--out NAME,NAME].

        POOL is an open pool, or some of its nodes such as `pool.node(1)`; by default the innermost open pool. The
        cell gets the variables of the notebook that it reads, as copies. Its value is that of its last expression.

        --each runs it on every node, and its value is a list. --out brings variables back into the notebook.
        """
        return run_cell(shell, line, cell)

    shell.register_magic_function(skyward, magic_kind="cell", magic_name="skyward")


def run_cell(shell: Any, line: str, cell: str) -> Any:
    """Run a cell on the pool that `line` names, and return its value.

    Raises:
        UsageError: `line` is wrong.
    """
    expression, is_each, outputs = _options(line)
    target: Target = eval(expression, shell.user_ns) if expression else sys.modules["skyward"]
    hidden = shell.user_ns_hidden
    wanted = names_read(cell)
    names = {name: shell.user_ns[name] for name in wanted if name in shell.user_ns and name not in hidden}
    filename = f"<skyward cell {next(_numbers)}>"
    # Remote tracebacks show the lines of files that only this process knows.
    linecache.cache[filename] = len(cell), None, cell.splitlines(keepends=True), filename
    call = compute(name="cell")(run_source)(cell, filename, outputs, **names)
    try:
        results = call @ target if is_each else [call >> target]
    except Exception as error:
        drop_our_frames(error)
        raise
    pick: Callable[[list[Any]], Any] = list if is_each else _only
    for name in outputs:
        shell.user_ns[name] = pick([variables[name] for _, variables in results])
    values = [value for value, _ in results]
    # A list of nothing but None says nothing: a cell that only prints shows what it printed.
    return None if all(value is None for value in values) else pick(values)


def _only(values: list[Any]) -> Any:
    """Return the value of the only node."""
    (value,) = values
    return value


def _options(line: str) -> tuple[str, bool, tuple[str, ...]]:
    """Return the expression of the target, whether the cell runs on each node, and the variables to bring back."""
    words = shlex.split(line)
    is_each = "--each" in words
    outputs: tuple[str, ...] = ()
    if "--out" in words:
        at = words.index("--out")
        named = words[at + 1 : at + 2]
        if not named or named[0].startswith("--"):
            raise UsageError(f"%%skyward --out: names no variable; {_USAGE}")
        outputs = tuple(name.strip() for name in named[0].split(",") if name.strip())
        del words[at : at + 2]
    rest = [word for word in words if word != "--each"]
    if unknown := [word for word in rest if word.startswith("--")]:
        raise UsageError(f"%%skyward {unknown[0]}: unknown option; {_USAGE}")
    return " ".join(rest), is_each, outputs
