"""Save the declared states of all ranks as one checkpoint, and load them again."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from ...errors import CheckpointNotFound, UsageError
from ...stores.folders import folder_at
from ..agree import Ranks, ranks_of_this_process
from ..snapshot import SnapshotPool
from .files import FileCheckpoints, OnBusy, sweep_folder
from .layout import checkpoints_in, name_of
from .load import LoadReport, Resharder
from .manifest import manifest_fields
from .patterns import SharingPattern, StateComponent
from .save import SaveRequest
from .topology import ranks_of_groups
from .verdicts import together


class CheckpointCoordinator:
    """Checkpoints of one run. All ranks create it, and call its methods at the same places.

    Args:
        state_components: parts of a checkpoint; the same on all ranks.
        process_groups: groups for PER_GROUP, by name. Each value is this rank's process group of torch.distributed, or
            the ranks of all such groups as lists (`{"dp": [[0, 4], [1, 5], ...]}`).
        dist: a `skyward.training.Ranks`. With None, or any other value, the ranks are those of torch's default process
            group, or a world of one if there is no group.
        output_dir: parent of the folders `checkpoint-<id>`: a path, or a URL of an object store that fsspec knows.
        on_each_node: whether `output_dir` is on a disk of each node. States that ranks share are then written on every
            node.
        step: returns the run's step, which names a checkpoint whose id is not passed.
        on_busy: behaviour of an asynchronous save while another one is being written; see `save_checkpoint_async`.
        pool: takes the snapshots of asynchronous saves; it can be shared with other users of snapshots.
        metadata: plain values for every manifest. `step`, `epoch`, `training_args_hash` and `is_finite` become fields
            of it. Without `is_finite`, the losses among `metrics` decide whether a run may resume from a checkpoint.
        allow_pickle: save and load objects of any class. Loading them can run code, so use it only for checkpoints that
            you trust.

    Raises:
        UsageError: components contradict each other, or name unknown groups.

    Example:
        coordinator = CheckpointCoordinator(
            [StateComponent("model", model, SharingPattern.REPLICATED)],
            output_dir="out",
        )
        coordinator.save_checkpoint(checkpoint_id=100)
        coordinator.load_checkpoint()
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
        """Write a checkpoint, and return when it is durable. Collective.

        Args:
            checkpoint_path: folder of the checkpoint. None: `output_dir/checkpoint-<checkpoint_id>`. An existing one is
                replaced as a whole.
            checkpoint_id: None: the run's step, or the number after the newest checkpoint.
            validate: compare all replicas, even of components that do not ask for it.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointSaveFailed: a rank could not write. All errors are raised on all ranks, and nothing is committed.
            CheckpointSuperseded: a newer attempt of this job saves there; see `SKYWARD_CHECKPOINT_WRITER`.
            ReplicationMismatch: replicas differ.
            UsageError: a state cannot be loaded again, or an argument is wrong.

        Example:
            path = coordinator.save_checkpoint(checkpoint_id=100)
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
        """Copy the states and return; a thread writes them. Collective.

        One save is written at a time. A second one waits for it, or is left out on all ranks with `on_busy="skip"`.

        Args:
            checkpoint_path: as in `save_checkpoint`.
            checkpoint_id: as in `save_checkpoint`.
            validate: as in `save_checkpoint`.
            is_needed: never leave this save out, for example because it is the last or the best one.
            metadata: plain values for this manifest, in addition to the coordinator's.
            after: called with the path after the commit, on every rank, in the thread that writes.

        Returns:
            False if the save was left out.

        Raises:
            Exception: the error of the previous save. An error of this one is raised by the next save, `poll`, `wait`,
                `load_checkpoint` or `close`.

        Example:
            for step in range(1000):
                train_step()
                coordinator.poll()
                if step % 100 == 0:
                    coordinator.save_checkpoint_async(checkpoint_id=step)
        """
        self.poll()
        if self.files.is_pending and self._on_busy == "skip" and not is_needed:
            return False
        self.files.write_behind(self._request(checkpoint_path, checkpoint_id, validate, metadata), after=after)
        return True

    def poll(self) -> str | None:
        """Check on the pending save; call it at every step of a loop that saves asynchronously.

        Collective while a save is pending: all ranks call it at the same steps.

        Returns:
            The path of a save that has ended on all ranks since, otherwise None.

        Raises:
            Exception: the error of the pending save, the same on all ranks.
        """
        return self.files.poll()

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Wait for the pending save.

        Args:
            timeout_s: longest wait in seconds; None: no limit.

        Returns:
            The path of the committed checkpoint; None if no save was pending.

        Raises:
            CheckpointSaveFailed: the save failed, or is not durable within `timeout_s`. Other errors of the save are
                raised as themselves, as by `poll`.
        """
        return self.files.wait(timeout_s)

    def close(self) -> None:
        """Wait for the pending save. It raises that save's error, as `poll` does, and can be called twice."""
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
        """Load a checkpoint, by default the newest, into the components. Collective.

        Args:
            checkpoint_path: folder or URL of the checkpoint. None: the newest one in `output_dir`.
            strict: raise an error if a required component is missing in the checkpoint. False: warn and continue.
            only: keys of the components to load; None: all.
            skip: keys of components to leave out.
            resharders: by key: functions that make a rank's state from the states of another number of ranks.

        Returns:
            A report of the loaded and the skipped components.

        Raises:
            CheckpointNotFound: no complete checkpoint is there, or a required component is missing in it.
            CheckpointCorrupt: a file is missing or changed.
            CheckpointMismatch: states do not fit this number of ranks, or this pattern.
            UsageError: an unknown key, or a state that needs `allow_pickle`. Each of these errors is raised on all
                ranks before any component changes.

        Example:
            report = coordinator.load_checkpoint(skip=["optimizer"])
            print(report.step)
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
        """Return the path of the newest checkpoint, as by `latest_checkpoint`; None if there is none. Collective."""
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
        """Return the parent folder, swept, and the name of the checkpoint. All ranks use rank 0's answer."""
        if path is not None:
            folder, name = folder_at(path).parent()
        elif self.output_dir is None:
            raise UsageError("output_dir=None: no folder to save to; set output_dir=, or pass checkpoint_path=")
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
                raise UsageError(
                    f"checkpoint_id={text!r}: cannot be part of a folder's name; "
                    "use a text without '/' that does not start with '.'"
                )
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
                f"output_dir={self.output_dir!r}: no complete checkpoint is there; save one, or pass checkpoint_path=",
                path=self.output_dir or "",
            )
        return latest

    def _check(self, process_groups: Mapping[str, Any]) -> None:
        for component in self.state_components:
            if not hasattr(component, "sharing_pattern"):
                raise UsageError(
                    f"state_components=[...]: {type(component).__name__!r} is not a component; write "
                    'StateComponent("model", model, SharingPattern.GLOBAL)'
                )
        keys = [state_component.key for state_component in self.state_components]
        duplicates = sorted({key for key in keys if keys.count(key) > 1})
        if duplicates:
            raise UsageError(
                f"state_components=[...]: several have the key {duplicates[0]!r}; give each component a key of its own"
            )
        for component in self.state_components:
            name = component.process_group_name
            if component.sharing_pattern is SharingPattern.PER_GROUP and name not in process_groups:
                raise UsageError(
                    f"process_group_name={name!r}: StateComponent {component.key!r} names an unknown group; "
                    f"use one of process_groups: {sorted(process_groups)}"
                )

    def _check_keys(self, *keys_of_options: Collection[str]) -> None:
        known = [state_component.key for state_component in self.state_components]
        for key in (key for keys in keys_of_options for key in keys):
            if key not in known:
                raise UsageError(f"key={key!r}: not a component of this run; use one of {known}")


def components_of(provider: Any) -> list[StateComponent]:
    """Return a provider's `get_state_components()`.

    Args:
        provider: an object with that method, or with `state_dict()` and `load_state_dict()`: it is then a single GLOBAL
            component with the key "state".

    Example:
        coordinator = CheckpointCoordinator(components_of(trainer), process_groups_of(trainer), output_dir="out")
    """
    declare = getattr(provider, "get_state_components", None)
    if callable(declare):
        return list(declare())
    return [StateComponent("state", provider, SharingPattern.GLOBAL)]


def process_groups_of(provider: Any) -> dict[str, Any]:
    """Return a provider's `get_process_groups()`.

    Args:
        provider: any object. The result is empty if it lacks the method.

    Example:
        coordinator = CheckpointCoordinator(components_of(trainer), process_groups_of(trainer), output_dir="out")
    """
    give = getattr(provider, "get_process_groups", None)
    return dict(give()) if callable(give) else {}
