"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .choice import as_dispatcher as as_dispatcher
from .in_process import InProcessDispatcher as InProcessDispatcher
from .remote import PoolDispatcher as PoolDispatcher
from .subprocesses import SubprocessDispatcher as SubprocessDispatcher
