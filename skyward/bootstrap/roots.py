"""Folders with the user's own modules: on sys.path, but neither Python's own nor installed from an index."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import site
import sysconfig
import tempfile
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Root:
    """Folder whose modules are sent. `only` lists the top-level names to send; None: all."""

    folder: str
    only: frozenset[str] | None = None

    def has(self, path: str) -> bool:
        """Tell whether a path below it may be sent. A checkout of skyward is not: it would hide the node's."""
        top = os.path.relpath(path, self.folder).partition(os.sep)[0].partition(".")[0]
        return top != "skyward" and (self.only is None or top in self.only)


def local_roots(path: Iterable[str], cwd: str, modules: Mapping[str, object]) -> list[Root]:
    """Return the roots on a sys.path, in its order, followed by packages that are installed editable.

    A folder that contains far more than a project, such as the home folder, contributes only loaded modules and the
    modules directly in it.
    """
    roots: dict[str, Root] = {}
    for entry in path:
        folder = os.path.realpath(os.path.join(cwd, entry))
        if os.path.isdir(folder) and folder not in roots and not is_installed(folder):
            roots[folder] = Root(folder=folder, only=_loaded_from(folder, modules) if _is_broad(folder) else None)
    for name, where in _editable(modules).items():
        folder, top = os.path.dirname(os.path.realpath(where)), name.partition(".")[0]
        if folder not in roots and not is_installed(folder):
            roots[folder] = Root(folder=folder, only=frozenset({top}))
    return list(roots.values())


def editable_metadata(path: Iterable[str], roots: Iterable[Root]) -> list[str]:
    """Return the .dist-info folders of packages that are installed editable from one of these roots.

    They are needed because a package may query its own version when it is imported. Source: PEP 610, direct_url.json.
    """
    sources = [root.folder + os.sep for root in roots]
    folders = []
    for entry in dict.fromkeys(path):
        for folder in glob.glob(os.path.join(glob.escape(entry), "*.dist-info")) if is_installed(entry) else ():
            with contextlib.suppress(OSError, ValueError, KeyError):  # not installed from a folder
                with open(os.path.join(folder, "direct_url.json"), encoding="utf-8") as file:
                    origin = json.load(file)
                project = os.path.realpath(urllib.parse.unquote(urllib.parse.urlsplit(origin["url"]).path))
                is_ours = os.path.basename(folder).startswith("skyward-")
                travels = any(source.startswith(project + os.sep) for source in sources)
                if origin["dir_info"].get("editable") and travels and not is_ours:
                    folders.append(folder)
    return folders


def is_installed(folder: str) -> bool:
    """Tell whether a folder is Python's own or has installed packages. `folder` must be free of symbolic links."""
    parts = folder.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    pythons = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    pythons |= {os.path.dirname(os.__file__), site.getusersitepackages()}
    return any(folder == at or folder.startswith(at + os.sep) for at in map(os.path.realpath, filter(None, pythons)))


def _is_broad(folder: str) -> bool:
    home = os.path.realpath(os.path.expanduser("~"))
    temporary = os.path.realpath(tempfile.gettempdir())
    return folder in (home, temporary, "/tmp", "/var/tmp") or home.startswith(folder.rstrip(os.sep) + os.sep)


def _loaded_from(folder: str, modules: Mapping[str, object]) -> frozenset[str]:
    names = {name[:-3] for name in os.listdir(folder) if name.endswith(".py")}
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and "." not in name:
            path = os.path.realpath(file)
            at = os.path.dirname(os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path)
            names |= {name} if at == folder else set()
    return frozenset(names)


def _editable(modules: Mapping[str, object]) -> dict[str, str]:
    """Return packages that setuptools' import hook finds, with their paths.

    Source: setuptools/command/editable_wheel.py.
    """
    places: dict[str, str] = {}
    for name, module in list(modules.items()):
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        if isinstance(mapping, dict):
            places.update({str(package): str(where) for package, where in mapping.items()})
    return places
