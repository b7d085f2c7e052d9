"""A notebook's kernel for the tests, and its client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

__all__ = ["OPEN_POOL", "Cell", "Notebook", "notebook"]

OPEN_POOL = """
import os, time
from pathlib import Path
import skyward as sky
pool = sky.ComputePool(provider=sky.Local(), nodes=2, cancel_grace_s=30).start()
"""
# The grace is long because a loaded machine may not schedule an interrupted slot for seconds. A slot that is killed at
# the end of a short grace never says that it stopped.


class Cell:
    """Output of a cell: its text, and the error it ended with."""

    def __init__(self) -> None:
        self.text = ""
        self.value = ""
        self.html = ""
        self.error = ""
        self.traceback = ""
        self.outputs: list[str | dict[str, str]] = []
        """In order: text, and what was displayed."""
        self.displays: dict[str, list[dict[str, str]]] = {}
        """By id: the states of each output that was replaced in place, or shown once."""

    def add_text(self, text: str) -> None:
        self.text += text
        last = self.outputs[-1] if self.outputs else None
        if isinstance(last, str):
            self.outputs[-1] = last + text
        else:
            self.outputs.append(text)


class Notebook:
    """A kernel and its client, which run one cell after another."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def begin(self, code: str) -> str:
        return str(self.client.execute(code))

    def finish(self, request: str, limit_s: float = 60) -> Cell:
        cell = Cell()
        while True:
            message = self.client.get_iopub_msg(timeout=limit_s)
            if message["parent_header"].get("msg_id") != request:
                continue
            content, kind = message["content"], message["msg_type"]
            if kind == "stream":
                cell.add_text(content["text"])
            elif kind == "execute_result":
                cell.value = content["data"]["text/plain"]
                cell.html = content["data"].get("text/html", "")
            elif kind in ("display_data", "update_display_data"):
                name = content.get("transient", {}).get("display_id", "")
                cell.displays.setdefault(name, []).append(content["data"])
                cell.outputs.append(content["data"])
            elif kind == "error":
                cell.error = content["ename"]
                cell.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def run(self, code: str) -> Cell:
        return self.finish(self.begin(code))

    def value(self, code: str) -> Any:
        cell = self.run(f"import json; print(json.dumps({code}))")
        assert not cell.error, cell.error
        return json.loads(cell.text)

    def pids(self) -> list[int]:
        """Return the pids of the kernel and its descendants: keeper, watchdogs, agents, zygotes, slots."""
        code = "from skyward.core.process import processes_below; [os.getpid(), *processes_below(os.getpid())]"
        imported, _, listed = code.partition("; ")
        self.run(imported)
        return [int(pid) for pid in self.value(listed)]


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    manager, client = start_new_kernel(startup_timeout=60)
    kernel = Notebook(manager, client)
    try:
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
