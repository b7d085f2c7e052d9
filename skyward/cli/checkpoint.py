"""`skyward checkpoint`: list, show, verify, compare and convert checkpoints of training runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "list, verify, compare and convert checkpoints"

DESCRIPTION = """\
Inspects and converts checkpoints of training runs, on disk or in an object store (s3://... or any URL that fsspec
opens). No command unpickles data that could run code, unless you pass --allow-pickle.
"""

EPILOG = """\
examples:
  skyward checkpoint ls out
  skyward checkpoint show out/checkpoint-100
  skyward checkpoint verify out/checkpoint-100 s3://bucket/run/checkpoint-100
  skyward checkpoint diff out/checkpoint-100 out/checkpoint-200
  skyward checkpoint migrate old/checkpoints/checkpoint-100 out/checkpoint-100
  skyward checkpoint export out/checkpoint-100 weights --format safetensors

exit status: 0 success, 1 a checkpoint is damaged, or two checkpoints differ
from Python: skyward.training.checkpoint: checkpoints_in(), problems(), differences(), migrate_checkpoint(),
export_checkpoint()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    unsafe = "load objects of any class; runs code from the files"
    ls = _add(actions, "ls", "list the complete checkpoints of a run, oldest first", "ls out")
    ls.add_argument("output_dir", help="output_dir of the run")
    ls.set_defaults(run=_refusing(_ls))
    show = _add(actions, "show", "list the components of a checkpoint", "show out/checkpoint-100")
    show.add_argument("path", help="a checkpoint: folder or URL")
    show.add_argument("--json", action="store_true", help="print the manifest as JSON")
    show.set_defaults(run=_refusing(_show))
    verify = _add(actions, "verify", "check that every file is present and unchanged", "verify out/checkpoint-100")
    verify.add_argument("path", nargs="+", help="checkpoints: folders or URLs")
    verify.add_argument("--quick", action="store_true", help="compare sizes only")
    verify.set_defaults(run=_refusing(_verify))
    diff = _add(actions, "diff", "compare the states of two checkpoints", "diff out/checkpoint-100 out/checkpoint-200")
    diff.add_argument("first", help="a checkpoint: folder or URL")
    diff.add_argument("second", help="the checkpoint to compare it with")
    diff.add_argument("--allow-pickle", action="store_true", help=unsafe)
    diff.set_defaults(run=_refusing(_diff))
    migrate = _add(
        actions,
        "migrate",
        "convert a checkpoint of an older layout, of Hugging Face or of DCP to skyward's",
        "migrate old/checkpoint-100 out/checkpoint-100 --rename net=model",
    )
    migrate.add_argument("source", help="the checkpoint to read: folder or URL")
    migrate.add_argument("target", help="folder or URL to write; must not exist")
    migrate.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW", help="rename a component; repeatable"
    )
    migrate.add_argument("--allow-pickle", action="store_true", help=unsafe)
    migrate.set_defaults(run=_refusing(_migrate), parser=migrate)
    export = _add(
        actions,
        "export",
        "write components in a format that other programs read",
        "export out/checkpoint-100 weights --format torch --component model",
    )
    export.add_argument("source", help="the checkpoint to read: folder or URL")
    export.add_argument("target", help="folder or URL to write; must not exist")
    export.add_argument(
        "--format", choices=("safetensors", "torch", "dcp"), default="safetensors", help="format of the files"
    )
    export.add_argument(
        "--component",
        action="append",
        default=[],
        metavar="KEY",
        help="component to export; repeatable (default: model)",
    )
    export.add_argument("--allow-pickle", action="store_true", help=unsafe)
    export.set_defaults(run=_refusing(_export))


def _add(actions: _Actions, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    description, epilog = f"{summary[0].upper()}{summary[1:]}.", f"example: skyward checkpoint {example}"
    return actions.add_parser(name, help=summary, description=description, epilog=epilog)


def _refusing(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Print an OSError of a disk or store in one line, like every other error."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return act(arguments)
        except OSError as error:
            from .screen import complain

            complain(error)
            return 1

    return run


def _ls(arguments: argparse.Namespace) -> int:
    from ..stores.folders import folder_at
    from ..training.checkpoint.layout import checkpoints_in, manifest_at
    from .screen import complain, table

    rows = []
    for saved in checkpoints_in(arguments.output_dir):
        manifest = saved.manifest if saved.manifest.files else manifest_at(folder_at(saved.path))
        metrics = manifest.metadata.get("metrics", {})
        shown = " ".join(f"{name}={value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
        shown += "" if saved.is_sound else " not finite"
        rows.append([saved.path, manifest.timestamp[:19], str(manifest.world_size), _size(manifest.total_bytes), shown])
    if not rows:
        complain(f"{arguments.output_dir}: no complete checkpoint is there; name the output_dir of a run")
        return 1
    print("\n".join(table(["checkpoint", "written (UTC)", "ranks", "size", "metrics"], rows, right=[2, 3])))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..stores.folders import folder_at
    from ..training.checkpoint.inspection import describe
    from ..training.checkpoint.layout import manifest_at
    from .screen import table

    manifest = manifest_at(folder_at(arguments.path))
    if arguments.json:
        print(json.dumps(json.loads(manifest.to_json()), indent=2))
        return 0
    print(f"{arguments.path}: format {manifest.format_version}, step {manifest.step}, {manifest.world_size} ranks,")
    print(f"  written {manifest.timestamp} by skyward {manifest.skyward_version}, torch {manifest.pytorch_version}")
    rows = [[key, pattern, ranks, kind, _size(size)] for key, pattern, ranks, kind, size in describe(manifest)]
    print("\n".join(table(["component", "sharing", "written by", "format", "size"], rows, right=[4])))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..errors import CheckpointError
    from ..training.checkpoint.inspection import problems

    status = 0
    for path in arguments.path:
        try:
            faults = problems(path, digests=not arguments.quick)
        except CheckpointError as error:
            faults = [str(error)]
        print("\n".join(faults) if faults else f"{path}: complete{' (sizes only)' if arguments.quick else ''}")
        status = 1 if faults else status
    return status


def _diff(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint.inspection import differences

    status = 0
    for difference in differences(arguments.first, arguments.second, allow_pickle=arguments.allow_pickle):
        print(f"{difference.component}{' ' if difference.path else ''}{difference.path}: {difference.what}")
        status = 1
    return status


def _migrate(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint.migrate import migrate_checkpoint

    keys = {}
    for rename in arguments.rename:
        old, separator, new = rename.partition("=")
        if not separator:
            arguments.parser.error(f"--rename {rename}: has no '='; write --rename OLD=NEW")
        keys[old] = new
    allow_pickle = arguments.allow_pickle
    print(migrate_checkpoint(arguments.source, arguments.target, keys=keys, allow_pickle=allow_pickle))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint.migrate import export_checkpoint

    components = tuple(arguments.component) or ("model",)
    print(
        export_checkpoint(
            arguments.source,
            arguments.target,
            to=arguments.format,
            components=components,
            allow_pickle=arguments.allow_pickle,
        )
    )
    return 0


def _size(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"
