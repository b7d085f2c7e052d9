"""Environment of a node as one frozen value: interpreter, packages, variables and files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

from ..core.bounds import is_positive
from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import UsageError
from .lock import Lock, read_lock
from .pip_index import PipIndex
from .secret import MASK, Secret, masking

V = TypeVar("V")

LONGEST_VARIABLE = 128 * 1024 - 2
"""Most bytes of an environment variable's name and value. Source: MAX_ARG_STRLEN of Linux, minus "=" and NUL."""

LOCAL_FIELDS = frozenset({"env", "includes", "excludes"})
"""Fields with an effect on the client's own machine, whose interpreter and packages stay as they are."""

_BOOTSTRAP_TIMEOUT_S = 300.0
_OLDEST_PYTHON = (3, 11)
_HASH_FORMAT = "skyward-image-1"
_NEW_FIELDS = frozenset({"run", "lock", "pip_indexes", "container"})
"""Fields that count in the hash only when they are set, so that older images keep their hashes."""

_PYTHON = re.compile(r"3\.(\d{1,2})(\.\d{1,3})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Source: Debian policy manual 5.6.1 (package names) and apt-get(8) (":architecture", "=version", "/release").
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?([=/][A-Za-z0-9.+:~-]+)?")
# Source: PEP 508: a requirement starts with a name; an extra, a version, a marker or " @ url" follows.
_PROJECT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?=$|[\[(<>=!~;@\s])")

# Source: distribution's reference grammar: [domain[:port]/]path[:tag][@digest].
_CONTAINER = re.compile(r"[A-Za-z0-9][\w.-]*(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@[\w+.-]+:[0-9a-fA-F]+)?", re.ASCII)
_COMMENT = re.compile(r"(^|\s)#.*$")
_INCLUDE = re.compile(r"(?:-r|--requirement)[=\s]*(\S.*)")

_SECRET_ENDINGS = ("token", "secret", "secrets", "password", "passwd", "apikey", "credential", "credentials")
_SECRET_WORDS = frozenset({"key", "keys", "pass", "passphrase", "pwd", "auth", "cred", "creds", "private", "tokens"})
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@checked_options
@dataclass(frozen=True, init=False, repr=False)
class Image:
    """Environment that calls run in: interpreter, packages, variables and files.

    An image is a value: frozen, hashable, picklable and safe to share. Nothing is installed until a pool creates a node
    from it. Lists become tuples and dicts become read-only mappings, so later changes to the arguments have no effect.
    Nodes always get the client's own build of skyward; it is not part of the image.

    On `sky.Local()` only `env`, `includes` and `excludes` apply. `unused_fields()` lists the other fields that were
    set.

    Args:
        python: "auto" for the client's major.minor, or a version such as "3.12" or "3.12.4", from 3.11 on. Values cross
            only between interpreters of the same minor version.
        pip: Requirements (PEP 508), URLs, or paths of local wheels. May contain `$NAME` of `shell_vars`.
        pip_index_url: Package index to use instead of PyPI.
        pip_extra_index_url: One or more additional indexes. As with pip, the best version of all indexes wins.
        requirements: Path of a requirements file. It is read now, and its lines are added to `pip`. It may include
            others with `-r`; other options are refused.
        lock: Path of a uv.lock, of a pylock.toml (PEP 751), or of requirements with hashes. It is read now. Nodes get
            exactly its packages, each checked against its hash, without the project itself and its development
            groups. Together with `pip`, `requirements` or `pip_indexes` it is refused.
        pip_indexes: Indexes for some packages alone, as `sky.PipIndex`. The packages come from there only, and all
            others never do.
        container: Image of a container that everything on the nodes runs in, such as "debian:12". A host needs podman
            or docker, and the image needs tar, gzip and timeout. Together with `apt` it is refused.
        apt: Debian packages, as `name`, `name=version` or `name:arch`.
        run: Lines of sh that finish the environment, after its packages are installed. They run once for each node and
            content, in the environment's folder with its Python first on PATH, as the login's user. A command that
            fails ends the bootstrap.
        env: Variables of every process that runs calls. Values are strings, or `sky.Secret` for confidential ones.
        shell_vars: Variable name to shell command. The node runs the command, and its output becomes the value.
        includes: Files and folders of the client that the node needs, relative to the working folder.
        excludes: Patterns of files to leave out, as in .gitignore.
        bootstrap_timeout_s: Time limit for creating the environment, in seconds, > 0.
        bootstrap_timeout: Alias of `bootstrap_timeout_s`.

    Raises:
        UsageError: A value is illegal. The error has `field`, `value` and `legal`.

    Example:
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
    lock: Lock | None
    pip_indexes: tuple[PipIndex, ...]
    container: str
    apt: tuple[str, ...]
    run: tuple[str, ...]
    env: FrozenMap[str | Secret]
    shell_vars: FrozenMap[str]
    includes: tuple[str, ...]
    excludes: tuple[str, ...]
    bootstrap_timeout_s: float

    # A generated __init__ would take the fields' own types. This one accepts lists and dicts, and stores tuples and
    # read-only mappings.
    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        *,
        python: str = "auto",
        pip: Sequence[str] = (),
        pip_index_url: str = "",
        pip_extra_index_url: str | Sequence[str] = (),
        requirements: str | os.PathLike[str] | None = None,
        lock: str | os.PathLike[str] | Lock | None = None,
        pip_indexes: Sequence[PipIndex] = (),
        container: str = "",
        apt: Sequence[str] = (),
        run: Sequence[str] = (),
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
            "pip": (*_strings("pip", pip, _requirement), *_required(requirements)),
            "pip_index_url": _url("pip_index_url", pip_index_url) if pip_index_url != "" else "",
            "pip_extra_index_url": _strings("pip_extra_index_url", indexes, _url),
            "lock": read_lock(lock),
            "pip_indexes": _indexes(pip_indexes),
            "container": _container(container) if container != "" else "",
            "apt": _strings("apt", apt, _apt_package),
            "run": _strings("run", run, _command),
            "env": _variables("env", env, may_be_secret=True),
            "shell_vars": _variables("shell_vars", shell_vars, may_be_empty=False),
            "includes": _strings("includes", includes, _path),
            "excludes": _strings("excludes", excludes, _path),
            "bootstrap_timeout_s": _seconds("bootstrap_timeout_s", timeout_s),
        }
        _check_lock(values)
        _check_container(values)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def python_version(self) -> str:
        """Requested Python version; for "auto", this interpreter's major.minor."""
        return f"{sys.version_info.major}.{sys.version_info.minor}" if self.python == "auto" else self.python

    def content_hash(self) -> str:
        """Return 12 hexadecimal digits that identify the environment, the same in every process and for any dict order.

        "auto" counts as the version that it stands for. The names of `includes` count, but not the contents of the
        files. Neither `bootstrap_timeout_s` nor the credentials of indexes count.
        """
        names = [name for name in _NAMES if name not in _NEW_FIELDS or getattr(self, name)]
        names.remove("bootstrap_timeout_s")
        content = {name: _plain(getattr(self, name)) for name in names}
        content["python"] = self.python_version
        text = json.dumps([_HASH_FORMAT, content], sort_keys=True, separators=(",", ":"))
        import hashlib  # loads OpenSSL, which nodes on this machine do not need

        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def with_pip(self, *requirements: str) -> Image:
        """Return this image with additional packages; all other fields stay.

        Packages that the image already names keep their requirement: the user's pin wins.

        With a `lock`, packages can only be added there, so those that it lacks are refused.

        Args:
            requirements: Requirements to add.

        Raises:
            UsageError: The image's lock lacks a package.

        Example:
            >>> Image(pip=["numpy<2"]).with_pip("numpy", "joblib").pip
            ('numpy<2', 'joblib')
        """
        have = {_project(r) for r in self.pip} | (self.lock.packages if self.lock else set())
        added = _strings("pip", requirements, _requirement)
        missing = tuple(r for r in added if _project(r) not in have)
        if missing and self.lock:
            raise UsageError(
                f"Image.lock={self.lock.path!r}: lacks {', '.join(missing)}, which the pool needs; add it to the lock",
                field="lock",
                value=self.lock.path,
            )
        return replace(self, pip=self.pip + missing)

    def merge(self, other: Image) -> Image:
        """Merge two images. Where they differ, `other` wins; no field is dropped.

        Lists are joined without repeats. Of two requirements for one package, `other`'s is kept, at the position of the
        first. Mappings are joined. A single value is `other`'s, unless that is the default.

        Args:
            other: The image that wins.

        Example:
            >>> Image(pip=["numpy<2"]).merge(Image(pip=["numpy<3"], apt=["git"]))
            Image(pip=('numpy<3',), apt=('git',))
        """
        return Image(**{name: _merged(name, getattr(self, name), getattr(other, name)) for name in _NAMES})

    def environment(self) -> dict[str, str]:
        """Return `env` with its secrets in clear. Raises UsageError if a secret has no value here."""
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in self.env.items()}

    def masker(self) -> Callable[[str], str]:
        """Return a function that replaces the image's secrets in a text with ***. Raises what `environment` raises."""
        return masking(self._secrets())

    def secret_values(self) -> tuple[str, ...]:
        """Return the image's secrets in clear, for a process that masks them. Raises what `environment` raises."""
        return tuple(secret.reveal() for secret in self._secrets())

    def with_secret_values(self, values: Iterable[str]) -> Image:
        """Return this image with values for its secrets, which an image that was pickled lacks.

        Args:
            values: Value of each secret, in the order of `secret_values`.
        """
        left = iter(values)

        def fill(value: V) -> V | Secret:
            return Secret(value.name, value=next(left)) if isinstance(value, Secret) else value

        env = FrozenMap({name: fill(value) for name, value in self.env.items()})
        indexes = tuple(replace(index, password=fill(index.password)) for index in self.pip_indexes)
        return replace(self, env=env, pip_indexes=indexes)

    def _secrets(self) -> Iterator[Secret]:
        passwords = (index.password for index in self.pip_indexes)
        return (value for value in (*self.env.values(), *passwords) if isinstance(value, Secret))

    def given_fields(self) -> tuple[str, ...]:
        """Return the names of the fields that differ from their defaults."""
        return tuple(name for name in _NAMES if getattr(self, name) != getattr(DEFAULT_IMAGE, name))

    def unused_fields(self, acting: Collection[str] = LOCAL_FIELDS) -> tuple[str, ...]:
        """Return the names of fields that were set but have no effect, when only those in `acting` have one.

        `python` counts as effective if this interpreter satisfies it.

        Args:
            acting: Fields that have an effect.

        Example:
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
    raise UsageError(f"Image.{field}={shown!r}: not supported; use {legal}", field=field, value=value, legal=legal)


def _python(field: str, value: object) -> str:
    legal = f'"auto" or a version from {".".join(map(str, _OLDEST_PYTHON))} on, such as "3.12" or "3.12.4"'
    match = _PYTHON.fullmatch(value) if isinstance(value, str) else None
    if value != "auto" and (match is None or (3, int(match[1])) < _OLDEST_PYTHON):
        _refuse(field, value, legal)
    return str(value)


def _seconds(field: str, value: object) -> float:
    if not is_positive(value):
        _refuse(field, value, "a number of seconds > 0")
    return float(value)


def _strings(field: str, values: object, check: Callable[[str, object], str]) -> tuple[str, ...]:
    # A bare string is a sequence of letters: pip="torch" would request five packages.
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


def _command(field: str, value: object) -> str:
    return _text(field, value, 'a line of sh such as "python -m nltk.downloader punkt"; join several with &&')


def _required(file: object, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the requirements in a file, and in those that it includes."""
    if file is None:
        return ()
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        _refuse("requirements", file, 'the path of a file, such as "requirements.txt"')
    path = os.path.abspath(os.path.expanduser(os.fsdecode(os.fspath(file))))
    if path in above:
        _refuse("requirements", path, "files that do not include one another in a circle")
    try:
        with open(path, encoding="utf-8") as lines:
            text = lines.read()
    except (OSError, UnicodeDecodeError) as error:
        _refuse("requirements", path, f"a text file that can be read ({error})")
    found: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        requirement = " ".join(_COMMENT.sub("", line).split())
        included = _INCLUDE.fullmatch(requirement)
        if included:
            inner = os.path.join(os.path.dirname(path), included[1])
            found += _required(inner, (*above, path))
        elif requirement.startswith("-") or " --" in requirement:
            legal = "requirements and `-r FILE`; for indexes use pip_index_url and pip_extra_index_url"
            _refuse("requirements", f"{path}: {requirement}", legal)
        elif requirement:
            found.append(_requirement("requirements", requirement))
    return tuple(dict.fromkeys(found))


def _url(field: str, value: object) -> str:
    legal = 'a URL such as "https://download.pytorch.org/whl/cpu"'
    if not re.match(r"(https?|file)://\S+$", _text(field, value, legal)):
        _refuse(field, value, legal)
    return str(value)


def _indexes(values: object) -> tuple[PipIndex, ...]:
    legal = 'a list of indexes, such as [sky.PipIndex("https://download.pytorch.org/whl/cu124", packages=["torch"])]'
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        _refuse("pip_indexes", values, legal)
    indexes = tuple(dict.fromkeys(values))
    owners: dict[str, PipIndex] = {}
    for index in indexes:
        if not isinstance(index, PipIndex):
            _refuse("pip_indexes", index, legal)
        for package in index.packages:
            if owners.setdefault(package, index) is not index:
                _refuse("pip_indexes", package, f"one index for each package; {package} has two")
    return indexes


def _container(value: object) -> str:
    legal = 'the name of a container image, such as "debian:12" or "ghcr.io/me/train:v3"'
    if not _CONTAINER.fullmatch(_text("container", value, legal)):
        _refuse("container", value, legal)
    return str(value)


def _check_container(values: Mapping[str, Any]) -> None:
    if values["container"] and values["apt"]:
        raise UsageError(
            f"Image.apt={list(values['apt'])!r}: together with container=, which has its own system; install the "
            "packages in the container image",
            field="apt",
            value=values["apt"],
        )


def _check_lock(values: Mapping[str, Any]) -> None:
    lock = values["lock"]
    others = [name for name in ("pip", "pip_indexes") if values[name]]
    if lock is not None and others:
        what = "pip= or requirements=" if others[0] == "pip" else "pip_indexes="
        raise UsageError(
            f"Image.lock={lock.path!r}: a lock has all packages with their indexes, so {what} cannot add to it; "
            "add them to the lock, or leave one of the two out",
            field="lock",
            value=lock.path,
        )


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
            _refuse(field, name, "names of letters, digits and _, without a digit first")
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
    """Return the package that a requirement names, normalized (PEP 503), or the whole text if it names none."""
    match = _PROJECT.match(requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else requirement


def _merged(name: str, base: Any, other: Any) -> Any:
    if name == "pip":
        return tuple({**{_project(r): r for r in base}, **{_project(r): r for r in other}}.values())
    if isinstance(base, tuple):
        return tuple(dict.fromkeys(base + other))
    if isinstance(base, FrozenMap):
        return {**base, **other}
    return base if other == getattr(DEFAULT_IMAGE, name) else other


def _plain(value: object) -> object:
    if isinstance(value, FrozenMap):
        return {name: ["secret", item.name] if isinstance(item, Secret) else item for name, item in value.items()}
    if isinstance(value, Lock):
        return value.digest
    if isinstance(value, tuple):
        return [(item.location, item.packages) if isinstance(item, PipIndex) else item for item in value]
    return value


def _masked(value: object) -> object:
    if isinstance(value, FrozenMap):
        return {name: _masked_variable(name, item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_masked_text(item) if isinstance(item, str) else item for item in value)
    if isinstance(value, Lock):
        return value.path
    return _masked_text(value) if isinstance(value, str) else value


def _masked_variable(name: str, value: str | Secret) -> object:
    if isinstance(value, Secret):
        return value
    return MASK if _looks_secret(name) else _masked_text(value)


def _masked_text(text: str) -> str:
    return _URL_CREDENTIALS.sub(MASK, text)


def _looks_secret(name: str) -> bool:
    # Whole words only: TOKENIZERS_PARALLELISM and KEYBOARD are not secrets.
    words = name.lower().split("_")
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


_NAMES = tuple(field.name for field in fields(Image))

DEFAULT_IMAGE = Image()
"""Default image: the client's Python version and nothing else."""
