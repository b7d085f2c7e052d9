"""DiLoCo on hosts of two regions: workers reach one server by a long line, with TLS and a token for each."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.client import DiLoCoClient
from tests.hosts.bed import Bed
from tests.hosts.faults import nothing_runs_on
from tests.hosts.fixtures import NewHost, NewRelay
from tests.hosts.index import PackageIndex
from tests.training.diloco.certificates import write_certificate

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

DELAY_S = 0.04


@pytest.fixture(autouse=True)
def _no_worker_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_SERVER", "DILOCO_TOKEN", "DILOCO_TOKEN_FILE", "DILOCO_CA"):
        monkeypatch.delenv(name, raising=False)


def test_workers_on_hosts_of_two_regions_train_over_tls_with_tokens(
    bed: Bed, new_host: NewHost, relay: NewRelay, torch_index: PackageIndex, tmp_path: Path
) -> None:
    @sky.compute  # in here, so that it travels by value
    def train(server: str, ca: str, token: str, worker_id: str) -> tuple[list[float], int]:
        import os
        import tempfile

        import torch

        from skyward.training.diloco import DiLoCoWorker

        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(ca)
            file.flush()
            os.environ["DILOCO_CA"] = file.name
            torch.manual_seed(len(worker_id))
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with DiLoCoWorker(
                model, optimizer, server, worker_id=worker_id, token=token, sync_every=5, quantization_bits=4
            ) as worker:
                for _ in range(10):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
        return model.weight.flatten().tolist(), int(worker.sync_metrics["diloco/sync_count"])

    hosts = [new_host(has_uv=True), new_host(has_uv=True)]
    provider = sky.SSH(hosts=[host.address for host in hosts], config_file=str(bed.ssh_config))
    image = sky.Image(pip=[f"torch=={version('torch')}", "numpy"], pip_index_url=torch_index.simple)
    ca, cert = write_certificate(tmp_path, bed.address)
    names = ("berlin", "oslo")
    with DiLoCoServer(num_workers=2, port=0, quantization_bits=4, cert=cert) as server:
        lines = [
            relay("127.0.0.1", int(server.address.rpartition(":")[2]), delay_s=DELAY_S * number, listen=bed.address)
            for number, _ in enumerate(names, start=1)
        ]
        tokens = {name: server.add_token(name) for name in names}
        with sky.ComputePool(
            provider, nodes=2, engine="direct", image=image, logs=False, console=False, provision_timeout_s=400
        ) as pool:
            calls = [
                train(f"https://{line.host}:{line.port}", ca.read_text(), tokens[name], name) > pool.node(node)
                for node, (name, line) in enumerate(zip(names, lines, strict=True))
            ]
            ends = [call.result() for call in calls]
            assert ends[0] == ends[1]
            assert ends[0][1] == server.status()["round"] == 2
            server.revoke_token("oslo")
            refused = train(f"https://{lines[1].host}:{lines[1].port}", ca.read_text(), tokens["oslo"], "oslo")
            with pytest.raises(UsageError, match="the one of worker 'oslo' was revoked"):
                refused >> pool.node(1)
        address = f"https://{lines[0].host}:{lines[0].port}"
        assert DiLoCoClient(address, token=tokens["berlin"], ca=str(ca)).ask("/status")["workers"] == []
    nothing_runs_on(hosts)
