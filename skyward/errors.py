"""Every error that skyward raises, split by who must act.

    SkywardError
    ├── UsageError                 you: the call or its arguments are wrong
    │   ├── NoActivePool           `f() >> sky` without an open pool
    │   ├── PoolClosed             the pool is not started, or already closed
    │   ├── ArgumentNotPicklable   an argument or the function cannot travel
    │   ├── WrongArguments         the arguments do not fit the function's signature
    │   ├── NotRun                 a call that has not run is used as if it were its value
    │   └── MissingDependency      an optional package is not installed
    ├── ProviderError              the provider of machines
    │   ├── NoCapacity             it has none of what was asked for
    │   ├── AuthFailed             it refused the credentials
    │   ├── HostKeyUnknown         a machine's SSH host key is not known here
    │   ├── HostKeyChanged         a machine's SSH host key is not the one that is known
    │   ├── QuotaExceeded          the account may not have that much
    │   ├── Throttled              it asked to be called less often, or later
    │   ├── OutcomeUnknown         a request failed, and may have been carried out all the same
    │   ├── BudgetExceeded         the pool would cost, or has cost, more than its budget_usd
    │   ├── ForeignState           what is written down here is about another account
    │   └── TerminateFailed        machines may still be running, and cost money
    ├── NodeError                  a machine, or the processes of ours on it
    │   ├── NodeLost               the node went away with work on it
    │   ├── SlotLost               the process that ran the call died
    │   ├── Preempted              the provider took the machine back
    │   ├── Unreachable            the machine does not answer
    │   └── BootstrapFailed        its environment could not be made
    ├── TaskError                  the user's code, when its own exception cannot be raised as itself
    │   ├── RemoteError            its exception's class is unknown here, or cannot be pickled
    │   ├── ResultNotPicklable     what it returned cannot travel back
    │   ├── PayloadNotLoadable     the function or its arguments cannot be loaded on the node
    │   ├── TaskExited             it called sys.exit()
    │   ├── TaskTimeout            it ran longer than its timeout_s
    │   ├── InteractiveInput       it called input() or breakpoint(): a task has no terminal
    │   ├── InitializerFailed      the pool's initializer raised in the slot
    │   ├── RendezvousFailed       the ranks of a gang could not meet
    │   └── GangHung               a rank of a gang does not come to where the others wait for it
    ├── ControlFailed              a training run could not be asked, or refused what it was asked
    ├── CheckpointError            a checkpoint of a training run
    │   ├── CheckpointNotFound     there is none, or a required part of it is missing
    │   ├── CheckpointCorrupt      a file of it is not what was written
    │   ├── CheckpointMismatch     it is whole, and does not fit this run: other ranks, other sharing
    │   ├── CheckpointSaveFailed   a rank could not write: nothing was committed, on any rank
    │   └── ReplicationMismatch    ranks that should hold the same state do not
    └── InternalError              us: a bug, please report it

The user's own exceptions are not in this tree: they are re-raised as themselves, with the remote traceback attached
as a note. All of these can be pickled; `retryable` says whether the same call may succeed if it is made again.
"""

from __future__ import annotations

from dataclasses import InitVar, field
from typing import TYPE_CHECKING, Any, dataclass_transform

from .core.printable import printable_lines

__all__ = [
    "ArgumentNotPicklable",
    "AuthFailed",
    "BootstrapFailed",
    "BudgetExceeded",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointSaveFailed",
    "ControlFailed",
    "ForeignState",
    "GangHung",
    "HostKeyChanged",
    "HostKeyUnknown",
    "InitializerFailed",
    "InteractiveInput",
    "InternalError",
    "MissingDependency",
    "NoActivePool",
    "NoCapacity",
    "NodeError",
    "NodeLost",
    "NotRun",
    "OutcomeUnknown",
    "PayloadNotLoadable",
    "PoolClosed",
    "Preempted",
    "ProviderError",
    "QuotaExceeded",
    "RemoteError",
    "RendezvousFailed",
    "ReplicationMismatch",
    "ResultNotPicklable",
    "SkywardError",
    "SlotLost",
    "TaskError",
    "TaskExited",
    "TaskTimeout",
    "TerminateFailed",
    "Throttled",
    "Unreachable",
    "UsageError",
    "WrongArguments",
]


# An explicit `__init__` for each class would repeat the fields of all its bases; real dataclasses would replace the
# pickling, `str` and equality of exceptions. So only type checkers see a dataclass.
@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class _Fields(Exception):
    """Turn keyword arguments into attributes; type checkers allow those that the class annotates."""

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(printable_lines(message))
        for name, value in fields.items():
            setattr(self, name, value)  # not in __dict__: ImportError has a `name` of its own


class SkywardError(_Fields):
    """Root of every error that skyward itself raises.

    Keyword arguments become attributes, so that a program reads fields instead of parsing the message.

    Attributes: `retryable` (whether the same call may succeed if it is made again).
    """

    if TYPE_CHECKING:
        message: InitVar[str] = field(default="", kw_only=False)
    retryable: bool = False

    def add_note(self, note: str, /) -> None:
        # Messages and notes quote other machines, and end on a terminal.
        super().add_note(printable_lines(note))


class UsageError(SkywardError, ValueError):
    """The call is wrong as written; the message names the field, the value and what to do.

    Attributes, empty where they do not apply: `field` (name of the argument), `value` (what was given), `legal` (what
    may be given, as text).
    """

    field: str = ""
    value: object = None
    legal: str = ""


class NoActivePool(UsageError):
    """`>> sky` found no open pool in this process."""


class PoolClosed(UsageError):
    """The pool is not started yet, or closed already."""


class ArgumentNotPicklable(UsageError):
    """The function or one of its arguments cannot be sent; `argument` names which."""

    argument: str = ""


class WrongArguments(UsageError, TypeError):
    """The arguments do not fit the signature; a TypeError, as Python raises for a plain call."""


class NotRun(UsageError, TypeError, AttributeError):
    """A pending call is used as if it were its value.

    It is what Python raises for the same use of any other object, too: a TypeError and an AttributeError. So `hasattr`
    and libraries that try what an object can do get the answer that they expect.
    """


class MissingDependency(UsageError, ImportError):
    """An optional package is not installed here; the message names the extra that brings it.

    Attributes: `name` of the package, as of any ImportError.
    """

    if TYPE_CHECKING:  # the attribute itself is ImportError's
        name: str | None = None


class ProviderError(SkywardError):
    """The provider of machines refused or failed.

    Attributes: `code` (the provider's own name of the failure; empty where it gave none).
    """

    code: str = ""


class NoCapacity(ProviderError):
    """The provider has no such machines now.

    Attributes: `tried` (the offers that were asked for, each with the answer).
    """

    retryable = True
    tried: tuple[str, ...] = ()


class AuthFailed(ProviderError):
    """The provider, or the machine itself, refused the credentials.

    Attributes: `host` (the machine; empty where it was the provider).
    """

    host: str = ""


class HostKeyUnknown(ProviderError):
    """Nothing here says which host key the machine has, so nothing says that it is the machine.

    Attributes: `host`; `fingerprint` of the key that it sent and `known_hosts_line` that would make it known, empty
    where it could not be asked.
    """

    host: str = ""
    fingerprint: str = ""
    known_hosts_line: str = ""


class HostKeyChanged(ProviderError):
    """The machine sent another host key than the one that is known for it. Never accepted, whatever the policy.

    Attributes: `host`, `fingerprint` of the key that it sent.
    """

    host: str = ""
    fingerprint: str = ""


class QuotaExceeded(ProviderError):
    """The account's quota does not allow that many machines.

    Attributes: `tried` (the offers that were asked for, each with the answer).
    """

    tried: tuple[str, ...] = ()


class Throttled(ProviderError):
    """The provider asked to be called less often, or later: nothing was done."""

    retryable = True


class OutcomeUnknown(ProviderError):
    """A request to the provider failed in a way that does not say whether it was carried out."""

    retryable = True


class BudgetExceeded(ProviderError):
    """The pool would cost more than its `budget_usd`, or would have if it had gone on.

    Attributes: `budget_usd`, `cost_usd` (so far, or forecast).
    """

    budget_usd: float = 0.0
    cost_usd: float = 0.0


class ForeignState(ProviderError):
    """What is written down here was made with another account or region: it is not acted on.

    Attributes: `recorded`, `current` (both as the provider names them).
    """

    recorded: str = ""
    current: str = ""


class TerminateFailed(ProviderError):
    """Machines may still be running, and cost money, or something made for them is still there.

    Attributes: `ids` (the provider's ids of them), `command` (what ends them by hand).
    """

    ids: tuple[str, ...] = ()
    command: str = ""


class NodeError(SkywardError):
    """A node, or a process of ours on it, failed under the call.

    Attributes: `node` (index in the pool, or None), `started` (True: the call had begun; False: it had not;
    None: not known).
    """

    retryable = True
    node: int | None = None
    started: bool | None = None


class NodeLost(NodeError):
    """The node died or left with this call sent to it."""


class SlotLost(NodeError):
    """The process that ran the call died: a signal, `os._exit`, or the memory ran out.

    Attributes: `signal` (number or None), `exit_code` (number or None).
    """

    signal: int | None = None
    exit_code: int | None = None


class Preempted(NodeError):
    """The provider took the machine back."""


class Unreachable(NodeError):
    """The machine exists but does not answer.

    Attributes: `host`, `is_final` (False: it may only be booting, or its link may come back), `was_stopped` (it was
    not asked any longer, because somebody here said so).
    """

    host: str = ""
    is_final: bool = False
    was_stopped: bool = False


class BootstrapFailed(NodeError):
    """What the image asks for could not be made on the machine.

    Attributes: `host`, `phase` ("apt", "packages", ...), `output` (the last lines that it printed), `advice` (what to
    do).
    """

    retryable = False
    host: str = ""
    phase: str = ""
    output: tuple[str, ...] = ()
    advice: str = ""


class TaskError(SkywardError):
    """The user's code failed in a way that its own exception cannot tell by itself.

    Attributes: `node`, `task` (name of the call), `remote_traceback` (text).
    """

    node: int | None = None
    task: str = ""
    remote_traceback: str = ""


class RemoteError(TaskError):
    """The remote exception's class does not exist here, or the exception cannot be pickled.

    Attributes: `exception_type` (qualified name), `exception_message`.
    """

    exception_type: str = ""
    exception_message: str = ""


class ResultNotPicklable(TaskError):
    """The value that the function returned (or yielded) cannot be pickled."""


class PayloadNotLoadable(TaskError):
    """The function or its arguments could not be unpickled on the node; the message names what is missing there."""


class TaskExited(TaskError):
    """The function called `sys.exit()`; `code` is what it passed."""

    code: object = None


class TaskTimeout(TaskError, TimeoutError):
    """The call ran longer than its `timeout_s` and was stopped."""

    timeout_s: float = 0.0


class InteractiveInput(TaskError, RuntimeError):
    """The function asked for a terminal: `input()`, `breakpoint()` or reading `sys.stdin`."""


class InitializerFailed(TaskError):
    """The pool's `initializer` raised in this slot, so the call was not begun."""


class RendezvousFailed(TaskError):
    """The ranks of a gang could not meet at the head's port."""

    retryable = True


class GangHung(TaskError):
    """Ranks of a gang waited longer than `hang_timeout_s` in one collective, and the gang was stopped.

    Attributes: `ranks` (those that are in no collective; empty if all wait, in different ones), `waiting` (the others),
    `waited_s`, `stacks` (by rank: its Python stacks as text; they are in the notes too).
    """

    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    waited_s: float = 0.0
    stacks: dict[int, str] = {}  # noqa: RUF012  # set by each instance


class ControlFailed(SkywardError):
    """A training run could not be asked, or refused what it was asked.

    Attributes: `job_id`, `status` (HTTP's; None: there was no answer), `is_gone` (the run has ended), `reason` (the
    agent's number for why nobody answered; 0: none).
    """

    reason: int = 0
    job_id: str | None = None
    status: int | None = None
    is_gone: bool = False


class CheckpointError(SkywardError):
    """A checkpoint of a training run cannot be written, read or trusted.

    Attributes: `path` (may be empty); where ranks acted together, `rank` (the first that failed; -1: none, or not
    known) and `error` (its error, as text).
    """

    path: str = ""
    rank: int = -1
    error: str = ""


class CheckpointNotFound(CheckpointError):
    """There is no such checkpoint, or it lacks a part that the run requires."""


class CheckpointCorrupt(CheckpointError):
    """A file is missing, has another size or digest than the manifest says, or cannot be read."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole, but was written by other ranks or with other sharing than this run has."""


class CheckpointSaveFailed(CheckpointError):
    """A rank could not write its part. Nothing was committed on any rank, and the last checkpoint is as it was."""


class ReplicationMismatch(CheckpointError):
    """Ranks that are declared to hold the same state do not.

    Attributes: `component`, `tensors` (paths of what differs), `ranks` (those that differ from their group's first).
    """

    component: str = ""
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class InternalError(SkywardError):
    """A bug in skyward."""
