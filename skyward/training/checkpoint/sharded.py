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

from ..agree import Alone, Ranks
from .commit import Staging
from .folders import Folder
from .manifest import FileEntry
from .patterns import StateComponent
from .verdicts import together
from .writer import check_file

__all__ = ["ModelState", "OptimizerState", "check_sharded", "read_sharded", "write_sharded", "write_whole"]


class ModelState:
    """A model's state as torch.distributed.checkpoint names it: without the prefixes of wrappers. Collective."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._model))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self._model, state_dict)


class OptimizerState:
    """An optimizer's state by its parameters' names, so that it can be loaded where they are split otherwise."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._model, self._optimizer))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self._model, self._optimizer, state_dict)


def write_sharded(ranks: Ranks, what: str, staging: Staging, key: str, state: Any) -> list[FileEntry]:
    """Collective. Gives the entries of all ranks' files."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp_files import FolderSystem, writer_of

    name = f"{key}.dcp"
    system = FolderSystem(staging.folder.child(name))

    def write() -> list[FileEntry]:
        # It gathers every rank's error itself, so that none is left in one of its exchanges.
        with _alone_or_not(ranks) as how:
            save(state, storage_writer=writer_of(system), **how)
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

    from .dcp_files import FolderSystem, writer_of

    with _alone_or_not(Alone()) as how:
        save(state, storage_writer=writer_of(FolderSystem(folder)), **how)


def check_sharded(ranks: Ranks, folder: Folder, files: Sequence[FileEntry]) -> None:
    """Each rank looks at its share of the files. Raises: CheckpointCorrupt."""
    for at, entry in enumerate(files):
        check_file(folder, entry, digest=at % ranks.world_size == ranks.rank)


def read_sharded(ranks: Ranks, folder: Folder, component: StateComponent, files: Sequence[FileEntry]) -> None:
    """Into the component, whatever world wrote it. Collective."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from .dcp_files import FolderSystem, reader_of

    state = component.stateful.state_dict()
    place = folder.child(files[0].path.rpartition("/")[0])
    with _alone_or_not(ranks) as how:
        load(state, storage_reader=reader_of(FolderSystem(place)), **how)
    component.stateful.load_state_dict(state)


@contextmanager
def _alone_or_not(ranks: Ranks) -> Iterator[dict[str, Any]]:
    if ranks.world_size > 1:
        yield {"process_group": getattr(ranks, "group", None)}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: that is what no_dist says
        yield {"no_dist": True}
