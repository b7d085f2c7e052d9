"""A hub in a process of its own, with every file it opens and every class it unpickles on record.

Run: `python -m tests.hub.http.watched_server FOLDER PATIENCE_S`. It prints its address and a token as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyward.hub.http.serve import serve
from skyward.hub.http.settings import LoggingSettings, local_settings

if TYPE_CHECKING:
    from skyward.hub.services.hub import Hub

EVENTS = frozenset({"open", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "socket.connect", "exec"})


def record_events(path: Path) -> None:
    """Append each event to a file, as one line of JSON."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            os.write(descriptor, json.dumps([event, str(arguments[0])]).encode() + b"\n")

    sys.addaudithook(hook)


def main(folder: Path, patience_s: float) -> None:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    settings = local_settings(data, port=0)
    server = replace(settings.server, patience_s=patience_s)
    settings = replace(settings, server=server, logging=LoggingSettings(level="debug"))

    async def greet(hub: Hub, url: str) -> None:
        owner = await hub.access.actor_named(hub.owner, None)
        token = (await hub.people.create_token(owner, "of a test")).text
        code = await hub.access.sign_in_code(hub.owner)
        record_events(folder / "events")
        print(json.dumps({"url": url, "token": token, "code": code}), flush=True)

    serve(settings, greet)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
