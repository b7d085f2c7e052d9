"""Container of a node: how commands run in it, from the first probe to the agent's end.

Preparation runs each script in a container of its own, which ends with the script. The agent runs in one that lives as
long as the node's folder, which the agent's parents remove when they end, and `undo` when a start is abandoned.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ProviderError
from .scripts import Runner, script

_START_LIMIT_S = 60.0
_IDLE_ROUNDS = 30
# It ends with the folder, and when nothing of the node runs for a minute: the client has died before the agent started.
_LIVE = (
    "trap 'exit 0' TERM INT; idle=0; "
    f'while [ -d "$1" ] && [ "$idle" -lt {_IDLE_ROUNDS} ]; do '
    "sleep 2 & wait $!; "
    'if grep -qsF "SKYWARD_NODE=$2" /proc/[0-9]*/environ; then idle=0; else idle=$((idle + 1)); fi; '
    "done"
)


@dataclass(frozen=True, kw_only=True)
class Container:
    """Container on a machine. `image_id` names the content of its image."""

    runtime: str
    image_id: str
    options: tuple[str, ...]
    folder: str

    @property
    def name(self) -> str:
        return f"skyward-{self.folder}"

    def once(self, command: str) -> str:
        """Return a line of sh that runs `command` in a container of its own."""
        words = [self.runtime, "run", "--rm", "--interactive", *self.options, self.image_id, "-c", command]
        return "exec " + shlex.join(words)

    def inside(self, command: str) -> str:
        """Return a line of sh that runs `command` in the container that `start` made."""
        return "exec " + shlex.join([self.runtime, "exec", "--interactive", self.name, "sh", "-c", command])

    def start(self, run: Runner, path: str) -> None:
        """Start the container, which lives as long as the folder at `path`. Raises ProviderError."""
        words = [self.runtime, "run", "--rm", "--detach", f"--name={self.name}", *self.options, self.image_id]
        done = run("exec " + shlex.join([*words, "-c", _LIVE, "sh", path, self.folder]), timeout_s=_START_LIMIT_S)
        if done.code:
            raise ProviderError(
                f"{self.runtime} run: exited with code {done.code} ({done.error_text}); log in there, and run "
                f"`{self.runtime} run --rm {self.image_id} true`",
                retryable=True,
            )


def find_container(
    run: Runner, image: str, *, folder: str, lease_file: str, has_volumes: bool, limit_s: float
) -> Container:
    """Get the image on a machine, and return how to run commands in it. Raises ProviderError."""
    variables = {
        "image": image,
        "folder": folder,
        "lease_file": lease_file,
        "volumes": "yes" if has_volumes else "",
        "limit_s": str(int(limit_s)),
    }
    done = run("exec sh -s", input=script(("node.sh", "container.sh"), variables), timeout_s=limit_s)
    facts: dict[str, list[str]] = {}
    for line in done.text.splitlines():
        name, _, text = line.removeprefix("\1").partition(" ")
        if line.startswith("\1"):
            facts.setdefault(name, []).append(text)
    if "problem" in facts or "end" not in facts:
        exited = f"the login shell exited with code {done.code} ({done.error_text}); log in there, and run `sh -c true`"
        problem = facts.get("problem", [exited])[0]
        raise ProviderError(f"Image.container={image!r}: {problem}")  # words: ok, container.sh says what to do
    return Container(runtime=facts["runtime"][0], image_id=facts["id"][0], options=tuple(facts["word"]), folder=folder)


def remove_command(runtime: str, folders: Sequence[str]) -> str:
    """Return a line of sh that ends and removes all containers of these nodes."""
    listed = "; ".join(f"{runtime} ps -aq --filter label=skyward={shlex.quote(folder)}" for folder in folders)
    return f'for id in $({listed}); do {runtime} rm -f "$id"; done'
