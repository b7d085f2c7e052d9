"""Remote compute for Python: decorate a function, choose where it runs at the call site, get its value back.

    import skyward as sky

    @sky.compute
    def double(x: int) -> int:
        return 2 * x

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        print(double(21) >> pool)    # one node; `@ pool` all nodes; `> pool` a future; `a & b` in parallel

Names load on first use: `import skyward` imports nothing heavy.
"""

import sys as _sys
from types import ModuleType as _ModuleType

from ._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, apart=("dict", "list", "set"))


class _Target(_ModuleType):
    """Module type that refuses `>> sky` and `@ sky` of values that are not calls.

    A call brings its own operator (`f(x) >> sky` uses the innermost open pool). Only a value without one, such as the
    result of a function that was not decorated, reaches these reflected operators.
    """

    def __rrshift__(self, value: object) -> None:
        _refuse(value, ">>")

    def __rmatmul__(self, value: object) -> None:
        _refuse(value, "@")

    def __lt__(self, value: object) -> None:
        _refuse(value, ">")

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, (self.__name__,)  # pickle recognizes modules by their exact type, which this is not


def _refuse(value: object, operator: str) -> None:
    from .calls.target import refuse_operand

    refuse_operand(value, operator)


def load_ipython_extension(shell: object) -> None:
    """Make the cell magic `%%skyward` known: `%load_ext skyward` calls this."""
    from .pool.magic import register

    register(shell)


_sys.modules[__name__].__class__ = _Target
