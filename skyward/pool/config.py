"""Pools that are written down, for `sky.ComputePool.named("train")` and the command line.

    [pools.train]
    provider = "aws"                                # a provider's name, or one of [providers]
    nodes = 4
    accelerator = { name = "A100", count = 8 }      # or just "A100"

    [pools.train.image]
    pip = ["torch"]
    env = { OMP_NUM_THREADS = "4", HF_TOKEN = { env = "HF_TOKEN" } }

    [providers.cheap]
    type = "aws"
    region = "us-east-2"

Three files, each on top of those before: `~/.skyward/defaults.toml`; `~/.config/skyward/skyward.toml`
(XDG_CONFIG_HOME is respected); and the project's: the nearest `skyward.toml` in the working folder or above it, up to
the project's root (the folder with `.git`, or else with `pyproject.toml`). A pool that two of them have is merged, key
by key. Wherever text is expected `{ env = "NAME" }` stands for the value of that environment variable here, so that no
secret need be in a file; among the variables of an image it is a `sky.Secret`.

A file of another user is refused, unless `SKYWARD_TRUST` names it; see `skyward.core.ownership`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

from ..accelerators import Accelerator
from ..core.ownership import check_file
from ..core.spellings import advice, foreign, suggestion
from ..errors import MissingDependency, SkywardError, UsageError
from ..providers import PROVIDERS, load
from ..values.image import Image
from ..values.secret import Secret
from .hints import class_in, element_of, illegal, is_reference, is_table, takes
from .options import ALIASES

__all__ = [
    "config_files",
    "of_file",
    "pool_fields",
    "pool_names",
    "provider_named",
    "mentioned_providers",
    "rented_providers",
]

_NAME = "skyward.toml"
_NOT_IN_A_FILE = frozenset({"initializer", "initargs", "on_event", "name", "aliases", "self"})
"""Arguments of a pool that are functions or values of Python."""


def pool_fields(name: str, make_pool: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the pool of that name, with its provider and image made.

    Args:
        make_pool: what they are for; its annotations say what a value may be.

    Raises:
        UsageError: there is no such pool, or something in the files is wrong: which key, of which file, and what may
            stand there.
        MissingDependency: its provider needs an extra that is not installed.
    """
    return _Config.read().pool(name, make_pool)


def of_file(name: str, error: UsageError) -> UsageError:
    """What is wrong with the pool of that name as an error about the file that says so."""
    config = _Config.read()
    key, _, what = str(error).partition(": ")
    if key in config.pools.get(name, {}):
        return config.wrong(("pools", name, key), what)
    return config.wrong(("pools", name), str(error))


def pool_names() -> list[str]:
    """The pools that are written down. Raises UsageError."""
    return sorted(_Config.read().pools)


def provider_named(name: str) -> Any:
    """A provider, by its own name or by that of `[providers]`. Raises as `pool_fields` does."""
    return _Config.read().named(name)


def mentioned_providers(names: Iterable[str] = ()) -> tuple[list[Any], list[SkywardError]]:
    """The providers of other machines that the files mention, and those of `names`, each once; and what is wrong.

    What is wrong in the files is told beside the others: whoever looks for machines must know where he did not look.
    One whose library is not installed here is left out. One of `names` raises.
    """
    names = list(names)
    try:
        config = _Config.read()
    except UsageError as error:
        if names:
            raise
        return [], [error]
    made = [config.named(name) for name in names]
    wrong: list[SkywardError] = []
    mentioned = [pool.get("provider") for pool in config.pools.values()] + list(config.providers)
    for name in mentioned:
        if isinstance(name, str | dict) and name != "local":
            try:
                made.append(config.pools_provider(name, ("providers", "provider")))
            except MissingDependency:  # a provider whose library is missing rents nothing here
                continue
            except SkywardError as error:
                if str(error) not in map(str, wrong):  # a table that two pools use
                    wrong.append(error)
    once: list[Any] = []
    for provider in made:
        if provider not in once:
            once.append(provider)
    return once, wrong


def rented_providers(names: Iterable[str] = ()) -> tuple[list[Any], list[SkywardError]]:
    """Those of them whose machines are rented; and what is wrong, see `mentioned_providers`."""
    mentioned, wrong = mentioned_providers(names)
    return [provider for provider in mentioned if provider.is_rented], wrong


def config_files() -> list[Path]:
    """Those that exist, lowest first."""
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CONFIG_HOME", "")
    config = base if os.path.isabs(base) else os.path.join(home, ".config")
    found = [Path(home, ".skyward", "defaults.toml"), Path(config, "skyward", _NAME)]
    project = _of_the_project(Path.cwd())
    if project is not None and project not in found:
        found.append(project)
    return [path for path in found if path.is_file()]


def _of_the_project(here: Path) -> Path | None:
    folders = [here, *here.parents]
    root = next((f for f in folders if (f / ".git").exists()), None)
    root = root or next((f for f in folders if (f / "pyproject.toml").exists()), here)
    for folder in folders:
        if (folder / _NAME).is_file():
            return folder / _NAME
        if folder == root:
            break
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """All files in one. `origins`: of each key, as the path to it, the file that it was last given in."""

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
                raise made.wrong((key,), f"there is no such table; {hint}")
        for table in ("pools", "providers"):
            tables = content.get(table, {})
            if not isinstance(tables, dict):
                raise made.wrong((table,), f"{tables!r}; it holds tables, [{table}.NAME]")
            for name, value in tables.items():
                if not isinstance(value, dict):
                    raise made.wrong((table, name), f"{value!r}; it is a table, [{table}.{name}]")
        return made

    def wrong(self, path: tuple[str, ...], what: str) -> UsageError:
        """An error about a key: where it is, and what is wrong with it."""
        file = next((self.origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.origins), None)
        where = f"{_shown(file)}: " if file is not None else ""
        table = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        return UsageError(f"{where}{table}{path[-1]}: {what}")

    # Pools ----------------------------------------------------------------------------------------------------------

    def pool(self, name: str, make_pool: Callable[..., Any]) -> dict[str, Any]:
        if name not in self.pools:
            raise UsageError(f"pool {name!r} is in none of {self._searched()}; there: {self._known()}")
        path = ("pools", name)
        hints = get_type_hints(make_pool)
        known = [key for key in hints if key not in (*_NOT_IN_A_FILE, "return")]
        fields: dict[str, Any] = {}
        for key, value in self.pools[name].items():
            if key in _NOT_IN_A_FILE and key != "self":
                raise self.wrong(
                    (*path, key), f"not for a file; give it in Python: ComputePool.named({name!r}, {key}=...)"
                )
            proper = ALIASES.get(key, key)
            if proper not in known:
                hint = advice("ComputePool", key, known, shown="{!r}")
                raise self.wrong((*path, key), f"there is no such key; {hint}")
            if proper in fields:
                raise self.wrong((*path, key), f"given twice ({proper} is the same option)")
            fields[proper] = self._pool_value(proper, value, hints[proper], (*path, key))
        if "provider" not in fields:
            raise self.wrong((*path, "provider"), f"is missing; it is one of {self._providers()}")
        return fields

    def _pool_value(self, key: str, value: Any, hint: Any, path: tuple[str, ...]) -> Any:
        if key == "provider":
            return self.pools_provider(value, path)
        if key == "image":
            return self._made(Image, self._table(value, path), path)
        if key == "accelerator" and isinstance(value, dict):
            return self._called(Accelerator.from_name, value, path)
        if key == "logs" and not isinstance(value, bool):
            raise self.wrong(path, f"{value!r}; it is true or false here (in Python it may be more)")
        return self._value(value, hint, path)

    def _known(self) -> str:
        return ", ".join(sorted(self.pools)) or "none"

    def _searched(self) -> str:
        files = [_shown(file) for file in self.files]
        return ", ".join(files) if files else f"./{_NAME}, ~/.config/skyward/{_NAME}, ~/.skyward/defaults.toml"

    # Providers ------------------------------------------------------------------------------------------------------

    def pools_provider(self, value: Any, path: tuple[str, ...]) -> Any:
        """What a pool's `provider` stands for: a name, or a table of its own."""
        if isinstance(value, dict):
            return self._provider_of(value, path)
        if not isinstance(value, str):
            raise self.wrong(path, f"{value!r}; it is one of {self._providers()}")
        return self.provider(value, path)

    def named(self, name: str) -> Any:
        """One that no file names, but who asks."""
        if name not in self.providers and name not in PROVIDERS:
            raise UsageError(f"{name!r} is no provider; {self._provider_advice(name)}")
        return self.provider(name, ("providers", name))

    def provider(self, name: str, path: tuple[str, ...]) -> Any:
        if name in self.providers:
            return self._provider_of(self.providers[name], ("providers", name))
        return self._provider_of({"type": name}, path)

    def _provider_of(self, table: dict[str, Any], path: tuple[str, ...]) -> Any:
        # [providers.aws] without a type is about the provider of that name.
        kind = table.get("type", path[-1])
        if kind not in PROVIDERS:
            where = (*path, "type") if "type" in table and path[0] == "providers" else path
            raise self.wrong(where, f"{kind!r} is no provider; {self._provider_advice(str(kind))}")
        try:
            made = load(kind)
        except MissingDependency as error:
            raise MissingDependency(f"{self.wrong(path, str(error))}") from error
        return self._made(made, {key: value for key, value in table.items() if key != "type"}, path)

    def _providers(self) -> str:
        return ", ".join(self._provider_names())

    def _provider_names(self) -> list[str]:
        """Those of ours, and those of the files that stand for one of ours."""
        written = [name for name, table in sorted(self.providers.items()) if table.get("type", name) in PROVIDERS]
        return list(dict.fromkeys([*PROVIDERS, *written]))

    def _provider_advice(self, name: str) -> str:
        near = suggestion(name, self._provider_names())
        if near is not None:
            return f"did you mean {near!r}?"
        known_elsewhere = foreign("provider", name.lower())
        return f"{known_elsewhere}{'; ' if known_elsewhere else ''}there are {self._providers()}"

    # Values ---------------------------------------------------------------------------------------------------------

    def _table(self, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(path, f"{value!r}; it is a table")
        return value

    def _made(self, make: Callable[..., Any], table: dict[str, Any], path: tuple[str, ...]) -> Any:
        """A value of a class of ours from its table."""
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
                raise self.wrong((*path, key), f"there is no such key; {hint}")
            fields[key] = self._value(value, hints.get(key, Any), (*path, key))
        try:
            return make(**fields)
        except SkywardError as error:
            raise self.wrong(path, str(error)) from error
        except TypeError as error:  # one that must be there
            raise self.wrong(path, str(error).partition(") ")[2] or str(error)) from error

    def _value(self, value: Any, hint: Any, path: tuple[str, ...]) -> Any:
        """The value as the hint wants it, with `{ env = ... }` put in."""
        if is_reference(value) and not is_table(hint):
            return self._referenced(value["env"], hint, path)
        legal = illegal(value, hint)
        if legal:
            raise self.wrong(path, f"{value!r}; it is {legal}")
        if isinstance(value, list):
            return tuple(self._value(one, element_of(hint), path) for one in value)
        if isinstance(value, dict):
            made = class_in(hint)
            if made is not None:
                return self._made(made, value, path)
            return {key: self._value(one, element_of(hint), (*path, key)) for key, one in value.items()}
        return value

    def _referenced(self, variable: str, hint: Any, path: tuple[str, ...]) -> str | Secret:
        if variable not in os.environ:
            raise self.wrong(path, f"the environment variable {variable} is not set here")
        return Secret(variable) if takes(hint, Secret) else os.environ[variable]


def _toml(path: Path) -> dict[str, Any]:
    check_file(str(path), "configuration")  # a provider's ProxyCommand, for one, runs here
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{_shown(path)}: {error}") from error
    except OSError as error:
        raise UsageError(f"{_shown(path)}: cannot be read: {error.strerror}") from error


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
    """As the user would write it."""
    for base, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if path.is_relative_to(base):
            return f"{sign}/{path.relative_to(base)}"
    return str(path)
