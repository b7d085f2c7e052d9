"""Jobs of a hub on SSH hosts and on rented machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import hub
from skyward.hub.client import capacity
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2, Machine
from tests.hosts.faults import nothing_runs_on
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 10.0


# In functions, so that they travel by value: this module is not on the nodes.


def where() -> Any:
    return sky.compute(lambda: os.uname().nodename)


def waiting() -> Any:
    import time

    def wait_for(file: str) -> str:
        """Note this run beside `file`, and return once `file` is there."""
        with open(f"{file}.runs", "a") as runs:
            runs.write(f"{os.getpid()}\n")
        while not os.path.exists(file):
            time.sleep(0.1)
        return os.uname().nodename

    return sky.compute(wait_for)


@pytest.fixture
def image(package_index: PackageIndex) -> sky.Image:
    return sky.Image(pip_index_url=package_index.simple)


def declare_lab(bed: Bed, hosts: list[Host]) -> None:
    provider = {"type": "ssh", "hosts": [host.name for host in hosts], "config_file": str(bed.ssh_config)}
    capacity.declare("lab", {**provider, "lease_s": LEASE_S}, nodes=len(hosts), labels=["lab"])


def test_jobs_get_the_hosts_that_are_theirs_and_wait_for_the_others(
    hub_process: HubProcess, hosts: Callable[[int], list[Host]], bed: Bed, image: sky.Image
) -> None:
    declare_lab(bed, hosts(2))
    gang = hub.submit(where()(), on="all", nodes=2, labels=["lab"], image=image)
    assert sorted(gang.result(200)) == sorted(host.name for host in hosts(2))
    one = hub.submit(waiting()("/tmp/one"), labels=["lab"], image=image)
    until(lambda: one.status == "running", 100)
    both = hub.submit(where()(), on="all", nodes=2, labels=["lab"], image=image)
    other = hub.submit(waiting()("/tmp/two"), labels=["lab"], image=image, max_duration_s=60)
    until(lambda: "waits for 2 nodes" in both.why_waiting)
    for job, file in ((one, "/tmp/one"), (other, "/tmp/two")):
        for host in hosts(2):
            host.run("touch", file)
        assert job.result(100) in {host.name for host in hosts(2)}
    assert sorted(both.result(200)) == sorted(host.name for host in hosts(2))
    hub_process.until_clean()
    clean_up(hosts(2))


def test_command_on_a_host_has_the_files_and_modules_that_it_has_here(
    hub_process: HubProcess,
    hosts: Callable[[int], list[Host]],
    bed: Bed,
    package_index: PackageIndex,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare_lab(bed, hosts(1))
    program = "import helper, beside; print(open('data/train.csv').read(), open('text-tasks/raw.txt').read())"
    files = {"project/text-tasks/run.py": program, "project/text-tasks/beside.py": "", "lib/helper.py": ""}
    files |= {"project/data/train.csv": "1,2", "project/text-tasks/raw.txt": "raw"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    image = {"pip_index_url": package_index.simple, "includes": ["data", "text-tasks/raw.txt"]}
    job = hub.submit_command({"command": ["python", "text-tasks/run.py"], "labels": ["lab"], "image": image})
    assert (job.exception(200), list(job.logs())) == (None, ["1,2 raw"])


def test_a_host_is_free_only_when_the_lease_of_a_killed_runner_is_over(
    hub_process: HubProcess, hosts: Callable[[int], list[Host]], bed: Bed, image: sky.Image
) -> None:
    (host,) = hosts(1)
    declare_lab(bed, [host])
    job = hub.submit(waiting()("/tmp/go"), labels=["lab"], image=image)
    until(lambda: len(runs_on(host)) == 1, 100)
    (runner,) = hub_process.runner_pids()
    os.kill(runner, signal.SIGKILL)
    until(lambda: len(runs_on(host)) == 2, 150)
    first, _ = runs_on(host)
    assert host.run("ls", f"/proc/{first}", check=False).returncode != 0, "two attempts of one job ran at once"
    host.run("touch", "/tmp/go")
    assert job.result(100) == host.name
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]
    hub_process.until_clean()
    clean_up([host])


def test_a_job_on_a_rented_spot_machine_moves_to_another_and_its_cost_is_counted(
    ec2: Ec2, hub_process: HubProcess, image: sky.Image
) -> None:
    provider = {"type": "aws", "client_cidr": ec2.client_cidr, "instance_types": ["m5.large"], "lease_s": 60.0}
    capacity.declare("cloud", provider, kind="elastic", nodes=2, usd_per_hour=0.1, labels=["cloud"])
    job = hub.submit(waiting()("/tmp/go"), labels=["cloud"], image=image, allocation="spot")
    until(lambda: job.status == "running" or job.attempts[1:], 150)
    assert job.status == "running", job.attempts
    first = machine_that_runs_it(ec2)
    ec2.interrupt(first.id, in_s=0.5)
    second = machine_that_runs_it(ec2, but=first)
    ec2.host(second.id).run("touch", "/tmp/go")
    assert job.result(100) == second.name
    assert [attempt.end for attempt in job.attempts] == ["lost", "completed"]
    assert job.cost_usd > 0
    hub_process.until_clean()
    assert ec2.left() == []


def machine_that_runs_it(ec2: Ec2, but: Machine | None = None) -> Machine:
    """Wait for a machine on which the call runs."""
    found: list[Machine] = []

    def has_begun() -> bool:
        for machine in ec2.machines("running"):
            with contextlib.suppress(Exception):  # it ends at this moment
                if (but is None or machine.id != but.id) and ec2.host(machine.id).run(
                    "ls", "/tmp/go.runs", check=False
                ).returncode == 0:
                    found.append(machine)
        return bool(found)

    until(has_begun, 150)
    return found[0]


def clean_up(hosts: list[Host]) -> None:
    """Check that no job left a process on the shared hosts, and remove its files."""
    nothing_runs_on(hosts, 30)
    for host in hosts:
        host.run("sh", "-c", "rm -f /tmp/go* /tmp/one* /tmp/two*")


def runs_on(host: Host) -> list[str]:
    return host.run("cat", "/tmp/go.runs", check=False).stdout.split()


def serving() -> Any:
    import http.server
    import threading

    def serve(file: str) -> int:
        """Serve the node's name on a port of its loopback until `file` is there. Write the port beside it."""

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(os.uname().nodename.encode() + body)

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open(f"{file}.new", "w") as port:
            port.write(str(server.server_port))
        os.rename(f"{file}.new", f"{file}.port")
        while not os.path.exists(file):
            time.sleep(0.1)
        server.shutdown()
        return server.server_port

    return sky.compute(serve)


def test_a_shell_and_a_port_of_a_running_job_over_sshd(
    hub_process: HubProcess, hosts: Callable[[int], list[Host]], bed: Bed, image: sky.Image, tmp_path: Path
) -> None:
    (host,) = hosts(1)
    declare_lab(bed, [host])
    job = hub.submit(serving()("/tmp/go"), labels=["lab"], image=image)
    until(lambda: host.run("ls", "/tmp/go.port", check=False).returncode == 0, 150)
    port = host.read("/tmp/go.port").strip()
    skyward = [sys.executable, "-m", "skyward"]
    shell = subprocess.run(
        [*skyward, "job", "ssh", job.id, "0", "--", "hostname"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (shell.stdout.strip(), shell.returncode) == (host.name, 0), shell.stderr
    elsewhere = subprocess.run(
        [*skyward, "job", "forward", job.id, port],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "elsewhere")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert elsewhere.returncode == 1
    assert "are reached only from the machine of its launcher" in elsewhere.stderr
    command = [*skyward, "job", "forward", job.id, port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            url = forward.stdout.readline().split()[0]
            body = os.urandom(3_000_000)
            for _ in range(3):
                with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60) as answer:
                    assert answer.read() == host.name.encode() + body
            host.run("touch", "/tmp/go")
            assert job.result(100) == int(port)
            assert forward.wait(60) == 0, "it ends with the job's machines"
            assert "has no machines anymore" in forward.stdout.read()
        finally:
            forward.kill()
    hub_process.until_clean()
    clean_up([host])
