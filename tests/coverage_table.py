"""Coverage of each room, as a table in Markdown: `python -m tests.coverage_table`, after `coverage combine`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent


def room_of(path: str) -> str:
    """Return the room of a module: its folder below `skyward`, or the package itself."""
    folder = PurePath(path).parts[1:-1]
    return f"skyward/{folder[0]}" if folder else "skyward"


def table(files: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the lines of the table.

    Args:
        files: statements and run statements of each module, by its path.

    Example:
        >>> print("\\n".join(table({"skyward/wire/frames.py": (80, 60), "skyward/_lazy.py": (20, 20)})))
        | room | statements | not run | coverage |
        |---|---:|---:|---:|
        | `skyward` | 20 | 0 | 100.0 % |
        | `skyward/wire` | 80 | 20 | 75.0 % |
        | all | 100 | 20 | 80.0 % |
    """
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, counts in files.items():
        rooms[room_of(path)] = [sum(pair) for pair in zip(rooms[room_of(path)], counts, strict=True)]
    total = [sum(column) for column in zip(*rooms.values(), strict=True)]
    lines = ["| room | statements | not run | coverage |", "|---|---:|---:|---:|"]
    lines += [_row(f"`{room}`", *rooms[room]) for room in sorted(rooms)]
    return [*lines, _row("all", *total)]


def _row(name: str, statements: int, run: int) -> str:
    return f"| {name} | {statements} | {statements - run} | {100 * run / max(statements, 1):.1f} % |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "coverage", "json", "-q", "--fail-under=0", "-o", str(report)]
        subprocess.run(command, cwd=ROOT, check=True)
        files = json.loads(report.read_text())["files"]
    summaries = {path: file["summary"] for path, file in files.items()}
    rows = table({path: (summary["num_statements"], summary["covered_lines"]) for path, summary in summaries.items()})
    print("\n".join(rows))


if __name__ == "__main__":
    main()
