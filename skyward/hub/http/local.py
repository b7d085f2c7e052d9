"""One person's hub: its token is kept in a file of its folder, so that the same lines work after a restart."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..model.product import ENVIRONMENT_PREFIX
from ..model.refusal import Refusal
from .v1.people import SIGN_IN_PATH

if TYPE_CHECKING:
    from ..services.hub import Hub

TOKEN_FILE = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Everything that a person needs to use a hub that has just started.

    Attributes:
        url: Address of the hub.
        link: Link that signs in once. Without authentication, the address.
        token: Token for clients. None without authentication.
        data: Folder of the hub.
    """

    url: str
    link: str
    token: str | None
    data: str

    def environment(self) -> dict[str, str]:
        """Return the variables that MLflow's clients and those of skyward read."""
        variables = {"MLFLOW_TRACKING_URI": self.url, f"{ENVIRONMENT_PREFIX}URL": self.url}
        if self.token is not None:
            variables["MLFLOW_TRACKING_TOKEN"] = self.token
            variables[f"{ENVIRONMENT_PREFIX}TOKEN"] = self.token
        return dict(sorted(variables.items()))

    def __repr__(self) -> str:
        return f"Welcome(url={self.url!r}, data={self.data!r})"


async def welcome(hub: Hub, url: str, data: Path) -> Welcome:
    """Make a sign-in link, and the token of this folder where it has none."""
    if not hub.with_auth:
        return Welcome(url=url, link=url, token=None, data=str(data))
    code = await hub.access.sign_in_code(hub.owner)
    token = await _token(hub, data / TOKEN_FILE)
    return Welcome(url=url, link=f"{url}{SIGN_IN_PATH}{code}", token=token, data=str(data))


async def _token(hub: Hub, path: Path) -> str:
    kept = await asyncio.to_thread(_read, path)
    try:
        await hub.access.actor_for(kept, None)
    except Refusal:
        owner = await hub.access.actor_named(hub.owner, None)
        made = await hub.people.create_token(owner, "of the hub's folder")
        await asyncio.to_thread(_write, path, made.text)
        return made.text
    return kept


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the first start in this folder
        return ""


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{text}\n")
