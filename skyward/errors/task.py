"""Errors of tasks: the user's code failed in a way that its own exception cannot report."""

from __future__ import annotations

from .base import SkywardError


class TaskError(SkywardError):
    """A call failed in a way that the user's own exception cannot express.

    Exceptions of your own functions are raised as themselves; subclasses of TaskError cover the remaining failures.

    Attributes:
        node: Index of the node, or None.
        task: Name of the call.
        remote_traceback: Traceback on the node, as text.

    Example:
        try:
            step(x) >> pool
        except sky.errors.TaskError as error:
            print(error.task, error.remote_traceback)
    """

    node: int | None = None
    task: str = ""
    remote_traceback: str = ""


class RemoteError(TaskError):
    """The function raised an exception that cannot be rebuilt here.

    Its class does not exist in this process, or the exception cannot be pickled. Define the class in a module that both
    sides import, or read the fields below.

    Attributes:
        exception_type: Qualified name of the class.
        exception_message: Message of the exception.

    Example:
        try:
            step(x) >> pool
        except sky.errors.RemoteError as error:
            if error.exception_type.endswith("DatabaseError"):
                print(error.exception_message)
    """

    exception_type: str = ""
    exception_message: str = ""


class ResultNotPicklable(TaskError):
    """The value that a function returned or yielded cannot be pickled there, or unpickled here.

    Return plain data instead of locks, open files, generators or models with hooks. The cause is the error of the
    value's own pickling or unpickling.

    Example:
        @sky.compute
        def connect():
            return threading.Lock()

        try:
            connect() >> pool
        except sky.errors.ResultNotPicklable as error:
            print(error)
    """


class PayloadNotLoadable(TaskError):
    """The function or its arguments cannot be unpickled on the node.

    The message names the missing part. Add a missing package with `Image(pip=[...])` and missing files with
    `Image(includes=[...])`.

    Example:
        try:
            step(x) >> pool
        except sky.errors.PayloadNotLoadable as error:
            print(error)  # ... the module 'mylib' is not installed on the node; ...
    """


class TaskExited(TaskError):
    """The function called `sys.exit()`.

    Return a value or raise an exception instead.

    Attributes:
        code: Argument of `sys.exit()`.

    Example:
        try:
            sky.compute(sys.exit)(3) >> pool
        except sky.errors.TaskExited as error:
            print(error.code)  # 3
    """

    code: object = None


class TaskTimeout(TaskError, TimeoutError):
    """A call ran longer than its `timeout_s` and was stopped.

    The limit counts from the moment the call begins on its slot. Raise it, or split the work. Also a TimeoutError.

    Attributes:
        timeout_s: The limit, in seconds.

    Example:
        try:
            step(x).with_timeout(60) >> pool
        except sky.errors.TaskTimeout as error:
            print(f"stopped after {error.timeout_s} s")
    """

    timeout_s: float = 0.0


class InteractiveInput(TaskError, RuntimeError):
    """The function asked for a terminal: `input()`, `breakpoint()`, or reading `sys.stdin`.

    Tasks have no terminal. Pass the value as an argument, and debug with the function's `.local(...)`. Also a
    RuntimeError.

    Example:
        try:
            sky.compute(input)("name? ") >> pool
        except sky.errors.InteractiveInput as error:
            print(error)
    """


class InitializerFailed(TaskError):
    """The pool's `initializer` raised in this slot, so the call did not begin.

    The message has the initializer's own error. Correct the initializer or its `initargs`.

    Example:
        with sky.ComputePool(provider=sky.Local(), initializer=load_model) as pool:
            try:
                predict(x) >> pool
            except sky.errors.InitializerFailed as error:
                print(error)
    """


class RendezvousFailed(TaskError):
    """The ranks of a gang could not connect to each other at the head's port.

    A gang whose port is taken tries a second one by itself. Check that the nodes reach each other on ports 20000 to
    29999, and that no firewall blocks them. With `max_restarts`, the gang starts again on other ports.

    Example:
        try:
            train(data) @ pool
        except sky.errors.RendezvousFailed as error:
            print(error)
    """

    retryable = True


class CommandFailed(TaskError):
    """A command that ran as a job of a hub ended with another status than 0, or could not be started.

    Its output says why: `skyward job logs ID`.

    Attributes:
        exit_code: Status of the command; negative for the signal that killed it, as in `subprocess`. 126 and 127 if it
            could not be started.

    Example:
        try:
            hub.submit_command({"command": ["python", "train.py"]}).result()
        except sky.errors.CommandFailed as error:
            print(error.exit_code, error.node)
    """

    exit_code: int = 1


class GangHung(TaskError):
    """Ranks of a gang waited longer than `hang_timeout_s` in one collective, and the gang was stopped.

    Usually one rank is stuck in its own code, or the ranks took different branches. The stacks show where each rank
    was.

    Attributes:
        ranks: Ranks that are in no collective; empty if all wait, in different collectives.
        waiting: Ranks that wait in a collective.
        waited_s: How long they waited, in seconds.
        stacks: Python stack of each rank, as text. The error's notes have them too.

    Example:
        try:
            train.with_options(hang_timeout_s=300)(data) @ pool
        except sky.errors.GangHung as error:
            print(f"ranks {error.ranks} did not arrive")
    """

    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    waited_s: float = 0.0
    stacks: dict[int, str] = {}  # noqa: RUF012  # set by each instance
