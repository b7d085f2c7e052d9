"""Package index for some packages alone, and the credentials that it asks for."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import KW_ONLY

from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import UsageError
from .secret import MASK, Secret

_URL = re.compile(r"(https?|file)://\S+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def normalized(package: str) -> str:
    """Return the name of a package as indexes compare it. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", package).lower()


@checked_options
@dataclass(frozen=True, repr=False)
class PipIndex:
    """Package index for named packages, which then come from nowhere else.

    The named packages are installed from this index, whether `Image.pip` lists them or one of its packages depends on
    them. A version is set in `Image.pip`. All other packages come from the default index, also those that this index
    has too. So nobody can replace a private package by publishing its name.

    Args:
        url: URL of the index (PEP 503), such as "https://download.pytorch.org/whl/cu124". It may contain credentials.
        packages: Names of packages, at least one.
        username: Name to log in with; empty for none.
        password: Password or token, as a `sky.Secret`.

    Raises:
        UsageError: A value is illegal.

    Example:
        >>> PipIndex("https://me:secret@pypi.example.com/simple", packages=["acme-models"])
        PipIndex('https://***@pypi.example.com/simple', packages=('acme-models',))
    """

    url: str
    _: KW_ONLY
    packages: Sequence[str]
    username: str = ""
    password: Secret | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not _URL.fullmatch(self.url):
            legal = 'use a URL such as "https://download.pytorch.org/whl/cu124"'
            raise UsageError(f"PipIndex.url={_masked(self.url)!r}: not a URL; {legal}", field="url")
        names = self.packages
        if isinstance(names, str | bytes) or not isinstance(names, Sequence) or not names:
            legal = 'use a list of names, such as packages=["torch"]'
            raise UsageError(f"PipIndex.packages={names!r}: not supported; {legal}", field="packages", value=names)
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                legal = 'use a name such as "torch", and set its version in Image(pip=["torch>=2.4"])'
                raise UsageError(f"PipIndex.packages={name!r}: not a name; {legal}", field="packages", value=name)
        if not isinstance(self.username, str) or (self.username and "@" in urllib.parse.urlsplit(self.url).netloc):
            legal = "set the name of the login here or in the URL, not in both"
            raise UsageError(f"PipIndex.username={self.username!r}: not supported; {legal}", field="username")
        if self.password is not None and not isinstance(self.password, Secret):
            # The value is not shown: users who pass text pass the secret itself.
            legal = 'use sky.Secret("PIP_TOKEN"), which reads that environment variable'
            raise UsageError(f"PipIndex.password=<{type(self.password).__name__}>: not supported; {legal}")
        object.__setattr__(self, "packages", tuple(dict.fromkeys(map(normalized, names))))

    @property
    def location(self) -> str:
        """URL without credentials."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def login(self) -> tuple[str, str]:
        """Return name and password in clear, each possibly empty. Raises UsageError if the secret has no value."""
        parts = urllib.parse.urlsplit(self.url)
        name = self.username or urllib.parse.unquote(parts.username or "")
        if self.password is not None:
            return name, self.password.reveal()
        return name, urllib.parse.unquote(parts.password or "")

    def __repr__(self) -> str:
        more = f", username={self.username!r}" if self.username else ""
        more += f", password={self.password!r}" if self.password is not None else ""
        return f"PipIndex({_masked(self.url)!r}, packages={self.packages!r}{more})"


def _masked(url: object) -> object:
    return re.sub(r"(?<=://)[^/@\s]+(?=@)|^[^/]*(?=@)", MASK, url) if isinstance(url, str) else url
