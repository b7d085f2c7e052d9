"""Processes as the operating system knows them."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import skyward
from skyward.core.process import PACKAGE_ROOT, is_readable, start_time


def test_a_running_process_has_a_start_time_and_an_ended_one_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = start_time(child.pid)
        assert started == start_time(child.pid) != ""
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) == ""  # a zombie, which will never run again
    assert start_time(child.pid) == ""
    assert int(start_time(os.getpid())) <= int(started)


def test_a_new_process_finds_this_package_in_the_package_root() -> None:
    assert Path(PACKAGE_ROOT) / "skyward" == Path(skyward.__file__).parent


def test_input_of_a_descriptor_that_select_does_not_take_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    read_fd, write_fd = os.pipe()
    high = fcntl.fcntl(read_fd, fcntl.F_DUPFD, 2000)
    try:
        assert not is_readable(high, 0.0)
        os.write(write_fd, b"x")
        assert is_readable(high, 60.0)
    finally:
        for fd in (read_fd, write_fd, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
