"""Pages of long lists, and the tokens that lead to the next one."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .refusal import Reason, Refusal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list.

    Attributes:
        items: Things on the page.
        next_token: Token of the next page, None on the last one.
    """

    items: Sequence[T]
    next_token: str | None = None


def encode_token(content: Sequence[Any]) -> str:
    """Make a page token. Clients must not look into it."""
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode()


def decode_token(token: str, kinds: Sequence[type | tuple[type, ...]]) -> list[Any]:
    """Read a page token.

    Args:
        token: Text from a client.
        kinds: Type of each element that this list's tokens have.

    Raises:
        Refusal: It is no token of this list.
    """
    try:
        content = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, binascii.Error, UnicodeError, RecursionError):
        content = None
    is_ours = isinstance(content, list) and len(content) == len(kinds)
    if not is_ours or not all(isinstance(item, kind) for item, kind in zip(content, kinds, strict=True)):
        raise Refusal(
            Reason.INVALID,
            f"page_token={token[:40]!r}: is not a token of this list; take the one that the page before gave",
            field="page_token",
        )
    return list(content)
