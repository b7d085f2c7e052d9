"""Public names of the package; `__init__.py` reads this list and loads each name on first use."""

from .arrays import ArraySnapshot as ArraySnapshot
from .arrays import ArraySnapshotPool as ArraySnapshotPool
from .take import Snapshot as Snapshot
from .take import SnapshotPool as SnapshotPool
from .take import common_pool as common_pool
