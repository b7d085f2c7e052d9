"""Which extras of a distribution are installed, read from its own metadata: no table to keep by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from .. import errors

__all__ = ["Extra", "Package", "PackageState", "examine_extras", "version_of"]

# A requirement as built metadata writes it (PEP 508): name[extras]specifier; marker.
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[[^]]*\])?\s*(?P<specifier>[^;]*)(?:;(?P<marker>.*))?")
EXTRA_MARKER = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
LEAST_VERSION = re.compile(r">=\s*([\d.]+)")


class PackageState(StrEnum):
    INSTALLED = "installed"
    TOO_OLD = "too old"
    MISSING = "not installed"


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution that an extra asks for, and what is here; `version` is "" where nothing is."""

    name: str
    version: str
    state: PackageState


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra and its packages; the extra named "core" is what every installation has."""

    name: str
    packages: tuple[Package, ...]

    @property
    def is_installed(self) -> bool:
        return all(package.state is PackageState.INSTALLED for package in self.packages)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    name: str
    least: str
    extra: str | None  # None: always wanted


def examine_extras(distribution: str) -> tuple[Extra, tuple[Extra, ...]]:
    """The core and every extra of an installed distribution, extras in the order of the metadata.

    Raises MissingDependency where the distribution is not installed (a source folder on the path is not enough).
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        message = f"{distribution} is imported from a folder but not installed: run `pip install -e .` in its checkout"
        raise errors.MissingDependency(message) from None
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
    """Of the installed distribution, or of its CPU build, as tensorflow-cpu is of tensorflow; "" where neither is."""
    for candidate in (name, f"{name}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # try the next name
            return metadata.version(candidate)
    return ""


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with: `2.13.0+cpu` is (2, 13, 0). Enough to tell a package that is too old."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
