"""Methods that checkpoint.py compares: ways to save the state of one process and to load it again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from skyward.training.checkpoint import CheckpointCoordinator, SharingPattern, StateComponent

__all__ = ["Method", "Orbax", "State", "lightning_async", "methods", "state_of"]

State = dict[str, torch.Tensor]
Wait = Callable[[], object]


@dataclass
class Method:
    """One way to save and load a checkpoint.

    `save` writes to a folder and returns a function that waits until the checkpoint is durable. `load` returns the
    state. The seconds of each round are kept by its number.
    """

    name: str
    save: Callable[[State, Path], Wait]
    load: Callable[[Path], State] | None = None
    blocked: dict[int, float] = field(default_factory=dict)
    durable: dict[int, float] = field(default_factory=dict)
    loaded: dict[int, float] = field(default_factory=dict)
    peak_mib: list[float] = field(default_factory=list)
    bytes: int = 0


def state_of(mib: int, device: str) -> State:
    """Make a state with the sizes of a transformer: a few large tensors and many small ones."""
    torch.manual_seed(0)
    large = 16
    each = (mib << 20) // 4 // large
    state = {f"layer.{at}.weight": torch.randn(each, device=device) for at in range(large)}
    return state | {f"layer.{at}.norm": torch.randn(768, device=device) for at in range(200)}


def methods(like: State) -> list[Method]:
    """Return the methods to compare.

    torch.distributed.checkpoint loads into `like`, a state of the same shapes.
    """
    ours = {
        f"skyward {kind}{', async' if is_async else ''}": _Skyward(kind, is_async=is_async)
        for kind in ("torch", "safetensors")
        for is_async in (False, True)
    }

    def dcp_load(folder: Path) -> State:
        state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        dcp.load(state, checkpoint_id=folder)
        return state

    # On a GPU, DefaultStager of torch 2.11 fails with KeyError: <class 'type'>.
    is_on_gpu = next(iter(like.values())).is_cuda
    fresh = BlockingAsyncStager() if is_on_gpu else None
    cached = BlockingAsyncStager(cache_staged_state_dict=True) if is_on_gpu else DefaultStager(PLAIN)
    return [
        Method("raw write + fsync", raw),
        Method("torch.save", torch_save, lambda folder: torch.load(folder / "state.pt", weights_only=True)),
        Method("safetensors", safetensors_save, safetensors_load),
        Method("DCP", dcp_save, dcp_load),
        Method("DCP async", dcp_async(fresh), dcp_load),
        Method(
            "DCP async, cached",
            dcp_async(cached),
            dcp_load,
        ),
        *(Method(name, each.save, each.load) for name, each in ours.items()),
    ]


def done() -> None:
    """Wait for nothing."""


def raw(state: State, folder: Path) -> Wait:
    folder.mkdir()
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return done


def torch_save(state: State, folder: Path) -> Wait:
    folder.mkdir()
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return done


def safetensors_save(state: State, folder: Path) -> Wait:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(state, folder / "state.safetensors")
    flush(folder / "state.safetensors")
    return done


def safetensors_load(folder: Path) -> State:
    """Map the file, then copy it: pages that are only mapped have not been read."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(folder / "state.safetensors").items()}


def dcp_save(state: State, folder: Path) -> Wait:
    dcp.save(state, checkpoint_id=folder)
    return done


def dcp_async(stager: Any) -> Callable[[State, Path], Wait]:
    def save(state: State, folder: Path) -> Wait:
        future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        return lambda: future.result()  # noqa: PLW0108  # of a type that torch does not say

    return save


PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""Options for a host without an accelerator, which keeps its buffers."""


def lightning_async() -> Method:
    """Return Lightning's asynchronous save.

    Raises:
        ImportError: Lightning is missing, or too old.
    """
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO

    def save(state: State, folder: Path) -> Wait:
        folder.mkdir()
        plugin = AsyncCheckpointIO(TorchCheckpointIO())
        plugin.save_checkpoint({"state_dict": state}, folder / "state.ckpt")

        def wait() -> None:
            plugin.teardown()
            flush(folder / "state.ckpt")  # Lightning itself does not flush

        return wait

    def load(folder: Path) -> State:
        state: State = TorchCheckpointIO().load_checkpoint(folder / "state.ckpt", weights_only=True)["state_dict"]
        return state

    return Method("Lightning async", save, load)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class _Holder:
    """Owner of the state that the coordinator saves and loads."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


class _Skyward:
    """skyward's coordinator in a world of one. `kind` is the file's format."""

    def __init__(self, kind: str, *, is_async: bool) -> None:
        self.holder = _Holder({})
        component = StateComponent("model", self.holder, SharingPattern.REPLICATED, metadata={"format": kind})
        self.coordinator = CheckpointCoordinator([component])
        self.is_async = is_async

    def save(self, state: State, folder: Path) -> Wait:
        self.holder.state = state
        if self.is_async:
            self.coordinator.save_checkpoint_async(folder)
            return self.coordinator.wait
        self.coordinator.save_checkpoint(folder)
        return done

    def load(self, folder: Path) -> State:
        self.coordinator.load_checkpoint(folder)
        # A checkpoint that is kept would be freed within the next save and counted as that save's time.
        loaded, self.holder.state = self.holder.state, {}
        return loaded


class Orbax:
    """Orbax in an environment of its own, with arrays of the same sizes. It runs in its turn."""

    def __init__(self, python: str, state: State) -> None:
        sizes = json.dumps({name: tensor.numel() for name, tensor in state.items()})
        script = Path(__file__).with_name("checkpoint_orbax.py")
        self._process = subprocess.Popen(
            [python, script, sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = self._answer()["version"]

    def measure(self, method: Method, folder: Path, turn: int) -> None:
        saved = self._ask(f"save {folder}")
        method.bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        method.blocked[turn], method.durable[turn] = saved["blocked"], saved["durable"]
        method.loaded[turn] = self._ask(f"load {folder}")["loaded"]

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended; run it by hand to see why")
        return json.loads(line)
