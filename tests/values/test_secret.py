"""A secret reaches the tasks and is seen nowhere else."""

from __future__ import annotations

import os
import pickle

import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.values import secret as secret_module
from skyward.values.secret import masking
from tests.doctests import run_examples

VALUE = "hf_0123456789abcdef"


def test_examples_in_docstrings_run() -> None:
    run_examples(secret_module)


def test_its_value_is_in_no_repr_no_pickle_and_no_hash() -> None:
    image = sky.Image(env={"TOKEN": sky.Secret("TOKEN", value=VALUE), "PLAIN": "seen"})
    assert VALUE not in repr(image) + repr(image.env) + str(image.env["TOKEN"]) + f"{image.env['TOKEN']}"
    assert "seen" in repr(image)
    assert VALUE.encode() not in pickle.dumps(image)
    other = sky.Image(env={"TOKEN": sky.Secret("TOKEN", value="another"), "PLAIN": "seen"})
    assert image.content_hash() == other.content_hash()
    assert image != other


def test_the_value_is_read_when_it_is_needed_or_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "first")
    later, now = sky.Secret("TOKEN"), sky.Secret.from_env("TOKEN")
    monkeypatch.setenv("TOKEN", "second")
    assert later.reveal() == "second"
    assert now.reveal() == "first"
    assert pickle.loads(pickle.dumps(now)).reveal() == "second"


def test_a_secret_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with pytest.raises(UsageError, match="NO_SUCH_TOKEN is not set here"):
        sky.Secret.from_env("NO_SUCH_TOKEN")
    with (
        pytest.raises(UsageError, match="NO_SUCH_TOKEN is not set here"),
        sky.ComputePool(provider=sky.Local(), image=sky.Image(env={"X": sky.Secret("NO_SUCH_TOKEN")})),
    ):
        pass


def test_a_value_given_as_the_name_is_refused() -> None:
    with pytest.raises(UsageError, match="pass the name of a variable"):
        sky.Secret("sk-not a name")


def test_only_the_environment_of_tasks_may_hold_a_secret() -> None:
    with pytest.raises(UsageError, match="shell_vars"):
        sky.Image(shell_vars={"X": sky.Secret("X")})  # type: ignore[dict-item]


def test_masking_takes_the_longest_secret_and_leaves_short_ones() -> None:
    mask = masking([sky.Secret("A", value="abcd"), sky.Secret("B", value="abcdef"), sky.Secret("C", value="x")])
    assert mask("abcdef abcd x") == "*** *** x"
    several = masking([sky.Secret("K", value="-----BEGIN-----\nMIIEvQIBADAN\n")])
    assert several("got MIIEvQIBADAN") == "got ***"


def test_tasks_have_secrets_and_their_output_is_masked() -> None:
    @sky.compute
    def show(fails: bool) -> str:
        print("the token is", os.environ["TOKEN"])
        if fails:
            raise ValueError("no")
        return os.environ["TOKEN"]

    lines: list[sky.LogLine] = []
    image = sky.Image(env={"TOKEN": sky.Secret("TOKEN", value=VALUE)})
    with sky.ComputePool(provider=sky.Local(), image=image, logs=lines.append) as pool:
        assert show(False) >> pool == VALUE
        with pytest.raises(ValueError, match="no") as caught:
            show(True) >> pool
    assert [line.text for line in lines] == ["the token is ***"] * 2
    assert VALUE not in "".join(getattr(caught.value, "__notes__", []))
    assert VALUE not in repr(pool.spec)
