"""Code of the user that travels: which files, how, and where they lie on the node."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import ClassVar

import pytest

from skyward.bootstrap.code import Code, gather
from skyward.bootstrap.prepare import Ready, prepare
from skyward.errors import UsageError
from skyward.events import Event, PhaseEnded, ignore
from skyward.values.image import Image
from tests.bootstrap.packages import Index
from tests.bootstrap.scratch import ScratchNode


def write(folder: Path, **files: str) -> None:
    """Write files. In a key, `__` stands for a slash, and `.py` is added if the last part has no dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path if "." in path.name else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names_in(code: Code) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as archive:
        return sorted(entry.name for entry in archive if entry.isfile() and entry.name != ".objects")


def gathered(folder: Path, image: Image | None = None, path: list[str] | None = None) -> Code:
    return gather(image or Image(), path=[str(folder)] if path is None else path, cwd=str(folder), modules={})


# --- files that travel ------------------------------------------------------------------------------------------


def test_modules_and_contents_of_packages_travel_and_other_files_do_not(tmp_path: Path) -> None:
    write(tmp_path, script="", helpers="", names__space__module="")
    (tmp_path / "package").mkdir()
    for name in ("__init__.py", "table.json", ".hidden"):
        (tmp_path / "package" / name).write_text("")
    (tmp_path / "package" / "sub").mkdir()
    (tmp_path / "package" / "sub" / "weights.bin").write_text("")
    for folder in ("gpt-4", "v1.0", ".secret"):
        (tmp_path / "package" / "sub" / folder).mkdir()
        (tmp_path / "package" / "sub" / folder / "prompt.txt").write_text("")
    (tmp_path / "data.csv").write_text("much")
    (tmp_path / "not-a-package").mkdir()
    (tmp_path / "not-a-package" / "x.py").write_text("")
    assert names_in(gathered(tmp_path)) == [
        "work/helpers.py",
        "work/names/space/module.py",
        "work/package/__init__.py",
        "work/package/sub/gpt-4/prompt.txt",
        "work/package/sub/v1.0/prompt.txt",
        "work/package/sub/weights.bin",
        "work/package/table.json",
        "work/script.py",
    ]


def test_histories_environments_and_ignored_files_stay_here(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("ignored\nbuilt*.py\n")
    write(tmp_path, kept="", ignored__x="", built_1="", node_modules__x="")
    environment = tmp_path / "env"
    environment.mkdir()
    (environment / "pyvenv.cfg").write_text("")
    (environment / "x.py").write_text("")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x.py").write_text("")
    assert names_in(gathered(tmp_path)) == ["work/kept.py"]


def test_includes_travel_even_if_git_ignores_them_and_excludes_do_not(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("data/\n")
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "a.csv").write_text("a")
    (tmp_path / "data" / "raw" / "b.csv").write_text("b")
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / ".git" / "x").write_text("")
    (tmp_path / "one.txt").write_text("1")
    code = gathered(tmp_path, Image(includes=["data", "one.txt"], excludes=["raw"]))
    assert names_in(code) == ["work/data/a.csv", "work/one.txt"]


def test_an_include_from_outside_lands_in_the_working_folder(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    write(elsewhere, tool="")
    code = gathered(project, Image(includes=["../elsewhere", str(elsewhere / "tool.py")]))
    assert names_in(code) == ["work/elsewhere/tool.py", "work/tool.py"]
    assert code.path[0] == "work/elsewhere"


def test_an_include_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Image\.includes='nowhere': does not exist"):
        gathered(tmp_path, Image(includes=["nowhere"]))


def test_skyward_itself_and_installed_packages_do_not_travel_as_code(tmp_path: Path) -> None:
    repository = str(Path(__file__).parents[2])
    code = gather(Image(), path=[*sys.path, repository], cwd=str(tmp_path), modules={})
    assert not [name for name in names_in(code) if "skyward/__init__" in name or "site-packages" in name]
    assert not [name for name in names_in(code) if name.endswith("/argparse.py")]


def test_each_folder_of_the_path_keeps_its_place_in_the_order(tmp_path: Path) -> None:
    for name in ("work", "a/lib", "b/lib"):
        write(tmp_path / name, m=name)
    path = [str(tmp_path / "b" / "lib"), "", str(tmp_path / "a" / "lib")]
    code = gather(Image(), path=path, cwd=str(tmp_path / "work"), modules={})
    assert code.path == ("lib", "work", "lib_")
    assert code.cwd == "work"


def test_packages_that_an_import_hook_finds_travel(tmp_path: Path) -> None:
    class Finder:
        MAPPING: ClassVar = {"mapped": str(tmp_path / "src" / "mapped")}

    write(tmp_path / "src", mapped__part="", other="")
    (tmp_path / "src" / "mapped" / "__init__.py").write_text("")
    code = gather(Image(), path=[], cwd=str(tmp_path), modules={"__editable___mapped_finder": Finder})
    assert names_in(code) == ["src/mapped/__init__.py", "src/mapped/part.py"]


def test_an_editable_package_knows_its_version_on_the_node(tmp_path: Path) -> None:
    project, site = tmp_path / "project", tmp_path / "site-packages"
    write(project, src__mine="")
    for name, source, is_editable in (("mine", project, "true"), ("built", project, "false"), ("far", site, "true")):
        info = site / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.2\n")
        (info / "RECORD").touch()
        (info / "direct_url.json").write_text(
            f'{{"url": "{source.as_uri()}", "dir_info": {{"editable": {is_editable}}}}}'
        )
    (site / "plain-1.0.dist-info").mkdir()
    code = gathered(tmp_path, path=[str(project / "src"), str(site)])
    assert names_in(code) == [".installed/mine-1.2.dist-info/METADATA", "src/mine.py"]
    assert code.path == ("src", "work", ".installed")


def test_only_imported_files_of_the_home_folder_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, script="", used__part="", unused__part="")
    (tmp_path / "used" / "__init__.py").write_text("")

    class Module:
        __file__ = str(tmp_path / "used" / "__init__.py")

    code = gather(Image(), path=[str(tmp_path)], cwd=str(tmp_path), modules={"used": Module})
    assert names_in(code) == ["work/script.py", "work/used/__init__.py", "work/used/part.py"]


def test_a_large_file_beside_modules_stays_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    with open(tmp_path / "package" / "weights.bin", "wb") as file:
        file.truncate(11 * 2**20)
    with pytest.warns(UserWarning, match=r"too large to send: .*weights\.bin"):
        code = gathered(tmp_path)
    assert code.left_out == (str(tmp_path / "package" / "weights.bin"),)
    asked_for = gathered(tmp_path, Image(includes=["package/weights.bin"], excludes=[]))
    assert list(asked_for.objects.values()) == [str(tmp_path / "package" / "weights.bin")]


def test_too_many_unrequested_files_are_an_error_with_the_largest(tmp_path: Path) -> None:
    for i in range(12):
        with open(tmp_path / f"m{i}.py", "wb") as file:
            file.truncate(9 * 2**20)
    with pytest.raises(UsageError, match=r"113 MB, too much.*m\d+\.py \(9\.4 MB\)"):
        gathered(tmp_path)


def test_the_same_files_have_the_same_name_whenever_they_are_read(tmp_path: Path) -> None:
    write(tmp_path, a="1", b="2")
    first = gathered(tmp_path)
    os.utime(tmp_path / "a.py", (1, 1))
    assert gathered(tmp_path).name == first.name
    write(tmp_path, a="3")
    assert gathered(tmp_path).name != first.name


def test_a_circular_link_ends(tmp_path: Path) -> None:
    write(tmp_path, package__m="")
    (tmp_path / "package" / "again").symlink_to(tmp_path)
    (tmp_path / "broken.py").symlink_to("nowhere")
    assert names_in(gathered(tmp_path)) == ["work/package/m.py"]


def test_a_second_name_of_a_folder_travels_too(tmp_path: Path) -> None:
    write(tmp_path, v1__m="")
    (tmp_path / "latest").symlink_to("v1")
    assert names_in(gathered(tmp_path)) == ["work/latest/m.py", "work/v1/m.py"]


def test_file_that_a_command_names_travels_with_the_modules_beside_it(tmp_path: Path) -> None:
    program = tmp_path / "text-tasks"
    write(program, **{"run_glue": "", "glue": "", "package__m": "", "data.csv": ""})
    (tmp_path / "train.sh").write_text("")
    (tmp_path / "left.sh").write_text("")
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(11 * 2**20)
    named = ["text-tasks/run_glue.py", "train.sh", "left.sh", "weights.bin"]
    with pytest.warns(UserWarning, match=r"too large to send: .*weights\.bin"):
        code = gather(Image(excludes=["left.sh"]), path=[], cwd=str(tmp_path), modules={}, named=named)
    assert names_in(code) == [
        "work/text-tasks/glue.py",
        "work/text-tasks/package/m.py",
        "work/text-tasks/run_glue.py",
        "work/train.sh",
    ]


# --- on the node ------------------------------------------------------------------------------------------------


def make_ready(node: ScratchNode, image: Image, code: Code, pool: str, events: list[Event] | None = None) -> Ready:
    emit = ignore if events is None else events.append
    return prepare(node, image, emit=emit, node=0, folder=f"test-0/{pool}", code=code)


def run_there(ready: Ready, code: str) -> str:
    boot = f"import sys; sys.path[:] = {list(ready.path)!r}\n{code}"
    done = subprocess.run(
        [ready.python, "-c", boot], env=dict(ready.env), cwd=ready.cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_code_lies_in_front_of_the_path_and_its_folder_is_the_working_folder(
    scratch: ScratchNode, index: Index, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    write(project, alpha="VALUE = 'mine'")
    (project / "table.txt").write_text("42")
    (project / "run.sh").write_text("#!/bin/sh\necho ran")
    (project / "run.sh").chmod(0o755)
    (project / "large.bin").write_bytes(os.urandom(300_000))
    (project / "data").mkdir()
    (project / "data" / "link.bin").symlink_to("../large.bin")
    names = [b"no \xff utf-8", b"space at the end "]
    for name in names:
        Path(os.fsdecode(bytes(project / "data") + b"/" + name)).write_bytes(os.urandom(300_000))
    includes = ["table.txt", "run.sh", "large.bin", "data"]
    image = Image(pip=["alpha"], pip_index_url=index.url, includes=includes)
    ready = make_ready(scratch, image, gathered(project, image), "a")
    assert run_there(ready, "import alpha; print(alpha.VALUE, open('table.txt').read())") == "mine 42"
    assert run_there(ready, "import subprocess; print(subprocess.check_output('./run.sh').decode())") == "ran"
    for path in ("large.bin", "data/link.bin", *(os.fsdecode(b"data/" + name) for name in names)):
        assert (Path(ready.cwd) / path).read_bytes() == (project / path).read_bytes()


def test_code_is_sent_once_and_only_changes_after_an_edit(scratch: ScratchNode, index: Index, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, m="VALUE = 1")
    (project / "large.bin").write_bytes(os.urandom(3_000_000))
    image = Image(pip_index_url=index.url, includes=["large.bin"])
    assert run_there(make_ready(scratch, image, gathered(project, image), "a"), "import m; print(m.VALUE)") == "1"

    scratch.commands.clear()
    events: list[Event] = []
    make_ready(scratch, image, gathered(project, image), "b", events)
    assert len(scratch.commands) == 1
    assert [e.phase for e in events if isinstance(e, PhaseEnded) and e.was_ready][-1] == "code"

    write(project, m="VALUE = 2")
    scratch.sent.clear()
    began = time.monotonic()
    ready = make_ready(scratch, image, gathered(project, image), "c")
    assert time.monotonic() - began < 60
    assert run_there(ready, "import m; print(m.VALUE)") == "2"
    assert len(scratch.sent) == 2
    assert sum(scratch.sent) < 100_000


def test_files_written_by_a_task_are_seen_by_no_other_pool(scratch: ScratchNode, index: Index, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, m="")
    (project / "large.bin").write_bytes(b"x" * 300_000)
    image = Image(pip_index_url=index.url, includes=["large.bin"])
    first = make_ready(scratch, image, gathered(project, image), "a")
    (Path(first.cwd) / "large.bin").write_bytes(b"y")
    second = make_ready(scratch, image, gathered(project, image), "b")
    assert (Path(second.cwd) / "large.bin").stat().st_size == 300_000
