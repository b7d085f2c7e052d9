"""Serves one transfer of files over its standard input and output, and ends with them.

A client starts it on a node, beside the agent: transfers wait for no slot, and a busy agent delays none.
"""

from __future__ import annotations

import select as polling
import sys

from ...wire.file_transfer import FileStream, PeerRefused, receive_files, send_files
from ...wire.file_tree import FileRefused, in_words, select


def serve() -> int:
    """Serve the transfer that the first message orders. The last argument of the command is the working folder."""
    stream = FileStream(sys.stdin.buffer, sys.stdout.buffer)
    try:
        stream.greet()
        order = stream.receive()
        if order["op"] == "receive":
            receive_files(stream, order["into"], order["kind"], sys.argv[-1], tick=_check_client)
        else:
            selection = select(order["path"], sys.argv[-1])
            stream.send({"kind": selection.kind})
            send_files(stream, selection.entries, tick=_check_client)
    except (EOFError, PeerRefused):  # the client is gone, or knows why
        return 1
    except FileRefused as error:
        stream.refuse(str(error))
        return 1
    except OSError as error:
        stream.refuse(f"{in_words(error)}; check the disk and the permissions on the node")
        return 1
    return 0


def _check_client() -> None:
    """Raise EOFError if the client is gone. It sends nothing while files are compared, so it can only have ended."""
    poll = polling.poll()
    poll.register(sys.stdin.fileno(), polling.POLLIN)
    if poll.poll(0):
        raise EOFError("the client is gone")
