"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .arrays import ArraySnapshot as ArraySnapshot
from .arrays import ArraySnapshotPool as ArraySnapshotPool
from .take import Snapshot as Snapshot
from .take import SnapshotPool as SnapshotPool
from .take import common_pool as common_pool
