"""Problems that would fail on the nodes are reported before there are any nodes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import skyward as sky
from skyward.bootstrap.code import gather
from skyward.bootstrap.preflight import PreflightFinding, check, preflight
from skyward.errors import UsageError
from skyward.values.image import Image
from tests.bootstrap.packages import Index

OTHER = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"


def certain(findings: list[PreflightFinding]) -> list[str]:
    return [str(finding) for finding in findings if finding.is_certain]


def project(folder: Path, **sources: str) -> dict[str, object]:
    """Write modules of these sources into a folder and load them."""
    modules: dict[str, object] = {}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    for name in sources:
        if name.startswith("not_loaded"):
            continue
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(folder))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(folder))
        modules[name] = module
    return modules


def findings_of(folder: Path, image: Image, modules: dict[str, object]) -> list[str]:
    code = gather(image, path=[str(folder)], cwd=str(folder), modules={})
    return [str(finding) for finding in preflight(image, code, resolves=False, modules=modules)]


def test_an_image_that_fits_has_no_findings(index: Index) -> None:
    assert preflight(Image(pip=["beta"], pip_index_url=index.url), None) == []


def test_another_minor_version_of_python_is_named() -> None:
    (found,) = certain(preflight(Image(python=OTHER), None))
    assert found.startswith(f"Image.python: '{OTHER}' differs from this Python's minor version")


def test_requirements_that_cannot_be_met_are_named(index: Index) -> None:
    (found,) = certain(preflight(Image(pip=["beta", "alpha>=2"], pip_index_url=index.url), None))
    assert "cannot be installed there" in found
    assert "alpha" in found


def test_a_requirement_without_a_wheel_for_the_nodes_platform_is_named(index: Index) -> None:
    for tag in ("macosx_11_0_arm64",):
        (index.folder / f"only_mac-1.0-py3-none-{tag}.whl").write_bytes(
            next(index.folder.glob("alpha-1.0*")).read_bytes()
        )
    (found,) = certain(preflight(Image(pip=["only-mac"], pip_index_url=index.url), None, architecture="x86_64"))
    assert "only-mac" in found


def test_an_index_that_does_not_answer_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    (found,) = preflight(Image(pip=["alpha"], pip_index_url="http://127.0.0.1:9/simple"), None)
    assert not found.is_certain
    assert "not checked" in found.text


def test_skyward_from_an_index_and_unknown_names_are_named() -> None:
    assert "never one from an index" in certain(preflight(Image(pip=["skyward"]), None))[0]
    assert "$CUDA, which is not in Image.shell_vars" in certain(preflight(Image(pip=["torch+cu$CUDA"]), None))[0]


def test_values_that_only_the_node_knows_are_not_checked(index: Index) -> None:
    image = Image(pip=["no-such-$X", "alpha"], pip_index_url=index.url, shell_vars={"X": "echo 1"})
    assert preflight(image, None) == []


def test_certain_failures_are_raised_together_and_possible_ones_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"(?s)no machine was started.*Image\.python.*Image\.pip"):
        check(Image(python=OTHER, pip=["skyward"]), None)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.warns(UserWarning, match="not checked"):
        check(Image(pip=["alpha"], pip_index_url="http://127.0.0.1:9/simple"), None)


# --- imports ----------------------------------------------------------------------------------------------------


def test_a_package_that_the_functions_module_imports_but_no_requirement_brings_is_named(tmp_path: Path) -> None:
    modules = project(
        tmp_path,
        work="import json\nimport helpers\nimport skyward as sky\n@sky.compute\ndef f(): ...\n",
        helpers="from not_loaded_yet import x\n",
        not_loaded_yet="import numpy\nx = 1\ntry:\n    import pandas\nexcept ImportError: ...\n",
    )
    modules["__main__"] = main = ModuleType("__main__")
    main.f = modules["work"].f  # type: ignore[attr-defined]
    (found,) = findings_of(tmp_path, Image(), modules)
    assert found.endswith("so calls that need it will fail with ModuleNotFoundError; add 'numpy'")
    assert "not_loaded_yet.py imports numpy" in found
    assert findings_of(tmp_path, Image(pip=["pandas"]), modules) == []  # numpy comes with it


def test_modules_that_the_program_does_not_name_are_not_checked(tmp_path: Path) -> None:
    function = "import skyward as sky\n@sky.compute\ndef f(): ...\n"
    modules = project(tmp_path, tool="import numpy\n", other=f"import numpy\n{function}", named=function)
    modules["__main__"] = main = ModuleType("__main__")
    main.tool, main.named = modules["tool"], modules["named"]  # type: ignore[attr-defined]
    assert findings_of(tmp_path, Image(), modules) == []


def test_functions_of_the_script_need_the_modules_they_name(tmp_path: Path) -> None:
    main = ModuleType("__main__")
    code = "import numpy, pandas\nimport skyward as sky\n@sky.compute\ndef f(): return numpy.zeros(1)\n"
    exec(code, vars(main))
    (found,) = findings_of(tmp_path, Image(), {"__main__": main})
    assert found.startswith("Image.pip: f() imports numpy")


def test_an_integration_needs_its_framework(tmp_path: Path) -> None:
    main = ModuleType("__main__")

    @sky.compute
    @sky.integrations.torch
    def train() -> None: ...

    main.train = train  # type: ignore[attr-defined]
    (found,) = findings_of(tmp_path, Image(), {"__main__": main})
    assert "the integration of train() imports torch" in found


def test_a_function_of_a_module_that_does_not_travel_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    modules = project(elsewhere, plugin="import skyward as sky\n@sky.compute\ndef f(): ...\n")
    modules["__main__"] = main = ModuleType("__main__")
    main.f = modules["plugin"].f  # type: ignore[attr-defined]
    (found,) = findings_of(tmp_path / "elsewhere" / "..", Image(excludes=["elsewhere"]), modules)
    assert "f() is defined in the module plugin, which is not sent" in found
    assert findings_of(elsewhere, Image(), modules) == []


def test_a_compiled_module_of_another_platform_is_named(tmp_path: Path) -> None:
    minor = f"{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"fast.cpython-{minor}-darwin.so").write_bytes(b"")
    (tmp_path / f"good.cpython-{minor}-x86_64-linux-gnu.so").write_bytes(b"")
    code = gather(Image(), path=[str(tmp_path)], cwd=str(tmp_path), modules={})
    (found,) = preflight(Image(), code, architecture="x86_64", modules={})
    assert "darwin.so is compiled for" in found.text
