"""`import skyward`: what it gives, what it costs, what it does not load."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import skyward

HEAVY = (
    *("torch", "jax", "numpy", "boto3", "ray", "sklearn", "joblib", "pandas"),
    *("asyncio", "cloudpickle", "pathspec", "xxhash"),
)


def fresh(code: str) -> str:
    """What the code prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_what_dir_shows_and_everything_in_it_is_there() -> None:
    assert sorted(skyward.__all__) == sorted(dir(skyward))
    assert len(set(skyward.__all__)) == len(skyward.__all__)
    for name in skyward.__all__:
        assert getattr(skyward, name) is not None


def test_a_star_import_gives_all_of_it() -> None:
    names = fresh("from skyward import *\nimport skyward\nprint(all(n in globals() for n in skyward.__all__))")
    assert names.strip() == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = skyward.no_such_name  # type: ignore[attr-defined]


def test_names_do_not_depend_on_what_was_imported_before() -> None:
    """A module of the package must not hide a public name once it is imported."""
    code = """
import importlib, pkgutil, types, skyward
before = {name: getattr(skyward, name) for name in skyward.__all__}
for module in ("pool.pool", "calls.output", "calls.compute", "values.image", "accelerators", "node.slot.runtime"):
    importlib.import_module(f"skyward.{module}")
print([name for name, value in before.items() if getattr(skyward, name) is not value])
"""
    assert fresh(code).strip() == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = fresh("import sys; before = set(sys.modules); import skyward; print(*(set(sys.modules) - before))").split()
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)
    assert {name for name in loaded if name.startswith("skyward.")} == {"skyward._lazy"}


def test_decorating_a_function_loads_no_framework() -> None:
    code = "import sys, skyward as sky\n@sky.compute\n@sky.integrations.torch\ndef f(): ...\n"
    code += "f(); print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in fresh(code).split()}
    assert not loaded & {"torch", "jax", "numpy", "boto3", "ray", "sklearn", "joblib", "pandas"}


def test_importing_the_package_takes_less_than_a_tenth_of_a_second() -> None:
    code = "import time; t = time.perf_counter(); import skyward; print(time.perf_counter() - t)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.1


@pytest.mark.timeout(300)  # a fork for each module
def test_every_module_can_be_imported_first() -> None:
    """No import circle that only some order of imports hides."""
    optional = ("skyward.integrations.joblib", "skyward.integrations.pools", "skyward.testing", "skyward.__main__")
    modules = [m.name for m in pkgutil.walk_packages(skyward.__path__, "skyward.") if not m.name.startswith(optional)]
    code = f"""
import os, sys
import torch.distributed.checkpoint  # many of ours do, it takes seconds, and is in no circle of ours
for name in {modules}:
    pid = os.fork()
    if pid == 0:
        try:
            __import__(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    assert fresh(code) == ""


def test_every_all_is_true() -> None:
    for info in pkgutil.walk_packages(skyward.__path__, "skyward."):
        if info.name != "skyward.__main__":
            module = importlib.import_module(info.name)
            for name in getattr(module, "__all__", ()):
                assert hasattr(module, name), f"{info.name}.{name}"
