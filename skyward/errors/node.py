"""Errors of nodes: a machine, or a process of skyward on it, failed."""

from __future__ import annotations

from .base import SkywardError


class NodeError(SkywardError):
    """A node, or a skyward process on it, failed under a call.

    With `retries`, the call runs again on another node or slot. Without, a call runs at most once and this error is
    raised.

    Attributes:
        node: Index of the node in the pool, or None.
        started: True if the call had begun, False if it had not, None if nobody knows.

    Example:
        try:
            result = step(x) >> pool
        except sky.errors.NodeError as error:
            print(f"node {error.node} failed; the call had begun: {error.started}")
    """

    retryable = True
    node: int | None = None
    started: bool | None = None


class NodeLost(NodeError):
    """A node died or left the pool with this call on it.

    The pool replaces the node, if the provider has another machine, and at most 16 times in all. Set `retries` if the
    call may run twice.

    Example:
        @sky.compute(retries=2)  # runs again when a node is lost
        def step(x): ...

        try:
            step(x) >> pool
        except sky.errors.NodeLost as error:
            print(f"lost node {error.node}")
    """


class HeadLost(NodeLost):
    """The head of a detached pool is lost with its machine, and the pool with it.

    The head holds the scheduler, the open calls, and the values that nobody has read. `retries` are not used, because
    nothing is left that could run the call. The other nodes end by themselves. Open a new pool, and make the calls
    again.

    Example:
        pool = sky.ComputePool.attach("train")
        try:
            values = [pool.future(call).result() for call in pool.calls()]
        except sky.errors.HeadLost as error:
            print(f"the pool is gone: {error}")
    """

    retryable = False


class RefLost(NodeError):
    """The nodes that held a value (`sky.Ref`) are gone, and the program has no copy of it.

    A value that `pool.put` was given stays in the program's memory too, so it is never lost. A value that a call kept
    (`f(x).keep()`) lies on its node, and on nodes where another call used it. Make it again. If the head of a detached
    pool is killed, all its references are lost.

    Example:
        model = prepare(raw).keep() >> pool
        try:
            score = evaluate(model) >> pool
        except sky.errors.RefLost:
            model = prepare(raw).keep() >> pool
    """

    retryable = False


class StateLost(NodeError):
    """Shared state of a detached pool was lost when the pool's head was killed.

    Everything that `sky.counter(name)` and its like held is gone, and so are the holders of locks. The name stays
    unusable: otherwise some would go on with values that others have never seen. Begin again under another name.

    Example:
        done = pool.counter("done")
        try:
            done.increment()
        except sky.errors.StateLost:
            done = pool.counter("done again")
    """

    retryable = False


class SlotLost(NodeError):
    """The process that ran the call died: a signal, `os._exit`, or out of memory.

    Look at the log lines in the notes. If the process ran out of memory, use a larger machine or a lower `concurrency`.

    Attributes:
        signal: Number of the signal that ended the process; None if it exited, or if nobody knows.
        exit_code: Exit code of the process; None if a signal ended it, or if nobody knows.

    Example:
        try:
            load_everything() >> pool
        except sky.errors.SlotLost as error:
            if error.signal == signal.SIGKILL:
                print("probably out of memory")
    """

    signal: int | None = None
    exit_code: int | None = None


class OutOfMemory(SlotLost, MemoryError):
    """The process that ran the call used more memory than the call's `memory_gib`, and the kernel killed it.

    Book more, or let the call hold less at once. It is not run again by `retries` or `max_restarts`, because it would
    need as much. Also a MemoryError.

    Attributes:
        memory_gib: The limit, in GiB. In a gang, that of all its ranks on the node.

    Example:
        try:
            load.with_options(memory_gib=4)(path) >> pool
        except sky.errors.OutOfMemory as error:
            print(f"needs more than {error.memory_gib} GiB")
    """

    retryable = False
    memory_gib: float = 0.0


class ActorLost(NodeError):
    """The process of an actor died, its node was lost, or the actor was closed.

    Raised for calls under way and for all later ones. With `max_restarts`, the actor is made again by its constructor,
    and only the calls under way raise this.

    Attributes:
        reason: Reason why it is gone, in a few words.

    Example:
        try:
            score = model.predict(x) >> pool
        except sky.errors.ActorLost as error:
            print(f"node {error.node}: {error.reason}")
    """

    retryable = False
    reason: str = ""


class Preempted(NodeError):
    """The provider took the machine back while a call ran on it.

    Allow `retries`, save progress when `sky.instance_info().is_preempted` is true, or use `allocation="on-demand"`.

    Example:
        try:
            train(data) >> pool
        except sky.errors.Preempted as error:
            print(f"node {error.node} was preempted")
    """


class Unreachable(NodeError):
    """A machine exists but does not answer.

    Check the network, the firewall and the SSH configuration of the host.

    Attributes:
        host: The machine.
        is_final: False if the machine may still be booting, or its link may come back.
        was_stopped: True if skyward stopped trying because a process here asked it to.

    Example:
        try:
            sky.ComputePool(provider=sky.SSH(hosts=["gpu1"])).start()
        except sky.errors.Unreachable as error:
            print(f"cannot reach {error.host}")
    """

    host: str = ""
    is_final: bool = False
    was_stopped: bool = False


class TransferFailed(NodeError):
    """A file could not be sent to a node, or fetched from it.

    Nothing incomplete has the name of a file. Repeat the call, and it continues where it stopped.

    Attributes:
        node: Index of the node.
        path: Path of the transfer.

    Example:
        try:
            pool.download("checkpoints/last.pt", "last.pt")
        except sky.errors.TransferFailed as error:
            print(f"node {error.node} has no {error.path} yet")
    """

    path: str = ""


class VolumeFailed(NodeError):
    """A volume could not be mounted, fetched from its object store, or saved to it.

    A call whose volume is not there does not begin. When its changes cannot be saved, it has run, and the files
    stay on the node until its pool ends: `commit` of a later call tries again.

    Attributes:
        path: Path under which the pool names the volume.
        files: Files that were changed here and in the store; empty for other failures.

    Example:
        try:
            train() >> pool
        except sky.errors.VolumeFailed as error:
            print(f"{error.path}: others have changed {error.files}")
    """

    path: str = ""
    files: tuple[str, ...] = ()


class BootstrapFailed(NodeError):
    r"""Setting up the image's environment on a machine failed.

    The message ends with advice for the failed phase, such as a package that does not exist for that Python version.

    Attributes:
        host: The machine.
        phase: Phase that failed, such as "apt" or "packages".
        output: Last lines of the phase's output.
        advice: Advice for this failure.

    Example:
        try:
            sky.ComputePool(provider=provider, image=sky.Image(pip=["no-such-package"])).start()
        except sky.errors.BootstrapFailed as error:
            print(error.phase, *error.output, sep="\n")
    """

    retryable = False
    host: str = ""
    phase: str = ""
    output: tuple[str, ...] = ()
    advice: str = ""
