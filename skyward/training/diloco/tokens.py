"""Tokens of a server: the operator's may do everything, and a worker's speaks for that worker only.

The token of a worker is shown once, and its hash is kept. It may join, exchange deltas and read the status, under the
worker's own id. It may not save, evict, stop, or issue tokens. A revoked one is remembered, so that its holder is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import threading
from dataclasses import asdict, dataclass

from ...errors import UsageError
from .addresses import TOKEN_FILE

WORKER_TOKENS_FILE = "worker_tokens.json"
"""Name of the file with the hashes of workers' tokens, in the folder of a server's saves."""
MOST_NAME = 200
"""Longest id of a worker with a token, in characters."""


class TokenRefused(Exception):
    """A token that is unknown or revoked. The message is a sentence for its holder."""


@dataclass(frozen=True, slots=True)
class _WorkerToken:
    sha256: str
    is_revoked: bool = False


class ServerTokens:
    """Tokens that a server accepts. Any thread may use it.

    Args:
        operator: The operator's token.
        folder: Folder that keeps the hashes of the workers' tokens. None, or a folder in an object store: they last
            until the server ends.

    Raises:
        UsageError: The file in the folder cannot be read.
    """

    def __init__(self, operator: str, folder: str | os.PathLike[str] | None = None) -> None:
        self._operator = operator.encode()
        is_local = folder is not None and "://" not in os.fspath(folder)
        self._path = os.path.join(folder, WORKER_TOKENS_FILE) if folder is not None and is_local else None
        self._lock = threading.Lock()
        self._workers = {} if self._path is None else _read(self._path)

    @property
    def are_kept(self) -> bool:
        """True if the workers' tokens outlast the server."""
        return self._path is not None

    def check(self, token: bytes) -> str | None:
        """Return the worker that a token is for; None for the operator's token.

        Raises:
            TokenRefused: The token is unknown or revoked.
        """
        if hmac.compare_digest(token, self._operator):
            return None
        sha256 = _hash(token)
        for worker, kept in self._workers.items():
            if kept.sha256 == sha256:
                if kept.is_revoked:
                    raise TokenRefused(
                        f"token: the one of worker {worker!r} was revoked; ask the server's operator for a new one"
                    )
                return worker
        raise TokenRefused("token: is missing or wrong; set DILOCO_TOKEN to the one that the server printed")

    def issue(self, worker: str) -> str:
        """Return a new token of a worker.

        Raises:
            UsageError: The name is not legal, or it has a token.
            OSError: The hash cannot be written.
        """
        if not worker.strip() or not worker.isprintable() or len(worker) > MOST_NAME:
            raise UsageError(
                f"worker={worker!r}: is no name; use 1 to {MOST_NAME} printable characters, such as 'berlin'"
            )
        token = secrets.token_hex(32)
        with self._lock:
            kept = self._workers.get(worker)
            if kept is not None and not kept.is_revoked:
                raise UsageError(f"worker={worker!r}: has a token already; revoke that one first")
            self._change(worker, _WorkerToken(_hash(token.encode())))
        return token

    def revoke(self, worker: str) -> None:
        """Refuse the token of a worker from now on.

        Raises:
            UsageError: It has none.
            OSError: The change cannot be written. The token is still accepted.
        """
        with self._lock:
            kept = self._workers.get(worker)
            if kept is None or kept.is_revoked:
                raise UsageError(f"worker={worker!r}: has no token; see `skyward diloco token list`")
            self._change(worker, _WorkerToken(kept.sha256, is_revoked=True))

    def workers(self) -> dict[str, bool]:
        """Return each worker that was ever given a token, and whether the token is accepted."""
        return {worker: not kept.is_revoked for worker, kept in sorted(self._workers.items())}

    def _change(self, worker: str, kept: _WorkerToken) -> None:
        changed = self._workers | {worker: kept}
        if self._path is not None:
            _write(self._path, json.dumps({name: asdict(entry) for name, entry in changed.items()}, indent=2))
        self._workers = changed  # a new dict, because `check` takes no lock


def token_in(folder: str | os.PathLike[str]) -> str:
    """Return the operator's token in a folder of saves, and make one if there is none.

    So workers reach a server that was started again. The file has mode 0600, and is complete or not there. A folder in
    an object store keeps no token, because no file there is private by itself.

    Raises:
        UsageError: The file cannot be read or written, or is empty.
    """
    made = secrets.token_hex(32)
    if "://" in os.fspath(folder):
        return made
    path = os.path.join(folder, TOKEN_FILE)
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.path.exists(path):
            _write(path, made)
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"save_dir={os.fspath(folder)!r}: cannot keep the token: {error}; name a folder that can be written"
        ) from error
    if not token:
        raise UsageError(f"token: {path} is empty; delete it, or set token=")
    return token


def _hash(token: bytes) -> str:
    # Tokens are random, with 256 bits. So one round without salt is enough: nobody can guess one.
    return hashlib.sha256(token).hexdigest()


def _read(path: str) -> dict[str, _WorkerToken]:
    try:
        with open(path, encoding="utf-8") as file:
            return {
                worker: _WorkerToken(entry["sha256"], entry["is_revoked"]) for worker, entry in json.load(file).items()
            }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"save_dir: the workers' tokens in {path} cannot be read: {error}; restore the file, or delete it and "
            "issue new ones"
        ) from error


def _write(path: str, text: str) -> None:
    """Replace a file that only its owner may read. It is complete or unchanged, also after a loss of power."""
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    unfinished = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
