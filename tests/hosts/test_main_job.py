"""The main job on machines that are not this one: examples with one line changed, and the numbers of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DDP = ("06_torch_ddp.py", "provider=sky.Local(), nodes=2")
GRID = ("07_grid_search.py", "sky.Local(), nodes=2, concurrency=slots")


def run_example(example: tuple[str, str], pool: str, folder: Path, **environment: str) -> str:
    """What the example prints when its pool is made with these arguments."""
    name, line = example
    text = (EXAMPLES / name).read_text()
    assert text.count(line) == 1, f"{name} makes its pool in another way"
    script = folder / name
    script.write_text(text.replace(line, pool))
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(printed: str) -> list[str]:
    """The lines that do not depend on the clock."""
    return [line for line in printed.splitlines() if not re.search(r"\d s$", line)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], list[str]]:
    """What an example shows on this machine, with three nodes."""
    shown: dict[str, list[str]] = {}

    def of(example: tuple[str, str]) -> list[str]:
        if example[0] not in shown:
            pool = "provider=sky.Local(), nodes=3" if example is DDP else "sky.Local(), nodes=3, concurrency=1"
            # The hosts' cores are this machine's: a number of threads changes the order of sums.
            printed = run_example(example, pool, tmp_path_factory.mktemp("here"), OMP_NUM_THREADS="1")
            shown[example[0]] = numbers(printed)
        return shown[example[0]]

    return of


def test_ddp_on_three_hosts_trains_to_the_same_numbers(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    torch_index: PackageIndex,
    here: Callable[[tuple[str, str]], list[str]],
    tmp_path: Path,
) -> None:
    names = [host.name for host in hosts(3)]
    image = f"sky.Image(pip=['torch=={version('torch')}', 'scikit-learn=={version('scikit-learn')}'], "
    image += f"pip_index_url={torch_index.simple!r}, env={{'OMP_NUM_THREADS': '1'}})"
    pool = f"provider=sky.SSH(hosts={names}, config_file={str(bed.ssh_config)!r}), nodes=3, image={image}"
    printed = run_example(DDP, pool, tmp_path)
    assert "trained on 3 ranks" in printed
    assert numbers(printed) == here(DDP)
    assert [host.started_processes() for host in hosts(3)] == [[], [], []]


def test_a_grid_search_on_three_hosts_finds_the_same(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    package_index: PackageIndex,
    here: Callable[[tuple[str, str]], list[str]],
    tmp_path: Path,
) -> None:
    names = [host.name for host in hosts(3)]
    pool = f"sky.SSH(hosts={names}, config_file={str(bed.ssh_config)!r}), nodes=3, concurrency=1, "
    pool += f"image=sky.Image(pip_index_url={package_index.simple!r})"
    printed = run_example(GRID, pool, tmp_path)
    assert "best_params_ equal: True" in printed
    assert "cv_results_ equal: True" in printed
    assert numbers(printed) == here(GRID)


def version(package: str) -> str:
    """The one that is installed here, without its build: the results are to be compared."""
    from importlib.metadata import version as installed

    return installed(package).partition("+")[0]
