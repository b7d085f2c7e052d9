"""What a node's environment holds: interpreter, packages, variables and files, as one frozen value."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from ..core.bounds import is_positive
from ..core.frozenmap import FrozenMap
from ..core.signatures import checked_options
from ..errors import UsageError
from .secret import MASK, Secret, masking

__all__ = ["DEFAULT_IMAGE", "LOCAL_FIELDS", "Image"]

LONGEST_VARIABLE = 128 * 1024 - 2
"""Bytes of an environment variable's name and value. Source: MAX_ARG_STRLEN of Linux, less "=" and NUL."""

LOCAL_FIELDS = frozenset({"env", "includes", "excludes"})
"""The fields that act where the machine, and so its interpreter and packages, is the client's own."""

_BOOTSTRAP_TIMEOUT_S = 300.0
_OLDEST_PYTHON = (3, 11)
_HASH_FORMAT = "skyward-image-1"

_PYTHON = re.compile(r"3\.(\d{1,2})(\.\d{1,3})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Source: Debian policy manual 5.6.1 (package names) and apt-get(8) (":architecture", "=version", "/release").
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?([=/][A-Za-z0-9.+:~-]+)?")
# Source: PEP 508, the name that opens a requirement; what follows is an extra, a version, a marker or " @ url".
_PROJECT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?=$|[\[(<>=!~;@\s])")

_SECRET_ENDINGS = ("token", "secret", "secrets", "password", "passwd", "apikey", "credential", "credentials")
_SECRET_WORDS = frozenset({"key", "keys", "pass", "passphrase", "pwd", "auth", "cred", "creds", "private", "tokens"})
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@checked_options
@dataclass(frozen=True, init=False, repr=False)
class Image:
    """The environment that calls run in. A value: nothing happens until a pool makes a node from it.

    Frozen, hashable, picklable and safe to share; lists become tuples and dicts become read-only mappings, so
    changing what was passed in later changes nothing here. Nodes always get the client's own build of skyward; it is
    no field of the image.

    Args:
        python: "auto" for the client's major.minor, or "3.12", "3.12.4". Values cross between interpreters of the
            same minor version only.
        pip: requirements (PEP 508), URLs, or paths of wheels here. May use `$NAME` of `shell_vars`.
        pip_index_url: the index of packages, instead of PyPI.
        pip_extra_index_url: one index, or several, searched besides that; as with pip, the best version of all wins.
        apt: Debian packages, as `name`, `name=version`, `name:arch`.
        env: variables of every process that runs calls. Values are strings, or `sky.Secret` for what nobody may see.
        shell_vars: name to a shell command; it runs on the node, what it prints is the variable's value.
        includes: files and folders of the client that the node needs, relative to the working folder.
        excludes: patterns (as in .gitignore) of what not to take from them.
        bootstrap_timeout_s: how long making the environment may take, in seconds, above 0. `bootstrap_timeout` is
            the same.

    Raises UsageError, with `field`, `value` and the legal range in words, when a value is not legal.

    On a local machine only `env`, `includes` and `excludes` act; `unused_fields()` names the others that were given.

        >>> image = Image(pip=["torch", "numpy<3"], env={"OMP_NUM_THREADS": "1"})
        >>> image.pip
        ('torch', 'numpy<3')
        >>> image.with_pip("joblib").pip
        ('torch', 'numpy<3', 'joblib')
    """

    python: str
    pip: tuple[str, ...]
    pip_index_url: str
    pip_extra_index_url: tuple[str, ...]
    apt: tuple[str, ...]
    env: FrozenMap[str | Secret]
    shell_vars: FrozenMap[str]
    includes: tuple[str, ...]
    excludes: tuple[str, ...]
    bootstrap_timeout_s: float

    # Written by hand so that lists and dicts are accepted where tuples and read-only mappings are kept: the types of
    # a generated __init__ would be those of the fields.
    def __init__(
        self,
        *,
        python: str = "auto",
        pip: Sequence[str] = (),
        pip_index_url: str = "",
        pip_extra_index_url: str | Sequence[str] = (),
        apt: Sequence[str] = (),
        env: Mapping[str, str | Secret] | Mapping[str, str] | None = None,
        shell_vars: Mapping[str, str] | None = None,
        includes: Sequence[str | os.PathLike[str]] = (),
        excludes: Sequence[str] = (),
        bootstrap_timeout_s: float = _BOOTSTRAP_TIMEOUT_S,
        bootstrap_timeout: float | None = None,
    ) -> None:
        indexes = (pip_extra_index_url,) if isinstance(pip_extra_index_url, str) else pip_extra_index_url
        timeout_s = bootstrap_timeout_s if bootstrap_timeout is None else bootstrap_timeout
        values: dict[str, Any] = {
            "python": _python("python", python),
            "pip": _strings("pip", pip, _requirement),
            "pip_index_url": _url("pip_index_url", pip_index_url) if pip_index_url != "" else "",
            "pip_extra_index_url": _strings("pip_extra_index_url", indexes, _url),
            "apt": _strings("apt", apt, _apt_package),
            "env": _variables("env", env, may_be_secret=True),
            "shell_vars": _variables("shell_vars", shell_vars, may_be_empty=False),
            "includes": _strings("includes", includes, _path),
            "excludes": _strings("excludes", excludes, _path),
            "bootstrap_timeout_s": _seconds("bootstrap_timeout_s", timeout_s),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def python_version(self) -> str:
        """The version that `python` asks for; for "auto" this interpreter's major.minor."""
        return f"{sys.version_info.major}.{sys.version_info.minor}" if self.python == "auto" else self.python

    def content_hash(self) -> str:
        """12 hexadecimal digits that name what is in the environment: the same in every process, for any dict order.

        "auto" counts as the version that it means here. The *names* of `includes` count, not what is in the files,
        and `bootstrap_timeout_s` does not count.
        """
        content = {name: _plain(getattr(self, name)) for name in _NAMES if name != "bootstrap_timeout_s"}
        content["python"] = self.python_version
        text = json.dumps([_HASH_FORMAT, content], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def with_pip(self, *requirements: str) -> Image:
        """This image and these packages too; every other field stays.

        A package that the image names already stays as it was written there: the user's pin wins.
        """
        have = {_project(r) for r in self.pip}
        added = _strings("pip", requirements, _requirement)
        return replace(self, pip=self.pip + tuple(r for r in added if _project(r) not in have))

    def merge(self, other: Image) -> Image:
        """Both images in one: `other` wins where the two differ, and no field is dropped.

        Lists are joined without repeats (of two requirements for one package, `other`'s stays, in the first one's
        place), mappings are joined, and a single value is `other`'s unless that is the default.
        """
        return Image(**{name: _merged(name, getattr(self, name), getattr(other, name)) for name in _NAMES})

    def environment(self) -> dict[str, str]:
        """`env` with its secrets in clear. Raises UsageError where one has no value here."""
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in self.env.items()}

    def masker(self) -> Callable[[str], str]:
        """A function that puts *** where a text has the value of one of the secrets. Raises as `environment`."""
        return masking(value for value in self.env.values() if isinstance(value, Secret))

    def given_fields(self) -> tuple[str, ...]:
        """Names of the fields that differ from the default."""
        return tuple(name for name in _NAMES if getattr(self, name) != getattr(DEFAULT_IMAGE, name))

    def unused_fields(self, acting: Collection[str] = LOCAL_FIELDS) -> tuple[str, ...]:
        """Names of the fields that were given but are not acted on, where only those in `acting` are.

        `python` counts as acted on when this interpreter is what it asks for.

            >>> Image(pip=["torch"], env={"A": "1"}).unused_fields()
            ('pip',)
        """
        unused = (name for name in self.given_fields() if name not in acting)
        return tuple(name for name in unused if not (name == "python" and self._is_this_python()))

    def _is_this_python(self) -> bool:
        wanted = [int(part) for part in self.python_version.split(".")]
        return list(sys.version_info[: len(wanted)]) == wanted

    def __repr__(self) -> str:
        shown = (f"{name}={_masked(getattr(self, name))!r}" for name in self.given_fields())
        return f"Image({', '.join(shown)})"


def _refuse(field: str, value: object, legal: str) -> NoReturn:
    shown = _masked_text(value) if isinstance(value, str) else value
    raise UsageError(f"Image.{field}: got {shown!r}; expected {legal}", field=field, value=value, legal=legal)


def _python(field: str, value: object) -> str:
    legal = f'"auto" or a version from {".".join(map(str, _OLDEST_PYTHON))} on, such as "3.12" or "3.12.4"'
    match = _PYTHON.fullmatch(value) if isinstance(value, str) else None
    if value != "auto" and (match is None or (3, int(match[1])) < _OLDEST_PYTHON):
        _refuse(field, value, legal)
    return str(value)


def _seconds(field: str, value: object) -> float:
    if not is_positive(value):
        _refuse(field, value, "a number of seconds above 0")
    return float(value)


def _strings(field: str, values: object, check: Callable[[str, object], str]) -> tuple[str, ...]:
    # A bare string is a sequence of one-letter strings: pip="torch" would ask for five packages.
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        _refuse(field, values, f"a list of strings, such as {field}=[{values!r}]")
    return tuple(check(field, value) for value in values)


def _text(field: str, value: object, legal: str) -> str:
    if not isinstance(value, str) or not value.strip() or any(c in value for c in "\0\r\n"):
        _refuse(field, value, legal)
    return value


def _requirement(field: str, value: object) -> str:
    legal = 'a requirement such as "torch>=2.4", a URL or a path (not an option; see pip_extra_index_url)'
    if _text(field, value, legal).lstrip().startswith("-"):
        _refuse(field, value, legal)
    return str(value).strip()


def _url(field: str, value: object) -> str:
    legal = 'a URL such as "https://download.pytorch.org/whl/cpu"'
    if not re.match(r"(https?|file)://\S+$", _text(field, value, legal)):
        _refuse(field, value, legal)
    return str(value)


def _apt_package(field: str, value: object) -> str:
    legal = 'the name of a Debian package, such as "git" or "libgl1=1.6.0-1"'
    if not _APT.fullmatch(_text(field, value, legal)):
        _refuse(field, value, legal)
    return str(value)


def _path(field: str, value: object) -> str:
    return _text(field, os.fspath(value) if isinstance(value, os.PathLike) else value, "a path or a pattern")


def _variables(
    field: str, values: object, *, may_be_empty: bool = True, may_be_secret: bool = False
) -> FrozenMap[str | Secret]:
    if values is None:
        return FrozenMap()
    if not isinstance(values, Mapping):
        _refuse(field, values, 'a dict of strings, such as {"NAME": "value"}')
    for name, value in values.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            _refuse(field, name, "names made of letters, digits and _, not beginning with a digit")
        if may_be_secret and isinstance(value, Secret):
            continue
        if not isinstance(value, str) or "\0" in value or not (value or may_be_empty):
            kind = type(value).__name__ if not isinstance(value, str) else "an empty or broken string"
            _refuse(f"{field}[{name!r}]", f"<{kind}>", "a string without NUL" + ("" if may_be_empty else ", not empty"))
        if len(name) + len(value.encode(errors="surrogateescape")) > LONGEST_VARIABLE:
            _refuse(
                f"{field}[{name!r}]", f"<{len(value)} characters>", f"at most {LONGEST_VARIABLE} bytes with its name"
            )
    return FrozenMap(values)


def _project(requirement: str) -> str:
    """The package that a requirement names, normalised (PEP 503); the whole text where it names none."""
    match = _PROJECT.match(requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else requirement


def _merged(name: str, mine: Any, theirs: Any) -> Any:
    if name == "pip":
        return tuple({**{_project(r): r for r in mine}, **{_project(r): r for r in theirs}}.values())
    if isinstance(mine, tuple):
        return tuple(dict.fromkeys(mine + theirs))
    if isinstance(mine, FrozenMap):
        return {**mine, **theirs}
    return mine if theirs == getattr(DEFAULT_IMAGE, name) else theirs


def _plain(value: object) -> object:
    if isinstance(value, FrozenMap):
        return {name: ["secret", item.name] if isinstance(item, Secret) else item for name, item in value.items()}
    return value


def _masked(value: object) -> object:
    if isinstance(value, FrozenMap):
        return {name: _masked_variable(name, item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_masked_text, value))
    return _masked_text(value) if isinstance(value, str) else value


def _masked_variable(name: str, value: str | Secret) -> object:
    if isinstance(value, Secret):
        return value
    return MASK if _looks_secret(name) else _masked_text(value)


def _masked_text(text: str) -> str:
    return _URL_CREDENTIALS.sub(MASK, text)


def _looks_secret(name: str) -> bool:
    # By whole words: TOKENIZERS_PARALLELISM and KEYBOARD are no secrets.
    words = name.lower().split("_")
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


_NAMES = tuple(field.name for field in fields(Image))

DEFAULT_IMAGE = Image()
"""The client's Python version and nothing else."""
