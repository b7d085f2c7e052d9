"""The `skyward` command: each subcommand is a thin layer over a call of the Python API.

    skyward ls              skyward.pool.fleet.survey()
    skyward ps              skyward.pool.detaching.glance()
    skyward attach          sky.ComputePool.attach()
    skyward down            skyward.pool.fleet.end()
    skyward gc              skyward.providers.local.collect_garbage(), skyward.providers.reaper.gc()
    skyward logs            skyward.state.outputs.read_output()
    skyward ssh             skyward.cli.shell.terminal_of()
    skyward offers          sky.ComputePool(...).offers()
    skyward plan            sky.ComputePool(...).plan()
    skyward volume          skyward.bootstrap.volumes.list_volumes(), remove_volume()
    skyward doctor          skyward.cli.doctor.examine()
    skyward checkpoint      skyward.training.checkpoint: checkpoints_in(), problems(), ...
    skyward integrations    skyward.cli.integrations.describe()
    skyward train           skyward.training.control
    skyward diloco          skyward.training.diloco
    skyward hub             skyward.hub.http.serve.serve()
    skyward experiment      skyward.hub.experiments()
    skyward run             skyward.hub.runs(), skyward.hub.run()
    skyward job             skyward.hub.submit(), skyward.hub.jobs(), skyward.hub.job()
    skyward hpo             skyward.hub.sweep(), skyward.hub.sweeps()
    skyward capacity        skyward.hub.client.capacity
    skyward explain         skyward.cli.explain.explanation()

A subcommand is a module of this package with HELP, DESCRIPTION, EPILOG, `add_options(parser)` and `run(arguments)`,
and an entry in `COMMANDS`. A module without `run` has subcommands of its own and shows its help. Modules import their
dependencies inside `run`, so that `skyward --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .. import _version, errors
from ..core.process import collect_rarely
from . import (
    attach,
    calls,
    capacity,
    checkpoint,
    completion,
    diloco,
    doctor,
    down,
    experiment,
    explain,
    garbage,
    hpo,
    hub,
    integrations,
    job,
    logs,
    offers,
    plan,
    pools,
    run,
    shell,
    train,
    volume,
)
from .layout import Parser

__all__ = ["main"]

COMMANDS: dict[str, ModuleType] = {
    "ls": pools,
    "ps": calls,
    "attach": attach,
    "down": down,
    "logs": logs,
    "ssh": shell,
    "offers": offers,
    "plan": plan,
    "gc": garbage,
    "volume": volume,
    "doctor": doctor,
    "integrations": integrations,
    "train": train,
    "checkpoint": checkpoint,
    "diloco": diloco,
    "hub": hub,
    "experiment": experiment,
    "run": run,
    "job": job,
    "hpo": hpo,
    "capacity": capacity,
    "explain": explain,
    "completion": completion,
}

DESCRIPTION = """\
Decorate a Python function, choose where it runs, and get its value back:
    import skyward as sky
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        print(sky.compute(abs)(-42) >> pool)
"""

EPILOG = """\
example: skyward doctor
exit status: 0 success, 1 something needs your attention, 2 wrong command line
"""

# 128 + the signal, as a shell reports a program that Ctrl-C ended, or whose reader left (`| head`).
INTERRUPTED, READER_LEFT = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: arguments without the program's name. None: those of this process.

    Returns:
        Exit status: 0, 1, 130 after Ctrl-C, or 141 if the reader of the output left.

    Raises:
        SystemExit: for `--help`, `--version` and a wrong command line, as argparse does.
    """
    if argv is None:
        collect_rarely()
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] | None = arguments.run
    if run is None:
        arguments.parser.print_help()
        return 0
    from ..console.log_handler import install_handler  # `logging` takes milliseconds that --help does not need

    install_handler()
    try:
        status = run(arguments)
        sys.stdout.flush()  # Python's own flush would be too late to catch
        return status
    except errors.SkywardError as error:
        from .screen import complain

        complain(error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe, or a socket
        return READER_LEFT


def _reader_left() -> bool:
    """Report whether nobody reads the output any longer. If so, drop the rest, or Python would fail as it ends."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):  # a pipe without a reader has an error or a hang-up
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line. The documentation and shell completion read it too."""
    parser = Parser(prog="skyward", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"skyward {_version.__version__}")
    parser.set_defaults(run=None, parser=parser, whole_parser=parser)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        texts = {"help": command.HELP, "description": command.DESCRIPTION, "epilog": command.EPILOG}
        own = subcommands.add_parser(name, **texts)
        own.set_defaults(run=getattr(command, "run", None), parser=own)
        command.add_options(own)
    return parser
