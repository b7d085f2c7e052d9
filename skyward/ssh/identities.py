"""Keys that paramiko offers a machine: the same that `ssh` would offer, from the agent and from files.

paramiko's own choice ignores IdentitiesOnly, IdentityAgent, public key files, and keys of files held by the agent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import getpass
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

import paramiko

from ..core.ownership import check_path
from .target import SSHTarget

_DEFAULT_FILES = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk"))
_BEGIN, _END = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END"
_MAGIC = b"openssh-key-v1\0"
_agent_variable = threading.Lock()


class Identities:
    """An `auth_strategy` for paramiko's client. `config` is the SSH configuration of the host."""

    def __init__(self, target: SSHTarget, config: dict[str, Any]) -> None:
        self._user: str = target.user or config.get("user") or getpass.getuser()
        configured = [target.key_file] if target.key_file else config.get("identityfile", [])
        files = [path for path in map(os.path.expanduser, configured) if os.path.isfile(path)]
        self._are_given = bool(files)
        self._files = files or [path for path in map(os.path.expanduser, _DEFAULT_FILES) if os.path.isfile(path)]
        self._are_all = bool(target.key_file) or config.get("identitiesonly") == "yes"
        self._agent_path = str(config.get("identityagent", "SSH_AUTH_SOCK")).strip('"')
        self._trouble: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Offer keys until one is accepted.

        Raises:
            AuthenticationException: no key was accepted; the text says what was tried.
            SSHException: the connection was lost.
        """
        tried = 0
        agent = self._agent()
        try:
            for key in self._keys(() if agent is None else agent.get_keys()):
                if self._is_let_in(transport, key):
                    return []
                tried += 1
                if not transport.is_active():
                    raise paramiko.AuthenticationException(f"Too many authentication failures, after {tried} keys")
        finally:
            if agent is not None:
                agent.close()
        what = (
            f"{tried} keys were refused" if tried > 1 else "the key was refused" if tried else "no key could be offered"
        )
        raise paramiko.AuthenticationException("; ".join([what, *self._trouble]))

    def _is_let_in(self, transport: paramiko.Transport, key: paramiko.PKey) -> bool:
        try:
            more = transport.auth_publickey(self._user, key)
        except paramiko.BadAuthenticationType:
            raise
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error):
                raise paramiko.SSHException(str(error)) from error
            return False
        if more:
            raise paramiko.AuthenticationException(f"besides the key it requires {' or '.join(more)}")
        return True

    def _keys(self, agents: tuple[paramiko.AgentKey, ...]) -> Iterator[paramiko.PKey]:
        """Yield agent keys named by a file, given files, other agent keys, then default files."""
        held = {key.asbytes(): key for key in agents}
        public = {path: _public(path) for path in self._files}
        named = [blob for blob in public.values() if blob in held]
        yield from (held[blob] for blob in named)
        others = [] if self._are_all else [key for blob, key in held.items() if blob not in named]
        files = [path for path in self._files if public[path] not in held]
        if self._are_given:
            yield from self._loaded(files)
        yield from others
        if not self._are_given:
            yield from self._loaded(files)

    def _loaded(self, files: list[str]) -> Iterator[paramiko.PKey]:
        for path in files:
            try:
                key = paramiko.PKey.from_path(path)
            except (paramiko.PasswordRequiredException, TypeError):  # cryptography raises TypeError for a passphrase
                self._trouble.append(f"{path} has a passphrase, and the agent does not hold it")
            except Exception as error:  # errors of paramiko, cryptography and the file system have no common base class
                self._trouble.append(f"{path} is not a readable private key ({type(error).__name__})")
            else:
                yield key

    def _agent(self) -> paramiko.Agent | None:
        where = self._agent_path
        if where == "none":
            return None
        if where.startswith("$"):
            where = where.strip("${}")
        path = os.environ.get(where, "") if "/" not in where else os.path.expanduser(where)
        if path:
            check_path(path)
        with _agent_variable:  # paramiko takes the agent's path from the environment only
            before = os.environ.get("SSH_AUTH_SOCK")
            os.environ["SSH_AUTH_SOCK"] = path
            try:
                return paramiko.Agent()
            except paramiko.SSHException as error:
                self._trouble.append(f"the agent at {path} does not answer: {error}")
                return None
            finally:
                del os.environ["SSH_AUTH_SOCK"]
                if before is not None:
                    os.environ["SSH_AUTH_SOCK"] = before


def _public(path: str) -> bytes:
    """Read the public half of a key file, which a passphrase does not encrypt; empty if unknown."""
    for name in (path, f"{path}.pub"):
        # Not a key, or in an unknown format: try the next file.
        with contextlib.suppress(OSError, UnicodeDecodeError, binascii.Error, struct.error, IndexError):
            with open(name, encoding="ascii") as file:
                text = file.read()
            if text.startswith(_BEGIN):
                return _first_public(base64.b64decode(text.removeprefix(_BEGIN).partition(_END)[0]))
            if not text.startswith("-"):
                return base64.b64decode(text.split()[1], validate=True)
    return b""


def _first_public(content: bytes) -> bytes:
    """Extract the first public key. Source: OpenSSH, PROTOCOL.key: magic, cipher, kdf, its options, count, keys."""
    at = len(_MAGIC)
    for _ in range(3):
        at += 4 + struct.unpack_from(">I", content, at)[0]
    (length,) = struct.unpack_from(">I", content, at + 4)
    return content[at + 8 : at + 8 + length]
