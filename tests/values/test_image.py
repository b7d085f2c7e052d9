"""Image: a value that is validated, hashed, merged and shown."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyward.bootstrap.environments import users_for
from skyward.core.frozenmap import FrozenMap
from skyward.errors import UsageError
from skyward.values import image as image_module
from skyward.values import pip_index as pip_index_module
from skyward.values.image import DEFAULT_IMAGE, Image
from skyward.values.pip_index import PipIndex
from skyward.values.secret import Secret
from tests.doctests import run_examples

FULL = Image(
    python="3.99",  # not that of these tests, which is the default
    pip=["torch>=2.4", "numpy"],
    pip_index_url="https://example.org/simple",
    pip_extra_index_url="https://download.pytorch.org/whl/cpu",
    pip_indexes=[PipIndex("https://example.org/own", packages=["own"])],
    apt=["git", "libgl1=1.6.0-1"],
    run=["make data"],
    env={"B": "2", "A": "1"},
    shell_vars={"CUDA": "nvcc --version"},
    includes=[Path("src"), "data.csv"],
    excludes=["*.pyc"],
    bootstrap_timeout_s=60,
)
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_examples_in_docstrings_run() -> None:
    run_examples(image_module)
    run_examples(pip_index_module)


# --- a value ----------------------------------------------------------------------------------------------------


def test_every_field_is_kept_and_lists_become_tuples() -> None:
    assert dataclasses.asdict(FULL) == {
        "python": "3.99",
        "pip": ("torch>=2.4", "numpy"),
        "pip_index_url": "https://example.org/simple",
        "pip_extra_index_url": ("https://download.pytorch.org/whl/cpu",),
        "lock": None,
        "pip_indexes": ({"url": "https://example.org/own", "packages": ("own",), "username": "", "password": None},),
        "container": "",
        "apt": ("git", "libgl1=1.6.0-1"),
        "run": ("make data",),
        "env": {"A": "1", "B": "2"},
        "shell_vars": {"CUDA": "nvcc --version"},
        "includes": ("src", "data.csv"),
        "excludes": ("*.pyc",),
        "bootstrap_timeout_s": 60.0,
    }


def test_it_is_frozen_hashable_and_picklable() -> None:
    packages = ["torch"]
    image = Image(pip=packages)
    packages.append("numpy")
    assert image.pip == ("torch",)
    assert len({image, Image(pip=("torch",))}) == 1
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    with pytest.raises(dataclasses.FrozenInstanceError):
        image.pip = ()  # type: ignore[misc]


def test_the_old_spelling_of_the_timeout_is_accepted() -> None:
    assert Image(bootstrap_timeout=5).bootstrap_timeout_s == 5.0


# --- content_hash -----------------------------------------------------------------------------------------------


def test_content_hash_is_12_hex_digits_and_ignores_dict_order() -> None:
    digest = FULL.content_hash()
    assert len(digest) == 12
    int(digest, 16)
    assert dataclasses.replace(FULL, env=FrozenMap({"A": "1", "B": "2"})).content_hash() == digest


def test_content_hash_is_the_same_in_every_process() -> None:
    program = (
        "from skyward.values.image import Image\n"
        "print(Image(python='3.12', pip=['torch'], env={'B': '2', 'A': '1'}).content_hash())\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {Image(python="3.12", pip=["torch"], env={"A": "1", "B": "2"}).content_hash()}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Image) if f.name not in ("lock", "container")])
def test_content_hash_reflects_the_environment(field: str) -> None:
    changed = dataclasses.replace(FULL, **{field: getattr(DEFAULT_IMAGE, field)})
    assert (changed.content_hash() == FULL.content_hash()) is (field == "bootstrap_timeout_s")


def test_auto_counts_as_the_version_it_stands_for() -> None:
    assert Image().content_hash() == Image(python=THIS).content_hash()
    assert DEFAULT_IMAGE.python_version == THIS


# --- merge and with_pip -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Image)])
def test_adding_packages_drops_no_field(field: str) -> None:
    added, merged = FULL.with_pip("joblib==1.4"), FULL.merge(Image(pip=["joblib==1.4"]))
    assert added == merged
    expected = (*FULL.pip, "joblib==1.4") if field == "pip" else getattr(FULL, field)
    assert getattr(added, field) == expected


@pytest.mark.parametrize(
    "pinned", ["scikit-learn==1.5", "Scikit_Learn", "scikit.learn[alldeps]>1", "scikit-learn @ file:///w"]
)
def test_the_users_own_pin_wins_over_an_added_package(pinned: str) -> None:
    assert Image(pip=[pinned]).with_pip("scikit-learn==1.4", "joblib").pip == (pinned, "joblib")


def test_a_package_whose_name_begins_alike_is_another_one() -> None:
    assert Image(pip=["torchvision"]).with_pip("torch").pip == ("torchvision", "torch")


def test_merge_joins_and_lets_the_other_win() -> None:
    mine = Image(python="3.11", pip=["torch==2.4", "numpy"], apt=["git"], env={"A": "1", "B": "1"}, excludes=["*.o"])
    other = Image(pip=["torch==2.5", "pandas"], apt=["git", "curl"], env={"B": "2"}, bootstrap_timeout_s=9)
    merged = mine.merge(other)
    assert merged.python == "3.11"
    assert merged.pip == ("torch==2.5", "numpy", "pandas")
    assert merged.apt == ("git", "curl")
    assert merged.env == {"A": "1", "B": "2"}
    assert merged.excludes == ("*.o",)
    assert merged.bootstrap_timeout_s == 9
    assert FULL.merge(DEFAULT_IMAGE) == DEFAULT_IMAGE.merge(FULL) == FULL


# --- fields that take effect ------------------------------------------------------------------------------------


def test_a_local_machine_uses_only_variables_and_files() -> None:
    assert FULL.unused_fields() == tuple(
        name for name in FULL.given_fields() if name not in {"env", "includes", "excludes"}
    )
    assert DEFAULT_IMAGE.unused_fields() == ()
    assert FULL.unused_fields(acting=FULL.given_fields()) == ()


def test_a_request_for_the_running_python_is_accepted() -> None:
    assert Image(python=THIS).unused_fields() == ()
    assert Image(python=".".join(map(str, sys.version_info[:3]))).unused_fields() == ()
    assert Image(python="3.99").unused_fields() == ("python",)


# --- repr -------------------------------------------------------------------------------------------------------


def test_repr_shows_the_given_values_and_can_be_read_back() -> None:
    assert repr(DEFAULT_IMAGE) == "Image()"
    assert repr(Image(pip=["torch"], env={"A": "1"})) == "Image(pip=('torch',), env={'A': '1'})"
    assert eval(repr(FULL)) == FULL


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "PASSWORD", "aws_secret_access_key", "APIKEY", "DB_PASS"]
)
def test_repr_masks_values_that_look_like_a_secret(name: str) -> None:
    for image in (Image(env={name: "correct-horse"}), Image(shell_vars={name: "echo correct-horse"})):
        assert "correct-horse" not in repr(image)
        assert name in repr(image)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "PASSES", "KERAS_BACKEND"])
def test_repr_shows_values_that_only_sound_like_one(name: str) -> None:
    assert "correct-horse" in repr(Image(env={name: "correct-horse"}))


def test_repr_masks_credentials_in_urls() -> None:
    image = Image(pip=["git+https://me:pw@host/x.git"], pip_extra_index_url=["https://tok@host/simple"])
    assert "pw" not in repr(image)
    assert "tok@" not in repr(image)


# --- validation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("python", "2.7", '"auto"'),
        ("python", "3.10", "3.11 on"),
        ("python", 3.12, '"3.12"'),
        ("pip", "torch", r"pip=\['torch'\]"),
        ("pip", [""], "requirement"),
        ("pip", ["--pre"], "not an option"),
        ("pip", ["a\nb"], "requirement"),
        ("pip", 3, "list of strings"),
        ("pip", {"torch": "2"}, "list of strings"),
        ("pip_extra_index_url", ["pytorch"], "a URL"),
        ("apt", ["git; rm -rf /"], "Debian package"),
        ("apt", ["Git"], "Debian package"),
        ("env", [("A", "1")], "a dict"),
        ("env", {"A-B": "1"}, "letters, digits"),
        ("env", {"1A": "1"}, "letters, digits"),
        ("env", {"A": 1}, "string"),
        ("env", {"A": "\0"}, "NUL"),
        ("shell_vars", {"A": ""}, "not empty"),
        ("includes", [None], "path"),
        ("excludes", "*.pyc", r"excludes=\['\*.pyc'\]"),
        ("bootstrap_timeout_s", 0, "seconds > 0"),
        ("bootstrap_timeout_s", float("nan"), "seconds > 0"),
        ("bootstrap_timeout_s", float("inf"), "seconds > 0"),
        ("bootstrap_timeout_s", True, "seconds > 0"),
        ("bootstrap_timeout_s", "60", "seconds > 0"),
    ],
)
def test_illegal_values_are_refused_with_field_and_legal_range(field: str, value: object, said: str) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(UsageError, match=said) as refused:
        Image(**given)
    assert str(refused.value).startswith(f"Image.{field}")
    assert refused.value.field.startswith(field)


def test_a_refused_variable_does_not_show_its_value() -> None:
    with pytest.raises(UsageError) as refused:
        Image(env={"HF_TOKEN": 12345})  # type: ignore[dict-item]
    assert "12345" not in str(refused.value)


@pytest.mark.parametrize(
    "requirement",
    ["torch", "torch==2.4.*", "x[extra]>=1; python_version<'3.13'", "git+https://h/x.git", "./wheel.whl", "torch==$TV"],
)
def test_requirements_urls_and_paths_are_accepted(requirement: str) -> None:
    assert Image(pip=[requirement]).pip == (requirement,)


def test_a_requirements_file_adds_to_pip(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("joblib\n")
    file = tmp_path / "requirements.txt"
    file.write_text("# ours\nnumpy<3  # pinned\n-r more/base.txt\ntorch[cpu] >= 2.4 ; \\\n  python_version > '3'\n\n")
    image = Image(pip=["rich"], requirements=file)
    assert image.pip == ("rich", "numpy<3", "joblib", "torch[cpu] >= 2.4 ; python_version > '3'")
    assert image == Image(pip=image.pip)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("-e .", r"-e \.': not supported"),
        ("--index-url http://x", "use pip_index_url"),
        ("torch --hash=sha256:00", "--hash=sha256:00"),
        ("-r requirements.txt", "in a circle"),
        ("-r none.txt", "No such file"),
    ],
)
def test_a_line_that_a_requirements_file_must_not_have_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"numpy\n{text}\n")
    with pytest.raises(UsageError, match=f"Image.requirements=.*{named}"):
        Image(requirements=file)


def test_setup_commands_are_part_of_the_content() -> None:
    image = Image(run=["make data"])
    assert image.run == ("make data",)
    assert image.content_hash() != Image().content_hash()
    assert Image(run=["a"]).merge(Image(run=["b"])).run == ("a", "b")
    with pytest.raises(UsageError, match="Image.run"):
        Image(run="make data")
    with pytest.raises(UsageError, match="Image.run"):
        Image(run=["make\ndata"])


# --- locks and indexes ------------------------------------------------------------------------------------------------

PYLOCK = """
lock-version = "1.0"
created-by = "test"
[[packages]]
name = "Alpha_Beta"
version = "1.0"
wheels = [{ url = "https://x/alpha_beta-1.0-py3-none-any.whl", hashes = { sha256 = "00" } }]
"""


def test_a_lock_is_a_value_that_counts_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "pylock.toml"
    file.write_text(PYLOCK)
    image = Image(lock=file)
    assert repr(image) == f"Image(lock={str(file)!r})"
    assert pickle.loads(pickle.dumps(image)) == image == Image(lock=str(file))
    assert image.with_pip("alpha-beta") == image
    assert Image(apt=["git"]).merge(image).lock == image.lock
    file.write_text(PYLOCK.replace("1.0-py3", "1.1-py3"))
    assert Image(lock=file) != image
    assert Image(lock=file).content_hash() != image.content_hash() != Image().content_hash()
    with pytest.raises(UsageError, match=r"lacks joblib.* add it to the lock"):
        image.with_pip("joblib")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("none.lock", None, "cannot be read"),
        ("poetry.lock", "", "a file of another kind; use a uv.lock"),
        ("uv.lock", "version = 1", "the project of the lock cannot be read"),
        ("uv.lock", "version = ", "TOMLDecodeError"),
        ("pylock.toml", PYLOCK.replace('hashes = { sha256 = "00" }', "size = 1"), "Alpha_Beta has no hashes"),
        ("pylock.dev.toml", '[[packages]]\nname = "a"\ndirectory = { path = "a" }', "a is a local path"),
        ("requirements.txt", "a==1\n", "`a==1` has no exact version with a hash"),
        ("requirements.txt", "a>=1 --hash=sha256:00\n", "`a>=1` has no exact version"),
        ("requirements.txt", "--index-url https://x\n", "set indexes with pip_index_url"),
    ],
)
def test_a_lock_that_does_not_pin_everything_is_refused(
    tmp_path: Path, name: str, text: str | None, named: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=named) as refused:
        Image(lock=tmp_path / name)
    assert str(refused.value).startswith("Image.lock=")
    assert refused.value.field == "lock"


def test_a_lock_refuses_packages_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pylock.toml").write_text(PYLOCK)
    (tmp_path / "requirements.txt").write_text("numpy")
    for others in (
        {"pip": ["numpy"]},
        {"requirements": tmp_path / "requirements.txt"},
        {"pip_indexes": [PipIndex("https://x/simple", packages=["a"])]},
    ):
        with pytest.raises(UsageError, match=r"Image\.lock=.*a lock has all packages"):
            Image(lock=tmp_path / "pylock.toml", **others)


def test_credentials_of_an_index_are_neither_shown_nor_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TOKEN", "correct-horse")
    first = PipIndex("https://me:correct-horse@x/simple", packages=["A_b"])
    second = PipIndex("https://x/simple", packages=["a-B"], username="me", password=Secret("PIP_TOKEN"))
    assert first.login() == second.login() == ("me", "correct-horse")
    assert first.packages == ("a-b",)
    images = [Image(pip_indexes=[index]) for index in (first, second)]
    for image in images:
        assert "correct-horse" not in repr(image)
    assert b"correct-horse" not in pickle.dumps(images[1])
    assert images[0].content_hash() == images[1].content_hash() != Image().content_hash()
    assert users_for(images[0]).name == users_for(images[1]).name
    assert images[1].masker()("token correct-horse refused") == "token *** refused"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "me:correct-horse@x", "packages": ["a"]}, "PipIndex.url="),
        ({"url": "https://x", "packages": "torch"}, "PipIndex.packages='torch'"),
        ({"url": "https://x", "packages": []}, "PipIndex.packages="),
        ({"url": "https://x", "packages": ["torch>=2"]}, "set its version in Image"),
        ({"url": "https://x", "packages": ["a"], "password": "correct-horse"}, "PipIndex.password=<str>"),
        ({"url": "https://me:correct-horse@x", "packages": ["a"], "username": "me"}, "not in both"),
    ],
)
def test_an_index_that_is_wrong_is_refused_by_field(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        PipIndex(**options)
    assert "correct-horse" not in f"{refused.value}{vars(refused.value)}"


def test_a_package_has_one_index() -> None:
    twice = [PipIndex("https://x", packages=["a"]), PipIndex("https://y", packages=["A"])]
    with pytest.raises(UsageError, match="a has two"):
        Image(pip_indexes=twice)


@pytest.mark.parametrize("name", ["", "debian:12", "ghcr.io/me/train:v3", "localhost:5000/a/b@sha256:00ff"])
def test_a_container_is_named_as_runtimes_name_it(name: str) -> None:
    image = Image(container=name)
    assert image.container == name
    assert (image.content_hash() == Image().content_hash()) is (name == "")


def test_a_container_that_is_wrong_is_refused() -> None:
    for name in ("-v/:/host", "a b", "$(x)", "http://x/y"):
        with pytest.raises(UsageError, match=r"Image\.container="):
            Image(container=name)
    with pytest.raises(UsageError, match=r"Image\.apt=\['git'\]: together with container="):
        Image(container="debian:12", apt=["git"])
