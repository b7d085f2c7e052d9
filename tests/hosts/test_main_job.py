"""The main job on other machines: examples with another pool, and the numbers of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.few_modules import LEAN
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DDP = ("06_torch_ddp.py", "provider=sky.Local(), nodes=2")
GRID = ("07_grid_search.py", "sky.Local(), nodes=2, concurrency=slots")
SMALLER = {
    DDP: {"epochs=12": "epochs=3"},
    GRID: {
        "x, y = load_digits(return_X_y=True)": "x, y = (part[:600] for part in load_digits(return_X_y=True))",
        "[5, 10, 20]": "[10]",
        "[0.05, 0.1, 0.3]": "[0.1]",
        " here = make_search()": " here = make_search().set_params(n_jobs=1)",
    },
}
"""Shorter examples: the same training for fewer epochs, and the same kinds of model with half of the fits on a third of
the digits. The fits without skyward need no processes, which would import.
"""


def run_example(example: tuple[str, str], pool: str, folder: Path, **environment: str) -> str:
    """Return the output of the example with a pool of these arguments."""
    name, line = example
    text = (EXAMPLES / name).read_text()
    for old, new in {line: pool, **SMALLER[example]}.items():
        assert text.count(old) == 1, f"{name} has not one {old!r}"
        text = text.replace(old, new)
    script = folder / name
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(LEAN), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(printed: str) -> list[str]:
    """Return the lines that do not depend on the clock."""
    return [line for line in printed.splitlines() if not re.search(r"\d s$", line)]


@pytest.fixture(scope="module")
def ddp_here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the output of the training on two nodes of this machine."""
    # The hosts have this machine's cores too. Another number of threads would add up in another order.
    pool = "provider=sky.Local(), nodes=2"
    return numbers(run_example(DDP, pool, tmp_path_factory.mktemp("here"), OMP_NUM_THREADS="1"))


def ddp_image(index: PackageIndex) -> str:
    pip = [f"{name}=={version(name)}" for name in ("torch", "scikit-learn")]
    return f"sky.Image(pip={pip}, pip_index_url={index.simple!r}, env={{'OMP_NUM_THREADS': '1'}})"


def ssh(bed: Bed, hosts: list[Host]) -> str:
    return f"sky.SSH(hosts={[host.name for host in hosts]}, config_file={str(bed.ssh_config)!r})"


# Two ranks average gradients, and each further one would install and import torch. The searches have three nodes.


def test_ddp_on_two_hosts_trains_to_the_same_numbers(
    bed: Bed, hosts: Callable[[int], list[Host]], torch_index: PackageIndex, ddp_here: list[str], tmp_path: Path
) -> None:
    pool = f"provider={ssh(bed, hosts(2))}, nodes=2, engine='direct', image={ddp_image(torch_index)}"
    printed = run_example(DDP, pool, tmp_path)
    assert "trained on 2 ranks" in printed
    assert numbers(printed) == ddp_here
    assert [host.started_processes() for host in hosts(2)] == [[], []]


def test_a_grid_search_on_three_hosts_finds_the_same(
    bed: Bed, hosts: Callable[[int], list[Host]], package_index: PackageIndex, tmp_path: Path
) -> None:
    image = f"sky.Image(pip_index_url={package_index.simple!r})"
    printed = run_example(GRID, f"{ssh(bed, hosts(3))}, nodes=3, engine='direct', image={image}", tmp_path)
    assert "best_params_ equal: True" in printed  # to the search without skyward, which the example makes too
    assert "cv_results_ equal: True" in printed
    assert [host.started_processes() for host in hosts(3)] == [[], [], []]


def aws(ec2: Ec2) -> str:
    return f"sky.AWS(instance_types=['m5.large'], client_cidr={ec2.client_cidr!r})"


def test_ddp_on_two_rented_machines_trains_to_the_same_numbers(
    ec2: Ec2, torch_index: PackageIndex, ddp_here: list[str], tmp_path: Path
) -> None:
    pool = f"provider={aws(ec2)}, nodes=2, engine='direct', image={ddp_image(torch_index)}"
    printed = run_example(DDP, pool, tmp_path)
    assert "trained on 2 ranks" in printed
    assert numbers(printed) == ddp_here
    assert ec2.left() == []


def test_a_grid_search_on_three_rented_machines_finds_the_same(
    ec2: Ec2, package_index: PackageIndex, tmp_path: Path
) -> None:
    image = f"sky.Image(pip_index_url={package_index.simple!r})"
    printed = run_example(GRID, f"{aws(ec2)}, nodes=3, engine='direct', image={image}", tmp_path)
    assert "best_params_ equal: True" in printed
    assert "cv_results_ equal: True" in printed
    assert ec2.left() == []


def version(package: str) -> str:
    """Return the installed version without its build, because the results are compared."""
    from importlib.metadata import version as installed

    return installed(package).partition("+")[0]
