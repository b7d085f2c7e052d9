"""States of DTensors (FSDP2, tensor parallel): torch.distributed.checkpoint writes them, and reads them in any world.

Every rank writes its own shards to `<key>.dcp/`. A run with another number of ranks reads the parts that it needs. The
coordinator stages, hashes and commits these files together with all others, so its guarantees cover them too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import CheckpointError, SkywardError
from ...stores.folders import Folder
from ..agree import Alone, Ranks
from .commit import Staging
from .manifest import FileEntry
from .patterns import StateComponent
from .verdicts import together
from .writer import check_file


class ModelState:
    """State of a model with the names of torch.distributed.checkpoint, which omit the prefixes of wrappers. Collective.

    Args:
        model: the model, wrapped or not.
        whole: gather a sharded model's parameters on the CPU of every rank; on loading, each rank takes its part.

    Example:
        StateComponent("model", ModelState(model), SharingPattern.REPLICATED)
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
    """State of an optimizer by its parameters' names, so that a run that shards them differently can load it.

    Args:
        model: the model that the optimizer updates.
        optimizer: the optimizer.
        whole: gather the state on the CPU of every rank, as in `ModelState`.

    Example:
        StateComponent("optimizer", OptimizerState(model, optimizer), SharingPattern.REPLICATED)
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
    """Write the shards of a component, and return the entries of all ranks' files. Collective."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp import FolderSystem, PlainSavePlanner, writer_of

    name = f"{key}.dcp"
    system = FolderSystem(staging.folder.child(name))
    planner = PlainSavePlanner(where=f"StateComponent {key!r}", allow_pickle=allow_pickle)
    together(ranks, what, lambda: planner.check(state))  # a phase of its own, because errors in `save` lose their class

    def write() -> list[FileEntry]:
        # `save` gathers the errors of all ranks itself, so a failed rank leaves none waiting in one of its exchanges.
        with _dcp_options(ranks) as options:
            save(state, storage_writer=writer_of(system), planner=planner, **options)
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
    """Write a state of one process as an ordinary checkpoint of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp import FolderSystem, writer_of

    # Without the marks of `plain`, because other programs read it.
    with _dcp_options(Alone()) as options:
        save(state, storage_writer=writer_of(FolderSystem(folder)), **options)


class ShardedFiles:
    """Files of a component, checked on creation. Each rank checks its share of them.

    Raises:
        CheckpointCorrupt: a file is missing or changed.
        UsageError: the metadata needs `allow_pickle`, because it may run code.
    """

    def __init__(self, ranks: Ranks, folder: Folder, files: Sequence[FileEntry], *, allow_pickle: bool = False) -> None:
        from .dcp import reader_of

        for at, entry in enumerate(files):
            check_file(folder, entry, digest=at % ranks.world_size == ranks.rank)
        self._ranks, self._allow_pickle = ranks, allow_pickle
        self._place = folder.child(files[0].path.rpartition("/")[0])
        self._reader = reader_of(self._place, allow_pickle=allow_pickle)

    def read_into(self, component: StateComponent) -> None:
        """Load the component, whatever world size wrote it. Collective.

        Raises:
            UsageError: an object needs `allow_pickle`.
            CheckpointCorrupt: a file is damaged.
            CheckpointError: loading failed on a rank.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        from .dcp import PlainLoadPlanner

        where = self._place.path
        state = component.stateful.state_dict()
        planner = PlainLoadPlanner(where=where, allow_pickle=self._allow_pickle)
        with _dcp_options(self._ranks) as options, _raising_cause(where):
            load(state, storage_reader=self._reader, planner=planner, **options)
        component.stateful.load_state_dict(state)


def read_whole(folder: Folder, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read a whole state that torch.distributed.checkpoint wrote. It raises the errors of `ShardedFiles`."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from .dcp import WholeLoadPlanner, reader_of

    state: dict[str, Any] = {}
    reader = reader_of(folder, allow_pickle=allow_pickle)
    planner = WholeLoadPlanner(where=folder.path, allow_pickle=allow_pickle)
    with _dcp_options(Alone()) as options, _raising_cause(folder.path):
        _load_state_dict(state, storage_reader=reader, planner=planner, **options)
    return state


@contextmanager
def _raising_cause(where: str) -> Iterator[None]:
    """Raise the first rank's error: torch.distributed.checkpoint wraps the errors of all ranks in a BaseException."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, SkywardError) or not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(
            f"{where}: rank {rank} cannot load it ({type(cause).__name__}: {cause}); check that every rank can read "
            "this folder, or resume from an earlier checkpoint",
            path=where,
        ) from cause


@contextmanager
def _dcp_options(ranks: Ranks) -> Iterator[dict[str, Any]]:
    if ranks.world_size > 1:
        yield {"process_group": getattr(ranks, "group", None)}
        return
    with warnings.catch_warnings():
        # torch warns that it is disabled, which is the purpose of no_dist.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield {"no_dist": True}
