"""Run the tests of this folder on a machine with a GPU, and write one report: `make test-gpu`.

    python3 tests/gpu/run.py [--device cpu] [--report FILE] [pytest's arguments]

Nothing is installed. The machine has PyTorch and pytest; a framework that is missing is not tested. Missing
packages come from wheels in `.make/gpu-wheels`: cloudpickle and xxhash, which skyward itself needs, Keras, and the
server of DiLoCo. Make these with `make gpu-wheels` on a machine with a network, for the Python and processor of this
one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WHEELS = ROOT / ".make" / "gpu-wheels"
REPORT = ROOT / ".make" / "gpu-report.md"
DEPENDENCIES = ("cloudpickle", "xxhash")
LIMIT_S = 470.0
"""The whole is to end within 8 minutes, whatever hangs."""
_END_S = 10.0
_HOW = """\
There is no GPU here that torch can use{why}.

On a machine with an NVIDIA GPU, its driver, and Python 3.11 or newer with torch (CUDA) and pytest:

    make test-gpu PYTHON=python3       no network and no install needed; about 8 minutes; .make/gpu-report.md

Without one, the same tests can be rehearsed on the CPU: make test-gpu ARGS="--device cpu"
"""


def is_missing(module: str) -> bool:
    return importlib.util.find_spec(module) is None


def unpacked(folder: Path) -> list[str]:
    """Unpack the wheels of packages that are not installed into the folder. Returns the problems that are left."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    made = set()
    for wheel in sorted(WHEELS.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        is_fitting = wheel.name.endswith("-none-any.whl") or (
            f"-{tag}-" in wheel.name and platform.machine() in wheel.name
        )
        if is_fitting and not is_installed(name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            made.add(name)
    return [
        f"{name}: not installed, and no wheel for {tag} on {platform.machine()} in {WHEELS}; run\n"
        f"    make gpu-wheels GPU_PYTHON={platform.python_version()} GPU_ARCH={platform.machine()}\n"
        "where there is a network, and bring that folder here"
        for name in DEPENDENCIES
        if name not in made and is_missing(name)
    ]


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def gpu_problem() -> str:
    """Return the reason why torch has no GPU here, or an empty text if it has one."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f": torch {torch.__version__} is a build without CUDA"
    return f": torch {torch.__version__} finds no device (does nvidia-smi?)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"for all tests together, {LIMIT_S:g}")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="skyward-gpu-") as scratch:
        site = Path(scratch, "site")
        problems = unpacked(site)
        problems += [
            f"{name}: not installed for {sys.executable}; name a Python that has it: make test-gpu PYTHON=..."
            for name in ("torch", "pytest")
            if is_missing(name)
        ]
        if not problems and options.device == "cuda" and (why := gpu_problem()):
            problems = [_HOW.format(why=why)]
        if problems:
            sys.stderr.write("\n".join(problems) + "\n")
            return 2
        return run(options, more, Path(scratch), site)


def run(options: argparse.Namespace, more: list[str], scratch: Path, site: Path) -> int:
    results, began = scratch / "results.jsonl", time.monotonic()
    paths = [str(ROOT), *([str(site)] if site.exists() else []), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # these tests need no framework, whatever the machine has
        "XDG_STATE_HOME": str(scratch / "state"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), f"--rootdir={ROOT}", str(HERE)]
    command += [f"--confcutdir={HERE}", f"--basetemp={scratch / 'tmp'}", f"--device={options.device}"]
    command += [f"--results={results}", *more]
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    with contextlib.ExitStack() as stack:
        stack.callback(kill_all, process)
        status = waited(process, options.limit_s)
    lines = results.read_text().splitlines() if results.exists() else []
    report = describe(options.device, [json.loads(line) for line in lines], time.monotonic() - began, status)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(report)
    sys.stdout.write(f"\nthe report: {options.report}\n")
    return status if status is not None else 1


def waited(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return pytest's exit status, or None if it timed out. Ctrl-C and a timeout end pytest by SIGINT first."""
    try:
        return process.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return None


def kill_all(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The report -------------------------------------------------------------------------------------------------------


def describe(device: str, tests: list[dict[str, Any]], seconds: float, status: int | None) -> str:
    counts = {outcome: sum(test["outcome"] == outcome for test in tests) for outcome in ("passed", "failed", "skipped")}
    ended = "its time was up" if status is None else f"pytest ended with status {status}"
    lines = [
        f"# GPU tests: {'a rehearsal on the CPU' if device == 'cpu' else devices_in_words()}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s; {ended}; "
        + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
        "",
        f"- machine: {platform.platform()}, {os.cpu_count()} cores",
        f"- Python {platform.python_version()}, {sys.executable}",
        f"- skyward {commit()}",
        "",
        "| test | outcome | s | figures |",
        "|---|---|---|---|",
    ]
    for test in tests:
        figures = "; ".join(f"{name}: {value}" for name, value in test["figures"].items())
        lines.append(f"| {test['test'].replace('|', '/')} | {test['outcome']} | {test['seconds']} | {figures} |")
    for test in tests:
        if test["why"]:
            lines += ["", f"## {test['outcome']}: {test['test']}", "", "```text", test["why"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def devices_in_words() -> str:
    query = "--query-gpu=name,memory.total,driver_version"
    return said("nvidia-smi", query, "--format=csv,noheader").replace("\n", "; ") or "NVIDIA"


def commit() -> str:
    return said("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "of an unknown commit"


def said(program: str, *arguments: str) -> str:
    """Return the program's output, or an empty text if it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
