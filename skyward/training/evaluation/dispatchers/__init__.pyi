"""Public names of the package; `__init__.py` reads this list and loads each name on first use."""

from .choice import as_dispatcher as as_dispatcher
from .in_process import InProcessDispatcher as InProcessDispatcher
from .remote import PoolDispatcher as PoolDispatcher
from .subprocesses import SubprocessDispatcher as SubprocessDispatcher
