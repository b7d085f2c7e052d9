"""One delivery: a signed HTTP POST, or a program of the operator.

Requests are signed as Standard Webhooks, whose libraries check them: `webhook-signature` is `v1,` and the base64 of the
HMAC-SHA256 of `<webhook-id>.<webhook-timestamp>.<body>`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import signal
import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

LIMIT_S = 10.0
"""Seconds for a request, from the look-up of its host to the first line of the answer."""
PROGRAM_S = 60.0
"""Seconds that a program may take. Then it is killed, with its children."""
_ERROR_BYTES = 4096
_GONE = 410
_WHSEC = "whsec_"


class NotDelivered(Exception):
    """A receiver did not take a message. `is_final` means that it never will."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


def signature(secret: str, message_id: str, timestamp_s: int, body: str) -> str:
    """Return the value of `webhook-signature`.

    Args:
        secret: Key: `whsec_` and base64, or any text, whose bytes are the key.
        message_id: Id of the message.
        timestamp_s: Time of this try, in seconds since 1970.
        body: Body of the request.

    Example:
        >>> signature("key", "msg_1", 1700000000, "{}")
        'v1,XaXLFEFQ69Q4+demDWPEv5ydXczDW2mM5crCUEFcFBA='
    """
    key = secret.encode()
    if secret.startswith(_WHSEC):
        with suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(_WHSEC), validate=True)
    digest = hmac.new(key, f"{message_id}.{timestamp_s}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


async def post_signed(url: str, message_id: str, timestamp_s: int, body: str, secret: str) -> None:
    """Send a message. Only the status of the answer is read, and no redirect is followed.

    Raises:
        NotDelivered: The receiver cannot be reached, is too slow, or answers with another status than 2xx.
    """
    split = urlsplit(url)
    port = split.port or (443 if split.scheme == "https" else 80)
    content = body.encode()
    host = f"[{split.hostname}]" if ":" in (split.hostname or "") else split.hostname
    head = (
        f"POST {split.path or '/'}{f'?{split.query}' if split.query else ''} HTTP/1.1\r\n"
        f"host: {host}:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        f"user-agent: skyward-hub\r\nconnection: close\r\nwebhook-id: {message_id}\r\n"
        f"webhook-timestamp: {timestamp_s}\r\n"
        f"webhook-signature: {signature(secret, message_id, timestamp_s, body)}\r\n\r\n"
    )
    context = ssl.create_default_context() if split.scheme == "https" else None
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(split.hostname, port, ssl=context)
            try:
                writer.write(head.encode("ascii") + content)
                await writer.drain()
                line = await reader.readuntil(b"\r\n")
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise NotDelivered(f"no answer within {LIMIT_S:g} s") from None
    except (OSError, EOFError, asyncio.LimitOverrunError, ssl.SSLError) as error:
        raise NotDelivered(f"{type(error).__name__}: {error}") from None
    parts = line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise NotDelivered("the answer is not HTTP")
    status = int(parts[1])
    if not 200 <= status < 300:
        raise NotDelivered(f"status {status}", is_final=status == _GONE)


async def run_program(argv: Sequence[str], message_id: str, body: str) -> None:
    """Run a program with a message on its standard input, without a shell and without this process's environment.

    Raises:
        NotDelivered: It cannot be started, takes too long, or ends with another status than 0.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={"PATH": os.defpath, "SKYWARD_MESSAGE_ID": message_id},
            start_new_session=True,
        )
    except OSError as error:
        raise NotDelivered(f"{argv[0]}: cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(PROGRAM_S):
            errors = await _talk(process, body.encode())
            await process.wait()
    except TimeoutError:
        raise NotDelivered(f"{argv[0]}: did not end within {PROGRAM_S:g} s") from None
    finally:
        with suppress(ProcessLookupError):  # its children too, also after its own end
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode != 0:
        text = errors.decode(errors="replace").strip()
        raise NotDelivered(f"{argv[0]}: ended with status {process.returncode}{f': {text}' if text else ''}")


async def _talk(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    """Write the message, and return the beginning of the errors."""
    assert process.stdin is not None
    assert process.stderr is not None
    with suppress(OSError):  # it need not read
        process.stdin.write(content)
        await process.stdin.drain()
        process.stdin.close()
    kept = b""
    while piece := await process.stderr.read(_ERROR_BYTES):
        kept = (kept + piece)[:_ERROR_BYTES]
    return kept
