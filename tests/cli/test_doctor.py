"""`skyward doctor` tells the truth about this machine and this environment."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from skyward import errors
from skyward.cli import main
from skyward.cli.doctor import Report, describe, examine
from skyward.cli.host import HostFacts, Support, examine_host
from skyward.cli.packages import Extra, Package, PackageState, examine_extras
from skyward.state.ray_losses import forget_loss, last_loss, note_loss

GIB = 1024**3


def test_it_reports_the_essentials_and_that_local_pools_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert platform.python_version() in out
    assert f"cloudpickle {metadata.version('cloudpickle')}" in out
    assert "sky.Local()" in out.splitlines()[-1]


def test_cores_and_memory_are_those_of_this_machine() -> None:
    host = examine_host()
    assert host.cores == os.cpu_count()
    assert 1 <= host.usable_cores <= host.cores
    assert host.memory_bytes == psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_usable_cores_follow_the_affinity_of_the_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert examine_host().usable_cores == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_probe_of_the_kernel_leaks_no_descriptor() -> None:
    mine = psutil.Process()
    before = mine.num_fds()
    examine_host()
    assert mine.num_fds() <= before  # fewer, if leftovers of other tests are collected meanwhile


def test_every_user_extra_of_the_metadata_is_shown_and_no_developer_extra() -> None:
    declared = set(metadata.metadata("skyward").get_all("Provides-Extra") or [])
    assert {extra.name for extra in examine().extras} == declared - {"all", "bench", "dev"}


def test_installed_extra_shows_its_versions() -> None:
    (joblib,) = (extra for extra in examine().extras if extra.name == "joblib")
    assert joblib.is_installed
    assert [p.version for p in joblib.packages] == [metadata.version("joblib")]


def fake_distribution(folder: Path, name: str, version: str, *fields: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_missing_and_too_old_packages_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(
        tmp_path,
        "house",
        "1.0",
        "Requires-Dist: floor>=2",
        "Requires-Dist: roof[red]<9,>=1.10; extra == 'top'",
        "Requires-Dist: chimney>=1; python_version >= '3' and extra == 'top'",
        "Provides-Extra: top",
        "Provides-Extra: garden",
    )
    fake_distribution(tmp_path, "floor", "2.0.1+oak")
    fake_distribution(tmp_path, "roof", "1.9")
    monkeypatch.syspath_prepend(str(tmp_path))

    core, (top, garden) = examine_extras("house")

    assert core.packages == (Package(name="floor", version="2.0.1+oak", state=PackageState.INSTALLED),)
    assert top.packages == (
        Package(name="roof", version="1.9", state=PackageState.TOO_OLD),
        Package(name="chimney", version="", state=PackageState.MISSING),
    )
    assert not top.is_installed
    assert garden == Extra(name="garden", packages=())
    assert garden.is_installed


def test_a_cpu_build_counts_as_the_package_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ("Requires-Dist: kiln>=2; extra == 'heat'", "Provides-Extra: heat")
    fake_distribution(tmp_path, "pottery", "1.0", *fields)
    fake_distribution(tmp_path, "kiln_cpu", "2.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, (heat,) = examine_extras("pottery")
    assert heat.packages == (Package(name="kiln", version="2.1", state=PackageState.INSTALLED),)


def test_a_folder_on_the_path_is_not_an_installation() -> None:
    with pytest.raises(errors.MissingDependency, match="pip install -e"):
        examine_extras("a-distribution-that-nobody-made")


def a_host(**changed: object) -> HostFacts:
    values: dict[str, object] = {
        "python": "CPython 3.11.9",
        "executable": "/usr/bin/python3",
        "platform": "a system",
        "cores": 8,
        "usable_cores": 2,
        "memory_bytes": 16 * GIB,
        "memory_available_bytes": 12 * GIB,
        "memory_limit_bytes": None,
        "open_files_soft": "1024",
        "open_files_hard": "unlimited",
        "supports": (),
        "problems": (),
    }
    return HostFacts(**(values | changed))  # type: ignore[arg-type]


def a_report(host: HostFacts, *extras: Extra) -> Report:
    core = Extra(name="core", packages=(Package(name="cloudpickle", version="3.1", state=PackageState.INSTALLED),))
    return Report(version="0.1", host=host, limits="none", core=core, extras=extras)


def test_a_missing_part_comes_with_the_way_to_get_it() -> None:
    jax = Extra(name="jax", packages=(Package(name="jax", version="", state=PackageState.MISSING),))
    keras = Extra(name="keras", packages=(Package(name="keras", version="2.1", state=PackageState.TOO_OLD),))
    text = "\n".join(describe(a_report(a_host(), jax, keras)))
    assert "pip install 'skyward[NAME]'" in text
    assert "needs jax" in text
    assert "keras 2.1 is too old" in text


def test_a_missing_means_comes_with_its_fallback() -> None:
    absent = Support(name="memfd", available=False, otherwise="large values lie in a scratch folder instead")
    text = "\n".join(describe(a_report(a_host(supports=(absent,)))))
    assert "no: large values lie in a scratch folder instead" in text


def test_the_limit_of_a_container_is_named() -> None:
    text = "\n".join(describe(a_report(a_host(memory_limit_bytes=4 * GIB))))
    assert "16.0 GiB, of which this process may use 4.0, 12.0 available" in text


def test_the_last_loss_of_ray_is_shown_until_a_ray_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert last_loss() is None
    note_loss("first", "no such port")
    note_loss("train", "ray was not found")
    text = "\n".join(describe(examine()))
    assert "was not there in pool train at 2" in text
    assert "ray was not found" in text
    forget_loss()
    forget_loss()
    assert "was not there" not in "\n".join(describe(examine()))
    (tmp_path / "skyward" / "ray-loss.json").write_text("{")
    assert last_loss() is None


def test_problems_come_last_and_say_that_local_pools_do_not_run() -> None:
    report = a_report(a_host(problems=("this system cannot fork; on Windows, use WSL 2",)))
    assert report.problems
    assert describe(report)[-2:] == [
        "sky.Local() does not run on this machine:",
        "  this system cannot fork; on Windows, use WSL 2",
    ]
