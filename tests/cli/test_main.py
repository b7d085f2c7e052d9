"""The command line as a newcomer meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skyward.providers.local
from skyward import _version, errors
from skyward.cli import build_parser, main


def test_without_a_command_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "doctor" in out
    assert "gc" in out
    assert "import skyward as sky" in out


def test_help_names_the_exit_statuses_and_fits_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "exit status" in out
    assert len(out.splitlines()) <= 40


def test_version_is_the_single_source(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"skyward {_version.__version__}\n"


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fly"])
    assert stopped.value.code == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gc nope", "skyward gc: error: unrecognized arguments: nope; skyward gc --help lists its arguments"),
        ("gc --dryrun", "skyward gc: error: unrecognized arguments: --dryrun; did you mean --dry-run?"),
        ("hub token list nope", "skyward hub token list: error: unrecognized arguments: nope; "),
        ("--json ls", "write --json after the command: skyward ls --json"),
        ("--nope", "skyward: error: unrecognized arguments: --nope; skyward --help lists its arguments"),
        ("ssh", "skyward ssh: error: the following arguments are required: POOL\n"),
    ],
)
def test_a_wrong_word_is_an_error_of_its_command(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    printed = capsys.readouterr().err
    assert said in printed


@pytest.mark.parametrize("command", ["doctor", "gc", "integrations"])
def test_each_command_names_its_call_from_python(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "from Python: skyward." in capsys.readouterr().out


def test_gc_names_each_item_it_removed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = ["process 4711 (agent of a pool that died)", "folder /tmp/skyward-x"]
    monkeypatch.setattr(skyward.providers.local, "collect_garbage", lambda is_dry_run: found)
    assert main(["gc"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"removed {what}" for what in found]


def test_gc_reports_that_nothing_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(skyward.providers.local, "collect_garbage", lambda is_dry_run: [])
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing to clean up on this machine (no provider was checked)\n"


def test_errors_of_skyward_are_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(is_dry_run: bool) -> list[str]:
        raise errors.ProviderError("local: process 4711 belongs to another user; ask them to run `skyward gc`")

    monkeypatch.setattr(skyward.providers.local, "collect_garbage", refuse)
    assert main(["gc"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == "skyward: local: process 4711 belongs to another user; ask them to run `skyward gc` [provider-error]\n"
    )


def test_ctrl_c_ends_it_as_a_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(is_dry_run: bool) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(skyward.providers.local, "collect_garbage", interrupted)
    assert main(["gc"]) == 130


def test_a_reader_that_leaves_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "-m", "skyward", "integrations", "--markdown"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before it writes anything
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_installed_script_and_module_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("skyward")
    lines = [
        subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        for command in ([str(script)], [sys.executable, "-m", "skyward"])
    ]
    assert lines == [f"skyward {_version.__version__}\n"] * 2


def test_help_imports_no_framework_and_no_pool() -> None:
    code = (
        "import sys; from skyward.cli import build_parser; build_parser();"
        "print(*{'numpy', 'torch', 'cloudpickle', 'skyward.pool.pool', 'skyward.providers'} & sys.modules.keys())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == []


def test_every_command_has_a_line_of_help() -> None:
    text = build_parser().format_help()
    for command, opening in {"doctor": "check this machine", "gc": "clean up"}.items():
        assert any(line.split()[:1] == [command] and opening in line for line in text.splitlines())


def test_gc_clears_caches_here_and_names_hosts_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "cache" / "skyward" / "client"
    kept.mkdir(parents=True)
    (kept / "uv.gz").write_bytes(b"0" * 100_000)
    assert main(["gc", "--cache"]) == 0
    assert not kept.exists()
    assert capsys.readouterr().out == "this machine: 0.00 GiB removed\n"
    assert main(["gc", "--cache", "--host", "nobody@127.0.0.1:9"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["gc", "--host", "nobody@127.0.0.1:9"])
    assert "--host: needs --cache" in capsys.readouterr().err
