"""Blueprints of detached pools: another process makes the same nodes, and no file has a secret."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.bootstrap.code import gather
from skyward.errors import UsageError
from skyward.pool import blueprint
from skyward.pool.blueprint import pack_blueprint, unpack_blueprint
from skyward.pool.detaching import Detachment
from skyward.state import detached
from skyward.values.machine import PoolSpec
from tests.pool.test_detached import SSH, a_pool


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def a_spec(folder: Path) -> PoolSpec:
    (folder / "mine.py").write_text("x = 1\n")
    (folder / "large.bin").write_bytes(os.urandom(300_000))
    image = sky.Image(
        pip=["acme"],
        env={"A": sky.Secret("TOKEN", value="first"), "MODE": "fast", "B": sky.Secret("TOKEN", value="second")},
        pip_indexes=[
            sky.PipIndex("https://acme.test", packages=["acme"], username="me", password=sky.Secret("P", value="third"))
        ],
        includes=["large.bin"],
    )
    code = gather(image, path=[str(folder)], cwd=str(folder))
    return PoolSpec(nodes=3, concurrency=2, image=image, preload=("json",), code=code)


def test_another_process_makes_the_same_nodes_with_the_secrets_that_the_head_has(tmp_path: Path) -> None:
    spec, pool = a_spec(tmp_path), a_pool()
    assert spec.code.objects
    data = pack_blueprint(spec)
    assert not [secret for secret in (b"first", b"second", b"third") if secret in data]
    detached.record(pool)
    detached.keep_code(pool, spec.code.to_bytes())
    again = unpack_blueprint(pool, data, spec.image.secret_values())
    assert again == spec
    assert again.image.environment() == {"A": "first", "MODE": "fast", "B": "second"}
    assert (again.code.name, again.code.archive) == (spec.code.name, spec.code.archive)
    assert (again.code.objects, again.code.path) == (spec.code.objects, spec.code.path)
    assert not again.stop.is_set()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("detached/*")} == {0o600}
    detached.end(pool, "in a test")
    assert detached.code_of(pool) is None


def test_a_program_that_cannot_make_such_nodes_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, pool = a_spec(tmp_path), a_pool()
    data = pack_blueprint(spec)
    with pytest.raises(UsageError, match="pool='train': its code is not on this machine; attach on the one that"):
        unpack_blueprint(pool, data, ())
    with pytest.raises(UsageError, match=r"its nodes run skyward 9\.9, and this program .*; install 9\.9 here"):
        unpack_blueprint(pool, b"", ())
    monkeypatch.setattr(blueprint, "__version__", "0.0.1")
    with pytest.raises(UsageError, match=r"and this program 0\.0\.1"):
        unpack_blueprint(pool, data, ())


@pytest.mark.parametrize("lost", [(), (1,)])
def test_a_program_on_another_machine_says_which_nodes_stay_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: tuple[int, ...]
) -> None:
    there = {node: 1 for node in range(3) if node not in lost}
    pool = a_pool(machine={"node": 0}, others=({"node": 1}, {"node": 2}))
    engine: Any = SimpleNamespace(
        blueprint=lambda: (pack_blueprint(a_spec(tmp_path)), ()), nodes=SimpleNamespace(agent_pids=lambda: there)
    )
    machines: Any = SimpleNamespace(rebuild_by=None)
    Detachment.of(pool, takes_over=False).take_up(SSH, machines, engine)
    assert len(caplog.messages) == len(lost)
    assert all(text.startswith("lost nodes 1 are not replaced: pool='train': its code is") for text in caplog.messages)
