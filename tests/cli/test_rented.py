"""The command line on rented machines: a local EC2, and a program that died with its pool open."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.cli import main
from skyward.pool import fleet
from skyward.state import live
from skyward.state.journal import Owner, journals
from skyward.state.live import LivePool
from tests.providers.moto_server import ec2_server

AMI = "ami-785db401"
POOL = "train-0123abcd"
DIES = f"""
import os, sys
from skyward.events import ignore
from skyward.values.machine import PoolSpec
from tests.providers.test_aws import AMI, MotoAWS
provider = MotoAWS(endpoint_url=sys.argv[1], ami=AMI, client_cidr="192.0.2.1/32")
spec = PoolSpec(nodes=2, vcpus=2, allocation="on-demand")
provider.launch(spec, provider.offers(spec), "{POOL}", [0, 1], ignore)
os._exit(9)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ec2_server() as url:
        yield url


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for the types of machines, which moto takes 2 s of processor time to describe."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, cache: str) -> Iterator[None]:
    """Make a user with a project that names the account."""
    folder = tempfile.mkdtemp(prefix="s-", dir="/tmp")  # `gc` would find folders of other tests' pools
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    Path("skyward.toml").write_text(
        f'[providers.aws]\nendpoint_url = "{server}"\nami = "{AMI}"\nclient_cidr = "192.0.2.1/32"\n'
        '[pools.train]\nprovider = "aws"\nnodes = 2\nvcpus = 2\nallocation = "on-demand"\nbudget_usd = 1\n'
    )
    yield
    shutil.rmtree(folder)


@pytest.fixture
def dead(server: str) -> str:
    """Return the remains of a program that died: the first of its two machines."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", DIES, server], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 9, done.stderr
    (journal,) = journals()
    return sorted(journal.living)[0]


def test_machines_of_a_dead_program_are_listed_and_ended(dead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 1  # it needs attention
    said = capsys.readouterr()
    assert f"{POOL}  aws       dead     2/2" in said.out
    assert dead in said.out
    assert "skyward gc" in said.err
    assert main(["ls", "--json"]) == 1
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert len(pool["instances"]) == 2
    assert pool["price_usd_per_hour"] > 0
    assert main(["ls", "--local"]) == 0
    assert capsys.readouterr().out == "no pool is open (no provider was checked)\n"

    assert main(["gc", "--dry-run"]) == 0
    assert f"would end machine {dead} of pool {POOL}" in capsys.readouterr().out
    assert main(["down", POOL, "--yes"]) == 0
    assert dead in capsys.readouterr().out
    assert journals() == []
    assert main(["ls"]) == 0
    assert main(["down", POOL, "--yes"]) == 0  # as the keeper may do again
    assert capsys.readouterr().out.endswith(f"{POOL}: no record of it is left on this machine\n")


def test_program_that_is_stopped_is_asked_to_close_its_pool_once_it_goes_on(dead: str) -> None:
    """Otherwise it would replace the machines that were ended."""
    live.announce(LivePool(pool=POOL, label="", provider="aws", wanted=2, is_rented=True))
    said = fleet.end(POOL, wait_s=0.1)
    assert re.fullmatch(r"ended 2 machines: .*; its program does not answer, and closes the pool once it goes on", said)
    assert live.is_asked_to_end(POOL)
    live.withdraw(POOL)


def test_machines_without_a_record_are_named_instead_of_taken_for_gone(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        assert main(["down", POOL, "--yes"]) == 1
        said = capsys.readouterr().err
        assert re.search(rf"{POOL}.*: no record of it is on this machine, and 2 machines of it exist \(.*{dead}", said)
    assert main(["down", POOL, "--yes"]) == 0


def test_account_of_other_credentials_is_named_instead_of_its_machines_taken_for_gone(
    dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (journal,) = journals()
    (path,) = [path for path in Path(journal.folder).iterdir() if journal.scope in path.read_text(errors="replace")]
    text = path.read_text()
    path.write_text(text.replace(journal.scope, "aws 999999999999"))
    assert main(["ls"]) == 1
    assert "belongs to aws 999999999999, but these credentials belong to" in capsys.readouterr().err
    path.write_text(text)
    assert main(["down", POOL, "--yes"]) == 0


def test_gc_ends_machines_of_a_dead_program(dead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc"]) == 0
    assert f"ended machine {dead}" in capsys.readouterr().out
    assert main(["gc"]) == 0
    assert "no machine is rented for it" in capsys.readouterr().out


def test_a_pool_of_a_killed_program_is_listed_by_its_name_until_it_is_ended(
    dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(host=Owner.this_process().host, boot="-", pid=1, started="-")
    live.announce(
        LivePool(
            pool=POOL,
            label="train",
            provider="aws",
            wanted=2,
            is_rented=True,
            owner=owner,
            program="train.py",
            began=1.0,
        )
    )
    assert main(["ls"]) == 1
    assert "train.py (1)" in capsys.readouterr().out
    assert main(["down", "train", "--yes"]) == 0
    assert dead in capsys.readouterr().out
    assert live.live_pools() == []


def shown_from(start: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output from that text on. Before it, moto, which runs in this process, reports its missing parts."""
    out = capsys.readouterr().out
    return out[out.index(start) :]


def test_offers_are_a_table_with_prices(capsys: pytest.CaptureFixture[str]) -> None:
    wishes = ["--accelerator", "T4", "--allocation", "on-demand", "--limit", "3"]
    assert main(["offers", "--provider", "aws", *wishes]) == 0
    header, *rows = shown_from("PROVIDER", capsys).splitlines()
    assert header.split()[:5] == ["PROVIDER", "MACHINE", "VCPUS", "GIB", "ACCELERATOR"]
    assert len(rows) == 3
    assert all("T4" in row and "on demand" in row and re.search(r"\$\d+\.\d{4} ", row) for row in rows)
    assert main(["offers", "--pool", "train", "--json", "--limit", "1"]) == 0
    (offer,) = json.loads(shown_from("[\n", capsys))
    assert offer["vcpus"] >= 2
    assert main(["offers", "--provider", "aws", "--region", "eu-west-1", "--vcpus", "8", "--limit", "1"]) == 0
    assert "eu-west-1" in capsys.readouterr().out
    regions = ["--region", "eu-west-1", "--region", "us-east-1"]
    kinds = ["--accelerator", "T4", "--accelerator", "A10G", "--selection", "first", "--limit", "0"]
    assert main(["offers", "--provider", "aws", *regions, *kinds, "--allocation", "on-demand"]) == 0
    rows = shown_from("PROVIDER", capsys).splitlines()[1:]
    order = [(kind, region) for region in ("eu-west-1", "us-east-1") for kind in ("T4", "A10G")]
    seen = [next(pair for pair in order if pair[0] in row and pair[1] in row) for row in rows]
    assert list(dict.fromkeys(seen)) == order


def test_a_plan_shows_requests_and_cost_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train"]) == 0
    shown = shown_from("2 x ", capsys)
    assert "per hour; at least $" in shown
    assert "the budget lasts " in shown
    assert "ImageId" in shown
    assert '"PublicKeyMaterial": "<public key>"' in shown
    assert journals() == []
    assert main(["ls"]) == 0
