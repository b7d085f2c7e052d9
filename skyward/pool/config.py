"""Configuration files with named pools, for `sky.ComputePool.named("train")` and the command line.

    [pools.train]
    provider = "aws"                                # a provider's name, or one of [providers]
    nodes = 4
    accelerator = { name = "A100", count = 8 }      # or just "A100"

    [pools.train.image]
    pip = ["torch"]
    env = { OMP_NUM_THREADS = "4", HF_TOKEN = { env = "HF_TOKEN" } }

    [pools.anywhere]
    any_of = ["ssh-lab", "cheap"]                   # offers of all are compared, one of them wins
    selection = "cheapest"
    accelerator = ["A100", "H100"]
    region = ["us-east-1", "eu-west-1"]

    [providers.cheap]
    type = "aws"
    region = "us-east-2"

Up to three files are read, and later ones win: `~/.skyward/defaults.toml`; `~/.config/skyward/skyward.toml`
(XDG_CONFIG_HOME is respected); and the project's file. That is the nearest `skyward.toml` in the working folder or
above it, up to the project's root: the folder with `.git`, otherwise with `pyproject.toml`. A pool in several files is
merged key by key. `{ env = "NAME" }` stands for the value of that environment variable on this machine wherever text is
expected, so files need no secrets. Among the variables of an image it becomes a `sky.Secret`.

Files of other users are refused unless `SKYWARD_TRUST` names them; see `skyward.core.ownership`.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

from ..accelerators import Accelerator
from ..core.ownership import check_file
from ..core.records import dataclass
from ..core.spellings import advice, foreign, suggestion
from ..errors import MissingDependency, SkywardError, UsageError
from ..providers import is_provider, load, provider_names
from ..values.image import Image
from ..values.secret import Secret
from .hints import class_in, element_of, illegal, is_reference, is_table, takes
from .options import ALIASES
from .sources import in_regions

_NAME = "skyward.toml"
_NOT_IN_A_FILE = frozenset({"initializer", "initargs", "on_event", "name", "aliases", "self"})
"""Arguments of a pool that only Python code can pass."""


def pool_fields(name: str, make_pool: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the named pool, with its provider and image constructed.

    Args:
        name: Name of the pool in the files.
        make_pool: Callable that takes the arguments; its annotations define the legal values.

    Raises:
        UsageError: There is no such pool, or a file has a mistake. The message names the file, the key and the fix.
        MissingDependency: The provider needs an extra that is not installed.
    """
    return _Config.read().pool(name, make_pool)


def of_file(name: str, error: UsageError) -> UsageError:
    """Turn an error about a named pool's argument into one about the file that sets it."""
    config = _Config.read()
    subject, _, problem = str(error).partition(": ")
    key = subject.partition("=")[0]
    if key in config.pools.get(name, {}):
        return config.wrong(("pools", name, key), problem, subject=subject)
    return config.wrong(("pools", name), str(error))


def pool_names() -> list[str]:
    """Return the names of all configured pools. Raises UsageError if a file has a mistake."""
    return sorted(_Config.read().pools)


def provider_named(name: str) -> Any:
    """Return a provider by its own name, or by its name in `[providers]`. Raises what `pool_fields` raises."""
    return _Config.read().named(name)


def provider_of(description: dict[str, Any]) -> Any:
    """Return the provider that a table describes, such as `{"type": "ssh", "hosts": ["a"]}`.

    Raises:
        UsageError: The table has a mistake. The message names the key and the fix.
        MissingDependency: The provider needs an extra that is not installed.
    """
    empty = _Config(pools={}, providers={}, origins={}, files=[])
    return empty.pools_provider(description, ("machines", "provider"))


def mentioned_providers(names: Iterable[str] = ()) -> tuple[list[Any], list[SkywardError]]:
    """Return the remote providers in the files and in `names`, each once, and the errors in the files.

    Errors come beside the providers: whoever searches for machines must know where nobody searched. Providers whose
    library is not installed are left out. A wrong name in `names` raises.
    """
    names = list(names)
    try:
        config = _Config.read()
    except UsageError as error:
        if names:
            raise
        return [], [error]
    providers = [config.named(name) for name in names]
    errors: list[SkywardError] = []
    # Without regions a source stands for its own one.
    mentioned = [(name, pool.get("region")) for pool in config.pools.values() for name in _sources_in(pool)]
    mentioned += [(name, None) for name in config.providers]
    for name, region in mentioned:
        if isinstance(name, str | dict) and name != "local":
            try:
                providers += in_regions(
                    [config.pools_provider(name, ("providers", "provider"))], region, is_lenient=True
                )
            except MissingDependency:  # a provider whose library is missing rents nothing here
                continue
            except SkywardError as error:
                if str(error) not in map(str, errors):  # two pools may use one table
                    errors.append(error)
    unique: list[Any] = []
    for provider in providers:
        if provider not in unique:
            unique.append(provider)
    return unique, errors


def rented_providers(names: Iterable[str] = ()) -> tuple[list[Any], list[SkywardError]]:
    """Return the providers of `mentioned_providers` whose machines are rented, and the errors in the files."""
    mentioned, errors = mentioned_providers(names)
    return [provider for provider in mentioned if provider.is_rented], errors


def config_files() -> list[Path]:
    """Return the existing configuration files, lowest priority first."""
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CONFIG_HOME", "")
    config = base if os.path.isabs(base) else os.path.join(home, ".config")
    paths = [Path(home, ".skyward", "defaults.toml"), Path(config, "skyward", _NAME)]
    project = _project_file(Path.cwd())
    if project is not None and project not in paths:
        paths.append(project)
    return [path for path in paths if path.is_file()]


def _project_file(here: Path) -> Path | None:
    folders = [here, *here.parents]
    root = next((f for f in folders if (f / ".git").exists()), None)
    root = root or next((f for f in folders if (f / "pyproject.toml").exists()), here)
    for folder in folders:
        if (folder / _NAME).is_file():
            return folder / _NAME
        if folder == root:
            break
    return None


@dataclass(frozen=True, kw_only=True)
class _Config:
    """All files merged. `origins` maps the path of each key to the file that set it last."""

    pools: dict[str, dict[str, Any]]
    providers: dict[str, dict[str, Any]]
    origins: dict[tuple[str, ...], Path]
    files: list[Path]

    @classmethod
    def read(cls) -> _Config:
        files = config_files()
        content: dict[str, Any] = {}
        origins: dict[tuple[str, ...], Path] = {}
        for file in files:
            _merge(content, _toml(file), (), file, origins)
        made = cls(pools=content.get("pools", {}), providers=content.get("providers", {}), origins=origins, files=files)
        for key in content:
            if key not in ("pools", "providers"):
                hint = advice("", key, ("pools", "providers"), shown="{!r}")
                raise made.wrong((key,), f"no such table; {hint}")
        for table in ("pools", "providers"):
            tables = content.get(table, {})
            if not isinstance(tables, dict):
                raise made.wrong_value((table,), tables, f"not a table; write [{table}.NAME]")
            for name, value in tables.items():
                if not isinstance(value, dict):
                    raise made.wrong_value((table, name), value, f"not a table; write [{table}.{name}]")
        return made

    def wrong(self, path: tuple[str, ...], problem: str, *, subject: str = "") -> UsageError:
        """Make an error about a key, with the file and the table that set it."""
        file = next((self.origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.origins), None)
        where = f"{_shown(file)}: " if file is not None else ""
        table = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        return UsageError(f"{where}{table}{subject or path[-1]}: {problem}")

    def wrong_value(self, path: tuple[str, ...], value: object, problem: str) -> UsageError:
        """Make an error about a key's value."""
        return self.wrong(path, problem, subject=f"{path[-1]}={value!r}")

    # Pools ----------------------------------------------------------------------------------------------------------

    def pool(self, name: str, make_pool: Callable[..., Any]) -> dict[str, Any]:
        if name not in self.pools:
            raise UsageError(f"pool {name!r}: not found in {self._searched()}; {self._known()}")
        path = ("pools", name)
        hints = get_type_hints(make_pool)
        known = [key for key in hints if key not in (*_NOT_IN_A_FILE, "return")]
        fields: dict[str, Any] = {}
        for key, value in self.pools[name].items():
            if key in _NOT_IN_A_FILE and key != "self":
                raise self.wrong(
                    (*path, key), f"not allowed in a file; pass it in Python: ComputePool.named({name!r}, {key}=...)"
                )
            proper = ALIASES.get(key, key)
            if proper not in known:
                hint = advice("ComputePool", key, known, shown="{!r}")
                raise self.wrong((*path, key), f"no such key; {hint}")
            if proper in fields:
                raise self.wrong((*path, key), f"given twice, because {proper} is the same option; keep only {proper}")
            fields[proper] = self._pool_value(proper, value, hints[proper], (*path, key))
        if "provider" not in fields and "any_of" not in fields:
            raise self.wrong((*path, "provider"), f"missing; set it to one of {self._providers()}")
        return fields

    def _pool_value(self, key: str, value: Any, hint: Any, path: tuple[str, ...]) -> Any:
        if key == "provider":
            return self.pools_provider(value, path)
        if key == "image":
            return self._made(Image, self._table(value, path), path)
        if key == "any_of":
            if not isinstance(value, list):
                raise self.wrong_value(path, value, 'not a list of providers; write any_of = ["aws", "ssh-lab"]')
            return [self.pools_provider(one, path) for one in value]
        if key == "accelerator" and isinstance(value, list):
            return [self._pool_value(key, one, hint, path) for one in value]
        if key == "accelerator" and isinstance(value, dict):
            return self._called(Accelerator.from_name, value, path)
        if key == "logs" and not isinstance(value, bool):
            raise self.wrong_value(path, value, "not supported in a file; write true or false, or pass logs= in Python")
        return self._value(value, hint, path)

    def _known(self) -> str:
        if not self.pools:
            return "add a table [pools.NAME], because there are no pools yet"
        return f"use one of {', '.join(sorted(self.pools))}"

    def _searched(self) -> str:
        files = [_shown(file) for file in self.files]
        return ", ".join(files) if files else f"./{_NAME}, ~/.config/skyward/{_NAME}, ~/.skyward/defaults.toml"

    # Providers ------------------------------------------------------------------------------------------------------

    def pools_provider(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return the provider that a pool's `provider` key stands for: a name, or an inline table."""
        if isinstance(value, dict):
            return self._provider_of(value, path)
        if not isinstance(value, str):
            raise self.wrong_value(path, value, f"not a provider; use one of {self._providers()}")
        return self.provider(value, path)

    def named(self, name: str) -> Any:
        """Return the provider that the caller names, whether or not a file does."""
        if name not in self.providers and not is_provider(name):
            raise UsageError(f"provider={name!r}: unknown provider; {self._provider_advice(name)}", field="provider")
        return self.provider(name, ("providers", name))

    def provider(self, name: str, path: tuple[str, ...]) -> Any:
        if name in self.providers:
            return self._provider_of(self.providers[name], ("providers", name))
        return self._provider_of({"type": name}, path)

    def _provider_of(self, table: dict[str, Any], path: tuple[str, ...]) -> Any:
        # [providers.aws] without a type configures the provider of that name.
        kind = table.get("type", path[-1])
        if not is_provider(kind):
            where = (*path, "type") if "type" in table and path[0] == "providers" else path
            raise self.wrong_value(where, kind, f"unknown provider; {self._provider_advice(str(kind))}")
        try:
            made = load(kind)
        except MissingDependency as error:
            raise MissingDependency(f"{self.wrong(path, str(error))}", name=error.name) from error
        return self._made(made, {key: value for key, value in table.items() if key != "type"}, path)

    def _providers(self) -> str:
        return ", ".join(self._provider_names())

    def _provider_names(self) -> list[str]:
        """Return the built-in providers, and the names in the files that stand for one of them."""
        configured = [name for name, table in sorted(self.providers.items()) if is_provider(table.get("type", name))]
        return list(dict.fromkeys([*provider_names(), *configured]))

    def _provider_advice(self, name: str) -> str:
        near = suggestion(name, self._provider_names())
        if near is not None:
            return f"did you mean {near!r}?"
        known_elsewhere = foreign("provider", name.lower())
        return f"{known_elsewhere}{'; ' if known_elsewhere else ''}use one of {self._providers()}"

    # Values ---------------------------------------------------------------------------------------------------------

    def _table(self, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong_value(path, value, f"not a table; write [{'.'.join(path)}] or {{ key = value }}")
        return value

    def _made(self, make: Callable[..., Any], table: dict[str, Any], path: tuple[str, ...]) -> Any:
        """Construct a class from its table."""
        return self._called(make, table, path, of=make.__init__)

    def _called(
        self,
        make: Callable[..., Any],
        table: dict[str, Any],
        path: tuple[str, ...],
        of: Callable[..., Any] | None = None,
    ) -> Any:
        hints = get_type_hints(of or make)
        known = [name for name in inspect.signature(of or make).parameters if name != "self"]
        fields = {}
        for key, value in table.items():
            if key not in known:
                hint = advice(getattr(make, "__name__", ""), key, known, shown="{!r}")
                raise self.wrong((*path, key), f"no such key; {hint}")
            fields[key] = self._value(value, hints.get(key, Any), (*path, key))
        try:
            return make(**fields)
        except SkywardError as error:
            raise self.wrong(path, str(error)) from error
        except TypeError as error:  # a required argument is missing
            raise self.wrong(path, str(error).partition(") ")[2] or str(error)) from error

    def _value(self, value: Any, hint: Any, path: tuple[str, ...]) -> Any:
        """Convert a value to what the hint wants, and resolve `{ env = ... }`."""
        if is_reference(value) and not is_table(hint):
            return self._referenced(value["env"], hint, path)
        legal = illegal(value, hint)
        if legal:
            raise self.wrong_value(path, value, f"wrong type or value; write {legal}")
        if isinstance(value, list):
            return tuple(self._value(item, element_of(hint), path) for item in value)
        if isinstance(value, dict):
            made = class_in(hint)
            if made is not None:
                return self._made(made, value, path)
            return {key: self._value(item, element_of(hint), (*path, key)) for key, item in value.items()}
        return value

    def _referenced(self, variable: str, hint: Any, path: tuple[str, ...]) -> str | Secret:
        if variable not in os.environ:
            raise self.wrong(path, f"the environment variable {variable} is not set here; set it before the program")
        return Secret(variable) if takes(hint, Secret) else os.environ[variable]


def _sources_in(pool: dict[str, Any]) -> list[Any]:
    """Return the names or tables of the providers that a pool's table mentions."""
    several = pool.get("any_of")
    return [pool.get("provider"), *(several if isinstance(several, list) else ())]


def _toml(path: Path) -> dict[str, Any]:
    check_file(str(path), "configuration")  # a file can make this machine run commands, such as a ProxyCommand
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{_shown(path)}: {error}; correct the TOML") from error
    except OSError as error:
        raise UsageError(f"{_shown(path)}: cannot be read: {error.strerror}; check its permissions") from error


def _merge(
    base: dict[str, Any],
    top: dict[str, Any],
    path: tuple[str, ...],
    file: Path,
    origins: dict[tuple[str, ...], Path],
) -> None:
    for key, value in top.items():
        here = (*path, key)
        origins[here] = file
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, here, file, origins)
        else:
            base[key] = value
            if isinstance(value, dict):
                _merge({}, value, here, file, origins)


def _shown(path: Path) -> str:
    """Format a path the way users write it."""
    for base, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if path.is_relative_to(base):
            return f"{sign}/{path.relative_to(base)}"
    return str(path)
