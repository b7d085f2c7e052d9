"""A launcher and its runners that reach their hub by a proxy, which answers for it at times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from skyward import hub
from skyward.errors import JobFailed
from skyward.hub.client import capacity
from skyward.testing.hub import HubServer
from tests.hub.jobs.calls import large, runs_of, wait_for
from tests.hub.jobs.launcher_process import Launcher
from tests.hub.jobs.proxy import Proxy
from tests.waiting import until

LIMIT_S = 100.0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy between a hub and its launcher. The client of this process asks the hub itself."""
    folder = tmp_path_factory.mktemp("proxied")
    with pytest.MonkeyPatch.context() as patch, HubServer(folder / "hub") as server:
        patch.setenv("SKYWARD_HUB_URL", server.url)
        patch.setenv("SKYWARD_HUB_TOKEN", server.token)
        hub.disconnect()
        capacity.declare("here", {"type": "local"})
        (folder / "data").mkdir()
        with Proxy(urlsplit(server.url).port or 0) as proxy:
            launcher = Launcher(folder / "data", SKYWARD_HUB_URL=proxy.url)
            launcher.start()
            try:
                yield proxy
            finally:
                launcher.close()
                hub.disconnect()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_proxy_that_answers_for_its_hub_ends_no_job(proxy: Proxy, tmp_path: Path, status: int) -> None:
    file = tmp_path / "go"
    job = hub.submit(wait_for(str(file)))
    until(lambda: bool(runs_of(file)), LIMIT_S)
    beat = f"/v1/jobs/{job.id}/attempts/1/beat"
    proxy.status = status
    until(lambda: proxy.answered.count(beat) >= 2, LIMIT_S)
    proxy.status = None
    file.write_text("went on")
    assert job.result(LIMIT_S) == "went on"
    assert [attempt.end for attempt in job.attempts] == ["completed"]


def test_value_that_a_proxy_finds_too_large_fails_the_job_once(proxy: Proxy) -> None:
    proxy.most_bytes = 1 << 20
    job = hub.submit(large(2 << 20), retries=5)
    with pytest.raises(JobFailed, match="the hub does not take its value .* status 413"):
        job.result(LIMIT_S)
    assert [attempt.end for attempt in job.attempts] == ["failed"]
    proxy.most_bytes = 1 << 40
