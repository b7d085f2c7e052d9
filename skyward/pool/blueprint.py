"""Blueprint of a detached pool's nodes, by which any client of the pool replaces lost ones.

It has the values of environment variables and secrets. So the head keeps it, in its memory, and no file has it. A
client gets it once it has proved that it may attach. The user's code can be large, so it is not in there: it lies
beside the record of the pool, on the machine that has opened it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .._version import __version__
from ..bootstrap.code import Code
from ..engine.head.plain import dump_plain, load_plain
from ..errors import UsageError
from ..state import detached
from ..state.detached import DetachedPool
from ..values.machine import PoolSpec

_OF_PROCESS = frozenset({"code", "stop", "meanwhile"})
"""Fields of a PoolSpec that another process cannot use."""


def pack_blueprint(spec: PoolSpec) -> bytes:
    """Return the blueprint of a pool, without the values of its secrets."""
    names = [field.name for field in dataclasses.fields(spec) if field.name not in _OF_PROCESS]
    return dump_plain((__version__, dump_plain({name: getattr(spec, name) for name in names})))


def unpack_blueprint(pool: DetachedPool, data: bytes, secrets: tuple[str, ...]) -> PoolSpec:
    """Return the request by which new nodes of a pool are like the others.

    Args:
        pool: Record of the pool.
        data: Its blueprint; empty if the head has none.
        secrets: Values of its secrets, in their order.

    Raises:
        UsageError: This process cannot make such nodes.
    """
    version, packed = load_plain(data) if data else (pool.version, b"")
    if version != __version__ or not packed:
        raise _refuse(
            pool, f"its nodes run skyward {version}, and this program {__version__}", f"install {version} here"
        )
    code = detached.code_of(pool)
    if code is None:
        raise _refuse(pool, "its code is not on this machine", "attach on the one that opened it")
    fields: dict[str, Any] = load_plain(packed)
    image = fields.pop("image").with_secret_values(secrets)
    return PoolSpec(**fields, image=image, code=Code.from_bytes(code))


def _refuse(pool: DetachedPool, problem: str, advice: str) -> UsageError:
    return UsageError(f"pool={pool.name!r}: {problem}; {advice}, or go on with the nodes that are there")
