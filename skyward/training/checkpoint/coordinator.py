"""Saves the declared states of all ranks as one checkpoint, and loads them again."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from ...errors import CheckpointNotFound, UsageError
from ..agree import Ranks, ranks_of_this_process
from ..snapshot import SnapshotPool
from .files import FileCheckpoints, OnBusy, sweep_folder
from .folders import folder_at
from .layout import checkpoints_in, name_of
from .load import LoadReport, Resharder
from .manifest import manifest_fields
from .patterns import SharingPattern, StateComponent
from .save import SaveRequest
from .topology import ranks_of_groups
from .verdicts import together

__all__ = ["CheckpointCoordinator", "LoadReport", "components_of", "process_groups_of"]


class CheckpointCoordinator:
    """Checkpoints of one run. All ranks make it, and call its methods, at the same places.

    state_components: what a checkpoint is made of; the same on all ranks.
    process_groups: by name, for PER_GROUP: this rank's process group of torch.distributed, or the ranks of all such
        groups as lists (`{"dp": [[0, 4], [1, 5], ...]}`).
    dist: the ranks: a `skyward.training.Ranks`; None or anything else is torch's default process group where there is
        one, and otherwise a world of one.
    output_dir: checkpoints are its folders `checkpoint-<id>`; a path, or a URL of an object store that fsspec knows.
    on_each_node: `output_dir` is a disk of each node: what ranks share is written on every node.
    step: gives the run's step, which names a checkpoint where its id is not given.
    on_busy: what an asynchronous save does while another one is being written; see `save_checkpoint_async`.
    pool: takes the snapshots of asynchronous saves; shared with others that take them.
    metadata: kept in every manifest, plain values; `step`, `epoch`, `training_args_hash` and `is_finite` become fields
        of it. Without the latter, losses among its `metrics` say whether a run may go on from a checkpoint.
    allow_pickle: save and load objects of any class. Loading them can run code: for checkpoints that you trust.

    Raises: UsageError for components that contradict one another or name unknown groups.
    """

    def __init__(
        self,
        state_components: Sequence[StateComponent],
        process_groups: Mapping[str, Any] | None = None,
        dist: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        on_each_node: bool = False,
        step: Callable[[], int] | None = None,
        on_busy: OnBusy = "wait",
        pool: SnapshotPool | None = None,
        metadata: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self.state_components = tuple(state_components)
        self.output_dir = None if output_dir is None else os.fspath(output_dir)
        self.metadata = dict(metadata or {})
        self.ranks: Ranks = cast("Ranks", dist) if hasattr(dist, "exchange") else ranks_of_this_process()
        self._groups = ranks_of_groups(process_groups or {}, self.ranks.rank)
        self.on_each_node, self._step, self._allow_pickle = on_each_node, step, allow_pickle
        self._is_swept: set[str] = set()
        self._on_busy: OnBusy = on_busy
        self.files = FileCheckpoints(
            self.output_dir or "", ranks=self.ranks, on_each_node=on_each_node, allow_pickle=allow_pickle, pool=pool
        )
        self._check(process_groups or {})

    def save_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_id: str | int | None = None,
        validate: bool = False,
    ) -> str:
        """Writes a checkpoint, and gives its path when it is durable. Collective.

        checkpoint_path: its folder; else `output_dir/checkpoint-<checkpoint_id>`, whose id is the step, or the
        number after the newest. One that is there already is replaced as a whole.
        validate: compare all replicas, also of components that do not ask for it.

        Raises: CheckpointSaveFailed, ReplicationMismatch, UsageError: the same on all ranks; nothing is committed.
        """
        self.wait()
        return self.files.write(self._request(checkpoint_path, checkpoint_id, validate))

    def save_checkpoint_async(
        self,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_id: str | int | None = None,
        validate: bool = False,
        *,
        is_needed: bool = False,
        metadata: Mapping[str, Any] | None = None,
        after: Callable[[str], None] | None = None,
    ) -> bool:
        """As `save_checkpoint`, but returns when the states are copied; they are written behind the caller.

        One save is written at a time. While it is, another one waits for it, or with `on_busy="skip"` is left out, on
        all ranks alike: False then. is_needed: it is never left out (a last or best one).
        metadata: of this checkpoint, beside the coordinator's. after: called on every rank, in the thread, when it is
        committed.

        Raises: what the save before it has, if that has failed. Its own error is raised by the next save, `poll`,
        `wait`, `load_checkpoint` or `close`.
        """
        self.poll()
        if self.files.is_pending and self._on_busy == "skip" and not is_needed:
            return False
        self.files.write_behind(self._request(checkpoint_path, checkpoint_id, validate, metadata), after=after)
        return True

    def poll(self) -> str | None:
        """For every step of a loop that saves asynchronously: gives the path of a save that has ended meanwhile.

        Collective while one is pending: all ranks call it at the same steps. Raises: what the save has, on all ranks.
        """
        return self.files.poll()

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Until the pending save is committed: its path; None where there was none. Raises: as `poll`."""
        return self.files.wait(timeout_s)

    def close(self) -> None:
        """Waits for the pending save. Raises: as `poll`. May be called again."""
        self.wait()

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str] | None = None,
        strict: bool = True,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        resharders: Mapping[str, Resharder] | None = None,
    ) -> LoadReport:
        """Loads a checkpoint, the newest by default, into the components. Collective.

        strict: False goes on, with a warning, without components that the checkpoint lacks, required ones too.
        only, skip: keys of components to load, and not to load. resharders: by key, make a rank's state from those
        of another number of ranks.

        Raises: CheckpointNotFound, CheckpointCorrupt, CheckpointMismatch, UsageError: the same on all ranks, before
        any component is changed.
        """
        self.wait()
        self._check_keys(only or (), skip, resharders or {})
        keys = {state_component.key for state_component in self.state_components} if only is None else set(only)
        return self.files.load(
            self._path_to_load(checkpoint_path),
            self.state_components,
            strict=strict,
            only=keys - set(skip),
            process_groups=self._groups,
            resharders=resharders,
        )

    def latest(self) -> str | None:
        """The newest checkpoint, as `latest_checkpoint` finds it; None where there is none. Collective."""
        return None if self.output_dir is None else self.files.latest()

    # -----------------------------------------------------------------------------------------------------------------

    def _request(
        self,
        path: str | os.PathLike[str] | None,
        checkpoint_id: str | int | None,
        compare_all: bool,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveRequest:
        places = together(self.ranks, "saving", lambda: self._place(path, checkpoint_id))
        name = places[0][1]
        parent = places[self.ranks.rank if self.on_each_node else 0][0]
        everything = {**self.metadata, **(metadata or {})}
        text = name.removeprefix(name_of(""))
        if "step" not in everything and text.isdigit():
            everything["step"] = int(text)
        return SaveRequest(
            components=self.state_components,
            groups=self._groups,
            parent=parent,
            name=name,
            compare_all=compare_all,
            on_each_node=self.on_each_node,
            allow_pickle=self._allow_pickle,
            about=manifest_fields(everything),
        )

    def _place(self, path: str | os.PathLike[str] | None, checkpoint_id: str | int | None) -> tuple[str, str]:
        """The folder that the checkpoint is to be in, swept, and its name. Those of rank 0 count."""
        if path is not None:
            folder, name = folder_at(path).parent()
        elif self.output_dir is None:
            raise UsageError("output_dir is not set: give it to CheckpointCoordinator, or save to a checkpoint_path")
        else:
            folder, name = folder_at(self.output_dir), name_of(self._id(checkpoint_id))
        if self.files.is_leader and folder.path not in self._is_swept:
            sweep_folder(folder)
            self._is_swept.add(folder.path)
        return folder.path, name

    def _id(self, checkpoint_id: str | int | None) -> str:
        if checkpoint_id is not None:
            text = str(checkpoint_id)
            if not text or "/" in text or text.startswith("."):
                raise UsageError(f"checkpoint_id={text!r}: it becomes the name of a folder")
            return text
        if self._step is not None:
            return str(self._step())
        steps = [
            checkpoint.step
            for checkpoint in checkpoints_in(cast("str", self.output_dir))
            if checkpoint.step is not None
        ]
        return str(max(steps, default=-1) + 1)

    def _path_to_load(self, path: str | os.PathLike[str] | None) -> str:
        if path is not None:
            return os.fspath(path)
        latest = self.latest()
        if latest is None:
            raise CheckpointNotFound(
                f"output_dir={self.output_dir!r}: no whole checkpoint is there", path=self.output_dir or ""
            )
        return latest

    def _check(self, process_groups: Mapping[str, Any]) -> None:
        keys = [state_component.key for state_component in self.state_components]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise UsageError(f"state_components: more than one has the key {twice[0]!r}; keys are unique")
        for component in self.state_components:
            name = component.process_group_name
            if component.sharing_pattern is SharingPattern.PER_GROUP and name not in process_groups:
                raise UsageError(
                    f"StateComponent {component.key!r}: process_group_name={name!r} is not one of process_groups: "
                    f"{sorted(process_groups)}"
                )

    def _check_keys(self, *given: Collection[str]) -> None:
        known = [state_component.key for state_component in self.state_components]
        for key in (key for keys in given for key in keys):
            if key not in known:
                raise UsageError(f"{key!r} is no component of this run: {known}")


def components_of(provider: Any) -> list[StateComponent]:
    """What a provider declares by `get_state_components()`; one without it is one state, of `state_dict()`."""
    declare = getattr(provider, "get_state_components", None)
    if callable(declare):
        return list(declare())
    return [StateComponent("state", provider, SharingPattern.GLOBAL)]


def process_groups_of(provider: Any) -> dict[str, Any]:
    """What it gives by `get_process_groups()`; none where it has no such method."""
    give = getattr(provider, "get_process_groups", None)
    return dict(give()) if callable(give) else {}
