"""Container of a node: how commands run in it, from the first probe to the agent's end.

Preparation runs each script in a container of its own, which ends with the script. The agent runs in one that lives as
long as the node's folder, which the agent's parents remove when they end, and `undo` when a start is abandoned. A head
beside the node runs there too, and may outlive the agent.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ProviderError
from .scripts import Runner, script

_START_LIMIT_S = 60.0
_ANSWER_S = 30.0
"""Time for a machine to say that its time is up."""
_IDLE_ROUNDS = 30
_NO_AGENT = 69
"""Exit code of `node.agent.attach` without an agent."""
# It ends with the folders of the node and of heads, and when nothing of them runs for a minute: the client has died
# before the agent started.
_LIVE = (
    "trap 'exit 0' TERM INT; idle=0; "
    f'while [ "$idle" -lt {_IDLE_ROUNDS} ] && {{ [ -d "$1" ] || ls -d "$3"*/ >/dev/null 2>&1; }}; do '
    "sleep 2 & wait $!; "
    'if grep -qsF -e "SKYWARD_NODE=$2" -e "SKYWARD_NODE=${3##*/}" /proc/[0-9]*/environ; then idle=0; '
    "else idle=$((idle + 1)); fi; "
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

    def inside_or_once(self, command: str) -> str:
        """Return a line of sh that does what `inside` does, or `once` where the container is gone."""
        return f"if {self._is_gone}; then {self.once(command)}; else {self.inside(command)}; fi"

    def channel(self, command: str) -> str:
        """Return a line of sh that does what `inside` does, and ends as without an agent if the container is gone."""
        inside = self.inside(command).removeprefix("exec ")
        tell = f"echo 'skyward: no agent: its container is gone' >&2; exit {_NO_AGENT}"
        return f'{inside}; code=$?; if [ "$code" != 0 ] && {self._is_gone}; then {tell}; fi; exit "$code"'

    @property
    def _is_gone(self) -> str:
        """Condition of sh. A runtime that fails to answer proves nothing."""
        running = shlex.join([self.runtime, "ps", "--quiet", "--filter", f"name=^/?{self.name}$"])
        return f'ids=$({running} 2>/dev/null </dev/null) && [ -z "$ids" ]'

    def start(self, run: Runner, path: str) -> None:
        """Start the container, which lives as long as the folder at `path`. Raises ProviderError; what `run` raises."""
        words = [self.runtime, "run", "--rm", "--detach", f"--name={self.name}", *self.options, self.image_id]
        words += ["-c", _LIVE, "sh", path, self.folder, f"{path.rsplit('-', 2)[0]}-head-"]
        done = run("exec " + shlex.join(words), timeout_s=_START_LIMIT_S)
        if done.code:
            raise ProviderError(
                f"{self.runtime} run: exited with code {done.code} ({done.error_text}); log in there, and run "
                f"`{self.runtime} run --rm {self.image_id} true`",
                retryable=True,
            )


def find_container(
    run: Runner,
    image: str,
    *,
    folder: str,
    lease_file: str,
    has_volumes: bool,
    is_detached: bool,
    limit_s: float,
) -> Container:
    """Get the image on a machine, and return how to run commands in it. Raises ProviderError; what `run` raises.

    Args:
        run: Runs commands on the machine.
        image: Name of the image.
        folder: Name of the node's folder.
        lease_file: File of a rented machine's lease; empty for none.
        has_volumes: Whether the node has volumes.
        is_detached: Whether the container must outlive the logins of its user.
        limit_s: Time limit in seconds.
    """
    variables = {
        "image": image,
        "folder": folder,
        "lease_file": lease_file,
        "volumes": "yes" if has_volumes else "",
        "is_detached": "yes" if is_detached else "",
        "limit_s": str(int(limit_s)),
    }
    done = run("exec sh -s", input=script(("node.sh", "container.sh"), variables), timeout_s=limit_s + _ANSWER_S)
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
