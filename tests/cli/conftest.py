"""Settings of the commands' tests."""

from tests.waiting import prepare_httpx

prepare_httpx()
