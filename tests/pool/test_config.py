"""Pools in configuration files: found, merged, checked key by key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.pool.config import config_files, pool_fields, pool_names, provider_named, rented_providers


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user without files, in the folder `project/src` of a project."""
    (tmp_path / "home").mkdir()
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "project" / "src")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_pool_is_made_of_three_files_key_by_key(home: Path) -> None:
    write(
        home / "home" / ".skyward" / "defaults.toml",
        '[providers.mine]\ntype = "local"\nlease_s = 9.0\n'
        '[pools.small]\nprovider = "mine"\nnodes = 1\nconcurrency = 3\n'
        '[pools.plain]\nprovider = "local"\n',
    )
    write(home / "home" / ".config" / "skyward" / "skyward.toml", "[pools.small]\nnodes = 5\nvcpus = 1\n")
    write(
        home / "project" / "skyward.toml",
        '[pools.small]\nnodes = 2\nmemory_gib = 1\n[pools.small.image]\nenv = { COLOUR = "red" }\n',
    )
    pool = sky.ComputePool.Named("small", logs=False)
    assert (pool.nodes, pool.concurrency, pool.spec.vcpus, pool.provider) == (2, 3, 1, sky.Local(lease_s=9.0))
    assert sky.ComputePool.named("plain", nodes=4).nodes == 4
    assert pool_names() == ["plain", "small"]
    with pool:
        assert sky.compute(os.getenv)("COLOUR") >> pool == "red"


def test_the_projects_file_is_the_nearest_one_up_to_its_root(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "skyward.toml", "")
    assert config_files() == []  # outside the project
    write(home / "project" / "skyward.toml", "")
    assert config_files() == [home / "project" / "skyward.toml"]
    write(home / "project" / "src" / "skyward.toml", "")
    assert config_files() == [home / "project" / "src" / "skyward.toml"]
    (home / ".git").mkdir()  # then the project is larger than one with a pyproject.toml
    (home / "project" / "src" / "skyward.toml").unlink()
    (home / "project" / "skyward.toml").unlink()
    assert config_files() == [home / "skyward.toml"]


def test_the_users_file_follows_xdg_config_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "elsewhere"))
    write(home / "elsewhere" / "skyward" / "skyward.toml", '[pools.p]\nprovider = "local"\n')
    assert pool_names() == ["p"]


def test_a_secret_is_given_by_the_name_of_its_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        home / "project" / "skyward.toml",
        '[pools.p]\nprovider = "local"\nimage = { env = { TOKEN = { env = "MY_TOKEN" } } }\n',
    )
    with pytest.raises(UsageError, match=r"\[pools.p.image.env\] TOKEN: the environment variable MY_TOKEN is not set"):
        sky.ComputePool.named("p")
    monkeypatch.setenv("MY_TOKEN", "hush")
    pool = sky.ComputePool.named("p")
    assert isinstance(pool.spec.image.env["TOKEN"], sky.Secret)
    assert pool.spec.image.env["TOKEN"].reveal() == "hush"
    assert "hush" not in repr(pool.spec)


def test_a_search_for_machines_reports_providers_that_cannot_be_made(home: Path) -> None:
    write(home / "project" / "skyward.toml", '[providers.east]\ntype = "aws"\nregoin = "us-east-1"\n[providers.aws]\n')
    found, wrong = rented_providers()
    assert found == [sky.AWS()]
    (error,) = wrong
    assert str(error).endswith("[providers.east] regoin: no such key; did you mean 'region'?")
    write(home / "project" / "skyward.toml", "[providers")
    assert rented_providers()[0] == []
    assert "Expected" in str(rented_providers()[1][0])
    with pytest.raises(UsageError, match="Expected"):
        rented_providers(["aws"])


def test_an_option_that_the_pool_refuses_is_reported_with_its_file(home: Path) -> None:
    write(home / "home" / ".config" / "skyward" / "skyward.toml", "[pools.train]\nnodes = 0\n")
    write(home / "project" / "skyward.toml", '[pools.train]\nprovider = "local"\nallocation = "spot"\n')
    with pytest.raises(
        UsageError, match=r"^.*/\.config/skyward/skyward.toml: \[pools.train\] nodes=0: must be a whole"
    ):
        sky.ComputePool.named("train")
    with pytest.raises(UsageError, match=r"^nodes=-1: must be a whole"):
        sky.ComputePool.named("train", nodes=-1)


def test_an_accelerator_is_a_name_or_a_table(home: Path) -> None:
    write(
        home / "project" / "skyward.toml",
        '[pools.one]\nprovider = "local"\naccelerator = "A100"\n'
        '[pools.eight]\nprovider = "local"\naccelerator = { name = "A100", count = 8 }\n',
    )
    assert sky.ComputePool.named("one").spec.accelerator == sky.Accelerator.from_name("A100")
    assert sky.ComputePool.named("eight").spec.accelerator == sky.Accelerator.from_name("A100", count=8)


def test_any_of_several_sources_is_a_list(home: Path) -> None:
    write(
        home / "project" / "skyward.toml",
        '[pools.train]\nany_of = ["local", "far", { type = "ssh", hosts = ["gpu1"] }]\nselection = "first"\n'
        'region = ["eu-west-1", "eu-west-2"]\naccelerator = ["A100", { name = "H100", count = 8 }]\n'
        '[providers.far]\ntype = "aws"\nprofile = "work"\n',
    )
    fields = pool_fields("train", sky.ComputePool.__init__)
    assert fields["any_of"] == [sky.Local(), sky.AWS(profile="work"), sky.SSH(hosts=["gpu1"])]
    pool = sky.ComputePool.named("train")
    assert repr(pool.provider).count("aws eu-west-") == 4
    assert sky.ComputePool.named("train", provider=sky.AWS(), region="eu-west-3", accelerator="L4").provider == sky.AWS(
        region="eu-west-3"
    )
    rented, errors = rented_providers()
    assert ([(provider.region, provider.profile) for provider in rented], errors) == (
        [("eu-west-1", "work"), ("eu-west-2", "work"), ("us-east-1", "work")],
        [],
    )


def test_a_provider_is_given_within_its_pool_or_by_name(home: Path) -> None:
    write(
        home / "project" / "skyward.toml",
        "[providers.local]\nlease_s = 7\n"
        '[pools.inline]\nprovider = { type = "local", lease_s = 3 }\n'
        '[pools.plain]\nprovider = "local"\n',
    )
    assert sky.ComputePool.named("inline").provider == sky.Local(lease_s=3)
    assert sky.ComputePool.named("plain").provider == sky.Local(lease_s=7)
    assert provider_named("local") == sky.Local(lease_s=7)


def test_options_have_the_same_aliases_as_in_python(home: Path) -> None:
    lines = ('provider = "local"', "memory_gb = 1", "logging = false", "provision_timeout = 60")
    write(home / "project" / "skyward.toml", "\n".join(("[pools.p]", *lines, "default_compute_timeout = 9")))
    pool = sky.ComputePool.named("p")
    assert (pool.spec.memory_gib, pool.spec.provision_timeout_s) == (1, 60)
    assert pool_fields("p", sky.ComputePool.__init__)["default_timeout_s"] == 9
    assert pool_fields("p", sky.ComputePool.__init__)["logs"] is False
    assert sky.ComputePool.named("p", memory_gb=2).spec.memory_gib == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pools.bad]\nnodes = 2\n", r"\./skyward.toml: \[pools.bad\] provider: missing; set it to one of .*local"),
        ('[pools.bad]\nprovider = "mars"\n', r"\[pools.bad\] provider='mars': unknown provider; use one of .*local"),
        ('[pools.bad]\nprovider = "locla"\n', "did you mean 'local'"),
        (
            '[pools.bad]\nprovider = "vastai"\n',
            r"provider='vastai': unknown provider; this provider does not exist yet; .*local, ray_cluster, ssh$",
        ),
        (
            '[pools.bad]\nprovider = "v"\n[providers.v]\ntype = "vastai"\n',
            r"\[providers.v\] type='vastai': unknown provider; .* use one of aws, local, ray_cluster, ssh$",
        ),
        ('[pools.bad]\nprovider = "local"\nttl = 600\n', r"ttl: no such key; leave it out: leases replace it"),
        ('[pools.bad]\nprovider = "local"\ngpus = 8\n', r"gpus: no such key; write accelerator="),
        ('[pools.bad]\nprovider = "local"\nmemory_gb = "8"\n', r"memory_gb='8': wrong type or value; write a number"),
        ('[pools.bad]\nprovider = "local"\nlogs = true\nlogging = true\n', r"logging: given twice, because logs"),
        (
            '[pools.bad]\nprovider = "local"\nnodez = 2\n',
            r"\[pools.bad\] nodez: no such key; did you mean 'nodes'",
        ),
        (
            '[pools.bad]\nprovider = "local"\nnodes = "2"\n',
            r"\[pools.bad\] nodes='2': wrong type or value; write a whole number",
        ),
        ('[pools.bad]\nprovider = "local"\nnodes = true\n', r"nodes=True: wrong type or value; write a whole number"),
        ('[pools.bad]\nprovider = "local"\nmemory_gib = "8"\n', r"memory_gib='8': wrong type or value; write a number"),
        (
            '[pools.bad]\nprovider = "local"\nallocation = "spt"\n',
            r"allocation='spt': wrong type or value; write one of 'spot', 'on-demand'",
        ),
        ('[pools.bad]\nprovider = "local"\nlogs = "x"\n', r"logs='x': not supported in a file; write true or false"),
        (
            '[pools.bad]\nprovider = "local"\npreload = "torch"\n',
            r"preload='torch': wrong type or value; write a list of text",
        ),
        (
            '[pools.bad]\nprovider = "local"\ninitializer = "f"\n',
            r"initializer: not allowed in a file; pass it in Python",
        ),
        ('[pools.bad]\nprovider = "local"\naccelerator = "A1000000"\n', r"A1000000"),
        (
            '[pools.bad]\nprovider = "local"\naccelerator = { nam = "A100" }\n',
            r"\[pools.bad.accelerator\] nam: .*'name'",
        ),
        (
            '[providers.mine]\ntype = "local"\nleases = 2\n[pools.bad]\nprovider = "mine"\n',
            r"\[providers.mine\] leases: no such key; did you mean 'lease_s'",
        ),
        (
            '[providers.mine]\ntype = "lo"\n[pools.bad]\nprovider = "mine"\n',
            r"\[providers.mine\] type='lo': unknown provider",
        ),
        (
            '[providers.mine]\ntype = "local"\nlease_s = -1\n[pools.bad]\nprovider = "mine"\n',
            r"\[providers\] mine: Local.lease_s=-1",
        ),
        (
            '[pools.bad]\nprovider = "local"\nimage = { pipp = ["x"] }\n',
            r"\[pools.bad.image\] pipp: .* did you mean 'pip'",
        ),
        (
            '[pools.bad]\nprovider = "local"\nimage = { pip = "torch" }\n',
            r"\[pools.bad.image\] pip='torch': .* list of text",
        ),
        (
            '[pools.bad]\nprovider = "local"\nimage = { env = { A = 1 } }\n',
            r"\[pools.bad.image\] env=.* table of text",
        ),
        (
            '[pools.bad]\nprovider = "local"\nimage = { python = "2.7" }\n',
            r"\[pools.bad\] image: Image.python='2.7'",
        ),
        ("[pool.bad]\n", r"pool: no such table; did you mean 'pools'"),
        ("pools = 3\n", "pools"),
        ("[pools]\nbad = 3\n", r"\[pools\] bad=3: not a table; write \[pools.bad\]"),
        ("[pools.bad\n", r"\./skyward.toml: "),
        ("", r"pool 'bad': not found in \./skyward.toml; add a table"),
    ],
)
def test_a_mistake_is_reported_with_its_place_and_the_legal_values(home: Path, text: str, message: str) -> None:
    write(home / "project" / "src" / "skyward.toml", text)
    with pytest.raises((UsageError, sky.errors.ProviderError), match=message):
        sky.ComputePool.named("bad")


def test_hosts_of_your_own_are_a_list_of_names_or_tables(home: Path) -> None:
    write(
        home / "project" / "skyward.toml",
        '[providers.lab]\ntype = "ssh"\nhosts = ["gpu1", { host = "gpu2", port = 2222 }]\n'
        '[pools.lab]\nprovider = "lab"\nnodes = 2\n',
    )
    provider = sky.ComputePool.named("lab").provider
    assert isinstance(provider, sky.SSH)
    assert [(target.host, target.port) for target in provider.targets] == [("gpu1", None), ("gpu2", 2222)]


def test_without_any_file_the_error_names_the_places_for_one(home: Path) -> None:
    with pytest.raises(UsageError, match=r"'bad': not found in \./skyward.toml, ~/.config/skyward/skyward.toml"):
        sky.ComputePool.named("bad")


def test_a_table_reserves_nodes_for_roles(home: Path) -> None:
    text = '[pools.train]\nprovider = "local"\nnodes = 3\n[pools.train.roles]\nevaluation = [2]\n'
    write(home / "project" / "skyward.toml", text)
    pool = sky.ComputePool.named("train")
    assert (pool.roles, pool.node_numbers) == ({"evaluation": (2,)}, (0, 1))
    write(home / "project" / "skyward.toml", text.replace("[2]", "2"))
    with pytest.raises(UsageError, match=r"skyward.toml: \[pools.train\] roles=.*; write a table of"):
        sky.ComputePool.named("train")
    write(home / "project" / "skyward.toml", text.replace("[2]", "[3]"))
    with pytest.raises(UsageError, match=r"roles\['evaluation'\]=3: no such node"):
        sky.ComputePool.named("train")
