"""`skyward checkpoint`: lists, shows, verifies, compares and converts checkpoints of training runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

__all__ = ["add_options"]

HELP = "list, verify, compare and convert checkpoints"

DESCRIPTION = """\
Looks at checkpoints of training runs, on disks and in object stores (s3://..., where fsspec knows them). Nothing is
unpickled that could run code, except with --allow-pickle.
"""

EPILOG = """\
examples:
  skyward checkpoint ls out
  skyward checkpoint show out/checkpoint-100
  skyward checkpoint verify out/checkpoint-100 s3://bucket/run/checkpoint-100
  skyward checkpoint diff out/checkpoint-100 out/checkpoint-200
  skyward checkpoint migrate old/checkpoints/checkpoint-100 out/checkpoint-100
  skyward checkpoint export out/checkpoint-100 weights --format safetensors

exit status: 0 all is well, 1 something is wrong with a checkpoint, or two differ
from Python: skyward.training.checkpoint: checkpoints_in(), problems(), differences(), migrate_checkpoint(),
export_checkpoint()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    unsafe = "load objects of any class: runs code of the files"
    ls = actions.add_parser("ls", help="the whole checkpoints of a run, the oldest first")
    ls.add_argument("output_dir")
    ls.set_defaults(run=_refusing(_ls))
    show = actions.add_parser("show", help="what a checkpoint is made of")
    show.add_argument("path")
    show.add_argument("--json", action="store_true", help="the manifest as it is")
    show.set_defaults(run=_refusing(_show))
    verify = actions.add_parser("verify", help="whether all files are there, as they were written")
    verify.add_argument("path", nargs="+")
    verify.add_argument("--quick", action="store_true", help="compare sizes only")
    verify.set_defaults(run=_refusing(_verify))
    diff = actions.add_parser("diff", help="how the states of two checkpoints differ")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.add_argument("--allow-pickle", action="store_true", help=unsafe)
    diff.set_defaults(run=_refusing(_diff))
    migrate = actions.add_parser(
        "migrate", help="write one of an older layout, Hugging Face's or DCP's, as one of ours"
    )
    migrate.add_argument("source")
    migrate.add_argument("target")
    migrate.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="of a component")
    migrate.add_argument("--allow-pickle", action="store_true", help=unsafe)
    migrate.set_defaults(run=_refusing(_migrate), parser=migrate)
    export = actions.add_parser("export", help="write components for others to read")
    export.add_argument("source")
    export.add_argument("target")
    export.add_argument("--format", choices=("safetensors", "torch", "dcp"), default="safetensors")
    export.add_argument("--component", action="append", default=[], metavar="KEY", help="default: model")
    export.add_argument("--allow-pickle", action="store_true", help=unsafe)
    export.set_defaults(run=_refusing(_export))


def _refusing(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What a disk or store refuses is said, as every other error."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return act(arguments)
        except OSError as error:
            print(f"skyward: {error}", file=sys.stderr)
            return 1

    return run


def _ls(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint.folders import folder_at
    from ..training.checkpoint.layout import checkpoints_in, manifest_at
    from .screen import table

    rows = []
    for saved in checkpoints_in(arguments.output_dir):
        manifest = saved.manifest if saved.manifest.files else manifest_at(folder_at(saved.path))
        metrics = manifest.metadata.get("metrics", {})
        shown = " ".join(f"{name}={value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
        shown += "" if saved.is_sound else " not finite"
        rows.append([saved.path, manifest.timestamp[:19], str(manifest.world_size), _size(manifest.total_bytes), shown])
    if not rows:
        print(f"{arguments.output_dir}: no whole checkpoint is there", file=sys.stderr)
        return 1
    print("\n".join(table(["checkpoint", "written (UTC)", "ranks", "size", "metrics"], rows, right=[2, 3])))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint.folders import folder_at
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
        print("\n".join(faults) if faults else f"{path}: whole{' (sizes only)' if arguments.quick else ''}")
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
            arguments.parser.error(f"--rename {rename}: give OLD=NEW")
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
