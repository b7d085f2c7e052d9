"""From a machine that answers to one on which an agent can be started, in one round trip where nothing is missing."""

from __future__ import annotations

import io
import re
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from ..events import Emit
from ..values.image import Image
from .cache import CACHE_LIMIT_GIB
from .code import Code
from .environments import ours_for, users_for
from .payload import LOADER, Payload, code_variables, script, write_apt
from .phases import Phases
from .probe import Facts, read_facts
from .runner import Runner, ShellResult, text_of
from .uv import client_uv_version

__all__ = ["Ready", "prepare"]

_PROBE_LIMIT_S = 60.0
_TIME_IS_UP = 124
"""Exit code of timeout(1)."""
_SESSION_VARIABLES = re.compile(
    r"SSH_.*|XDG_SESSION_.*|XDG_RUNTIME_DIR|_|PWD|OLDPWD|SHLVL|LS_COLORS|MAIL|MOTD_SHOWN|SKYWARD_RUN|SKYWARD_NODE"
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHELL_ADVICE = (
    "`ssh <host> echo here` must print `here` at its end: an account that may not log in, or a start-up file of its "
    "shell that ends it or starts another program, does not let it"
)
_ADVICE = (
    ("no space left on device|disk quota exceeded", "free some of its disk, or clear the cache: skyward gc --cache"),
    (
        "dns error|failed to fetch|could not connect|connection refused|network is unreachable|timed? ?out",
        "an index cannot be reached from the node: name one that can in Image(pip_index_url=...)",
    ),
    (
        "no solution found|not found in the package registry|has no wheels|unsatisfiable",
        "the requirements of Image.pip cannot be met for this Python and platform",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What an agent needs to start on a node. All paths are there."""

    python: str
    """The interpreter of the user's environment, for slots."""
    path: tuple[str, ...]
    """The slots' sys.path: the user's code, the user's packages, ours behind them."""
    agent_python: str
    agent_path: tuple[str, ...]
    """The agent's sys.path; it is started with -S -E."""
    env: tuple[tuple[str, str], ...] = field(repr=False)
    """The whole environment of the user's processes. Holds secrets in clear."""
    cwd: str
    folder: str
    """Of this pool's node alone; who prepared it removes it."""
    cores: int
    memory_gib: float
    python_version: str


def prepare(
    run: Runner,
    image: Image,
    *,
    emit: Emit,
    node: int,
    folder: str,
    host: str = "",
    code: Code | None = None,
    cache_limit_gib: float = CACHE_LIMIT_GIB,
    deadline: float | None = None,
) -> Ready:
    """Make a machine ready for an agent of this pool. Blocks; cancelled by an exception in this thread.

    `folder` is the name of the pool's folder there; `host` is what errors call the machine; `code` is what `gather` has
    found, once for all nodes; `cache_limit_gib` bounds what stays there, of all pools of this user; `deadline` is by
    time.monotonic(), by default `image.bootstrap_timeout_s` from now. May be called again after any failure, and goes
    on where it was; several pools may prepare one machine at a time. If it raises, the pool's folder may be there, and
    nothing else but the cache.

    Raises UsageError, BootstrapFailed, and what `run` raises when the link is lost.
    """
    return _Bootstrap(run, image, emit, node, folder, host, code, cache_limit_gib, deadline).go()


class _Bootstrap:
    def __init__(
        self,
        run: Runner,
        image: Image,
        emit: Emit,
        node: int,
        folder: str,
        host: str,
        code: Code | None,
        cache_limit_gib: float,
        deadline: float | None,
    ) -> None:
        self._run = run
        self._image = image
        self._phases = Phases(emit, node, _masking(image), host)
        self._folder = folder
        self._code = code
        self._cache_limit_gib = cache_limit_gib
        self._deadline = time.monotonic() + image.bootstrap_timeout_s if deadline is None else deadline
        self._ours = ours_for(image)
        self._users = users_for(image)

    def go(self) -> Ready:
        facts = self._probe()
        if facts.missing_apt:
            self._install_apt(facts.missing_apt)
            facts = self._probe()
        self._check_variables(facts)
        self._users = users_for(self._image, facts.variables)
        if facts.folder and self._users.name not in facts.users:
            facts = self._probe()  # the environment that it found was of other values
        if facts.ours and self._users.name in facts.users and facts.is_unpacked:
            for phase in self._all_phases():
                self._phases.ready(phase)
        else:
            facts = self._install(facts)
        return self._ready(facts)

    def _all_phases(self) -> list[str]:
        apt, code = ["apt"] if self._image.apt else [], ["code"] if self._code else []
        return [*apt, "python", "skyward", "packages", *code]

    def _check_variables(self, facts: Facts) -> None:
        for name, code in facts.failed_variables.items():
            self._phases.start("shell_vars")
            how = f"ended there with code {code}" if code else "printed nothing there"
            raise self._phases.fail(f"Image.shell_vars[{name!r}]: `{self._image.shell_vars[name]}` {how}")

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._phases.fail("the time is up", self._advice_on_time())
        return left_s

    def _advice_on_time(self) -> str:
        return (
            f"Image(bootstrap_timeout_s=...) allows more than {self._image.bootstrap_timeout_s:g} s, "
            "and the next attempt goes on where this one ended"
        )

    def _probe(self) -> Facts:
        self._phases.start("probe")
        variables = {
            "ours": self._ours.name,
            "user": self._users.name,
            "minor": ".".join(self._image.python_version.split(".")[:2]),
            "uv_version": client_uv_version(),
            "folder": self._folder,
            "apt": " ".join(self._image.apt),
            **code_variables(self._code),
        }
        evaluate = "".join(
            f"variable {name} {shlex.quote(command)}\n" for name, command in self._image.shell_vars.items()
        )
        text = script(("node.sh", "probe.sh"), variables, f"eval_vars() {{\n:\n{evaluate}}}\n")
        done = self._call("exec sh -s", io.BytesIO(text), min(_PROBE_LIMIT_S, self._left_s()))
        facts = read_facts(text_of(done.stdout).splitlines())
        if facts.problem:
            raise self._phases.fail(facts.problem)
        if not facts.is_whole:
            for line in [*text_of(done.stdout).splitlines(), *text_of(done.stderr).splitlines()]:
                self._phases.output(line)  # such as that the account may not log in
            raise self._phases.fail(f"the shell there ended with code {done.code} and did not answer", _SHELL_ADVICE)
        self._phases.end()
        return facts

    def _install_apt(self, packages: tuple[str, ...]) -> None:
        self._phases.start("apt", " ".join(packages))
        with tempfile.TemporaryFile() as payload:
            write_apt(payload, self._image.apt, self._left_s())
            self._run_task(payload)

    def _install(self, before: Facts) -> Facts:
        self._phases.start("upload")
        with tempfile.TemporaryFile() as payload:
            Payload(
                image=self._image,
                facts=before,
                ours=self._ours,
                users=self._users,
                code=self._code,
                folder=self._folder,
                limit_s=self._left_s(),
                cache_limit_gib=self._cache_limit_gib,
            ).write(payload)
            return before.updated(self._run_task(payload))

    def _run_task(self, payload: BinaryIO) -> Facts:
        lines: list[str] = []

        def on_line(line: str) -> None:
            name, _, text = line[1:].partition(" ") if line.startswith("\1") else ("", "", "")
            if name == "phase":
                if text != self._phases.name:
                    self._phases.start(text)
            elif name == "ready":
                self._phases.end()
                self._phases.ready(text)
            elif name:
                lines.append(line)
            else:
                self._phases.output(line)

        payload.seek(0)
        done = self._call(f"exec sh -c {shlex.quote(LOADER)}", payload, self._left_s(), on_line)
        told = read_facts(lines)
        if told.problem:
            raise self._phases.fail(told.problem, _advice(self._phases))
        if done.code == _TIME_IS_UP:
            raise self._phases.fail("the time is up", self._advice_on_time())
        if not told.is_whole:
            self._phases.output(text_of(done.stderr))
            raise self._phases.fail(f"ended with code {done.code}", _advice(self._phases))
        self._phases.end()
        return told

    def _call(
        self, command: str, payload: BinaryIO, timeout_s: float, on_line: Callable[[str], None] | None = None
    ) -> ShellResult:
        try:
            return self._run(command, input=payload, timeout_s=timeout_s, on_line=on_line)
        except TimeoutError as error:
            raise self._phases.fail(f"no answer within {timeout_s:.0f} s", self._advice_on_time()) from error
        except BaseException as error:  # the link is lost, or somebody has interrupted it: that says enough itself
            self._phases.fail(str(error) or type(error).__name__)
            raise

    def _ready(self, facts: Facts) -> Ready:
        ours, users = facts.ours, facts.users[self._users.name]
        environment = {n: v for n, v in facts.environ.items() if not _SESSION_VARIABLES.fullmatch(n)}
        root = users.python.rpartition("/bin/")[0]
        environment["VIRTUAL_ENV"] = root
        environment["PATH"] = f"{root}/bin:{environment.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
        environment.update(facts.variables)
        environment.update(self._image.environment())
        assert ours is not None
        code, local = f"{facts.folder}/code", self._code.path if self._code else ()
        return Ready(
            python=users.python,
            path=tuple(dict.fromkeys((*(f"{code}/{folder}" for folder in local), *users.path, *ours.path))),
            agent_python=ours.python,
            agent_path=ours.path,
            env=tuple(environment.items()),
            cwd=f"{code}/{self._code.cwd if self._code else 'work'}",
            folder=facts.folder,
            cores=facts.cores,
            memory_gib=facts.memory_gib,
            python_version=users.version,
        )


def _advice(phases: Phases) -> str:
    """What to do about what the phase printed last."""
    text = "\n".join(phases.tail)
    advice = _ADVICE if phases.name in ("skyward", "packages") else _ADVICE[:1]
    return next((what for pattern, what in advice if re.search(pattern, text, re.IGNORECASE)), "")


def _masking(image: Image) -> Callable[[str], str]:
    mask = image.masker()
    return lambda text: _URL_CREDENTIALS.sub("***", mask(text))
