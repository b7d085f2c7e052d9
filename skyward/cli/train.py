"""`skyward train`: trainings that run, and what they left behind."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import train_control, train_report, train_watch
from .groups import add_group

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_to"]

COMMANDS = (train_control, train_watch, train_report)

HELP = "look at trainings that run, save, stop or abort them; report those that ended"

DESCRIPTION = """\
Reaches the trainings of yours on this machine that have a skyward.training.TrainerControlCallback and listen. One that
runs in a call of a pool listens with TrainerControlCallback(enable_http=True); without, its program reaches it by
pool.control().
"""

EPILOG = """\
examples:
  skyward train list
  skyward train watch my-run
  skyward train save-stop my-run --wait 600
  skyward train abort my-run --yes        without asking
  skyward train report out/my-run         a page of a run, by its folder

exit status: 0 it was done, 1 it was not, or not yet
from Python: skyward.training.control.find(), runs(), sweep(); skyward.training.report()
"""


def add_to(subcommands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    own = add_group(subcommands, "train", summary=HELP, description=DESCRIPTION, epilog=EPILOG, members="commands")
    for command in COMMANDS:
        command.add_to(own)
