"""Names of results: they are not those of the content, and yet unique in a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyward.core.process import PACKAGE_ROOT
from skyward.node.slot.execute import put_result_blob

_PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from skyward.node.slot.execute import put_result_blob
print(os.getpid(), *(put_result_blob(memoryview(b"x")).digest.hex() for _ in range(3)))
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root makes processes with equal numbers")
def test_processes_with_equal_numbers_name_their_results_differently() -> None:
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", _PROGRAM, PACKAGE_ROOT]
    said = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert said[0][0] == said[1][0] == "1"
    assert len({name for _, *names in said for name in names}) == 6


def test_a_fork_names_its_results_differently() -> None:
    names = {put_result_blob(memoryview(b"x")).digest}
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, put_result_blob(memoryview(b"x")).digest)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        names |= {put_result_blob(memoryview(b"x")).digest, file.read()}
    os.waitpid(pid, 0)
    assert len(names) == 3


def test_threads_name_their_results_differently() -> None:
    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(lambda _: put_result_blob(memoryview(b"x")).digest, range(2000)))
    assert len(set(names)) == 2000
