"""How torch.distributed.checkpoint writes and reads the values of a state that are no tensors: as `plain` has them.

Its own planners unpickle whatever a file says.
"""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from .plain import to_plain
from .writer import load_plain

__all__ = ["PlainLoadPlanner", "PlainSavePlanner", "WholeLoadPlanner"]


class PlainSavePlanner(DefaultSavePlanner):
    def __init__(self, *, where: str, allow_pickle: bool) -> None:
        super().__init__()
        self._where, self._allow_pickle = where, allow_pickle

    def check(self, state: Any) -> None:
        """Raises: UsageError for a value that could not be loaded again."""
        to_plain(state, where=self._where, allow_pickle=self._allow_pickle)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # its name there
        if write_item.type == WriteItemType.BYTE_IO:
            object = to_plain(object, where=self._where, allow_pickle=self._allow_pickle)  # noqa: A001
        return super().transform_object(write_item, object)


class _ReadsPlainValues(DefaultLoadPlanner):
    def __init__(self, *, where: str, allow_pickle: bool) -> None:
        super().__init__()
        self._where, self._allow_pickle = where, allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_plain(value, where=f"{self._where}: {name}", allow_pickle=self._allow_pickle)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class PlainLoadPlanner(_ReadsPlainValues):
    """Fills a state dict that is there."""


class WholeLoadPlanner(_ReadsPlainValues, _EmptyStateDictLoadPlanner):
    """Makes the state dict from the metadata."""
