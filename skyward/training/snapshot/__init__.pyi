"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from .arrays import ArraySnapshot as ArraySnapshot
from .arrays import ArraySnapshotPool as ArraySnapshotPool
from .take import Snapshot as Snapshot
from .take import SnapshotPool as SnapshotPool
from .take import common_pool as common_pool
