"""Text of tokens: `sky_<id>_<secret>`. Only the SHA-256 of a secret is stored."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from .product import TOKEN_PREFIX

_ID_BYTES, _SECRET_BYTES = 6, 32


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made. Its text is shown once.

    Attributes:
        id: Public part, by which it is listed and revoked.
        text: The whole token.
    """

    id: str
    text: str

    def __repr__(self) -> str:
        return f"NewToken(id={self.id!r})"

    @property
    def sha256(self) -> str:
        return secret_hash(self.text)


def new_token() -> NewToken:
    """Make a random token."""
    token_id = secrets.token_hex(_ID_BYTES)
    return NewToken(token_id, f"{TOKEN_PREFIX}{token_id}_{secrets.token_hex(_SECRET_BYTES)}")


def token_id(text: str) -> str | None:
    """Return the id in a token, None where the text is no token."""
    prefix, _, secret = text.rpartition("_")
    if not prefix.startswith(TOKEN_PREFIX) or not secret:
        return None
    return prefix[len(TOKEN_PREFIX) :]


def secret_hash(text: str) -> str:
    """Return the SHA-256 of a whole token, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
