"""Address of a hub, and where a run waits for it: from arguments, or from the environment."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import UsageError
from ..model.product import ENVIRONMENT_PREFIX, PORT, PREFIX

URL, TOKEN = f"{ENVIRONMENT_PREFIX}URL", f"{ENVIRONMENT_PREFIX}TOKEN"
PROJECT, EXPERIMENT = f"{ENVIRONMENT_PREFIX}PROJECT", f"{ENVIRONMENT_PREFIX}EXPERIMENT"
SPOOL = f"{ENVIRONMENT_PREFIX}SPOOL"
JOB = f"{ENVIRONMENT_PREFIX}JOB"
"""Variable with the id of the job that a process belongs to. Runs that begin there get the tag `JOB_TAG`."""
JOB_TAG = f"{PREFIX}.job"

DEFAULT_EXPERIMENT = "Default"
_PROBE_S = 2.0
_SCHEMES = {"http": "http", "https": "https", PREFIX: "http", f"{PREFIX}+https": "https"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A hub, and who asks.

    Attributes:
        url: `http://host:port` or `https://host:port`, perhaps with a path, without a slash at the end.
        token: the token; None for a hub that demands none.
        project: name of the project; None: the token's.
        through_program: whether requests go through the pool's program, because this is a task of it.

    Example:
        >>> from skyward.hub import Address
        >>> Address(url="http://127.0.0.1:8057", token="sky_1_secret")
        Address(url='http://127.0.0.1:8057', token='***', project=None)
    """

    url: str
    token: str | None = None
    project: str | None = None
    through_program: bool = False

    def __repr__(self) -> str:
        token = None if self.token is None else "***"
        way = ", through_program=True" if self.through_program else ""
        return f"Address(url={self.url!r}, token={token!r}, project={self.project!r}{way})"


def address_of(url: str | None = None, token: str | None = None, project: str | None = None) -> Address | None:
    """Return the hub's address from arguments, completed by the environment. None: no hub is named.

    Args:
        url: `http://`, `https://`, `skyward://` (plain) or `skyward+https://` and a host.
        token: the token.
        project: name of the project.

    Raises:
        UsageError: the address is not one.
    """
    url = url or os.environ.get(URL) or None
    if url is None:
        return None
    return Address(
        url=checked_url(url),
        token=token or os.environ.get(TOKEN) or None,
        project=project or os.environ.get(PROJECT) or None,
    )


def checked_url(url: str) -> str:
    """Return the address as http or https, without a slash at its end. A hub's own scheme has a hub's port.

    Raises:
        UsageError: the address is not one.
    """
    parts = urlsplit(url.strip())
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in _SCHEMES or not parts.hostname or port == -1:
        raise UsageError(
            f"url={_masked(url)!r}: is not the address of a hub; write http://host:{PORT}", field="url", value=url
        )
    if parts.username or parts.password:
        raise UsageError(f"url={_masked(url)!r}: has a user in it; pass token=, or set {TOKEN}", field="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None and parts.scheme.startswith(PREFIX):
        port = PORT
    return f"{_SCHEMES[parts.scheme]}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def can_reach(address: Address) -> bool:
    """Return whether something listens at the address of a hub. Wait two seconds at most."""
    parts = urlsplit(address.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _PROBE_S).close()
    except OSError:
        return False
    return True


def _masked(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", url)


def spool_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all runs' spools: an argument, `SKYWARD_HUB_SPOOL`, or this user's state folder."""
    chosen = folder or os.environ.get(SPOOL)
    if chosen:
        return Path(chosen).expanduser().absolute()
    from ...state.journal import state_folder

    return Path(state_folder()) / "hub" / "runs"
