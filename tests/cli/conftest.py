"""Settings of the commands' tests."""

from tests.waiting import let_httpx_wait

let_httpx_wait()
