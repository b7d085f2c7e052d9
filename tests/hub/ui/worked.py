"""A hub with jobs in it, and the launcher and runners that its pages show: they speak to the hub as real ones do."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

import skyward as sky
from skyward import hub
from skyward.hub.model.jobs import PROTOCOL
from tests.waiting import until, until_text

LAB = {
    "name": "lab",
    "provider": {"type": "local"},
    "nodes": 2,
    "devices": 4,
    "accelerator": "A100",
    "usd_per_hour": 4.0,
}
CLOUD = {"name": "cloud", "provider": {"type": "aws"}, "kind": "elastic", "nodes": 3, "usd_per_hour": 2.5}


@sky.compute
def record(file: str) -> str:
    """Log a run of the job, and return the text of `file` once it is there."""
    with hub.start_run(run_name="of the job", experiment="jobs") as run:
        run.log_metrics({"loss": 0.5}, step=1)
        print("begins", flush=True)
        text = until_text(Path(file), 120)
        print("ends", flush=True)
    return text


class Workers:
    """A launcher whose runners are requests of the test.

    Args:
        url: Address of a hub without authentication.
    """

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=60)
        self.launches: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def post(self, path: str, body: object = None) -> Any:
        return self.client.post(path, json=body).raise_for_status().json()

    def put(self, path: str, body: object) -> None:
        self.client.put(path, json=body).raise_for_status()

    def declare(self, machines: dict[str, Any]) -> None:
        self.post("/v1/capacity", machines)

    def submit(self, name: str, *, kind: str = "training", priority: str = "medium", **spec: object) -> str:
        """Submit a job and return its id."""
        job = self.post("/v1/jobs", {"name": name, "type": kind, "priority": priority, "spec": spec})
        return str(job["id"])

    def status(self, job: str) -> str:
        return str(self.get(f"/v1/jobs/{job}")["status"])

    def poll(self) -> None:
        """Take what the scheduler has placed."""
        known = [(job, launch["attempt"]) for job, launch in self.launches.items()]
        orders = self.post("/v1/launchers/test/poll", {"known": known, "protocol": PROTOCOL})
        self.launches |= {launch["job"]: launch for launch in orders["start"]}
        for job, attempt in orders["forget"]:
            if self.launches.get(job, {}).get("attempt") == attempt:
                del self.launches[job]

    def run(self, job: str, cost_usd: float = 0.0) -> None:
        """Bring a job to its run, once the scheduler has placed it."""

        def is_taken() -> bool:
            self.poll()
            return job in self.launches

        until(is_taken)
        self.beat(job, cost_usd=cost_usd)

    def beat(self, job: str, **facts: object) -> str:
        """Send a sign of life of a runner, and return the command that it gets."""
        order = self.post(self._attempt(job, "beat"), {"is_running": True, "protocol": PROTOCOL, **facts})
        return str(order["command"])

    def save(self, job: str) -> None:
        """Report a checkpoint."""
        self.beat(job, saved_at=int(time.time() * 1000))

    def print(self, job: str, text: str) -> None:
        """Send output of the attempt that runs."""
        sent = self.get(f"/v1/jobs/{job}")["attempts"][-1]["output_bytes"]
        answer = self.client.put(self._attempt(job, "output"), params={"start": sent}, content=text.encode())
        answer.raise_for_status()

    def end(self, job: str, end: str, error: str = "", cost_usd: float = 0.0) -> None:
        """End the attempt that runs."""
        if end == "completed":
            self.client.put(self._attempt(job, "results/value"), content=b"42").raise_for_status()
        self.post(self._attempt(job, "end"), {"end": end, "error": error, "cost_usd": cost_usd})
        del self.launches[job]

    def _attempt(self, job: str, part: str) -> str:
        return f"/v1/jobs/{job}/attempts/{self.launches[job]['attempt']}/{part}"


def fill(workers: Workers) -> dict[str, str]:
    """Fill a hub with jobs in most states, and return name -> id."""
    workers.declare(LAB)
    workers.declare(CLOUD)
    workers.put("/v1/projects/default/job-quota", {"weight": 2.0, "devices": {"A100": 16}, "usd_per_day": 500.0})
    ids: dict[str, str] = {}
    a100: dict[str, object] = {"accelerator": "A100"}

    def submit(name: str, **spec: Any) -> str:
        ids[name] = workers.submit(name, **spec)
        return ids[name]

    done = submit("tokenize", kind="other", devices=2, **a100)
    workers.run(done)
    workers.print(done, "2,000 files\ndone\n")
    workers.end(done, "completed")
    broken = submit("broken", devices=1, **a100)
    workers.run(broken)
    workers.print(broken, "step 1\n")
    workers.end(broken, "failed", "RuntimeError: loss is not finite at step 1")
    submit("pretrain", nodes=1, devices=4, max_duration_s=3 * 3600.0, budget_usd=40.0, **a100)
    workers.run(ids["pretrain"])
    workers.end(ids["pretrain"], "lost", "NodeLost: node 0 does not answer", 1.5)
    workers.run(ids["pretrain"], 0.25)
    workers.save(ids["pretrain"])
    workers.print(ids["pretrain"], "[0] step 10, loss 2.31\n[1] step 10, loss 2.30\n")
    submit("finetune", devices=2, is_preemptible=True, priority="low", max_duration_s=2 * 3600.0, **a100)
    workers.run(ids["finetune"])
    submit("sample", labels=[], devices=None, max_duration_s=1800.0)
    workers.run(ids["sample"], 0.8)
    submit("large gang", nodes=2, devices=4, max_duration_s=4 * 3600.0, **a100)
    submit("ablation", devices=4, max_duration_s=3600.0, **a100)
    submit("next model", devices=8, accelerator="H100")
    submit("later", devices=1, **a100)
    workers.post(f"/v1/jobs/{ids['later']}/hold")
    return ids
