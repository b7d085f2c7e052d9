"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from .choice import as_dispatcher as as_dispatcher
from .in_process import InProcessDispatcher as InProcessDispatcher
from .remote import PoolDispatcher as PoolDispatcher
from .subprocesses import SubprocessDispatcher as SubprocessDispatcher
