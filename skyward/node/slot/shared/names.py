"""Names of shared things as users write them: `sky.dict`, `sky.lock` and so on."""

from .containers import SharedCounter as counter
from .containers import SharedDict as dict
from .containers import SharedList as list
from .containers import SharedSet as set
from .waits import SharedBarrier as barrier
from .waits import SharedEvent as event
from .waits import SharedLock as lock
from .waits import SharedQueue as queue
from .waits import SharedSemaphore as semaphore

__all__ = ["barrier", "counter", "dict", "event", "list", "lock", "queue", "semaphore", "set"]
