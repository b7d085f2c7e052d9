"""Every error that skyward raises, grouped by who must act.

    SkywardError
    ├── UsageError                 you: the call or its arguments are wrong
    │   ├── NoActivePool           `f() >> sky` without an open pool
    │   ├── PoolClosed             the pool is not open
    │   ├── ArgumentNotPicklable   an argument or the function cannot be pickled
    │   ├── WrongArguments         the arguments do not fit the function's signature
    │   ├── NotRun                 a call that has not run is used as if it were its value
    │   └── MissingDependency      an optional package is not installed
    ├── ProviderError              the provider of machines
    │   ├── NoCapacity             no such machines are available
    │   ├── AuthFailed             the credentials were refused
    │   ├── HostKeyUnknown         a machine's SSH host key is not known here
    │   ├── HostKeyChanged         a machine's SSH host key differs from the known one
    │   ├── QuotaExceeded          the account's quota is too small
    │   ├── Throttled              too many requests; the provider did nothing
    │   ├── OutcomeUnknown         a request failed, but the provider may have carried it out
    │   ├── BudgetExceeded         the pool would cost, or has cost, more than its budget_usd
    │   ├── ForeignState           the local records belong to another account or region
    │   └── TerminateFailed        machines may still be running, and cost money
    ├── NodeError                  a machine, or skyward's processes on it
    │   ├── NodeLost               the node went away with work on it
    │   │   └── HeadLost           the head of a detached pool went away, and the pool with it
    │   ├── RefLost                the nodes that held a kept value are gone
    │   ├── StateLost              shared state was lost with the head that held it
    │   ├── SlotLost               the process that ran the call died
    │   │   └── OutOfMemory        the call used more memory than its memory_gib
    │   ├── ActorLost              an actor's process or node is gone, or it was closed
    │   ├── Preempted              the provider took the machine back
    │   ├── Unreachable            the machine does not answer
    │   ├── TransferFailed         a file could not be sent to a node or fetched from it
    │   ├── VolumeFailed           a volume could not be mounted, fetched from its store or saved to it
    │   └── BootstrapFailed        setting up the environment failed
    ├── TaskError                  your function, where its own exception cannot be raised as itself
    │   ├── RemoteError            the exception's class is unknown here, or it cannot be pickled
    │   ├── ResultNotPicklable     the return value cannot be pickled there or unpickled here
    │   ├── PayloadNotLoadable     the function or its arguments cannot be unpickled on the node
    │   ├── TaskExited             the function called sys.exit()
    │   ├── TaskTimeout            the call ran longer than its timeout_s
    │   ├── InteractiveInput       the function called input() or breakpoint(); tasks have no terminal
    │   ├── InitializerFailed      the pool's initializer raised in the slot
    │   ├── RendezvousFailed       the ranks of a gang could not connect to each other
    │   ├── GangHung               ranks of a gang waited too long in a collective
    │   └── CommandFailed          a command that ran as a job ended with another status than 0
    ├── ControlFailed              a training run did not answer, or refused a command
    ├── HubError                   a hub refused a request
    │   ├── HubUnreachable         the hub does not answer, or none is named
    │   ├── JobFailed              a job ended without a value
    │   └── StreamRestarted        a new attempt of a job yields its items from the beginning
    ├── CheckpointError            a checkpoint of a training run
    │   ├── CheckpointNotFound     the checkpoint, or a required part of it, is missing
    │   ├── CheckpointCorrupt      a file differs from what was written
    │   ├── CheckpointMismatch     the checkpoint is intact but does not fit this run's ranks or sharding
    │   ├── CheckpointSaveFailed   a rank could not write; nothing was committed
    │   ├── CheckpointSuperseded   a newer attempt saves in the folder; nothing was committed
    │   └── ReplicationMismatch    ranks that should hold the same state do not
    └── InternalError              skyward: a bug, please report it

Exceptions of your own functions are not in this tree. They are raised as themselves, with the remote traceback as a
note. All errors here can be pickled. `retryable` says whether the same call may succeed when it is made again.

Example:
    >>> import skyward as sky
    >>> try:
    ...     sky.ComputePool(provider=sky.Local(), concurrency=0)
    ... except sky.errors.UsageError as error:
    ...     print(error)
    concurrency=0: must be a whole number >= 1; set concurrency=1 or more
"""

from __future__ import annotations

from .base import InternalError, SkywardError
from .hub import HubError, HubUnreachable, JobFailed, StreamRestarted
from .node import (
    ActorLost,
    BootstrapFailed,
    HeadLost,
    NodeError,
    NodeLost,
    OutOfMemory,
    Preempted,
    RefLost,
    SlotLost,
    StateLost,
    TransferFailed,
    Unreachable,
    VolumeFailed,
)
from .provider import (
    AuthFailed,
    BudgetExceeded,
    ForeignState,
    HostKeyChanged,
    HostKeyUnknown,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    TerminateFailed,
    Throttled,
)
from .task import (
    CommandFailed,
    GangHung,
    InitializerFailed,
    InteractiveInput,
    PayloadNotLoadable,
    RemoteError,
    RendezvousFailed,
    ResultNotPicklable,
    TaskError,
    TaskExited,
    TaskTimeout,
)
from .training import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointSaveFailed,
    CheckpointSuperseded,
    ControlFailed,
    ReplicationMismatch,
)
from .usage import ArgumentNotPicklable, MissingDependency, NoActivePool, NotRun, PoolClosed, UsageError, WrongArguments

__all__ = [
    "ActorLost",
    "ArgumentNotPicklable",
    "AuthFailed",
    "BootstrapFailed",
    "BudgetExceeded",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointSaveFailed",
    "CheckpointSuperseded",
    "CommandFailed",
    "ControlFailed",
    "ForeignState",
    "GangHung",
    "HeadLost",
    "HostKeyChanged",
    "HostKeyUnknown",
    "HubError",
    "HubUnreachable",
    "InitializerFailed",
    "InteractiveInput",
    "InternalError",
    "JobFailed",
    "MissingDependency",
    "NoActivePool",
    "NoCapacity",
    "NodeError",
    "NodeLost",
    "NotRun",
    "OutOfMemory",
    "OutcomeUnknown",
    "PayloadNotLoadable",
    "PoolClosed",
    "Preempted",
    "ProviderError",
    "QuotaExceeded",
    "RefLost",
    "RemoteError",
    "RendezvousFailed",
    "ReplicationMismatch",
    "ResultNotPicklable",
    "SkywardError",
    "SlotLost",
    "StateLost",
    "StreamRestarted",
    "TaskError",
    "TaskExited",
    "TaskTimeout",
    "TerminateFailed",
    "Throttled",
    "TransferFailed",
    "Unreachable",
    "UsageError",
    "VolumeFailed",
    "WrongArguments",
]

# Pickles, reprs and docs name the public module, so that classes can move between the files of this package.
for _name in __all__:
    globals()[_name].__module__ = __name__
