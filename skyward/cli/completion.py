"""`skyward completion`: print a script that completes `skyward` in a shell."""

from __future__ import annotations

import argparse

HELP = "print a tab-completion script for your shell"

DESCRIPTION = """\
Prints a script that completes commands and options of `skyward` when you press Tab. Needs the package shtab.
"""

EPILOG = """\
examples:
  eval "$(skyward completion bash)"                                          for this shell
  skyward completion bash > ~/.local/share/bash-completion/completions/skyward
  skyward completion zsh > ~/.zfunc/_skyward                                 with fpath+=~/.zfunc
"""

SHELLS = ("bash", "zsh", "tcsh")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="name of your shell")


def run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        from ..errors import MissingDependency

        message = f"completion: shtab is not installed; run: pip install 'skyward[completion]' ({error})"
        raise MissingDependency(message, name="shtab") from error

    print(shtab.complete(arguments.whole_parser, shell=arguments.shell))
    return 0
