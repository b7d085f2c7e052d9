"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from skyward.calls.control import COMMANDS as COMMANDS
from skyward.calls.control import Client as Client
from skyward.calls.control import CommandState as CommandState
from skyward.calls.control import RunStatus as RunStatus

from .callback import TrainerControlCallback as TrainerControlCallback
from .client import find as find
from .client import runs as runs
from .endpoint import Endpoint as Endpoint
from .endpoint import sweep as sweep
