"""Diagnosis of hangs: stacks of a gang's ranks when one of them has waited too long for the others."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Iterable
from dataclasses import field
from typing import NamedTuple

from ..core.records import dataclass
from ..errors import GangHung, TaskTimeout

_FRAMEWORKS = ("-packages/torch/", "-packages/jax/", "-packages/jaxlib/", "-packages/tensorflow/")
"""Folders of frameworks: a rank that waits for other ranks is inside their code. The paths are those of installed
packages, because a project of the user's may be in a folder called jax.
"""
_OWN_WAITS = (
    "/torch/utils/data/",
    "/torch/multiprocessing/",
    "/torch/serialization.py",
    "/torch/hub.py",
    "/torch/_inductor/",
)
"""Parts of frameworks in which a rank waits for its own processes, a disk or a network instead of other ranks."""
_CALLER = "/skyward/node/slot/execute.py"
_INTEGRATIONS = "/skyward/integrations/"
_SESSION = f"{_INTEGRATIONS}base.py"
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "error_handler")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread|Stack)\b")


class _Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def is_framework(self) -> bool:
        return any(part in self.file for part in _FRAMEWORKS)

    @property
    def source(self) -> str:
        """Source line; empty if this process does not have the file."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Stack of one rank. `threads` has the frames of each thread, innermost first, and the main thread last."""

    rank: int
    node: int
    state: str
    """State of the process as reported by the kernel, such as "S (sleeping)"."""
    threads: tuple[tuple[_Frame, ...], ...]

    @property
    def main(self) -> tuple[_Frame, ...]:
        return self.threads[-1] if self.threads else ()

    @property
    def waits_in(self) -> str:
        """Collective, or other function of the framework, that the rank waits in; empty if it is elsewhere."""
        if not self.main:
            return ""
        inside = list(itertools.takewhile(lambda frame: frame.is_framework, self.main))
        caller = self.main[len(inside) : len(inside) + 1]
        if caller and _INTEGRATIONS in caller[0].file:
            return ""  # before or after the user's function, where ranks may wait long and have another timeout
        if any(part in frame.file for frame in inside for part in _OWN_WAITS):
            return ""
        if inside:
            names = [frame.function for frame in reversed(inside)]
            return next((name for name in names if name not in _WRAPPERS), names[0])
        return "wait" if ".wait(" in self.main[0].source else ""

    @property
    def place(self) -> str:
        """Line of the user's code that the rank is at."""
        others = [frame for frame in self.main if not frame.is_framework]
        frame = next((frame for frame in others if "/site-packages/" not in frame.file), next(iter(others), None))
        return frame.place if frame else f"an unknown place (its process: {self.state or 'no answer'})"

    def text(self) -> str:
        """Describe the rank's state, followed by its traceback."""
        does = f"waits in {self.waits_in}" if self.waits_in else "is in no collective"
        head = f"Rank {self.rank} (node {self.node}) {does}; its process: {self.state}"
        return f"{head}\n{self.traceback() or '  no stack available'}"

    def traceback(self) -> str:
        """Format the frames of all threads, innermost last. Return "" if the process wrote no stack."""
        lines: list[str] = []
        for frames in reversed(self.threads):
            if frames is not self.main:
                lines.append("  another thread:")
            for frame in reversed(frames):
                lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
                lines += [f"    {frame.source}"] if frame.source else []
        return "\n".join(lines)


def read_stack(rank: int, node: int, text: str, state: str) -> RankStack:
    """Parse the output of `faulthandler`."""
    threads: list[list[_Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(_Frame(frame[1], int(frame[2]), frame[3]))
    users = (tuple(_without_ours(frames)) for frames in threads)
    return RankStack(rank=rank, node=node, state=state, threads=tuple(frames for frames in users if frames))


def _without_ours(frames: list[_Frame]) -> Iterable[_Frame]:
    """Remove the frames that called the user's function."""
    end = next((at for at, frame in enumerate(frames) if _CALLER in frame.file), len(frames))
    while end and _SESSION in frames[end - 1].file:
        end -= 1
    return frames[:end]


@dataclass(eq=False, kw_only=True)
class Stacks:
    """Stacks requested from the ranks of a gang that have not ended."""

    asked: set[int]
    """Ranks that have not answered yet."""
    stacks: dict[int, RankStack] = field(default_factory=dict)
    is_judged: bool = False

    def add(self, stack: RankStack) -> None:
        if stack.rank in self.asked:
            self.stacks[stack.rank] = stack
            self.asked.discard(stack.rank)


@dataclass(eq=False, kw_only=True)
class Hang(Stacks):
    """Suspected hang: one rank has waited in one collective for `waited_s`."""

    first: RankStack
    waited_s: float
    ended: tuple[int, ...] = ()
    """Ranks whose function has returned."""

    def is_real(self) -> bool:
        """Tell whether the rank is still at the same place now that all ranks have answered."""
        now = self.stacks.get(self.first.rank)
        return now is None or now.main[:1] == self.first.main[:1]

    def error(self, name: str) -> GangHung:
        stacks = {self.first.rank: self.first, **self.stacks}
        waiting = {rank: stack for rank, stack in sorted(stacks.items()) if stack.waits_in}
        elsewhere = {rank: stack for rank, stack in sorted(stacks.items()) if not stack.waits_in}
        silent = [f"rank {rank} has returned" for rank in self.ended]
        absent = sorted(self.asked - set(stacks))
        silent += [f"rank {rank} does not answer" for rank in absent]
        error = GangHung(
            f"{name!r}: hangs, because {_sentence(waiting, elsewhere, silent, self.waited_s)}; compare their stacks",
            ranks=tuple(sorted((*elsewhere, *absent, *self.ended))),
            waiting=tuple(waiting),
            waited_s=self.waited_s,
            stacks={rank: stack.text() for rank, stack in sorted(stacks.items())},
            task=name,
        )
        for rank in (*elsewhere, *waiting):
            error.add_note(error.stacks[rank])
        return error


@dataclass(eq=False, kw_only=True)
class Late(Stacks):
    """Stacks for a call that exceeded its timeout."""

    rank: int
    """Rank whose timeout expired first."""

    def error(self, name: str, timeout_s: float) -> TaskTimeout:
        return timed_out(name, timeout_s, [stack.text() for _, stack in sorted(self.stacks.items())])


def timed_out(name: str, timeout_s: float, notes: Iterable[str]) -> TaskTimeout:
    """Build the error of a call that ran too long. The notes show its stack and its last output."""
    error = TaskTimeout(
        f"{name!r}: ran longer than its timeout_s={timeout_s:g} and was stopped; raise timeout_s if it needs more time",
        task=name,
        timeout_s=timeout_s,
    )
    for note in notes:
        error.add_note(note)
    return error


def _sentence(
    waiting: dict[int, RankStack], elsewhere: dict[int, RankStack], silent: list[str], waited_s: float
) -> str:
    culprits = [f"rank {r} (node {s.node}) is in no collective, but at {s.place}" for r, s in elsewhere.items()]
    culprits += silent
    waits = [f"rank {rank} (node {s.node}) in {s.waits_in} at {s.place}" for rank, s in waiting.items()]
    waited = f"{', '.join(waits)} for {waited_s:.0f} s"
    if culprits:
        return f"{'; '.join(culprits)}; waiting for it: {waited}"
    if len({(s.waits_in, s.place) for s in waiting.values()}) > 1:
        return f"every rank waits in a collective, but not in the same one: {waited}"
    return f"every rank waits in the same collective, with another order, group or shape before or in it: {waited}"
