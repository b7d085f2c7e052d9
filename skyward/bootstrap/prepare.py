"""Preparation of a reachable machine for an agent, in one round trip if nothing is missing."""

from __future__ import annotations

import io
import json
import re
import shlex
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from ..errors import BootstrapFailed
from ..events import Emit, PhaseEnded, PhaseFailed, PhaseOutput, PhaseStarted
from ..ssh import SSHResult
from ..values.image import Image
from .code import Code
from .environments import ours_for, users_for
from .payload import LOADER, Payload, code_variables, write_apt
from .probe import Facts, read_facts
from .scripts import CACHE_LIMIT_GIB, Runner, script
from .uv import client_uv_version

_PROBE_LIMIT_S = 60.0
_OWN_PATH = "import json, sys; print(json.dumps([sys.prefix, sys.path[1:]]))"
_TAIL_LINES = 20
_TIME_IS_UP = 124
"""Exit code of timeout(1)."""
_SESSION_VARIABLES = re.compile(
    r"SSH_.*|XDG_SESSION_.*|XDG_RUNTIME_DIR|_|PWD|OLDPWD|SHLVL|LS_COLORS|MAIL|MOTD_SHOWN|SKYWARD_RUN|SKYWARD_NODE"
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHELL_ADVICE = (
    "make sure that `ssh <host> echo here` prints `here` last: the account must be allowed to log in, and no start-up "
    "file of its shell may exit or start another program"
)
_ADVICE = (
    ("no space left on device|disk quota exceeded", "free disk space there, or clear the cache: skyward gc --cache"),
    (
        "dns error|failed to fetch|could not connect|connection refused|network is unreachable|timed? ?out",
        "set an index that the node can reach with Image(pip_index_url=...)",
    ),
    (
        "no solution found|not found in the package registry|has no wheels|unsatisfiable",
        "change the requirements of Image.pip, which cannot be met for this Python and platform",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Settings to start an agent on a node. All paths are on the node."""

    python: str
    """Interpreter of the user's environment, for slots."""
    path: tuple[str, ...]
    """sys.path of the slots: the user's code, the user's packages, then ours."""
    agent_python: str
    agent_path: tuple[str, ...]
    """sys.path of the agent, which is started with -S -E."""
    env: tuple[tuple[str, str], ...] = field(repr=False)
    """Complete environment of the user's processes. Holds secrets in clear text."""
    cwd: str
    folder: str
    """Folder of this pool's node alone. The code that prepared the machine removes it."""
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
    beside: str = "",
    host: str = "",
    code: Code | None = None,
    base: str = "",
    cache_limit_gib: float = CACHE_LIMIT_GIB,
    deadline: float | None = None,
) -> Ready:
    """Prepare a machine for an agent of this pool. Blocks; an exception in this thread cancels it.

    After a failure it can be called again, and continues where it stopped. Several pools can prepare a machine at the
    same time. If it raises, only the cache and the pool's folder may remain on the machine.

    Args:
        run: Runs commands on the machine.
        image: The image.
        emit: Takes events.
        node: Number of the node.
        folder: Name of the pool's folder on the machine.
        beside: Name of a node's folder, without which nothing is made; empty for none.
        host: Name of the machine for errors.
        code: Result of `gather`, which is the same for all nodes; None: no code is sent.
        base: Name of the container image that the commands run in, by its content; empty for none.
        cache_limit_gib: Limit of the cache on the machine, for all pools of this user.
        deadline: Time to give up, by time.monotonic(); by default `image.bootstrap_timeout_s` from now.

    Raises:
        UsageError: The image cannot be used.
        BootstrapFailed: A phase failed, or the time was over.
        Exception: Any error of `run` when the link is lost.
    """
    return _Bootstrap(
        run=run,
        image=image,
        phases=_Phases(emit, node, _masking(image), host),
        folder=folder,
        beside=beside,
        code=code,
        base=base,
        cache_limit_gib=cache_limit_gib,
        deadline=time.monotonic() + image.bootstrap_timeout_s if deadline is None else deadline,
    ).go()


def in_python(run: Runner, ready: Ready, python: str) -> Ready:
    """Return settings by which slots use an interpreter of the machine, with all the packages that it has.

    Args:
        run: Runs commands on the machine.
        ready: Settings with an environment that `prepare` has made.
        python: Path of the interpreter, which has the minor version of that environment.

    Raises:
        BootstrapFailed: The interpreter does not run.
    """
    done = run(f"exec {shlex.quote(python)} -c {shlex.quote(_OWN_PATH)}", timeout_s=_PROBE_LIMIT_S)
    if done.code:
        message = f"{python}: does not run ({done.error_text}); mend it, or list the packages in Image(pip=[...])"
        raise BootstrapFailed(message, phase="python", advice="", output=tuple(done.error_text.splitlines()))
    prefix, own = json.loads(done.text.splitlines()[-1])
    made = ready.python.rpartition("/bin/")[0]
    path = [entry for entry in ready.path if not entry.startswith(f"{made}/")]
    code = [entry for entry in path if entry.startswith(f"{ready.folder}/")]
    env = dict(ready.env)
    env["PATH"] = env["PATH"].removeprefix(f"{made}/bin:")
    env["VIRTUAL_ENV"] = prefix
    return replace(ready, python=python, path=tuple(dict.fromkeys((*code, *own, *path))), env=tuple(env.items()))


@dataclass(kw_only=True)
class _Bootstrap:
    run: Runner
    image: Image
    phases: _Phases
    folder: str
    beside: str
    code: Code | None
    base: str
    cache_limit_gib: float
    deadline: float

    def __post_init__(self) -> None:
        self._ours = ours_for(self.image, self.base)
        self._users = users_for(self.image, base=self.base)

    def go(self) -> Ready:
        facts = self._probe()
        if facts.missing_apt:
            self._install_apt(facts.missing_apt)
            facts = self._probe()
        self._check_variables(facts)
        self._users = users_for(self.image, facts.variables, self.base)
        if facts.folder and self._users.name not in facts.users:
            facts = self._probe()  # the environments found so far belong to other values of the variables
        if facts.ours and self._users.name in facts.users and facts.is_unpacked:
            for phase in self._all_phases():
                self.phases.ready(phase)
        else:
            facts = self._install(facts)
        return self._ready(facts)

    def _all_phases(self) -> list[str]:
        apt, code = ["apt"] if self.image.apt else [], ["code"] if self.code else []
        setup = ["setup"] if self.image.run else []
        return [*apt, "python", "skyward", "packages", *setup, *code]

    def _check_variables(self, facts: Facts) -> None:
        for name, code in facts.failed_variables.items():
            self.phases.start("shell_vars")
            how = f"exited with code {code} on the node" if code else "printed nothing on the node"
            command = self.image.shell_vars[name]
            advice = "mend the command, or set the variable in Image(env=...)"
            raise self.phases.fail(f"Image.shell_vars[{name!r}]: `{command}` {how}", advice)

    def _left_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise self.phases.fail("timed out", self._advice_on_time())
        return left_s

    def _advice_on_time(self) -> str:
        return (
            f"set Image(bootstrap_timeout_s=...) to more than {self.image.bootstrap_timeout_s:g} s and try again, "
            "which continues where this attempt stopped"
        )

    def _probe(self) -> Facts:
        self.phases.start("probe")
        variables = {
            "ours": self._ours.name,
            "user": self._users.name,
            "minor": ".".join(self.image.python_version.split(".")[:2]),
            "uv_version": client_uv_version(),
            "folder": self.folder,
            "beside": self.beside,
            "apt": " ".join(self.image.apt),
            **code_variables(self.code),
        }
        evaluate = "".join(
            f"variable {name} {shlex.quote(command)}\n" for name, command in self.image.shell_vars.items()
        )
        text = script(("node.sh", "probe.sh"), variables, f"eval_vars() {{\n:\n{evaluate}}}\n")
        done = self._call("exec sh -s", io.BytesIO(text), min(_PROBE_LIMIT_S, self._left_s()))
        facts = read_facts(done.text.splitlines())
        if facts.problem:
            raise self.phases.fail(facts.problem)
        if not facts.is_whole:
            for line in [*done.text.splitlines(), *done.error_text.splitlines()]:
                self.phases.output(line)  # it may say why, such as that the account must not log in
            raise self.phases.fail(f"the login shell exited with code {done.code} without an answer", _SHELL_ADVICE)
        self.phases.end()
        return facts

    def _install_apt(self, packages: tuple[str, ...]) -> None:
        self.phases.start("apt", " ".join(packages))
        with tempfile.TemporaryFile() as payload:
            write_apt(payload, self.image.apt, self._left_s())
            self._run_task(payload)

    def _install(self, before: Facts) -> Facts:
        self.phases.start("upload")
        with tempfile.TemporaryFile() as payload:
            Payload(
                image=self.image,
                facts=before,
                ours=self._ours,
                users=self._users,
                code=self.code,
                folder=self.folder,
                beside=self.beside,
                limit_s=self._left_s(),
                cache_limit_gib=self.cache_limit_gib,
            ).write(payload)
            return before.updated(self._run_task(payload))

    def _run_task(self, payload: BinaryIO) -> Facts:
        lines: list[str] = []

        def on_line(line: str) -> None:
            name, _, text = line[1:].partition(" ") if line.startswith("\1") else ("", "", "")
            if name == "phase":
                if text != self.phases.name:
                    self.phases.start(text)
            elif name == "ready":
                self.phases.end()
                self.phases.ready(text)
            elif name:
                lines.append(line)
            else:
                self.phases.output(line)

        payload.seek(0)
        done = self._call(f"exec sh -c {shlex.quote(LOADER)}", payload, self._left_s(), on_line)
        facts = read_facts(lines)
        if facts.problem:
            raise self.phases.fail(facts.problem, _advice(self.phases))
        if done.code == _TIME_IS_UP:
            raise self.phases.fail("timed out", self._advice_on_time())
        if not facts.is_whole:
            self.phases.output(done.error_text)
            advice = _advice(self.phases) or "mend what its last output says, and open the pool again"
            raise self.phases.fail(f"exited with code {done.code}", advice)
        self.phases.end()
        return facts

    def _call(
        self, command: str, payload: BinaryIO, timeout_s: float, on_line: Callable[[str], None] | None = None
    ) -> SSHResult:
        try:
            return self.run(command, input=payload, timeout_s=timeout_s, on_line=on_line)
        except TimeoutError as error:
            raise self.phases.fail(f"no answer within {timeout_s:.0f} s", self._advice_on_time()) from error
        except BaseException as error:  # a lost link or an interrupt: end the phase, and let the error through
            self.phases.fail(str(error) or type(error).__name__)
            raise

    def _ready(self, facts: Facts) -> Ready:
        ours, users = facts.ours, facts.users[self._users.name]
        environment = {n: v for n, v in facts.environ.items() if not _SESSION_VARIABLES.fullmatch(n)}
        root = users.python.rpartition("/bin/")[0]
        environment["VIRTUAL_ENV"] = root
        environment["PATH"] = f"{root}/bin:{environment.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
        environment.update(facts.variables)
        environment.update(self.image.environment())
        assert ours is not None
        code, local = f"{facts.folder}/code", self.code.path if self.code else ()
        return Ready(
            python=users.python,
            path=tuple(dict.fromkeys((*(f"{code}/{folder}" for folder in local), *users.path, *ours.path))),
            agent_python=ours.python,
            agent_path=ours.path,
            env=tuple(environment.items()),
            cwd=f"{code}/{self.code.cwd if self.code else 'work'}",
            folder=facts.folder,
            cores=facts.cores,
            memory_gib=facts.memory_gib,
            python_version=users.version,
        )


def _advice(phases: _Phases) -> str:
    """Return advice about the last output of the phase; empty if there is none."""
    output = "\n".join(phases.tail)
    candidates = _ADVICE if phases.name in ("skyward", "packages") else _ADVICE[:1]
    return next((advice for pattern, advice in candidates if re.search(pattern, output, re.IGNORECASE)), "")


def _masking(image: Image) -> Callable[[str], str]:
    mask = image.masker()
    return lambda text: _URL_CREDENTIALS.sub("***", mask(text))


class _Phases:
    """Phases of a node's preparation, reported as events. Used by one thread at a time.

    Args:
        emit: Takes the events.
        node: Number of the node.
        mask: Hides secrets in every line that is shown or kept.
        host: Name of the machine for errors.
    """

    def __init__(self, emit: Emit, node: int, mask: Callable[[str], str], host: str = "") -> None:
        self._emit = emit
        self._node = node
        self._mask = mask
        self._host = host
        self.name = ""
        """Name of the open phase; empty if none is open."""
        self._began = 0.0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """Last lines of the phase's output."""
        return tuple(self._tail)

    def start(self, name: str, detail: str = "") -> None:
        """Begin a phase, and end the open one."""
        self.end()
        self.name = name
        self._began = time.monotonic()
        self._tail.clear()
        self._emit(PhaseStarted(node=self._node, phase=name, detail=self._mask(detail)))

    def output(self, line: str) -> None:
        text = self._mask(line.rstrip())
        if text:
            self._tail.append(text)
            self._emit(PhaseOutput(node=self._node, phase=self.name, text=text))

    def end(self, *, was_ready: bool = False) -> None:
        if self.name:
            seconds = time.monotonic() - self._began
            self._emit(PhaseEnded(node=self._node, phase=self.name, seconds=seconds, was_ready=was_ready))
            self.name = ""

    def ready(self, name: str) -> None:
        """Report a phase that had nothing to do."""
        self.start(name)
        self.end(was_ready=True)

    def fail(self, reason: str, advice: str = "") -> BootstrapFailed:
        """End the open phase as failed, and return the error to raise, with the last lines of output and advice."""
        name, seconds = self.name or "bootstrap", time.monotonic() - self._began
        reason = self._mask(reason)
        self._emit(PhaseFailed(node=self._node, phase=name, seconds=seconds, reason=reason))
        self.name = ""
        output = "".join(f"\n    {line}" for line in self._tail)
        where = f" ({self._host})" if self._host else ""
        message = f"node {self._node}{where}: {name} failed after {seconds:.1f} s: {reason}"
        message += f"; {advice}" if advice else ""
        message += f"\nlast output:{output}" if output else ""
        return BootstrapFailed(  # words: ok, a problem that a script reports says what to do
            message, node=self._node, phase=name, output=tuple(self._tail), advice=advice, host=self._host
        )
