"""No code in a checkpoint's pickles runs unless pickles are allowed."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.cli import main
from skyward.errors import SkywardError, UsageError
from skyward.stores.folders import digest_of_file, folder_at
from skyward.training import TrainingArguments
from skyward.training.checkpoint import (
    CheckpointCoordinator,
    CheckpointManager,
    Manifest,
    best_of,
    checkpoints_in,
    differences,
    export_checkpoint,
    latest_checkpoint,
    migrate_checkpoint,
    problems,
    prune,
)
from skyward.training.checkpoint.sharded import write_whole
from skyward.training.checkpoint.writer import check_is_zip
from skyward.training.frameworks.lightning.checkpoint_io import lightning_checkpoint_io
from tests.training.checkpoint.states import Box, part
from tests.training.trainer.regression import trainer

ASSETS = Path(__file__).parent / "assets"
MARK = "skyward-payload"

_seen: list[str] = []
_is_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Install one audit hook for all tests, because hooks cannot be removed.

    It notes a payload's actions and imports.
    """
    if _is_watching and (
        (event == "pickle.find_class" and arguments[1:] in PAYLOADS.values())
        or (event in ("os.mkdir", "os.system", "exec", "compile") and MARK in str(arguments))
    ):
        _seen.append(f"{event} {arguments!r:.100}")


sys.addaudithook(_audit)

PAYLOADS = {
    "mkdir": ("posix", "mkdir"),
    "dotted": ("torch", "os.mkdir"),
    "eval": ("builtins", "eval"),
    "getattr": ("builtins", "getattr"),
}


@contextmanager
def watching() -> Iterator[list[str]]:
    global _is_watching
    _seen.clear()
    _is_watching = True
    try:
        yield _seen
    finally:
        _is_watching = False


def payload(kind: str, *, protocol: int = 4) -> bytes:
    """Return a pickle that would make a folder. From protocol 4 on a name may have dots in it."""
    module, name = PAYLOADS[kind]
    argument = f"__import__('os').mkdir('{MARK}')" if kind == "eval" else MARK
    if protocol == 2:
        return f"\x80\x02c{module}\n{name}\nX{chr(len(argument))}\0\0\0{argument}\x85R.".encode("latin-1")
    texts = [f"\x8c{chr(len(text))}{text}" for text in (module, name, argument)]
    return f"\x80\x04{texts[0]}{texts[1]}\x93{texts[2]}\x85R.".encode("latin-1")


def in_torchs_file(kind: str) -> bytes:
    """Replace the pickle in a zip file that torch.save wrote."""
    whole, out = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.ones(2)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = payload(kind, protocol=2) if name.endswith("data.pkl") else old.read(name)
            new.writestr(name, data)
    return out.getvalue()


def rewrite(checkpoint: Path, file: Path, data: bytes) -> None:
    """Replace a file, and change the manifest to match it."""
    file.write_bytes(data)
    manifest = checkpoint / "checkpoint_manifest.json"
    raw = json.loads(manifest.read_text())
    raw.pop("digest", None)
    for entry in raw["files"]:
        if checkpoint / entry["path"] == file:
            entry |= {"bytes": len(data), "digest": digest_of_file(folder_at(file.parent), file.name)}
    raw["commit_number"] = 0
    again = Manifest.from_json(json.dumps(raw).encode(), where=str(checkpoint))
    manifest.write_bytes(Manifest(**{**vars(again), "commit_number": 1}).to_json())


def with_dcp(folder: Path) -> Path:
    """Make a checkpoint with a `sharded` state of torch.distributed.checkpoint, and plain ones."""
    shutil.copytree(ASSETS / "v2-store", folder, dirs_exist_ok=True)
    return folder / "checkpoint-11"


def in_metadata(folder: Path, kind: str) -> Path:
    path = with_dcp(folder)
    rewrite(path, next(path.glob("*/sharded.dcp/.metadata")), payload(kind))
    return path


def in_bytes_of_dcp(folder: Path, kind: str) -> Path:
    """Replace a value that is no tensor, which is a separate pickle in DCP's files."""
    path = with_dcp(folder)
    place = next(path.glob("*/sharded.dcp"))
    shutil.rmtree(place)
    write_whole(folder_at(place), {"weight": torch.zeros(16), "lr": 0.5})
    raw = json.loads((path / "checkpoint_manifest.json").read_text())
    (first,) = place.glob("*.distcp")
    entry = next(each for each in raw["files"] if each["format"] == "dcp")
    raw["files"] = [each for each in raw["files"] if each["format"] != "dcp"]
    for file in (first, place / ".metadata"):
        raw["files"].append(entry | {"path": str(file.relative_to(path))})
    (path / "checkpoint_manifest.json").write_text(json.dumps(raw))
    metadata = pickle.loads((place / ".metadata").read_bytes())
    data = bytearray(first.read_bytes())
    at = next(info for index, info in metadata.storage_data.items() if index.fqn == "lr")
    evil = in_torchs_file(kind)
    at.offset, at.length = len(data), len(evil)
    rewrite(path, first, bytes(data) + evil)
    rewrite(path, place / ".metadata", pickle.dumps(metadata))
    return path


def in_a_state(folder: Path, kind: str) -> Path:
    path = with_dcp(folder)
    rewrite(path, next(path.glob("*/optimizer_state.pt")), in_torchs_file(kind))
    return path


def in_a_raw_pickle(folder: Path, kind: str) -> Path:
    """Write a raw pickle without a zip file, which torch reads for old files."""
    path = with_dcp(folder)
    rewrite(path, next(path.glob("*/optimizer_state.pt")), payload(kind, protocol=2))
    return path


def without_manifest(folder: Path, kind: str) -> Path:
    path = folder / "checkpoint-3"
    path.mkdir(parents=True)
    (path / "optimizer_state.pt").write_bytes(in_torchs_file(kind))
    return path


def of_dcp_alone(folder: Path, kind: str) -> Path:
    path = folder / "checkpoint-3"
    write_whole(folder_at(path), {"weight": torch.zeros(16)})
    (path / ".metadata").write_bytes(payload(kind))
    return path


def of_hugging_face(folder: Path, kind: str) -> Path:
    path = folder / "checkpoint-3"
    path.mkdir(parents=True)
    for name in ("optimizer.pt", "pytorch_model.bin", "scheduler.pt"):
        (path / name).write_bytes(in_torchs_file(kind))
    return path


def components() -> list[Any]:
    return [
        part("sharded", Box({"weight": torch.zeros(16), "lr": 0.0}), "per_rank", required=False),
        part("optimizer", Box({}), "global", required=False),
    ]


def read_in_every_way(path: Path, scratch: Path) -> list[str]:
    """Use every way to read a checkpoint. Returns the result of each."""
    run = path.parent

    def command(*words: object) -> Callable[[], int]:
        return lambda: main(["checkpoint", *map(str, words)])

    def load(**options: Any) -> Callable[[], Any]:
        return lambda: CheckpointCoordinator(components()).load_checkpoint(path, **options)

    def export(key: str, to: Any) -> Callable[[], str]:
        return lambda: export_checkpoint(path, scratch / f"{to}-{key}", to=to, components=(key,))

    def whole_run() -> CheckpointCoordinator:
        return CheckpointCoordinator(components(), output_dir=run)

    ways: dict[str, Callable[[], Any]] = {
        "ls": command("ls", run),
        "show": command("show", path),
        "verify": command("verify", path),
        "diff": command("diff", path, path),
        "migrate": command("migrate", path, scratch / "migrated"),
        "export": command("export", path, scratch / "out", "--component", "sharded"),
        **{f"export {key}": export(key, "safetensors") for key in ("sharded", "optimizer", "model")},
        **{f"export to {to}": export("sharded", to) for to in ("torch", "dcp")},
        "differences": lambda: list(differences(path, path)),
        "problems": lambda: problems(path),
        "migrate_checkpoint": lambda: migrate_checkpoint(path, scratch / "again"),
        "latest": lambda: latest_checkpoint(run),
        "best_of": lambda: best_of(checkpoints_in(run), "loss"),
        "load the newest": lambda: whole_run().load_checkpoint(),
        "load": load(),
        "load not strictly": load(strict=False),
        "load DCP": load(only=["sharded"]),
        "load a state": load(only=["optimizer"]),
        "reshard": load(resharders={"optimizer": lambda states, *_: states[0]}),
        "resume": lambda: CheckpointManager(whole_run()).resume(),
        "Trainer": lambda: trainer(scratch / "train", max_steps=1, resume_from_checkpoint=str(path)).train(),
        "lightning": lambda: lightning_checkpoint_io().load_checkpoint(str(path)),
        "prune": lambda: prune(run, keep=1, protect=[]),
    }
    said = []
    for name, act in ways.items():
        try:
            act()
            said.append(f"{name}: done")
        except SkywardError as error:
            said.append(f"{name}: {type(error).__name__}")
    return said


PLACES = (
    in_metadata,
    in_bytes_of_dcp,
    in_a_state,
    in_a_raw_pickle,
    without_manifest,
    of_dcp_alone,
    of_hugging_face,
)


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_no_way_to_read_a_checkpoint_runs_code_in_it(
    place: Callable[[Path, str], Path], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path / "run", kind)
    with watching() as seen:
        said = read_in_every_way(path, tmp_path)
    assert seen == []
    assert not Path(MARK).exists()
    assert "problems: done" in said or place is of_hugging_face or place is of_dcp_alone
    assert any(each.endswith("UsageError") for each in said) or place is of_hugging_face, said


@pytest.mark.parametrize("place", [in_metadata, in_bytes_of_dcp, in_a_state, of_dcp_alone])
def test_the_payload_runs_if_pickles_are_allowed(
    place: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the refusal kept the payload from running, and not a mistake of the other test."""
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path / "run", "mkdir")
    with watching() as seen, suppress(Exception):
        if place is of_dcp_alone:
            main(["checkpoint", "migrate", str(path), str(tmp_path / "ours"), "--allow-pickle"])
        else:
            main(["checkpoint", "diff", str(path), str(path), "--allow-pickle"])
    assert Path(MARK).is_dir()
    assert seen


def test_the_refusal_names_the_file_and_the_refused_name(tmp_path: Path) -> None:
    path = in_metadata(tmp_path, "mkdir")
    with pytest.raises(UsageError, match=r"sharded.dcp/.metadata: names posix.mkdir.*allow_pickle=True"):
        list(differences(path, path))


def test_a_torch_that_runs_code_of_old_files_reads_only_the_present_format() -> None:
    """Torch before 2.6 has this problem."""
    for is_zip in (True, False):
        file = io.BytesIO()
        torch.save({"weight": torch.ones(2)}, file, _use_new_zipfile_serialization=is_zip)
        file.seek(0)
        if is_zip:
            check_is_zip(file, "it")
            assert file.tell() == 0
        else:
            with pytest.raises(UsageError, match="it: is in a format from before torch 1.6"):
                check_is_zip(file, "it")


def test_the_arguments_of_a_trainer_have_no_pickles() -> None:
    assert not any("pickle" in name for name in vars(TrainingArguments("x")))
