"""State of a distribution's extras, from its installed metadata."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from .. import errors

# A requirement in built metadata (PEP 508): name[extras]specifier; marker.
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[[^]]*\])?\s*(?P<specifier>[^;]*)(?:;(?P<marker>.*))?")
EXTRA_MARKER = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
LEAST_VERSION = re.compile(r">=\s*([\d.]+)")


class PackageState(StrEnum):
    INSTALLED = "installed"
    TOO_OLD = "too old"
    MISSING = "not installed"


@dataclass(frozen=True, kw_only=True)
class Package:
    """Distribution that an extra requires. `version` is the installed one, "" where there is none."""

    name: str
    version: str
    state: PackageState


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Extra and its packages. "core" stands for the requirements without an extra."""

    name: str
    packages: tuple[Package, ...]

    @property
    def is_installed(self) -> bool:
        return all(package.state is PackageState.INSTALLED for package in self.packages)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    name: str
    least: str
    extra: str | None  # None: required without an extra


def examine_extras(distribution: str) -> tuple[Extra, tuple[Extra, ...]]:
    """Look up the core and every extra of an installed distribution.

    Returns:
        The core, and the extras in the order of the metadata.

    Raises:
        MissingDependency: the distribution is not installed. A source folder on the path has no metadata.
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        message = f"{distribution}: imported from a folder, but not installed; run `pip install -e .` in its checkout"
        raise errors.MissingDependency(message, name=distribution) from None
    requirements = list(parse(installed.requires or ()))
    names: list[str] = installed.metadata.get_all("Provides-Extra") or []
    core = wanted_by(None, requirements, name="core")
    return core, tuple(wanted_by(extra, requirements, name=extra) for extra in names)


def wanted_by(extra: str | None, requirements: Iterable[Requirement], *, name: str) -> Extra:
    return Extra(name=name, packages=tuple(look_up(r) for r in requirements if r.extra == extra))


def parse(lines: Iterable[str]) -> Iterator[Requirement]:
    for line in lines:
        match = REQUIREMENT.match(line)
        if match is None:
            continue
        extra = EXTRA_MARKER.search(match["marker"] or "")
        least = LEAST_VERSION.search(match["specifier"])
        yield Requirement(
            name=match["name"],
            least=least[1] if least else "",
            extra=extra[1] if extra else None,
        )


def look_up(requirement: Requirement) -> Package:
    version = version_of(requirement.name)
    if not version:
        return Package(name=requirement.name, version="", state=PackageState.MISSING)
    is_old = release(version) < release(requirement.least)
    return Package(
        name=requirement.name, version=version, state=PackageState.TOO_OLD if is_old else PackageState.INSTALLED
    )


def version_of(name: str) -> str:
    """Look up the installed version of a distribution or of its CPU build (tensorflow-cpu); "" where there is none."""
    for candidate in (name, f"{name}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # try the next name
            return metadata.version(candidate)
    return ""


def release(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: `2.13.0+cpu` becomes (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
