"""`skyward hub`: start a hub, and manage it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .hub_data import add_data
from .hub_import import add_import
from .hub_people import add_people
from .hub_secret import add_secrets

if TYPE_CHECKING:
    from ..hub.http.local import Welcome
    from ..hub.runner.launcher import Launcher
    from ..hub.services.hub import Hub

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "start a tracking server for runs, and manage it"

DESCRIPTION = """\
A hub remembers runs: parameters, metrics, artifacts. It speaks MLflow's protocol, so scripts that log to MLflow
need no change. It needs `pip install 'skyward[hub]'`; clients need nothing.
"""

EPILOG = """\
examples:
  skyward hub up
  skyward hub up --data ./hub --port 8100
  skyward hub up --runs ~/copied/runs
  skyward hub serve --config hub.yaml
  skyward hub launcher --provider ssh --machines lab
  skyward hub secret set HF_TOKEN < token.txt
  skyward hub sync copied/runs
  skyward hub user add ada
  skyward hub token create laptop
  skyward hub status
  skyward hub check
  skyward hub backup hub.backup
  skyward hub import ./mlruns

exit status: 0 success, 1 a failure or a finding, which is named
from Python: skyward.hub.http.serve.serve(), skyward.hub.sync(), skyward.hub.client.people,
skyward.hub.store.backup
"""


_NEEDED = ("alembic", "httptools", "msgspec", "sqlalchemy", "starlette", "uvicorn", "zstandard")


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    up = _add(actions, "up", "start a hub for one person on this machine", "up --data ./hub")
    up.add_argument("--data", metavar="DIR", help="folder of the hub (default: $XDG_DATA_HOME/skyward/hub)")
    up.add_argument(
        "--port", type=int, default=8057, metavar="N", help="port on 127.0.0.1 (default: 8057; 0: a free one)"
    )
    up.add_argument("--runs", metavar="FOLDER", help="also show the runs in this folder, made without a hub")
    up.add_argument("--no-auth", action="store_true", help="let every program on this machine in without a token")
    up.add_argument("--json", action="store_true", help="print address, link and token as one line of JSON")
    up.add_argument(
        "--notify-host", action="append", default=[], metavar="HOST", help="let jobs name webhooks there; repeatable"
    )
    up.add_argument(
        *("--notify-command",),
        action="append",
        default=[],
        metavar="PATH",
        help="let jobs name this program; repeatable",
    )
    up.set_defaults(run=_up)
    serve = _add(actions, "serve", "start a hub for a team", "serve --config hub.yaml")
    serve.add_argument("--config", metavar="FILE", help="configuration; SKYWARD_HUB_<SECTION>_<KEY> overrides a key")
    serve.set_defaults(run=_serve)
    launcher = _add(actions, "launcher", "start jobs of a hub on machines of this one's providers", "launcher")
    launcher.add_argument("--data", metavar="DIR", help="folder of the launcher (default: $XDG_DATA_HOME/skyward/hub)")
    launcher.add_argument("--machines", action="append", default=[], metavar="SET", help="serve this set; repeatable")
    launcher.add_argument(
        "--provider", action="append", default=[], metavar="NAME", help="serve all sets of this provider; repeatable"
    )
    launcher.add_argument("--url", help="address of the hub (default: SKYWARD_HUB_URL)")
    launcher.set_defaults(run=_launcher)
    sync = _add(actions, "sync", "send folders of runs to a hub; SKYWARD_HUB_URL names it", "sync copied/runs")
    sync.add_argument("folder", help="folder of a run, or of several runs")
    sync.add_argument("--url", help="address of the hub (default: SKYWARD_HUB_URL)")
    sync.set_defaults(run=_sync)
    add_people(actions)
    add_data(actions)
    add_import(actions)
    add_secrets(actions)


def _add(actions: _Actions, name: str, text: str, example: str) -> argparse.ArgumentParser:
    own = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: skyward hub {example}",
    )
    own.set_defaults(parser=own)
    return own


def _up(arguments: argparse.Namespace) -> int:
    _need_extra()
    from ..hub.client.settings import Address
    from ..hub.client.sync import check_runs
    from ..hub.http.local import welcome
    from ..hub.http.serve import serve
    from ..hub.http.settings import data_folder, local_settings
    from ..hub.runner.local import start_local_launcher
    from ..hub.store.lock import make_folder

    if arguments.runs:
        check_runs(arguments.runs)
    data = Path(arguments.data).absolute() if arguments.data else data_folder()
    umask = os.umask(0o077)  # the database holds what others on this machine must not read
    make_folder("data", data)

    async def greet(hub: Hub, url: str) -> None:
        greeting = await welcome(hub, url, data)
        launchers.append(await start_local_launcher(hub, Address(url=url, token=greeting.token), data, umask))
        if arguments.runs:
            await asyncio.to_thread(_show_runs, arguments.runs, greeting)
        print(_json_line(greeting) if arguments.json else "\n".join(_lines(greeting)), flush=True)

    launchers: list[Launcher] = []
    try:
        serve(
            local_settings(
                data,
                port=arguments.port,
                with_auth=not arguments.no_auth,
                hosts=arguments.notify_host,
                commands=arguments.notify_command,
            ),
            greet,
        )
    finally:
        for launcher in launchers:
            launcher.stop()
    return 0


def _launcher(arguments: argparse.Namespace) -> int:
    _need_extra()
    import logging
    import signal

    from ..errors import UsageError
    from ..hub.client.settings import address_of
    from ..hub.http.settings import data_folder
    from ..hub.runner.launcher import Launcher
    from ..providers import load

    for name in arguments.provider:
        load(name)  # an unknown one is refused, and one whose package is not here
    address = address_of(arguments.url)
    if address is None:
        raise UsageError("url: no hub is named; pass --url, or set SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN")
    logging.getLogger("skyward").setLevel(logging.INFO)
    data = Path(arguments.data).absolute() if arguments.data else data_folder()
    launcher = Launcher(address, data / "launcher", arguments.machines, arguments.provider)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: launcher.stop())
    return 0 if launcher.run() else 1


def _show_runs(folder: str, greeting: Welcome) -> None:
    from ..hub.client.sync import sync

    shown = sync(folder, url=greeting.url, token=greeting.token)
    print(f"{len(shown)} run{'s' * (len(shown) != 1)} of {folder} in the hub", file=sys.stderr)


def _serve(arguments: argparse.Namespace) -> int:
    _need_extra()
    from ..hub.http.serve import serve
    from ..hub.http.settings import read_settings

    serve(read_settings(Path(arguments.config) if arguments.config else None, os.environ))
    return 0


def _sync(arguments: argparse.Namespace) -> int:
    from ..hub.client.sync import sync

    outcomes = sync(arguments.folder, url=arguments.url)
    for synced in outcomes:
        left = f", {synced.unsent} left to the process that writes them" if synced.unsent else ""
        print(f"{synced.run_id}: {synced.sent} records sent{left}")
    return 1 if any(synced.unsent for synced in outcomes) else 0


def _need_extra() -> None:
    from importlib.util import find_spec

    from ..errors import MissingDependency

    for name in _NEEDED:
        if find_spec(name) is None:
            raise MissingDependency(
                f"skyward hub: requires {name}, which is not installed here; pip install 'skyward[hub]'", name=name
            )


def _json_line(greeting: Welcome) -> str:
    return json.dumps(
        {
            "url": greeting.url,
            "link": greeting.link,
            "token": greeting.token,
            "data": greeting.data,
            "environment": greeting.environment(),
        }
    )


def _lines(greeting: Welcome) -> list[str]:
    lines = [f"skyward hub at {greeting.url}, data in {greeting.data} (Ctrl-C stops it)", ""]
    if greeting.token is None:
        lines += ["Without authentication: every program on this machine may read and write.", f"  {greeting.link}"]
    else:
        lines += ["Sign in (the link works once, within 15 minutes):", f"  {greeting.link}"]
    lines += ["", "Paste these lines where training runs:"]
    lines += [f"  export {name}={value}" for name, value in greeting.environment().items()]
    return lines
