"""Errors of use: the call or its arguments are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import SkywardError


class UsageError(SkywardError, ValueError):
    """Wrong use of skyward: a bad argument, an unknown option, a call at the wrong time.

    Raised before anything is sent or rented, wherever possible. The message has the form
    `field=value: problem; what to do`. Correct the code: a retry cannot help. Also a ValueError.

    Attributes:
        field: Name of the argument; empty if there is none.
        value: Value of the argument.
        legal: Legal values, as text; may be empty.

    Example:
        >>> import skyward as sky
        >>> try:
        ...     sky.compute(retries=-1)
        ... except sky.errors.UsageError as error:
        ...     (error.field, error.value)
        ('retries', -1)
    """

    field: str = ""
    value: object = None
    legal: str = ""


class NoActivePool(UsageError):
    """No pool is open in this process for `f() >> sky`.

    Open a pool around the call, or name one: `f() >> pool`. Tasks have no pool of their own; there, call the function's
    `.local(...)`.

    Example:
        try:
            area(3, 4) >> sky
        except sky.errors.NoActivePool:
            area.local(3, 4)  # without a pool, here
    """


class PoolClosed(UsageError):
    """The pool is not open: not started yet, closed already, or closed early.

    Raised by every call to such a pool, and by calls still open when a pool is closed from outside: by `skyward down`,
    or by another pool that replaces it in a notebook. Send calls inside the `with` block, or between `start()` and
    `close()`.

    Example:
        >>> import skyward as sky
        >>> pool = sky.ComputePool(provider=sky.Local())
        >>> try:
        ...     sky.compute(abs)(-1) >> pool
        ... except sky.errors.PoolClosed:
        ...     print("enter the pool first")
        enter the pool first
    """


class ArgumentNotPicklable(UsageError):
    """A function or one of its arguments cannot be pickled, so it cannot be sent.

    Typical culprits are locks, open files, database connections, and calls that have not run. Create such objects
    inside the function, or pass plain data.

    Attributes:
        argument: Description of the part that cannot be pickled, such as "argument 1".

    Example:
        try:
            use(threading.Lock()) >> pool
        except sky.errors.ArgumentNotPicklable as error:
            print(error.argument)
    """

    argument: str = ""


class WrongArguments(UsageError, TypeError):
    """Arguments that do not fit the signature of a function or class.

    Raised when the call is made, before it is sent. Also a TypeError, which Python raises for a plain call. The message
    shows the signature, or the nearest name of a misspelled option.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def double(x: int) -> int:
        ...     return 2 * x
        >>> try:
        ...     double(y=3)
        ... except sky.errors.WrongArguments as error:
        ...     print(error)
        double(): missing a required argument: 'x'; call it as double(x)
    """


class NotRun(UsageError, TypeError, AttributeError):
    """A pending call is used as if it were its value.

    Send the call first, `value = f(x) >> pool`, or run the function here with `f.local(x)`. Also a TypeError and an
    AttributeError, as Python raises for the same use of other objects. So `hasattr`, and libraries that probe objects,
    get the answer that they expect.

    Example:
        >>> import skyward as sky
        >>> call = sky.compute(abs)(-1)
        >>> try:
        ...     call + 1
        ... except sky.errors.NotRun:
        ...     print("send the call first")
        send the call first
    """


class MissingDependency(UsageError, ImportError):
    """An optional package is not installed here.

    The message names the extra that installs it. Also an ImportError.

    Attributes:
        name: Name of the missing module or package. None where an installed one cannot be imported.

    Example:
        try:
            provider = sky.AWS()
        except sky.errors.MissingDependency as error:
            print(error.name, error)  # boto3 ... pip install 'skyward[aws]'
    """

    if TYPE_CHECKING:  # the attribute itself is ImportError's
        name: str | None = None
