"""The newcomer's walk: the commands of README.md, unchanged, in a fresh environment, and then its first example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^\$ (.*)", block, re.MULTILINE)
]
INSTALLS = [command for command in COMMANDS if command.startswith("pip install ")]
MAKES = {"make demo": "examples/demo.py", "make test": "-m tests promises"}
"""Commands that other tests run, and the end of the last line that make runs for each."""


def test_every_command_is_run_by_the_tests() -> None:
    assert len(INSTALLS) == 2
    assert {*INSTALLS, *MAKES} == set(COMMANDS)


@pytest.mark.parametrize(("command", "end"), MAKES.items())
def test_make_runs_what_other_tests_run(command: str, end: str) -> None:
    """Two tests stand for the commands: test_demo_succeeds_and_prints_what_the_tour_shows, and all of them."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run([*command.split(), "-n"], cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith(end)


@pytest.mark.timeout(300)
def test_the_commands_install_what_the_first_example_needs(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    # The libraries are those of this environment, so that pip finds them installed and downloads nothing. So is pip.
    (libraries,) = folder.glob("lib/python*/site-packages")
    (libraries / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # No isolation for the build, which would download its backend. pip reads "0" as "no isolation".
    settings = {"PATH": path, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command in INSTALLS:
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=ours | settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    example = re.search(r"^```python\n(.*?)^```\n(?:.*?)^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert example is not None
    (tmp_path / "example.py").write_text(example[1])
    where = "import skyward; print(skyward.__file__)"
    for line, expected in ((["example.py"], example[2]), (["-c", where], f"{libraries}/skyward/__init__.py\n")):
        done = subprocess.run(
            ["python", *line], cwd=tmp_path, env=ours | settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == sorted(expected.splitlines())
