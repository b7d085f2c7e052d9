"""The programs as files, under the names that their imports expect."""

from __future__ import annotations

from importlib.resources import files

STUB = "skyward/bootstrap/ray/stub.py"
_PROGRAMS = ("bootstrap/ray/bridge.py", "bootstrap/ray/driver.py", "bootstrap/ray/stub.py")
_STREAMS = ("wire/carried.py", "wire/exchange.py")
_PACKAGES = ("", "bootstrap/", "bootstrap/ray/", "wire/")


def program_files() -> dict[str, str]:
    """Return the text of each file by its path. The packages around the programs are empty."""
    texts = {f"skyward/{name}__init__.py": "" for name in _PACKAGES}
    return texts | {f"skyward/{name}": program(name) for name in (*_PROGRAMS, *_STREAMS)}


def program(name: str) -> str:
    """Return the text of a file of this package, by its path."""
    return (files("skyward") / name).read_text()
