"""Detached pools: illegal options, and names that nobody can attach to. The rest is in tests/hosts/test_detach.py."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.cli import main
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import NodeHead
from skyward.errors import Unreachable, UsageError
from skyward.pool.attach_file import adopt, export
from skyward.pool.detaching import attachable
from skyward.ssh import SSHResult
from skyward.state import detached
from skyward.state.detached import DetachedPool
from skyward.state.journal import Journal, Owner, journals
from skyward.wire.frames import PROTOCOL_VERSION
from tests.engine.parts import machine

SSH = sky.SSH(hosts=["gpu1", "gpu2"])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"provider": SSH, "detached_for_s": 0, "name": "a"}, "must be a number of seconds > 0"),
        ({"provider": SSH, "detached_for_s": float("inf"), "name": "a"}, "must be a number of seconds > 0"),
        ({"provider": SSH, "detached_for_s": 60}, 'needs a name, by which clients attach; set name="train"'),
        ({"provider": sky.Local(), "detached_for_s": 60, "name": "a"}, "not supported with local"),
        ({"any_of": [SSH, sky.AWS()], "detached_for_s": 60, "name": "a"}, "not supported with several sources"),
        ({"provider": SSH, "idle_timeout_s": 9, "detached_for_s": 60, "name": "a"}, "omit idle_timeout_s"),
        (
            {"provider": SSH, "nodes": (1, 2), "on_idle": "close", "detached_for_s": 60, "name": "a"},
            "neither rests nor closes when it is idle; omit idle_timeout_s and on_idle",
        ),
    ],
)
def test_an_illegal_detached_pool_is_refused_before_anything_starts(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"detached_for_s=.*{problem}") as refused:
        sky.ComputePool(**options)
    assert refused.value.field == "detached_for_s"


def test_a_detached_pool_always_has_a_node() -> None:
    with pytest.raises(UsageError, match="min=0: the scheduler of a detached pool is on its first node") as refused:
        sky.ComputePool(SSH, nodes=(0, 2), detached_for_s=60, name="a")
    assert (refused.value.field, refused.value.value) == ("min", 0)


def a_pool(**fields: Any) -> DetachedPool:
    return DetachedPool(
        **{
            "name": "train",
            "pool": "train-1f2e3d4c",
            "began": 1.0,
            "detached_for_s": 60.0,
            "protocol": PROTOCOL_VERSION,
            "version": "9.9",
            "key": "secret",
            "socket_path": "/tmp/head.sock",
            "process": ("1", "2", "/tmp"),
            "lease_s": 60.0,
            "provider": {"type": "ssh", **SSH.fields()},
            "machine": {},
            "options": {},
            **fields,
        }
    )


def test_attaching_to_an_unknown_name_tells_which_there_are() -> None:
    with pytest.raises(UsageError, match="no detached pool of that name .* open one first"):
        sky.ComputePool.attach("train")
    detached.record(a_pool())
    with pytest.raises(
        UsageError, match="pool='trian': no detached pool of that name on this machine; use one of train"
    ):
        sky.ComputePool.attach("trian")
    with pytest.raises(UsageError, match="pool='': no detached pool"):
        sky.ComputePool.attach("")


class Hanging:
    """Login to a machine whose programs never end."""

    def run(self, *_: Any, timeout_s: float, **__: Any) -> SSHResult:
        raise TimeoutError(f"no end after {timeout_s:g} s")


def test_machine_of_a_head_that_hangs_is_named_and_stops_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = machine(login=Hanging())
    monkeypatch.setattr(sky.SSH, "reach", lambda *_: hangs)  # no host of a test hangs
    monkeypatch.setattr(sky.SSH, "leave", lambda *_: None)
    detached.record(a_pool())
    assert main(["down", "train", "train-0123abcd", "--yes"]) == 1
    said = capsys.readouterr()
    assert "the machine of its head does not answer within 20 s; try again later" in said.err
    assert "train-0123abcd: no record of it is left" in said.out
    config = HeadConfig(pool="train", folder="/tmp/head", cancel_grace_s=1.0, lease_s=30.0)
    with pytest.raises(Unreachable, match="head: did not start on the machine of node 0 within 60 s"):
        NodeHead(hangs).start(config)


def test_a_record_is_private_and_keeps_no_key_once_its_pool_has_ended(state: Path) -> None:
    detached.record(a_pool())
    (path,) = state.rglob("train-1f2e3d4c.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert detached.find("train") == a_pool()
    assert "secret" not in repr(a_pool())
    detached.end(a_pool(), "because it was closed")
    assert "secret" not in path.read_text()
    with pytest.raises(UsageError, match="ended on .*, because it was closed; open a new one") as refused:
        sky.ComputePool.attach("train")
    assert (refused.value.field, refused.value.value) == ("name", "train")


def test_a_file_of_a_pool_is_private_and_makes_it_known_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = {"type": "ssh", **sky.SSH(hosts=["gpu1"], key_file="/gone/key", config_file=str(tmp_path)).fields()}
    detached.record(a_pool(provider=provider))
    file = tmp_path / "train.pool"
    export("train", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="file='.*': exists already"):
        export("train", file)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    pool = adopt(file)
    assert pool.key == "secret"
    assert pool.provider["key_file"] is None, "this user's own keys serve"
    assert pool.provider["config_file"] == str(tmp_path)
    assert detached.find("train") == pool
    file.chmod(0o644)
    with pytest.raises(UsageError, match=r"others may use it \(mode 644\); run `chmod 600") as refused:
        sky.ComputePool.attach(file=file)
    assert "secret" not in str(refused.value)
    file.chmod(0o600)
    detached.end(pool, "in a test")
    assert main(["ps", "--from", str(file)]) == 1
    assert "pool='train': ended on" in capsys.readouterr().err
    file.write_text("{}")
    with pytest.raises(UsageError, match="is not a file of a detached pool; write it again"):
        adopt(file)
    with pytest.raises(UsageError, match=r"cannot be read: No such file.*`skyward ps NAME --export FILE"):
        adopt(tmp_path / "other.pool")
    with pytest.raises(UsageError, match=r"takes the name of a pool or file="):
        sky.ComputePool.attach()


def test_a_file_of_a_pool_with_rented_machines_has_their_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open_new(pool="rented-1f2e3d4c", provider="aws", fields={}, scope="account")
    journal.settle(journal.begin(offer={}, nodes=[0], at=1.0).token, ["i-1"])
    Path(journal.folder, "key").write_text("private")
    detached.record(a_pool(pool=journal.pool, name="rented", machine={"node": 0, "journal": journal.id}))
    detached.record(a_pool(pool="over-1f2e3d4c", name="over", machine={"node": 0, "journal": "0123"}))
    file = tmp_path / "rented.pool"
    export("rented", file)
    with pytest.raises(UsageError, match="over has no record of its machines anymore, so they have ended; open a new"):
        export("over", tmp_path / "over.pool")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    text = file.read_text()
    file.write_text(text.replace('"key":', '"../key":'))
    with pytest.raises(UsageError, match="is not a file of a detached pool"):
        adopt(file)
    assert not (tmp_path / "elsewhere").exists()
    file.write_text(text)
    adopt(file)
    (copy,) = journals(journal.pool)
    assert copy.folder.startswith(str(tmp_path / "elsewhere"))
    assert (copy.id, list(copy.living)) == (journal.id, ["i-1"])
    assert copy.owner == Owner.this_process(), "so that it is known to be left over, once the pool has ended"
    key = Path(copy.folder, "key")
    assert (key.read_text(), stat.S_IMODE(key.stat().st_mode)) == ("private", 0o600)
    adopt(file)


def test_a_head_of_another_version_names_the_version_to_install() -> None:
    for protocol in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        detached.record(a_pool(protocol=protocol))
        assert attachable("train").protocol == protocol
    detached.record(a_pool(protocol=PROTOCOL_VERSION + 2))
    with pytest.raises(UsageError, match=r"its head runs skyward 9\.9, .* install skyward==9\.9 here") as refused:
        sky.ComputePool.attach("train")
    assert (refused.value.field, refused.value.value) == ("name", "train")


def test_only_the_newest_pools_that_have_ended_are_kept() -> None:
    for number in range(25):
        detached.end(a_pool(pool=f"train-{number}"), "in a test")
    assert len(detached.detached_pools()) == 20


def test_a_pool_that_is_not_detached_has_no_calls_to_take() -> None:
    with sky.ComputePool(sky.Local(), logs=False) as pool:
        for use in (pool.calls, pool.detach, lambda: pool.future(2), lambda: pool.extend(5)):
            with pytest.raises(UsageError, match=r"pool=.*: is not detached, .* open it with detached_for_s="):
                use()
        with pytest.raises(UsageError, match=r"extend\.seconds=0: must be a number of seconds > 0"):
            pool.extend(0)


def test_an_ssh_provider_is_made_again_from_its_fields() -> None:
    provider = sky.SSH(hosts=["a", sky.SSHHost(host="b", key_file=Path("/k"))], config_file=Path("/c"), lease_s=5.0)
    again = sky.SSH(**provider.fields())
    assert again.targets == provider.targets
    assert again.lease_s == 5.0
