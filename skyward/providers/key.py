"""The key pair of one pool: made for it, kept beside its journal, gone with it. No key of the user's is ever sent."""

from __future__ import annotations

import os

from ..errors import MissingDependency

__all__ = ["public_key_of"]


def public_key_of(folder: str) -> str:
    """The public half of `<folder>/key` ("ssh-ed25519 AAAA..."), which is made, mode 0600, where it is not there yet.

    Raises MissingDependency.
    """
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise MissingDependency(f"rented machines need `pip install skyward[ssh]`: {error}") from error
    path = os.path.join(folder, "key")
    if os.path.exists(path):
        with open(path, "rb") as file:
            key = form.load_ssh_private_key(file.read(), password=None)
    else:
        key = Ed25519PrivateKey.generate()
        data = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        partial = f"{path}.{os.getpid()}"
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return public.decode("ascii")
