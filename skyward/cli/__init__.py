"""The `skyward` command: thin, every subcommand is a call that anyone can make from Python.

    skyward ls              skyward.pool.fleet.survey()
    skyward down            skyward.pool.fleet.end()
    skyward gc              skyward.providers.local.collect_garbage(), skyward.providers.reaper.gc()
    skyward logs            skyward.state.outputs.read_output()
    skyward ssh             skyward.cli.shell.terminal_of()
    skyward offers          sky.ComputePool(...).offers()
    skyward plan            sky.ComputePool(...).plan()
    skyward doctor          skyward.cli.doctor.examine()
    skyward checkpoint      skyward.training.checkpoint: checkpoints_in(), problems(), ...
    skyward integrations    skyward.cli.integrations.describe()
    skyward train           skyward.training.control

A subcommand is a module of this package with HELP, DESCRIPTION, EPILOG, `add_options(parser)` and `run(arguments)`;
`COMMANDS` names it. Without `run`, as where it has commands of its own, it shows its help. What a subcommand needs is
imported when it runs, so `skyward --help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .. import _version, errors
from . import checkpoint, doctor, down, garbage, integrations, logs, offers, plan, pools, shell, train

__all__ = ["main"]

COMMANDS: dict[str, ModuleType] = {
    "ls": pools,
    "down": down,
    "logs": logs,
    "ssh": shell,
    "offers": offers,
    "plan": plan,
    "gc": garbage,
    "doctor": doctor,
    "integrations": integrations,
    "train": train,
    "checkpoint": checkpoint,
}

DESCRIPTION = """\
Decorate a Python function, choose where it runs at the call site, get its value back.
This command looks after your pools and machines; the work itself is started from Python:

    import skyward as sky

    @sky.compute
    def hello(name):
        return f"hello {name}"

    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        print(hello("world") >> pool)
"""

EPILOG = """\
exit status: 0 all is well, 1 something needs your attention, 2 the command line is wrong
"""

# 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; `argv` is the process's own where it is None.

    Raises SystemExit for `--help`, `--version` and a wrong command line, as argparse does.
    """
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] | None = arguments.run
    if run is None:
        arguments.parser.print_help()
        return 0
    from ..console.log_handler import install_handler  # `logging` takes milliseconds that --help does not need

    install_handler()
    try:
        return run(arguments)
    except errors.SkywardError as error:
        print(f"skyward: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; also what a documentation page or a completion script reads."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="skyward", description=DESCRIPTION, epilog=EPILOG, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"skyward {_version.__version__}")
    parser.set_defaults(run=None, parser=parser)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        texts = {"help": command.HELP, "description": command.DESCRIPTION, "epilog": command.EPILOG}
        own = subcommands.add_parser(name, **texts, formatter_class=layout)
        own.set_defaults(run=getattr(command, "run", None), parser=own)
        command.add_options(own)
    return parser
