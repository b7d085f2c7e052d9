"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .jsonlog import JsonLogger as JsonLogger
from .jsonlog import JsonLogWriter as JsonLogWriter

__all__ = [
    "JsonLogWriter",
    "JsonLogger",
]
