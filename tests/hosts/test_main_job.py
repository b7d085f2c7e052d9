"""The main job on other machines: examples with another pool, and the numbers of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import skyward as sky
from skyward.cli import main
from skyward.state import detached
from skyward.values.machine import LogLine
from tests.few_modules import LEAN
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.faults import nothing_runs_on
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
BY_RAY = {
    "        there = make": "        while pool.engine != 'ray':\n            time.sleep(0.1)\n        there = make",
}
"""The search begins when Ray stands."""
GO = "/root/go-on-training"
SLOWER = {
    "        sampler.set_epoch(epoch)": f"""
        while epoch and not __import__("os").path.exists("{GO}"):
            __import__("time").sleep(0.05)
        sampler.set_epoch(epoch)
""",
}
"""The second epoch of the training waits for a file."""


def changed(
    example: tuple[str, str], pool: str, folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Write the example with a pool of these arguments and further changes, and return its path."""
    name, line = example
    text = (EXAMPLES / name).read_text()
    for old, new in {line: pool, **SMALLER[example], **changes}.items():
        assert text.count(old) == 1, f"{name} has not one {old!r}"
        text = text.replace(old, new)
    script = folder / name
    script.write_text(text)
    return script


def run_example(script: Path, **environment: str) -> str:
    """Return the output of an example."""
    folder = script.parent
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
def ddp_here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """Return the output of the training on `nodes` nodes of this machine."""

    @functools.cache
    def trained(nodes: int) -> list[str]:
        script = changed(DDP, f"provider=sky.Local(), nodes={nodes}", tmp_path_factory.mktemp("here"))
        # The hosts have this machine's cores too. Another number of threads would add up in another order.
        return numbers(run_example(script, OMP_NUM_THREADS="1"))

    return trained


def ddp_image(index: PackageIndex) -> str:
    pip = [f"{name}=={version(name)}" for name in ("torch", "scikit-learn")]
    return f"sky.Image(pip={pip}, pip_index_url={index.simple!r}, env={{'OMP_NUM_THREADS': '1'}})"


def ssh(bed: Bed, hosts: list[Host]) -> str:
    return f"sky.SSH(hosts={[host.name for host in hosts]}, config_file={str(bed.ssh_config)!r})"


# On rented machines two ranks average gradients: each further one would install and import torch.


def test_detached_ddp_on_three_hosts_of_ray_trains_to_the_same_numbers_although_its_program_is_killed(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    torch_index: PackageIndex,
    ddp_here: Callable[[int], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    on = f"provider={ssh(bed, hosts(3))}, nodes=3, engine='ray', image={ddp_image(torch_index)}"
    script = changed(DDP, f"{on}, name='train', detached_for_s=600", tmp_path, SLOWER)
    lines: list[LogLine] = []
    expected = ddp_here(3)
    program = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(LEAN)},
        start_new_session=True,
    )
    try:
        printed = until_ray_carries_the_training(program)
        program.kill()
        program.wait()
        for host in hosts(3):
            host.write(GO, "")
        with sky.ComputePool.attach("train", logs=lines.append) as pool:
            (call,) = pool.calls()
            results = pool.future(call).result(240)
    finally:
        end(program)
        for host in hosts(3):
            host.run("sh", "-c", f"rm -f {GO} /tmp/skyward-0/*.ended")
    (accuracy, ranks), *others = results
    assert others == [(accuracy, ranks)] * 2
    assert expected[-1] == f"trained on {ranks} ranks: test accuracy {accuracy:.3f}"
    epochs = set(re.findall("epoch .*", printed)) | {line.text for line in lines}
    assert sorted(epochs) == re.findall("epoch .*", "\n".join(expected))
    nothing_runs_on(hosts(3))


def until_ray_carries_the_training(program: subprocess.Popen[str]) -> str:
    """Return what a program has printed when its first epoch is over, and Ray carries its calls."""
    assert program.stdout is not None
    printed = ""
    for line in program.stdout:
        printed += line
        if "Ray carries the calls" in printed and "epoch  1" in printed:
            return printed
    raise AssertionError(printed)


def end(program: subprocess.Popen[str]) -> None:
    """End a program and its detached pool, whatever is left of them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert program.stdout is not None
    program.stdout.close()
    for pool in detached.detached_pools():
        if not pool.has_ended:
            main(["down", pool.pool, "--yes"])


def test_a_grid_search_on_three_hosts_of_ray_finds_the_same(
    bed: Bed, hosts: Callable[[int], list[Host]], ray_index: PackageIndex, tmp_path: Path
) -> None:
    image = f"sky.Image(pip_index_url={ray_index.simple!r})"
    pool = f"{ssh(bed, hosts(3))}, nodes=3, engine='ray', image={image}"
    printed = run_example(changed(GRID, pool, tmp_path, BY_RAY))
    assert "best_params_ equal: True" in printed  # to the search without skyward, which the example makes too
    assert "cv_results_ equal: True" in printed
    assert [host.started_processes() for host in hosts(3)] == [[], [], []]


def aws(ec2: Ec2) -> str:
    return f"sky.AWS(instance_types=['m5.large'], client_cidr={ec2.client_cidr!r})"


def test_ddp_on_two_rented_machines_trains_to_the_same_numbers(
    ec2: Ec2, torch_index: PackageIndex, ddp_here: Callable[[int], list[str]], tmp_path: Path
) -> None:
    pool = f"provider={aws(ec2)}, nodes=2, engine='direct', image={ddp_image(torch_index)}"
    printed = run_example(changed(DDP, pool, tmp_path))
    assert "trained on 2 ranks" in printed
    assert numbers(printed) == ddp_here(2)
    assert ec2.left() == []


def test_a_grid_search_on_three_rented_machines_finds_the_same(
    ec2: Ec2, package_index: PackageIndex, tmp_path: Path
) -> None:
    image = f"sky.Image(pip_index_url={package_index.simple!r})"
    printed = run_example(changed(GRID, f"{aws(ec2)}, nodes=3, engine='direct', image={image}", tmp_path))
    assert "best_params_ equal: True" in printed
    assert "cv_results_ equal: True" in printed
    assert ec2.left() == []


def version(package: str) -> str:
    """Return the installed version without its build, because the results are compared."""
    from importlib.metadata import version as installed

    return installed(package).partition("+")[0]
