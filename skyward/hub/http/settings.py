"""Configuration of the server: a YAML file, environment variables, or the defaults of one person's hub.

Each key of the file has a variable `SKYWARD_HUB_<SECTION>_<KEY>`, which wins. A value may hold `${NAME}`, which is a
variable of the environment, and a key that ends with `_file` names a file whose text is the value.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..model.notices import NoticeRules
from ..model.product import ENVIRONMENT_PREFIX, METRICS_PORT, PORT
from ..store.blobs import Bucket
from ..store.secret_files import FOLDER

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

CLIENT_VARIABLES = frozenset({"URL", "TOKEN", "PROJECT", "EXPERIMENT", "SPOOL", "JOB", "TRACKING_URI", "CONFIG"})
"""Variables with the same prefix that belong to the client, or name the file."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address of the server.

    Attributes:
        host: Address that it listens on.
        port: Port of the API and the pages. 0 chooses a free one.
        workers: Processes. More than one needs PostgreSQL.
        allowed_hosts: Names by which clients may address it, beside those of this machine. `*` allows all.
        url: Address in links, where it differs from `http://host:port`.
        lost_after_s: Seconds without heartbeat after which a run is lost.
        patience_s: Seconds in which a client must send the head of a request, or a further KiB of its body.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    workers: int = 1
    allowed_hosts: tuple[str, ...] = ()
    url: str = ""
    lost_after_s: float = 60.0
    patience_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings:
    """Address of the database.

    Attributes:
        url: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
        search_s: Seconds that a search may take. A longer one is refused.
    """

    url: str = field(default="", repr=False)
    search_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Place of artifacts: a folder, or a bucket of an object store.

    Attributes:
        folder: Used where no bucket is given.
        endpoint: URL of an S3 service other than AWS.
        bucket: Name of the bucket.
        prefix: Beginning of the keys in the bucket.
        region: Region of the bucket, where boto3 does not find it by itself.
        access_key: Credentials. Without them boto3 looks for its own, such as the role of a machine.
        secret_key: Goes with the access key.
    """

    folder: str = ""
    endpoint: str = ""
    bucket: str = ""
    prefix: str = ""
    region: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)

    @property
    def place(self) -> Path | Bucket:
        """Where the bytes of artifacts are."""
        if not self.bucket:
            return Path(self.folder)
        return Bucket(
            name=self.bucket,
            prefix=self.prefix,
            endpoint=self.endpoint,
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Authentication.

    Attributes:
        enabled: False lets every local request act as the owner. For 127.0.0.1 only.
        owner: Name of the first user.
    """

    enabled: bool = True
    owner: str = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Prometheus metrics, on a port of their own.

    Attributes:
        enabled: Whether the port is open. It needs no token.
        host: Address that it listens on.
        port: Its number. With several workers each has its own: this one, the next one, and so on.
        path: Path of the metrics.
    """

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = METRICS_PORT
    path: str = "/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    """Log of the server, on stderr.

    Attributes:
        level: `debug` logs each request. Others are `info`, `warning` and `error`.
        format: `json` for one object a line, or `text`.
    """

    level: str = "info"
    format: str = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySettings:
    """Receivers of the news of jobs that users may name. By default there is none.

    Attributes:
        hosts: Hosts of webhooks: `hooks.example.org`, `*.example.org`, or with a port of its own `127.0.0.1:8080`.
        commands: Absolute paths of programs. Allow only those whose arguments any user may choose.
        secrets: Folder with a folder for each project, which has a file for each secret; see `skyward hub secret`.
    """

    hosts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    secrets: str = ""

    @property
    def rules(self) -> NoticeRules:
        return NoticeRules(hosts=self.hosts, commands=self.commands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Configuration of one hub.

    Raises:
        UsageError: The settings contradict each other.
    """

    server: ServerSettings = ServerSettings()
    database: DatabaseSettings = DatabaseSettings()
    storage: StorageSettings = StorageSettings()
    auth: AuthSettings = AuthSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: LoggingSettings = LoggingSettings()
    notify: NotifySettings = NotifySettings()

    def __post_init__(self) -> None:
        if not self.auth.enabled and self.server.host not in LOOPBACK:
            raise UsageError(
                f"server.host={self.server.host!r}: without authentication anybody could write; use 127.0.0.1"
            )
        if self.server.workers > 1 and not self.database.url.startswith("postgresql"):
            raise UsageError(f"server.workers={self.server.workers}: SQLite takes one process; use PostgreSQL, or 1")
        for program in self.notify.commands:
            if not Path(program).is_absolute():
                raise UsageError(f"notify.commands={program!r}: not an absolute path; write one")
        if not self.database.url:
            raise UsageError("database.url=: empty; give sqlite:///FILE or postgresql://USER@HOST/NAME")
        if not (self.storage.folder or self.storage.bucket):
            raise UsageError("storage.folder=: empty; give a folder or a bucket")
        if bool(self.storage.access_key) != bool(self.storage.secret_key):
            raise UsageError("storage.secret_key=***: goes with storage.access_key; give both, or neither for a role")

    @property
    def url(self) -> str:
        """Address for links."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return self.server.url or f"http://{host}:{self.server.port}"


def data_folder() -> Path:
    """Return the folder of one person's hub: `$XDG_DATA_HOME/skyward/hub`, or `~/.local/share/skyward/hub`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "skyward" / "hub"


def local_settings(
    data: Path, *, port: int = PORT, with_auth: bool = True, hosts: Sequence[str] = (), commands: Sequence[str] = ()
) -> Settings:
    """Return the settings of a hub in a folder, for one person on this machine."""
    return Settings(
        server=ServerSettings(port=port),
        database=DatabaseSettings(url=f"sqlite:///{data / 'hub.db'}"),
        storage=StorageSettings(folder=str(data / "blobs")),
        auth=AuthSettings(enabled=with_auth),
        logging=LoggingSettings(level="warning", format="text"),
        notify=NotifySettings(hosts=tuple(hosts), commands=tuple(commands), secrets=str(data / "launcher" / FOLDER)),
    )


def read_settings(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Read the configuration of a server.

    Args:
        path: YAML file. None: the environment alone.
        environment: Variables of the environment.

    Raises:
        UsageError: The file cannot be read, or a key or value is wrong.
    """
    values: dict[str, Any] = {} if path is None else _read(path)
    known = {section.name: section for section in dataclasses.fields(Settings)}
    for name, content in values.items():
        if name not in known:
            raise UsageError(f"{name}=: no section of the configuration; choose one of {sorted(known)}")
        if not isinstance(content, dict):
            raise UsageError(f"{name}=: not a section; write its keys below it")
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            _override(values, variable, text)
    types_of = typing.get_type_hints(Settings)
    sections = {name: _section(name, types_of[name], content or {}, environment) for name, content in values.items()}
    return Settings(**sections)


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"config={str(path)!r}: cannot be read: {error}; check the file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"config={str(path)!r}: not a mapping; write sections with keys below them")
    return content


def _override(values: dict[str, Any], variable: str, text: str) -> None:
    """Set the value that a variable of the environment names."""
    rest = variable.removeprefix(ENVIRONMENT_PREFIX)
    if rest in CLIENT_VARIABLES:
        return
    section, _, key = rest.lower().partition("_")
    hints = typing.get_type_hints(Settings)
    if section not in hints or key not in {option.name for option in dataclasses.fields(hints[section])}:
        raise UsageError(f"{variable}=: no key of the configuration; see the reference of `skyward hub serve`")
    values[section] = {**(values.get(section) or {}), key: text}


def _section(section: str, kind: type, content: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    hints = typing.get_type_hints(kind)
    values = {}
    for key, raw in content.items():
        name, value = str(key), raw
        if name not in hints and name.removesuffix("_file") in hints:
            name = name.removesuffix("_file")
            try:
                value = Path(_interpolated(section, str(key), str(raw), environment)).read_text().strip()
            except OSError as error:
                raise UsageError(f"{section}.{key}: cannot be read: {error.strerror}; check the file") from None
        elif isinstance(value, str):
            value = _interpolated(section, name, value, environment)
        if name not in hints:
            raise UsageError(f"{section}.{name}=: no such key; choose one of {sorted(hints)}")
        values[name] = _converted(f"{section}.{name}", hints[name], value)
    return kind(**values)


def _interpolated(section: str, key: str, text: str, environment: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise UsageError(f"{section}.{key}=${{{match[1]}}}: not in the environment; set {match[1]}")
        return environment[match[1]]

    return _VARIABLE.sub(replace, text)


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _converted(name: str, kind: Any, value: Any) -> Any:
    """Convert a value of YAML or of the environment to the type of its key."""
    try:
        if kind is bool:
            return value if isinstance(value, bool) else _BOOLEANS[str(value).lower()]
        if isinstance(kind, types.GenericAlias):  # tuple[str, ...]
            return _texts(value)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return kind(value)
    except (KeyError, ValueError):
        pass  # raised below, with the name of the key
    shown = "***" if "key" in name or name == "database.url" else repr(value)
    raise UsageError(f"{name}={shown}: not of type {getattr(kind, '__name__', kind)}; see the reference of the server")


def _texts(value: Any) -> tuple[str, ...]:
    """Return a list, which the environment spells with commas or as JSON."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [part for part in value.split(",") if part]
    if not isinstance(value, list):
        raise ValueError("value: not a list; write one")
    return tuple(str(item) for item in value)
