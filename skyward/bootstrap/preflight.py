"""Checks that find on this machine what would fail on the nodes, before any machine is paid for."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.user_lines import warn_user
from ..errors import UsageError
from ..values.image import Image
from .code import Code
from .environments import users_for
from .imports import imported_there, left_behind
from .uv import client_uv

_RESOLVE_LIMIT_S = 30.0
_OLDEST_GLIBC = "manylinux_2_28"
"""Oldest glibc of current machines: Debian 10, Ubuntu 18.10, RHEL 8 and later."""
_UNSOLVABLE = re.compile(r"no solution found|not found in the package registry|unsatisfiable|failed to parse", re.I)
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN = frozenset({"skyward", "cloudpickle", "xxhash"})
_FOREIGN = re.compile(r"\.(cpython-(\d+)-([\w-]+)|abi3)\.so$")

Architecture = Literal["x86_64", "arm64"]


@dataclass(frozen=True, kw_only=True)
class PreflightFinding:
    """Problem with `field` (such as "Image.pip").

    `text` says what would fail and what to do. Unless `is_certain`, it might not fail.
    """

    field: str
    text: str
    is_certain: bool = False

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def check(image: Image, code: Code | None, *, architecture: Architecture | None = None, resolves: bool = True) -> None:
    """Warn about problems that may occur on the nodes. See `preflight` for the arguments.

    Raises:
        UsageError: Some problems are certain. The message lists them.
    """
    findings = preflight(image, code, architecture=architecture, resolves=resolves)
    for finding in findings:
        if not finding.is_certain:
            warn_user(str(finding))
    certain = [str(finding) for finding in findings if finding.is_certain]
    if certain:
        raise UsageError("preflight: no machine was started; fix these problems first:\n  - " + "\n  - ".join(certain))


def preflight(
    image: Image,
    code: Code | None,
    *,
    architecture: Architecture | None = None,
    resolves: bool = True,
    modules: Mapping[str, object] | None = None,
) -> list[PreflightFinding]:
    """Find problems with the Python version, requirements, imports and compiled extensions.

    Args:
        image: The image.
        code: The user's code; None: it is not sent.
        architecture: Architecture of the nodes; None: unknown, so assume that of this machine.
        resolves: Whether to query the indexes if the requirements can be met, for half a minute at most. Unreachable
            indexes are a finding, not a failure.
        modules: Loaded modules; by default those of this process.
    """
    machine = {"arm64": "aarch64", None: platform.machine()}.get(architecture, architecture or "")
    findings = [*_python(image), *_requirements(image, machine, resolves=resolves)]
    if code is not None:
        loaded = sys.modules if modules is None else modules
        findings += [*_imports(image, code, loaded), *_modules(code, loaded), *_extensions(code, machine)]
    return findings


def _python(image: Image) -> Iterator[PreflightFinding]:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    there = ".".join(image.python_version.split(".")[:2])
    if there != here:
        yield PreflightFinding(
            field="Image.python",
            text=f"{image.python!r} differs from this Python's minor version, {here}, but functions and values need "
            f"the same one on both sides; leave it out, or run this program with Python {there}",
            is_certain=True,
        )


def _requirements(image: Image, machine: str, *, resolves: bool) -> Iterator[PreflightFinding]:
    try:
        users = users_for(image)
    except UsageError as error:
        field = f"Image.{error.field}" if error.field in ("pip", "lock") else "Image"
        yield PreflightFinding(field=field, text=str(error).removeprefix(f"{field}="), is_certain=True)
        return
    # Variables have their values only on the node, so requirements with variables cannot be checked here.
    known = [requirement for requirement in image.pip if "$" not in requirement]
    if image.lock or not (known or image.pip_indexes) or not resolves:
        return
    uv = client_uv()
    if uv is None:
        yield PreflightFinding(
            field="Image.pip",
            text="not checked, because uv is not installed here; run: pip install 'skyward[ssh]'",
        )
        return
    kind = "unknown-linux-gnu" if machine not in ("x86_64", "aarch64") else _OLDEST_GLIBC
    command = [uv.path, "pip", "compile", "-", "--quiet", "--no-header", "--python-platform", f"{machine}-{kind}"]
    command += ["--python-version", image.python_version]
    try:
        with tempfile.TemporaryDirectory(prefix="skyward-check-") as folder:
            for name, text in users.lists.items():
                Path(folder, name).write_text(text)
                command.append(os.path.join(folder, name))
            done = subprocess.run(
                command,
                input="\n".join(known),
                capture_output=True,
                text=True,
                timeout=_RESOLVE_LIMIT_S,
                env={**os.environ, **users.indexes, "UV_NO_PROGRESS": "1"},
                check=False,
            )
    except subprocess.TimeoutExpired:
        yield _unchecked(f"no answer within {_RESOLVE_LIMIT_S:.0f} s")
        return
    if done.returncode:
        output = re.sub(r"(?<=://)[^/@\s]+(?=@)", "***", image.masker()(done.stderr.strip()))
        if _UNSOLVABLE.search(output):
            yield PreflightFinding(field="Image.pip", text=f"cannot be installed there:\n{output}", is_certain=True)
        else:
            yield _unchecked(output.splitlines()[0] if output else f"uv ended with code {done.returncode}")


def _unchecked(why: str) -> PreflightFinding:
    text = f"not checked, because no index can be reached from here ({why})"
    return PreflightFinding(field="Image.pip", text=text)


def _imports(image: Image, code: Code, modules: Mapping[str, object]) -> Iterator[PreflightFinding]:
    """Find packages that the program's functions need on the nodes but the image does not install."""
    named = {_project(requirement) for requirement in image.pip}
    named.update(*(index.packages for index in image.pip_indexes))
    installed = _closure(named) | (image.lock.packages if image.lock else set()) | _OWN
    for name, user in sorted(imported_there(code, modules).items()):
        projects = projects_of(name)
        if projects and not installed.intersection((_normal(name), *projects)):
            yield PreflightFinding(
                field="Image.pip",
                text=f"{user} imports {name}, which no requirement installs, so calls that need it will fail with "
                f"ModuleNotFoundError; add {projects[0]!r}",
            )


def projects_of(name: str) -> list[str]:
    """Return the names of the local packages that contain a module of this name."""
    try:
        return [_normal(importlib.metadata.distribution(name).name)]
    except importlib.metadata.PackageNotFoundError:
        return [_normal(project) for project in _installed().get(name, ())]


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()  # reads the files of every package: 0.2 s for hundreds of them


def _modules(code: Code, modules: Mapping[str, object]) -> Iterator[PreflightFinding]:
    for module, function in left_behind(code, modules).items():
        yield PreflightFinding(
            field="code",
            text=f"{function}() is defined in the module {module}, which is not sent because it is not on sys.path; "
            "put its folder on sys.path, or list it in Image.includes",
        )


def _closure(projects: Collection[str]) -> set[str]:
    """Return these projects with their dependencies, including extras, as far as they are installed here."""
    closure: set[str] = set()
    waiting = list(projects)
    while waiting:
        project = waiting.pop()
        if project in closure:
            continue
        closure.add(project)
        try:
            waiting += [_project(requirement) for requirement in importlib.metadata.requires(project) or ()]
        except importlib.metadata.PackageNotFoundError:  # not installed here, so its requirements are unknown
            continue
    return closure


def _project(requirement: str) -> str:
    match = _PROJECT.match(requirement.strip())
    return _normal(match[0]) if match else requirement


def _normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def _extensions(code: Code, machine: str) -> Iterator[PreflightFinding]:
    """Find compiled modules in the user's code for another Python or platform."""
    for name in sorted(code.sources):
        match = _FOREIGN.search(name)
        here = f"{sys.version_info.major}{sys.version_info.minor}"
        if match is None or match[1] == "abi3":
            continue
        if match[2] != here or match[3] != f"{machine}-linux-gnu":
            yield PreflightFinding(
                field="code",
                text=f"{name} is compiled for {match[1]}, so it cannot be loaded on {machine}-linux-gnu nodes; build a "
                "wheel of its package for them, and list that in Image.pip",
            )
