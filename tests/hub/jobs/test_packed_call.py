"""Packed calls: the runner reads the launch of a call, and refuses one that would run something of the user's."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import TaskExited, UsageError
from skyward.hub.client.job_code import pack_call
from skyward.hub.runner.packed_call import CallFailed, join_call, run_packed, split_call, stream_packed
from skyward.values.launch import ProcessLaunch
from skyward.wire.failures import decode_failure
from skyward.wire.payloads import pickle_whole, unpickle_whole
from tests.hub.jobs.calls import OwnError, add, fail


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_packed_call_runs_and_its_value_is_packed(tmp_path: Path) -> None:
    launch, call = split_call(pack_call(add(1, 2), tmp_path).path.read_bytes())
    assert launch == ProcessLaunch()
    assert unpickle_whole(run_packed(call)) == 3


def test_exception_travels_in_a_carrier_that_needs_no_class_of_the_user(tmp_path: Path) -> None:
    _, call = split_call(pack_call(fail("hot"), tmp_path).path.read_bytes())
    with pytest.raises(CallFailed, match="OwnError: hot") as caught:
        run_packed(call)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.text, copy.failure) == (caught.value.text, caught.value.failure)


def test_exit_of_the_function_is_an_error_that_ends_nobody_else(tmp_path: Path) -> None:
    @sky.compute
    def leave(code: object) -> None:
        sys.exit(code)  # type: ignore[arg-type]

    for code in (0, "no data"):
        _, call = split_call(pack_call(leave(code), tmp_path).path.read_bytes())
        with pytest.raises(CallFailed, match=re.escape(f"called sys.exit({code!r})")) as caught:
            run_packed(call)
        error = decode_failure(pickle.loads(caught.value.failure), where="", node=None, task="leave")
        assert isinstance(error, TaskExited)
        assert error.code == code


def test_items_of_a_generator_are_packed_one_by_one_and_an_error_follows_those_before_it() -> None:
    @sky.compute
    def stream(has_lock: bool) -> Iterator[object]:
        yield 0
        yield threading.Lock() if has_lock else 1
        raise OwnError("too late")

    for has_lock, error, count in (
        (False, "OwnError: too late", 2),
        (True, "item 1: cannot be packed, because TypeError", 1),
    ):
        items = []
        with pytest.raises(CallFailed, match=error):
            for packed in stream_packed(pickle_whole((stream, (has_lock,), {}, ()))):
                items.append(unpickle_whole(packed))
        assert items == list(range(count))


def test_retry_on_decides_on_the_node_whether_an_error_is_tried_again(tmp_path: Path) -> None:
    for kinds, may_retry in (((), True), (OwnError, True), ((KeyError, Exception), True), (KeyError, False)):
        pending = fail.with_options(retries=1, retry_on=kinds)("hot")
        _, call = split_call(pack_call(pending, tmp_path).path.read_bytes())
        with pytest.raises(CallFailed) as caught:
            run_packed(call)
        assert pickle.loads(pickle.dumps(caught.value)).may_retry is may_retry


def test_call_that_was_packed_by_an_earlier_version_runs() -> None:
    assert unpickle_whole(run_packed(pickle_whole((add, (1, 2), {})))) == 3


def test_variables_of_the_job_are_set_before_its_call_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_CHECKPOINT_DIR", "of an earlier job")
    call = pickle_whole((sky.compute(os.getenv), ("SKYWARD_CHECKPOINT_DIR",), {}))
    assert unpickle_whole(run_packed(call, {"SKYWARD_CHECKPOINT_DIR": "mine"})) == "mine"


def test_launch_with_integrations_of_skyward_is_read(tmp_path: Path) -> None:
    @sky.compute
    @sky.integrations.torch(backend="gloo")
    def train() -> None: ...

    launch, _ = split_call(pack_call(train(), tmp_path).path.read_bytes())
    assert [integration.name for integration in launch.integrations] == ["torch"]


@pytest.mark.parametrize("value", [Evil(), (Evil(),), Path("x"), {"launch": 1}])
def test_launch_that_names_anything_else_is_refused_and_not_run(value: object) -> None:
    with pytest.raises(UsageError, match="is not one of skyward's"):
        split_call(join_call(pickle.dumps(value), b""))
