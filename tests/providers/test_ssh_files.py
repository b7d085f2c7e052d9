"""Files and ports of nodes that are reached over SSH."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import skyward as sky
from skyward.ssh.connect import Transport
from skyward.wire.file_tree import PART_ENDING
from tests.pool.test_forward import check_all_ways
from tests.providers.conftest import Hosts
from tests.relay import Relay
from tests.waiting import until

# They travel by value, because this module is not on the nodes.
read = sky.compute(lambda path: __import__("pathlib").Path(path).read_text())
write = sky.compute(lambda path, text: __import__("pathlib").Path(path).write_text(text))
folder_of = sky.compute(os.getcwd)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("a")
    monkeypatch.chdir(folder)
    return folder


def test_tasks_find_uploads_where_they_are_here_and_results_come_back(
    sshds: Hosts, transport: Transport, project: Path
) -> None:
    with sky.ComputePool(provider=sshds.ssh(transport=transport), nodes=2, engine="direct") as pool:
        assert pool.upload("data") == sky.Transfer(files=2, copied=2, bytes=2)
        assert read("data/a.txt") @ pool == ["a", "a"]
        assert pool.upload("data").copied == 0
        (project / "data" / "b.txt").write_text("b")
        assert pool.upload("data/*.txt", nodes=[1]).copied == 1
        assert read("data/b.txt") >> pool.node(1) == "b"
        write("out.txt", "one") >> pool.node(1)
        pool.download("out.txt", "results/", nodes=1)
        assert (project / "results" / "out.txt").read_text() == "one"


def test_a_lost_connection_is_made_again_and_the_file_continues(
    sshds: Hosts, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = os.urandom(24 * 2**20)
    (tmp_path / "large.bin").write_bytes(content)
    server = sshds.servers[0]
    relay = Relay(("127.0.0.1", server.port), delay_s=0.02)
    try:
        config = tmp_path / "config"
        config.write_text(server.config.read_text().replace(f"Port {server.port}", f"Port {relay.port}"))
        known = tmp_path / "known_hosts"
        known.write_text(server.known_hosts.read_text().replace(f":{server.port} ", f":{relay.port} "))
        config.write_text(config.read_text().replace(str(server.known_hosts), str(known)))
        with sky.ComputePool(provider=sky.SSH(hosts=["host0"], config_file=config)) as pool:
            folder = Path(folder_of() >> pool)
            part = folder / f".large.bin{PART_ENDING}"
            target = folder / "large.bin"

            def cut() -> None:
                until(lambda: target.exists() or (part.exists() and part.stat().st_size > 4 * 2**20), 60)
                relay.reset()

            cutter = threading.Thread(target=cut)
            cutter.start()
            transfer = pool.upload("large.bin")
            cutter.join()
            assert target.read_bytes() == content
            assert transfer.copied == 1
            assert not part.exists()
            pool.download("large.bin", "back.bin")
            assert (tmp_path / "back.bin").read_bytes() == content
    finally:
        relay.close()


def test_ports_of_a_node_are_reached_through_its_connection(sshds: Hosts, transport: Transport) -> None:
    with sky.ComputePool(provider=sshds.ssh("host0", transport=transport)) as pool:
        check_all_ways(pool)
