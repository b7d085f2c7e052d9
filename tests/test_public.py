"""`import skyward`: its names, its cost, and the modules that it must not load."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward
from tests.few_modules import lean_frameworks

HEAVY = (
    *("torch", "jax", "numpy", "boto3", "ray", "sklearn", "joblib", "pandas"),
    *("asyncio", "cloudpickle", "pathspec", "xxhash"),
)


def fresh(code: str) -> str:
    """Return the output of the code in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _frameworks() -> Iterator[None]:
    """Let the frameworks that this process looks up import little: a third of the time."""
    with lean_frameworks(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        yield


BUILTINS = ("dict", "list", "set")
"""Public names that a star import skips, because they would hide Python's own."""


def test_all_agrees_with_dir_and_every_name_exists() -> None:
    assert sorted([*skyward.__all__, *BUILTINS]) == sorted(dir(skyward))
    assert len(set(skyward.__all__)) == len(skyward.__all__)
    for name in skyward.__all__:
        assert getattr(skyward, name) is not None


SAKURA = "skyward.training.sakura"
"""Its classes say so in their source; looking all of them up imports every framework."""

PUBLIC = [
    "skyward",
    "skyward.errors",
    "skyward.hub",
    "skyward.events",
    "skyward.accelerators",
    "skyward.integrations",
    "skyward.training",
    *(
        f"skyward.training.{name}"
        for name in ("callbacks", "checkpoint", "control", "diloco", "evaluation", "snapshot")
    ),
]

PICKLED = f"""
import importlib, pickle, pickletools, sys, types
pickles = []
for module in {PUBLIC}:
    for name in importlib.import_module(module).__all__:
        value = getattr(sys.modules[module], name)
        if isinstance(value, type | types.FunctionType) and value.__qualname__ == name:
            pickles.append((module, name, value.__module__, pickle.dumps(value, protocol=2)))
"""


def test_public_classes_report_a_public_module_and_pickle_by_it(tmp_path: Path) -> None:
    path = tmp_path / "pickles"
    fresh(f"{PICKLED}\nopen({str(path)!r}, 'wb').write(pickle.dumps(pickles))")
    code = f"""
import importlib, pickle
for module, name, reported, data in pickle.load(open({str(path)!r}, "rb")):
    value = pickle.loads(data)
    here = getattr(importlib.import_module(module), name)
    assert value is here, (module, name)
    print(module, name, reported, f"c{{reported}}\\n{{name}}\\n".encode() in data)
"""
    rows = [line.split() for line in fresh(code).splitlines()]
    assert {row[0] for row in rows} == set(PUBLIC)
    assert {row[1] for row in rows} >= {"CallOptions", "ComputePool", "Future", "NodeTarget", "NodeLost", "Trainer"}
    private = [row for row in rows if row[2] not in (*PUBLIC, SAKURA) or row[3] != "True"]
    assert not private


def test_classes_of_sakura_report_a_public_module_and_pickle_by_it() -> None:
    sakura = importlib.import_module(SAKURA)
    for name in sakura.__all__:
        value = getattr(sakura, name)
        assert value.__module__ in (*PUBLIC, SAKURA)
        assert pickle.loads(pickle.dumps(value)) is value


def test_the_hints_of_a_public_class_are_found_where_it_was_written() -> None:
    for cls in (skyward.CallOptions, skyward.Image, skyward.AWS, skyward.LogLine, skyward.InstanceInfo):
        assert cls.__module__ == "skyward"
        hints = typing.get_type_hints(cls)
        assert hints
        assert not any(isinstance(hint, str | typing.ForwardRef) for hint in hints.values())


def test_a_star_import_gives_all_of_it() -> None:
    names = fresh("from skyward import *\nimport skyward\nprint(all(n in globals() for n in skyward.__all__))")
    assert names.strip() == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = skyward.no_such_name  # type: ignore[attr-defined]


def test_names_do_not_depend_on_earlier_imports() -> None:
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


IDLE_WITHOUT = {
    # Each takes 0.1 to 0.7 MiB of every program with a pool.
    *("_hashlib", "ctypes", "glob", "numbers", "pathlib", "random", "shutil", "tempfile"),
    *("skyward.console.live_view", "skyward.console.notebook", "skyward.console.terminal"),
    *("skyward.engine.dialler", "skyward.engine.hangs", "skyward.engine.keeper", "skyward.shared.store"),
    *("skyward.node.agent.devices", "skyward.node.agent.watchdog", "skyward.pool.actor_map", "skyward.pool.gang_map"),
    *("skyward.providers.any_of", "skyward.wire.huge", "skyward.wire.stream"),
}


def test_a_local_pool_loads_nothing_that_plain_calls_do_not_need() -> None:
    code = "import sys, skyward as sky\nwith sky.ComputePool(provider=sky.Local()) as pool:\n"
    code += "    sky.compute(abs)(-1) >> pool\n    print(*sys.modules)"
    assert set(fresh(code).split()) & IDLE_WITHOUT == set()


def test_decorating_a_function_loads_no_framework() -> None:
    code = "import sys, skyward as sky\n@sky.compute\n@sky.integrations.torch\ndef f(): ...\n"
    code += "f(); print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in fresh(code).split()}
    assert not loaded & {"torch", "jax", "numpy", "boto3", "ray", "sklearn", "joblib", "pandas"}


def test_importing_the_package_takes_less_than_a_tenth_of_a_second() -> None:
    code = "import time; t = time.perf_counter(); import skyward; print(time.perf_counter() - t)"
    assert any(float(fresh(code)) < 0.1 for _ in range(20))  # a busy machine adds to many of them


PROGRAMS = ("skyward.__main__", "skyward.hub.store.migrations.env")
"""Modules that Python and Alembic run, and nobody imports."""


def test_every_all_is_correct() -> None:
    for info in pkgutil.walk_packages(skyward.__path__, "skyward."):
        if info.name not in PROGRAMS:
            module = importlib.import_module(info.name)
            for name in getattr(module, "__all__", ()):
                assert hasattr(module, name), f"{info.name}.{name}"


EXAMPLE = re.compile(r"Examples?:|>>> ")
DOCUMENTED = (
    "skyward",
    "skyward.accelerators",
    "skyward.errors",
    "skyward.events",
    "skyward.hub",
    "skyward.integrations",
    "skyward.testing",
    "skyward.training",
    "skyward.training.callbacks",
    "skyward.training.checkpoint",
    "skyward.training.control",
    "skyward.training.diloco",
    "skyward.training.evaluation",
    "skyward.training.evaluation.dispatchers",
    "skyward.training.snapshot",
    "skyward.training.sakura",
)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_class_and_function_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    values = {public: getattr(module, public) for public in module.__all__}
    objects = {public: value for public, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert [public for public, value in objects.items() if not EXAMPLE.search(inspect.getdoc(value) or "")] == []
