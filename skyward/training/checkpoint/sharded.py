"""States of DTensors (FSDP2, tensor parallel): torch.distributed.checkpoint writes and reads them, in any world.

Every rank writes its own shards to `<key>.dcp/`, and a run of another size reads the parts that it needs. What the
coordinator promises holds for them too: they are staged, digested and committed with the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import CheckpointError, SkywardError
from ..agree import Alone, Ranks
from .commit import Staging
from .folders import Folder
from .manifest import FileEntry
from .patterns import StateComponent
from .verdicts import together
from .writer import check_file

__all__ = [
    "ModelState",
    "OptimizerState",
    "ShardedFiles",
    "read_whole",
    "write_sharded",
    "write_whole",
]


class ModelState:
    """A model's state as torch.distributed.checkpoint names it: without the prefixes of wrappers. Collective.

    whole: gather a sharded model's parameters on the CPU of every rank; each takes its part when they are loaded.
    """

    def __init__(self, model: torch.nn.Module, *, whole: bool = False) -> None:
        self._model, self._whole = model, whole

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._model, options=_options(whole=self._whole)))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self._model, state_dict, options=_options(whole=self._whole))


class OptimizerState:
    """An optimizer's state by its parameters' names, so that it can be loaded where they are split otherwise.

    whole: as `ModelState` takes it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool = False) -> None:
        self._model, self._optimizer, self._whole = model, optimizer, whole

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._model, self._optimizer, options=_options(whole=self._whole)))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self._model, self._optimizer, state_dict, options=_options(whole=self._whole))


def _options(*, whole: bool) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True) if whole else None


def write_sharded(
    ranks: Ranks, what: str, staging: Staging, key: str, state: Any, *, allow_pickle: bool = False
) -> list[FileEntry]:
    """Collective. Gives the entries of all ranks' files. allow_pickle: as `write_state`'s."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp import FolderSystem, PlainSavePlanner, writer_of

    name = f"{key}.dcp"
    system = FolderSystem(staging.folder.child(name))
    planner = PlainSavePlanner(where=f"StateComponent {key!r}", allow_pickle=allow_pickle)
    together(ranks, what, lambda: planner.check(state))  # in a phase of its own: what fails in `save` loses its class

    def write() -> list[FileEntry]:
        # It gathers every rank's error itself, so that none is left in one of its exchanges.
        with _alone_or_not(ranks) as how:
            save(state, storage_writer=writer_of(system), planner=planner, **how)
        return [
            FileEntry(
                path=f"{staging.prefix}{name}/{path}",
                component=key,
                index=ranks.rank,
                rank=ranks.rank,
                members=(ranks.rank,),
                bytes=file.bytes,
                digest=file.digest,
                format="dcp",
            )
            for path, file in sorted(system.written.items())
        ]

    return [entry for entries in together(ranks, what, write) for entry in entries]


def write_whole(folder: Folder, state: Any) -> None:
    """One process's state, as a checkpoint of torch.distributed.checkpoint's own."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp import FolderSystem, writer_of

    # Others read it, so it has no marks of ours.
    with _alone_or_not(Alone()) as how:
        save(state, storage_writer=writer_of(FolderSystem(folder)), **how)


class ShardedFiles:
    """The files of a component, which have been checked. Each rank looks at its share of them.

    allow_pickle: read objects of any class.
    Raises: CheckpointCorrupt; UsageError for metadata that is not read unasked, because that may run code.
    """

    def __init__(self, ranks: Ranks, folder: Folder, files: Sequence[FileEntry], *, allow_pickle: bool = False) -> None:
        from .dcp import reader_of

        for at, entry in enumerate(files):
            check_file(folder, entry, digest=at % ranks.world_size == ranks.rank)
        self._ranks, self._allow_pickle = ranks, allow_pickle
        self._place = folder.child(files[0].path.rpartition("/")[0])
        self._reader = reader_of(self._place, allow_pickle=allow_pickle)

    def read_into(self, component: StateComponent) -> None:
        """Load the component, whatever world wrote it. Collective.

        Raises: UsageError for objects of classes that are not loaded unasked; CheckpointCorrupt, CheckpointError.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        from .dcp import PlainLoadPlanner

        where = self._place.path
        state = component.stateful.state_dict()
        planner = PlainLoadPlanner(where=where, allow_pickle=self._allow_pickle)
        with _alone_or_not(self._ranks) as how, _raising_its_cause(where):
            load(state, storage_reader=self._reader, planner=planner, **how)
        component.stateful.load_state_dict(state)


def read_whole(folder: Folder, *, allow_pickle: bool = False) -> dict[str, Any]:
    """A state that torch.distributed.checkpoint wrote, as one process sees it whole. Raises: as `ShardedFiles`."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from .dcp import WholeLoadPlanner, reader_of

    state: dict[str, Any] = {}
    reader = reader_of(folder, allow_pickle=allow_pickle)
    planner = WholeLoadPlanner(where=folder.path, allow_pickle=allow_pickle)
    with _alone_or_not(Alone()) as how, _raising_its_cause(folder.path):
        _load_state_dict(state, storage_reader=reader, planner=planner, **how)
    return state


@contextmanager
def _raising_its_cause(where: str) -> Iterator[None]:
    """torch.distributed.checkpoint gathers what its ranks raised into a BaseException: raise the first of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, SkywardError) or not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(
            f"{where}: cannot be loaded (rank {rank}): {type(cause).__name__}: {cause}", path=where
        ) from cause


@contextmanager
def _alone_or_not(ranks: Ranks) -> Iterator[dict[str, Any]]:
    if ranks.world_size > 1:
        yield {"process_group": getattr(ranks, "group", None)}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: that is what no_dist says
        yield {"no_dist": True}
