"""`skyward diloco`: start a server of loosely joined training, and manage it."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..core.printable import printable
from .layout import add_command

if TYPE_CHECKING:
    from ..training.diloco import DiLoCoServer
    from ..training.diloco.client import DiLoCoClient

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "serve training over slow networks (DiLoCo), and manage it"

DESCRIPTION = """\
The server averages the progress of workers that train on their own for hundreds of steps. It needs
`pip install 'skyward[diloco]'`. The other actions ask a server that runs: DILOCO_SERVER and DILOCO_TOKEN name it, as
`serve` prints them.
"""

EPILOG = """\
examples:
  skyward diloco serve --workers 2 --save-dir global
  skyward diloco serve --workers 2 --save-dir global --host 0.0.0.0 --cert server.pem
  skyward diloco serve --workers 2 --save-dir global --token-for berlin --token-for paris
  skyward diloco status
  skyward diloco watch                   follow it in this terminal
  skyward diloco watch --page            print the link to its page
  skyward diloco kick worker-3
  skyward diloco token add berlin        print lines for a worker with a token of its own
  skyward diloco token revoke berlin     refuse that token, and evict the worker
  skyward diloco export model             write model/model.safetensors
  skyward diloco stop

exit status: 0 success, 1 the server refuses, does not answer, or cannot save
from Python: skyward.training.diloco: DiLoCoServer, DiLoCoWorker
"""

_CA_FILE = "ca.pem"
"""Name that the printed lines give to the certificate where workers train."""

_SERVE_DESCRIPTION = """\
Starts a server, and prints lines to paste where workers train. It runs until Ctrl-C, SIGTERM or `skyward diloco stop`,
saves, and ends. Started again with the same --save-dir and --port, it goes on, and its workers with it. Its token is
that of DILOCO_TOKEN or DILOCO_TOKEN_FILE, or else a new one, which --save-dir keeps. With --token-for, each worker has
a token of its own, which can be revoked.
"""

_WATCH_DESCRIPTION = """\
Shows workers and losses as they change on a terminal (needs skyward[training]); elsewhere, prints a line for each
change. Ctrl-C stops watching, not the server. With --page, prints a link for a browser, with the token behind its `#`:
the page shows charts and saves, evicts and stops. A server in a pool's program (`sky.integrations.diloco`) has no
address, so neither reaches it: that program logs its rounds.
"""

_TOKEN_DESCRIPTION = """\
A worker's token exchanges deltas under that worker's id, and reads the status. It cannot save, evict, stop or issue
tokens. The server keeps a hash of it in its --save-dir, so nobody can look it up later.
"""

_EXPORT_DESCRIPTION = """\
Writes the global model of a server, or of its newest save, as FOLDER/model.safetensors. With the model's config.json
beside it, `from_pretrained` reads the folder. An older file is replaced at once, also while it is read.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_serve(add_command(actions, "serve", "start a server", "diloco serve --workers 2 --save-dir global"))
    status = _add(actions, "status", "show the round, the workers and the last save", "status --json", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    follow = _add(actions, "watch", "follow the rounds and workers until the server ends", "watch", _watch)
    follow.description = _WATCH_DESCRIPTION
    follow.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="time between two requests (default: 1)"
    )
    follow.add_argument("--page", action="store_true", help="print the link to the server's page instead")
    _add(actions, "save", "save the state now", "save", _save)
    kick = _add(actions, "kick", "evict a worker; it may join again", "kick worker-3", _kick)
    kick.add_argument("worker", help="id of the worker; see `skyward diloco status`")
    _add_token(add_command(actions, "token", "give workers tokens of their own", "diloco token add berlin"))
    _add(actions, "stop", "save, and end the server; workers train on alone", "stop", _stop)
    export = _add(actions, "export", "write the global model for from_pretrained", "export model", _export)
    export.description = _EXPORT_DESCRIPTION
    export.add_argument("folder", help="folder to write model.safetensors to")
    export.add_argument("--save-dir", metavar="DIR", help="take the newest save in this folder, and ask no server")


def _add(
    actions: _Actions, name: str, text: str, example: str, act: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action that asks a server."""
    own = add_command(actions, name, text, f"diloco {example}")
    own.add_argument("--server", metavar="ADDR", help="address of the server (default: DILOCO_SERVER)")
    own.set_defaults(run=_reporting(act))
    return own


def _add_token(own: argparse.ArgumentParser) -> None:
    own.description = _TOKEN_DESCRIPTION
    actions = own.add_subparsers(title="actions", metavar="ACTION")
    for name, text, act in (
        ("add", "make a token, and print lines to paste where its worker trains", _add_worker_token),
        ("revoke", "refuse a worker's token from now on, and evict the worker", _revoke_worker_token),
    ):
        _add(actions, name, text, f"token {name} berlin", act).add_argument("worker", help="id of the worker")
    _add(actions, "list", "show which workers have tokens", "token list", _list_worker_tokens)


def _add_serve(own: argparse.ArgumentParser) -> None:
    own.description = _SERVE_DESCRIPTION
    own.add_argument("--workers", type=int, default=1, metavar="N", help="workers the first round awaits (default: 1)")
    own.add_argument(
        "--min-workers", type=int, default=1, metavar="N", help="least workers that end a round (default: 1)"
    )
    own.add_argument(
        "--save-dir", metavar="DIR", help="folder for the saves; without it the state is lost with the process"
    )
    own.add_argument(
        "--save-every", type=int, default=1, metavar="N", help="rounds between two saves (default: 1, none is lost)"
    )
    own.add_argument(
        "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on; others than loopback need --cert"
    )
    own.add_argument("--port", type=int, metavar="N", help="port (default: the first free one from 8512 on)")
    own.add_argument("--cert", metavar="FILE", help="PEM file with the certificate for TLS and its key")
    own.add_argument(
        "--token-for",
        action="append",
        default=[],
        metavar="WORKER",
        help="give a worker a token of its own, unless it has one; repeat it for more workers",
    )
    own.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="silence after which a worker is evicted; 0: never (default: 120)",
    )
    own.add_argument("--lr", type=float, default=0.7, metavar="X", help="learning rate of the outer SGD (default: 0.7)")
    own.add_argument(
        "--momentum", type=float, default=0.9, metavar="X", help="its Nesterov momentum; 0: none (default: 0.9)"
    )
    own.add_argument(
        "--async-mode", action="store_true", help="apply each update as it arrives; no worker waits for another"
    )
    own.add_argument(
        "--dn-buffer-size",
        type=int,
        default=0,
        metavar="N",
        help="with --async-mode: updates between two of the momentum (default: --workers)",
    )
    own.add_argument("--bf16-answers", action="store_true", help="answer in bfloat16, which halves the download")
    own.add_argument(
        "--quantization-bits",
        type=int,
        default=0,
        choices=(8, 4),
        help="answer with 8 or 4 bits for each value, and add the rounding errors to the next answer",
    )
    own.add_argument(
        "--weighting",
        default="equal",
        choices=("equal", "samples", "tokens"),
        help="weight of a worker in the mean, by its samples or tokens since the last round (default: equal)",
    )
    own.set_defaults(run=_reporting(_serve))


def _reporting(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Print the failures of networks and disks in one line, like every other error."""

    def run(arguments: argparse.Namespace) -> int:
        from ..training.diloco.transport import ServerUnreachable
        from .screen import complain

        try:
            return act(arguments)
        except (ServerUnreachable, OSError) as error:
            complain(error)
            return 1

    return run


def _serve(arguments: argparse.Namespace) -> int:
    import logging

    from ..errors import CheckpointSaveFailed
    from ..training.diloco import DiLoCoServer
    from ..training.diloco.addresses import token_of_environment
    from .screen import complain

    if arguments.workers < 1:
        arguments.parser.error(f"--workers: must be 1 or more, and is {arguments.workers}")
    logging.getLogger("skyward").setLevel(logging.INFO)
    if arguments.dn_buffer_size and not arguments.async_mode:
        arguments.parser.error("--dn-buffer-size: is for asynchronous updates; add --async-mode")
    server = DiLoCoServer(
        num_workers=max(arguments.workers, arguments.min_workers),
        min_workers=arguments.min_workers,
        outer_lr=arguments.lr,
        outer_momentum=arguments.momentum,
        save_dir=arguments.save_dir,
        save_every_n_rounds=arguments.save_every,
        heartbeat_timeout=arguments.heartbeat_timeout,
        bf16_answers=arguments.bf16_answers,
        quantization_bits=arguments.quantization_bits,
        async_mode=arguments.async_mode,
        dn_buffer_size=arguments.dn_buffer_size,
        weighting=arguments.weighting,
        host=arguments.host,
        port=arguments.port,
        cert=arguments.cert,
        token=token_of_environment(),
    )
    # Not SIGINT's handler: a shell lets programs behind `&` ignore that one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with server:
            print("\n".join(_welcome(server, arguments)), flush=True)
            try:
                server.wait()
            except KeyboardInterrupt:
                print("ends; another Ctrl-C ends it without a save", flush=True)
    except CheckpointSaveFailed as error:
        complain(error)
        return 1
    status = server.status()
    if arguments.save_dir is None or not status["parameters"]:
        return 0
    print(f"round {status['round']} is saved in {arguments.save_dir}")
    return 0


def _welcome(server: DiLoCoServer, arguments: argparse.Namespace) -> list[str]:
    workers = list(dict.fromkeys(arguments.token_for))
    environment = _environment(server, arguments)
    saves = "no saves" if arguments.save_dir is None else f"saves in {os.path.abspath(arguments.save_dir)}"
    lines = [f"skyward diloco at {server.address}, {saves} (Ctrl-C stops it)", ""]
    lines += _exports("you manage it. Their token may do everything" if workers else "workers train", environment)
    environment.pop("DILOCO_TOKEN_FILE", None)
    for worker in workers:
        if server.tokens.get(worker):
            lines += ["", f"{worker} has its token; `skyward diloco token revoke` and `add` make a new one."]
        else:
            lines += ["", *_exports(f"{worker} trains", environment | _own(worker, server.add_token(worker)))]
    lines += ["", "Watch it with `skyward diloco watch`; `skyward diloco watch --page` prints the link to its page."]
    if arguments.cert is not None:
        served = shlex.quote(arguments.cert)
        lines += ["", f"{_CA_FILE} is the certificate without its key: `openssl x509 -in {served} -out {_CA_FILE}`."]
        lines += ["Copy it to each machine where you paste the lines, into the folder where you do."]
    return lines


def _exports(where: str, environment: Mapping[str, str]) -> list[str]:
    lines = [f"  export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return [f"Paste these lines where {where}:", *lines]


def _own(worker: str, token: str) -> dict[str, str]:
    return {"DILOCO_TOKEN": token, "DILOCO_WORKER_ID": worker}


def _environment(server: DiLoCoServer, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables of a worker. A token in a file stays out of the histories of shells on this machine."""
    from ..training.control.server import is_loopback
    from ..training.diloco.addresses import TOKEN_FILE, token_of_environment

    address = server.address.rpartition("://")[2]
    if arguments.host in ("0.0.0.0", "::"):  # every address of this machine: name it
        address = f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    variables = {"DILOCO_SERVER": address, "DILOCO_TOKEN": server.token}
    is_kept = arguments.save_dir is not None and token_of_environment() is None
    if is_kept and is_loopback(arguments.host):
        del variables["DILOCO_TOKEN"]
        variables["DILOCO_TOKEN_FILE"] = os.path.join(os.path.abspath(arguments.save_dir), TOKEN_FILE)
    if arguments.cert is not None:
        variables["DILOCO_CA"] = _CA_FILE
    return variables


def _client(arguments: argparse.Namespace) -> DiLoCoClient:
    from ..errors import UsageError
    from ..training.diloco.client import DiLoCoClient

    address = arguments.server or os.environ.get("DILOCO_SERVER")
    if not address:
        raise UsageError("server: none is named; paste the lines of `skyward diloco serve`, or pass --server")
    if address.startswith("pool://"):
        raise UsageError(
            f"server={address!r}: runs in a pool's program, and only tasks of that pool reach it; read the program's "
            "log, or start `skyward diloco serve` and name that server"
        )
    return DiLoCoClient(address)


def _status(arguments: argparse.Namespace) -> int:
    from ..training.diloco.report import WORKER_COLUMNS, round_line, server_line, worker_cells
    from .screen import as_json, complain, table

    status = _client(arguments).ask("/status")
    if arguments.json:
        print(as_json(status))
        return 1 if status["save_error"] else 0
    print(server_line(status))
    if status["workers"]:
        rows = map(worker_cells, status["workers"])
        print("\n".join(table(WORKER_COLUMNS, rows, right=range(2, len(WORKER_COLUMNS) - 1))))
    if status["last"] is not None:
        print(f"last {round_line(status['last'])}")
    if status["save_error"]:
        complain(status["save_error"])
        return 1
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from ..training.diloco.addresses import page_link, token_of_environment
    from ..training.diloco.watch import watch

    client = _client(arguments)
    if arguments.page:
        print(page_link(client.name, token_of_environment()))
        return 0
    print(printable(watch(client, every_s=max(0.05, arguments.every))))
    return 0


def _save(arguments: argparse.Namespace) -> int:
    from .screen import complain

    path = _client(arguments).ask("/control/save", {})["path"]
    if path is None:
        complain("the server has nothing to save: its first worker brings a model, and --save-dir a folder")
        return 1
    print(f"saved: {printable(path)}")
    return 0


def _kick(arguments: argparse.Namespace) -> int:
    from .screen import complain

    if not _client(arguments).ask("/control/kick", {"worker": arguments.worker})["was_present"]:
        complain(f"worker={arguments.worker!r}: is not present; see `skyward diloco status`")
        return 1
    print(f"{arguments.worker}: evicted")
    return 0


def _add_worker_token(arguments: argparse.Namespace) -> int:
    client = _client(arguments)
    answer = client.ask("/tokens/add", {"worker": arguments.worker})
    environment = {"DILOCO_SERVER": client.name, **_own(arguments.worker, answer["token"])}
    if os.environ.get("DILOCO_CA"):
        environment["DILOCO_CA"] = os.environ["DILOCO_CA"]
    print("\n".join(_exports(f"{arguments.worker} trains. The token is not shown again", environment)))
    if not answer["are_kept"]:
        print("It lasts until the server ends, because that one has no folder on its machine for its saves.")
    return 0


def _revoke_worker_token(arguments: argparse.Namespace) -> int:
    was_present = _client(arguments).ask("/tokens/revoke", {"worker": arguments.worker})["was_present"]
    print(f"{arguments.worker}: its token is refused from now on{', and it was evicted' if was_present else ''}")
    return 0


def _list_worker_tokens(arguments: argparse.Namespace) -> int:
    from .screen import table

    workers = _client(arguments).ask("/tokens")["workers"]
    rows = [(worker, "accepted" if is_accepted else "revoked") for worker, is_accepted in workers.items()]
    print("\n".join(table(("worker", "token"), rows)) if rows else "no worker has a token of its own")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from .screen import complain

    problem = _client(arguments).ask("/control/stop", {}).get("problem")
    if problem:
        complain(f"the server ends, but {problem}")
        return 1
    print("the server has saved, and ends")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from ..training.diloco.export import export_model, saved_model
    from .screen import complain

    frame = saved_model(arguments.save_dir) if arguments.save_dir else _client(arguments).parameters()
    if frame is None:
        complain("the server has no model yet; its first worker brings one")
        return 1
    print(export_model(frame, arguments.folder))
    return 0
