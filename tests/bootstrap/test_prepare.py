"""Preparation of a machine: missing parts are made once, existing ones are found in one round trip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path

import pytest

from skyward.bootstrap.prepare import Ready, prepare
from skyward.errors import BootstrapFailed, UsageError
from skyward.events import Event, PhaseEnded, PhaseFailed, PhaseOutput, PhaseStarted, ignore
from skyward.values.image import Image
from tests.bootstrap.packages import Index, make_wheel
from tests.bootstrap.scratch import ScratchNode, phases_of
from tests.waiting import until

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_ready(node: ScratchNode, image: Image, events: list[Event] | None = None) -> Ready:
    return prepare(node, image, emit=ignore if events is None else events.append, node=0, folder="test-0")


def run_slot(node: ScratchNode, ready: Ready, code: str) -> str:
    """Run code like a slot's, with the whole path and the whole environment. Returns its output."""
    boot = f"import sys; sys.path[:] = {list(ready.path)!r}\n{code}"
    done = subprocess.run([ready.python, "-c", boot], env=dict(ready.env), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_bare_machine_is_prepared_and_then_found_ready_in_one_round_trip(bare: ScratchNode, index: Index) -> None:
    image = Image(pip=["beta"], pip_index_url=index.url, env={"NAME": "value"})
    events: list[Event] = []
    ready = make_ready(bare, image, events)
    assert run_slot(bare, ready, "import beta, skyward, xxhash, cloudpickle; print(beta.alpha.VALUE)") == "1"
    assert ready.python_version.startswith(f"{MINOR}.")
    assert {"probe", "upload", "uv", "skyward", "packages"} <= set(phases_of(events, PhaseStarted))
    assert phases_of(events, PhaseStarted) == phases_of(events, PhaseEnded)
    assert any("beta==1.0" in event.text for event in events if isinstance(event, PhaseOutput))

    bare.commands.clear()
    events.clear()
    began = time.monotonic()
    assert make_ready(bare, image, events) == ready
    assert time.monotonic() - began < 60
    assert len(bare.commands) == 1
    made = [event for event in events if isinstance(event, PhaseEnded) and not event.was_ready]
    assert [event.phase for event in made] == ["probe"]


def test_the_agent_runs_the_client_s_own_build_without_the_user_s_packages(scratch: ScratchNode, index: Index) -> None:
    ready = make_ready(scratch, Image(pip=["alpha"], pip_index_url=index.url))
    code = f"import sys; sys.path[:] = {list(ready.agent_path)!r}\n"
    code += "import importlib.metadata as m, skyward, skyward.node.agent.main\n"
    code += "print(m.version('skyward'), skyward.__file__)"
    done = subprocess.run(
        [ready.agent_python, "-S", "-E", "-s", "-c", code], capture_output=True, text=True, check=True
    )
    version, path = done.stdout.split()
    import skyward

    assert version.startswith(f"{skyward.__version__}+")
    assert path.startswith(str(scratch.cache))
    assert not any("user-" in entry for entry in ready.agent_path)


def test_the_user_s_versions_take_precedence(scratch: ScratchNode, index: Index) -> None:
    ready = make_ready(scratch, Image(pip=["alpha"], pip_index_url=index.url))
    users = [i for i, entry in enumerate(ready.path) if "/user-" in entry]
    ours = [i for i, entry in enumerate(ready.path) if "/ours-" in entry]
    assert users
    assert ours
    assert max(users) < min(ours)


def test_pth_files_of_the_user_s_environment_are_read(scratch: ScratchNode, index: Index) -> None:
    ready = make_ready(scratch, Image(pip_index_url=index.url))
    extra = scratch.folder / "extra"
    extra.mkdir()
    (extra / "found_by_pth.py").write_text("")
    site = next(Path(entry) for entry in ready.path if "/user-" in entry and entry.endswith("site-packages"))
    (site / "more.pth").write_text(f"{extra}\n")
    (site.parents[2] / "ready.json").unlink()  # preparing again would remove it, so query as the script does
    text = (Path(__file__).parents[2] / "skyward" / "bootstrap" / "install.sh").read_text()
    describe = text.split("describe='")[1].split("'\n")[0]
    told = subprocess.run([ready.python, "-c", describe], capture_output=True, text=True, check=True).stdout
    assert str(extra) in told


def test_the_environment_of_tasks_is_the_node_s_own_with_the_image_s_on_top(scratch: ScratchNode, index: Index) -> None:
    scratch.variables.update(LANG="C.UTF-8", SSH_CONNECTION="here there", ODD="two\nlines=1")
    ready = make_ready(scratch, Image(pip_index_url=index.url, env={"LANG": "de_DE"}, shell_vars={"SHELLY": "echo 7"}))
    env = dict(ready.env)
    assert env["HOME"] == str(scratch.home)
    assert env["LANG"] == "de_DE"
    assert env["SHELLY"] == "7"
    assert env["ODD"] == "two\nlines=1"
    assert env["PATH"].split(":")[0] == os.path.dirname(ready.python)
    assert "SSH_CONNECTION" not in env
    assert "value" not in repr(ready)


def test_values_of_shell_vars_stand_in_requirements_and_name_the_environment(
    scratch: ScratchNode, index: Index
) -> None:
    wanted = scratch.home / "version"
    wanted.write_text("1.0")
    image = Image(pip=["alpha==${VERSION}"], pip_index_url=index.url, shell_vars={"VERSION": "cat ~/version"})
    assert run_slot(scratch, make_ready(scratch, image), "import alpha; print(alpha.VALUE)") == "1"
    wanted.write_text("2.0")
    assert run_slot(scratch, make_ready(scratch, image), "import alpha; print(alpha.VALUE)") == "2"
    scratch.commands.clear()
    wanted.write_text("1.0")
    assert run_slot(scratch, make_ready(scratch, image), "import alpha; print(alpha.VALUE)") == "1"
    assert len(scratch.commands) == 1


def test_a_wheel_of_this_machine_is_sent_along(scratch: ScratchNode, index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "mine", "1.0", "VALUE = 'first'", ("alpha<2",))
    image = Image(pip=[str(wheel)], pip_index_url=index.url)
    first = make_ready(scratch, image)
    assert run_slot(scratch, first, "import mine, alpha; print(mine.VALUE, alpha.VALUE)") == "first 1"
    make_wheel(tmp_path, "mine", "1.0", "VALUE = 'second'")
    second = make_ready(scratch, image)
    assert run_slot(scratch, second, "import mine; print(mine.VALUE)") == "second"


def test_a_path_in_pip_without_a_file_is_named(scratch: ScratchNode, tmp_path: Path) -> None:
    for path, wrong in ((f"{tmp_path}/no.whl", "does not exist"), (str(tmp_path), "is a folder; build a wheel of it")):
        with pytest.raises(UsageError, match=wrong):
            make_ready(scratch, Image(pip=[path]))


def test_a_shell_var_that_fails_is_named(scratch: ScratchNode, index: Index) -> None:
    image = Image(pip=["alpha==$V"], pip_index_url=index.url, shell_vars={"V": "no-such-command"})
    with pytest.raises(BootstrapFailed, match=r"Image\.shell_vars\['V'\].*no-such-command.*code 127"):
        make_ready(scratch, image)


def test_a_package_that_does_not_exist_fails_with_phase_node_last_lines_and_advice(
    scratch: ScratchNode, index: Index
) -> None:
    events: list[Event] = []
    with pytest.raises(BootstrapFailed, match="node 0: packages failed") as caught:
        make_ready(scratch, Image(pip=["no-such-package"], pip_index_url=index.url), events)
    assert caught.value.phase == "packages"
    assert caught.value.node == 0
    assert any("no-such-package" in line for line in caught.value.output)
    assert "Image.pip" in caught.value.advice
    assert phases_of(events, PhaseFailed) == ["packages"]


def test_an_attempt_after_a_failure_continues_where_it_stopped(bare: ScratchNode, index: Index) -> None:
    with pytest.raises(BootstrapFailed):
        make_ready(bare, Image(pip=["no-such-package"], pip_index_url=index.url))
    events: list[Event] = []
    make_ready(bare, Image(pip=["alpha"], pip_index_url=index.url), events)
    ready = [event.phase for event in events if isinstance(event, PhaseEnded) and event.was_ready]
    assert ready == ["skyward"]
    assert "uv" not in phases_of(events, PhaseStarted)


def test_skyward_never_comes_from_an_index(scratch: ScratchNode, index: Index) -> None:
    with pytest.raises(UsageError, match="never one from an index"):
        make_ready(scratch, Image(pip=["skyward[torch]"], pip_index_url=index.url))
    index.requests.clear()
    ready = make_ready(scratch, Image(pip=["wants_ours"], pip_index_url=index.url))
    assert run_slot(scratch, ready, "import skyward, wants_ours; print(skyward.__version__)")
    assert not [path for path in index.requests if "/skyward" in path]


def test_a_name_in_pip_that_is_no_shell_var_is_refused(scratch: ScratchNode) -> None:
    with pytest.raises(UsageError, match=r"\$NOWHERE, which is not in Image.shell_vars"):
        make_ready(scratch, Image(pip=["alpha==$NOWHERE"]))
    assert not scratch.commands


def test_an_index_s_password_is_in_no_argument_and_no_message(scratch: ScratchNode, index: Index) -> None:
    url = index.url.replace("//", "//me:hunter2@")
    with pytest.raises(BootstrapFailed) as caught:
        make_ready(scratch, Image(pip=["no-such-package"], pip_index_url=url))
    assert "hunter2" not in str(caught.value)
    assert not any("hunter2" in command for command in scratch.commands)
    left = subprocess.run(["grep", "-rl", "hunter2", str(scratch.home)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_two_pools_prepare_one_machine_at_once(bare: ScratchNode, index: Index) -> None:
    image = Image(pip=["beta"], pip_index_url=index.url)
    made: list[Ready] = []

    def make(pool: int) -> None:
        made.append(prepare(bare, image, emit=ignore, node=0, folder=f"test-0/{pool}"))

    threads = [threading.Thread(target=make, args=[pool]) for pool in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
    assert len({ready.python for ready in made}) == 1
    assert len({ready.folder for ready in made}) == 3
    assert run_slot(bare, made[0], "import beta; print('ok')") == "ok"


def test_a_killed_preparation_leaves_nothing_running_and_continues_next_time(bare: ScratchNode, index: Index) -> None:
    image = Image(pip=["alpha"], pip_index_url=index.url)
    make_ready(bare, Image(pip_index_url=index.url))
    # This uv never ends and is found before ours.
    uv = next(bare.platform.glob("uv-[0-9]*"))
    kept = uv.with_name("kept")
    uv.rename(kept)
    uv.write_text(
        f'#!/bin/sh\ncase "$*" in *user.txt*) echo $$ >{bare.folder}/pid; sleep 1000;; esac\nexec {kept} "$@"\n'
    )
    uv.chmod(0o700)

    class Cut(Exception):
        pass

    def node_that_is_lost(command: str, **options: object) -> object:
        """Kill this end of the connection. The processes over there are not told."""
        if "guard.sh" not in command:
            return bare(command, **options)  # type: ignore[arg-type]
        data = options["input"].read()  # type: ignore[attr-defined]
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare.environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(data)
        process.stdin.close()
        until((bare.folder / "pid").exists)
        process.stdout.close()
        orphans.append(process)
        raise Cut

    orphans: list[subprocess.Popen[bytes]] = []
    events: list[Event] = []
    with pytest.raises(Cut):
        prepare(node_that_is_lost, image, emit=events.append, node=0, folder="test-0")  # type: ignore[arg-type]
    assert phases_of(events, PhaseFailed)
    (process,) = orphans
    process.wait(60)  # by itself: nobody listens to it
    sleeper = int((bare.folder / "pid").read_text())
    until(lambda: not Path(f"/proc/{sleeper}").exists())
    assert list((bare.cache / "tmp").iterdir()) == []

    uv.unlink()
    kept.rename(uv)
    ready = make_ready(bare, image)
    assert run_slot(bare, ready, "import alpha; print(alpha.VALUE)") == "2"


def test_a_half_made_environment_is_made_again(scratch: ScratchNode, index: Index) -> None:
    image = Image(pip=["alpha"], pip_index_url=index.url)
    ready = make_ready(scratch, image)
    user = Path(ready.python).parents[1]
    (user / "ready.json").unlink()
    shutil.rmtree(user / "lib")
    assert run_slot(scratch, make_ready(scratch, image), "import alpha; print(alpha.VALUE)") == "2"


def test_an_environment_whose_python_is_gone_is_made_again(scratch: ScratchNode, index: Index) -> None:
    image = Image(pip=["alpha"], pip_index_url=index.url)
    ready = make_ready(scratch, image)
    python = Path(ready.python)
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert run_slot(scratch, make_ready(scratch, image), "import alpha; print(alpha.VALUE)") == "2"


def test_the_time_limit_is_kept_and_named(bare: ScratchNode, index: Index) -> None:
    make_ready(bare, Image(pip_index_url=index.url))
    uv = next(bare.platform.glob("uv-[0-9]*"))
    uv.write_text('#!/bin/sh\n[ "$1" = --version ] && echo uv 99.0 || sleep 1000\n')
    began = time.monotonic()
    with pytest.raises(BootstrapFailed, match=r"packages failed.*timed out.*bootstrap_timeout_s") as caught:
        make_ready(bare, Image(pip=["alpha"], pip_index_url=index.url, bootstrap_timeout_s=8))
    assert time.monotonic() - began < 60
    assert caught.value.phase == "packages"


def test_a_python_missing_on_the_node_is_an_error_with_advice(scratch: ScratchNode, index: Index) -> None:
    scratch.variables["UV_PYTHON_INSTALL_MIRROR"] = "http://127.0.0.1:9"
    scratch.variables["UV_HTTP_RETRIES"] = "0"
    with pytest.raises(BootstrapFailed, match=r"python failed.*Python 3\.99 is missing.*install it there"):
        make_ready(scratch, Image(python="3.99", pip_index_url=index.url))


def test_a_python_missing_on_the_node_is_downloaded_by_uv(bare: ScratchNode, index: Index) -> None:
    """A stand-in answers for uv, because a test cannot download anything."""
    make_ready(bare, Image(pip_index_url=index.url))
    uv = next(bare.platform.glob("uv-[0-9]*"))
    kept = uv.with_name("kept")
    uv.rename(kept)
    python = next(bare.bin.iterdir())
    asked = bare.folder / "asked"
    uv.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"python install") echo "$3 $UV_PYTHON_INSTALL_DIR" >>{asked} ;;
"python find") echo {python} ;;
*) exec {kept} "$@" ;;
esac
"""
    )
    uv.chmod(0o700)
    make_ready(bare, Image(python="3.99", pip_index_url=index.url))
    assert asked.read_text() == f"3.99 {bare.platform}/python\n"


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    node = ScratchNode(tmp_path / "node", variables={"XDG_CACHE_HOME": "/proc/nowhere"})
    with pytest.raises(BootstrapFailed, match=r"probe failed.*must be writable"):
        make_ready(node, Image())


def test_a_tool_missing_on_the_machine_is_named(scratch: ScratchNode) -> None:
    for tool in ("uname", "id", "mkdir", "cat", "tr", "sed", "df", "awk", "gzip", "timeout", "dpkg-query", "sh"):
        if found := shutil.which(tool, path="/usr/bin:/bin"):
            (scratch.bin / tool).symlink_to(found)
    scratch.variables["PATH"] = str(scratch.bin)
    with pytest.raises(BootstrapFailed, match="`tar` is missing; install it on the machine"):
        make_ready(scratch, Image())


def test_a_folder_that_cannot_be_made_is_named_with_the_needed_permission(scratch: ScratchNode) -> None:
    path = Path(f"/tmp/skyward-{os.getuid()}/test-0")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(exist_ok=True)
    (path / "file").touch()
    text = (files("skyward.bootstrap") / "node.sh").read_text()
    done = scratch(f"{text}\nmake_folder test-0/file/x", timeout_s=60)
    assert f"{path}/file/x: cannot create the folder; /tmp must be writable" in done.stdout.decode()
    assert done.code == 1


def test_a_login_shell_that_exits_is_named_with_its_output(scratch: ScratchNode) -> None:
    def ending(command: str, **options: object) -> object:
        return scratch("echo This account is not available.; exit 1", **options)  # type: ignore[arg-type]

    with pytest.raises(BootstrapFailed, match=r"without an answer; .*`ssh <host> echo here`(?s:.)*This account is not"):
        prepare(ending, Image(), emit=ignore, node=0, folder="test-0/a")  # type: ignore[arg-type]


def test_a_login_shell_that_prints_does_no_harm(scratch: ScratchNode, index: Index) -> None:
    def talking(command: str, **options: object) -> object:
        return scratch(f"echo Welcome; echo '\x01nonsense'; {command}", **options)  # type: ignore[arg-type]

    prepare(talking, Image(pip_index_url=index.url), emit=ignore, node=0, folder="test-0")  # type: ignore[arg-type]


def test_nothing_that_is_made_is_readable_by_others(bare: ScratchNode, index: Index) -> None:
    ready = make_ready(bare, Image(pip_index_url=index.url))
    assert bare.cache.stat().st_mode & 0o077 == 0
    assert os.stat(ready.folder).st_mode & 0o077 == 0


def test_setup_commands_run_once_for_their_content(scratch: ScratchNode, index: Index) -> None:
    run = ["python -c 'import alpha, sys; print(alpha.VALUE, sys.prefix)' > answer", "echo $VIRTUAL_ENV"]
    image = Image(pip=["alpha"], pip_index_url=index.url, run=run)
    events: list[Event] = []
    ready = make_ready(scratch, image, events)
    root = ready.python.removesuffix("/bin/python")
    assert Path(root, "answer").read_text() == f"2 {root}\n"
    assert root in [event.text for event in events if isinstance(event, PhaseOutput) and event.phase == "setup"]
    Path(root, "answer").write_text("kept")
    events.clear()
    assert make_ready(scratch, image, events) == ready
    assert Path(root, "answer").read_text() == "kept"
    assert [event.was_ready for event in events if isinstance(event, PhaseEnded) and event.phase == "setup"] == [True]


def test_a_setup_command_that_fails_is_named_with_its_code_and_output(scratch: ScratchNode, index: Index) -> None:
    image = Image(pip_index_url=index.url, run=["true", "echo first; echo the reason >&2; exit 7", "touch never"])
    with pytest.raises(BootstrapFailed, match=r"setup failed.*`echo first; .*exit 7` exited with code 7") as failed:
        make_ready(scratch, image)
    assert failed.value.phase == "setup"
    assert failed.value.output[-2:] == ("first", "the reason")
    assert not list(scratch.platform.glob("user-*/ready.json"))
    assert not list(scratch.platform.glob("user-*/never"))
