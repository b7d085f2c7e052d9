"""Lock files in the form in which a node installs them: a pylock.toml, or requirements with hashes."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from typing import NoReturn

from ..errors import UsageError
from ..values.lock import Lock, lines_of
from ..values.pip_index import normalized
from .uv import client_uv

_EXPORT_LIMIT_S = 60.0
_EXPORT = ("export", "--quiet", "--frozen", "--offline", "--no-config", "--no-header", "--format", "pylock.toml")
_WITHOUT = ("--no-default-groups", "--no-emit-local", "--no-emit-package", "skyward")
_PACKAGE = re.compile(r"^(?=\[\[packages\]\])", re.MULTILINE)
_NAME = re.compile(r"""^name\s*=\s*["']([^"']+)["']""", re.MULTILINE)


@functools.lru_cache(maxsize=16)
def locked_file(lock: Lock) -> tuple[str, str]:
    """Return the name and the text of the file for the node.

    Neither skyward is in it, because nodes get the client's, nor packages of local folders, because the user's code is
    sent. Markers stay, so the node decides.

    Raises:
        UsageError: uv cannot read the lock, or is not installed here.
    """
    if lock.kind == "requirements":
        lines = [line for line in lines_of(lock.text) if normalized(re.split(r"[\[\s=@;]", line)[0]) != "skyward"]
        return "locked.txt", "".join(f"{line}\n" for line in lines)
    text = _exported(lock) if lock.kind == "uv" else lock.text
    parts = _PACKAGE.split(text)
    return "pylock.toml", "".join(part for part in parts if not _is_ours(part))


def _is_ours(part: str) -> bool:
    name = _NAME.search(part)
    return part.startswith("[[packages]]") and name is not None and normalized(name[1]) == "skyward"


def _exported(lock: Lock) -> str:
    uv = client_uv()
    if uv is None:
        _refuse(lock, "reading it needs uv, which is not installed here", "run: pip install 'skyward[ssh]'")
    with tempfile.TemporaryDirectory(prefix="skyward-lock-") as folder:
        for place, text in lock.texts.items():
            path = os.path.join(folder, place)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        try:
            done = subprocess.run(
                [uv.path, *_EXPORT, *_WITHOUT, "--output-file", "pylock.toml"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_EXPORT_LIMIT_S,
                check=False,
                # A setting of this shell, such as a private index, must not change what the lock says.
                env={name: value for name, value in os.environ.items() if not name.startswith("UV_")},
            )
        except subprocess.TimeoutExpired:
            _refuse(lock, f"uv did not read it within {_EXPORT_LIMIT_S:.0f} s", "export it to a pylock.toml")
        if done.returncode:
            _refuse(lock, f"uv cannot export it: {done.stderr.strip()}", "run `uv lock` beside it")
        with open(os.path.join(folder, "pylock.toml"), encoding="utf-8") as file:
            return file.read()


def _refuse(lock: Lock, problem: str, advice: str) -> NoReturn:
    raise UsageError(f"Image.lock={lock.path!r}: {problem}; {advice}", field="lock", value=lock.path)
