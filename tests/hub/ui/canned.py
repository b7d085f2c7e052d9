"""A hub of canned answers for the pages: 100,000 runs with 20 metrics each, made as they are asked for.

The pages' tests of behaviour run against the real application. This one stands where size or timing matters and the
store is not the subject: scrolling through 100,000 runs, drawing 400,000 points.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skyward.hub.http.page_files import FILE_PATH, PAGE_PATHS, FileAnswer, PageFiles

RUNS = 100_000
STARTED = 1_790_000_000_000
STEPS = 50_000
METRICS = ("loss", "accuracy", "eval/loss", "eval/accuracy", "learning_rate", "grad_norm", "tokens_per_s", "eval/f1")
FURTHER = tuple(f"extra/metric_{i:02}" for i in range(8))
SYSTEM = ("system/cpu_percent", "system/memory_gb", "system/gpu_0_percent", "system/gpu_0_memory_gb")
STATES = ("running", "completed", "completed", "completed", "failed", "completed", "lost", "completed", "cancelled")
OPTIMIZERS = ("adamw", "sgd", "lion")


def run_id(index: int) -> str:
    return f"{index:032x}"


def run_of(index: int) -> dict[str, Any]:
    """The run of that number, always the same."""
    state = STATES[index % len(STATES)]
    started = STARTED - index * 60_000
    rate = 10 ** -(2 + index % 4)
    noise = (index * 2654435761 % 1000) / 1000
    values = {
        "loss": 0.08 + noise,
        "accuracy": 0.99 - noise / 3,
        "eval/loss": 0.1 + noise,
        "eval/accuracy": 0.97 - noise / 3,
        "learning_rate": rate / 10,
        "grad_norm": 0.3 + noise,
        "tokens_per_s": 41_250 + 9_000 * noise,
        "eval/f1": 0.95 - noise / 3,
        **dict.fromkeys(FURTHER, noise),
        **dict.fromkeys(SYSTEM, 61.5),
    }
    return {
        "id": run_id(index),
        "experiment_id": "1",
        "experiment": "pretraining",
        "project": "default",
        "name": f"{('brave', 'calm', 'eager', 'gentle')[index % 4]}-{('otter', 'heron', 'lynx')[index % 3]}-{index}",
        "status": state,
        "lifecycle": "active",
        "user_id": ("ada", "grace", "alan")[index % 3],
        "start_time": started,
        "end_time": None if state in {"running", "lost"} else started + 3_600_000 + index % 997 * 1000,
        "heartbeat_at": started + 3_600_000,
        "error": "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB" if state == "failed" else None,
        "params": {
            "batch_size": str(2 ** (5 + index % 4)),
            "learning_rate": f"{rate:g}",
            "optimizer": OPTIMIZERS[index % 3],
            "layers": str(12 + index % 3 * 6),
            "dropout": f"{0.1 * (index % 3):.1f}",
            "seed": str(index),
            "dataset": "fineweb-edu",
        },
        "tags": {"team": "language", "skyward.checkpoint.40000": json.dumps({"digest": "9f2c" * 16, "at": started})},
        "metrics": [
            {"key": k, "value": v, "step": STEPS - 1, "timestamp": started + 3_600_000} for k, v in values.items()
        ],
        "artifacts": [],
        "system_metrics": {},
    }


@dataclass(frozen=True, slots=True)
class Names:
    """Names that users of a hub choose."""

    user: str = "ada"
    member: str = "grace"
    project: str = "default"
    experiment: str = "pretraining"
    run: str = ""
    metric: str = ""
    param: str = ""
    value: str = ""
    token: str = "laptop"
    pool: str = "train"
    file: str = ""


LONG_NAMES = Names(
    user="wilhelmina.featherstonehaugh@computational-linguistics.uni-x.de",
    member="m" * 63,
    project="project-of-all-language-models-" + "x" * 32,
    experiment="experiment_" + "long-" * 20 + "e" * 389,
    run="run_" + "r" * 246,
    metric="evaluation/" + "m" * 239,
    param="param_" + "p" * 244,
    value="/scratch/" + "v" * 491,
    token="token of a machine with a name that has words " + "t" * 204,
    pool="pool_" + "p" * 95,
    file="checkpoint_" + "f" * 200 + ".txt",
)
"""As long as a hub takes them, mostly without a place where a line may break."""


@dataclass(slots=True)
class Canned:
    """Contents of the application, which tests change and inspect."""

    runs: int = RUNS
    names: Names = Names()
    steps: int = STEPS
    authentication: bool = True
    artifacts: dict[str, bytes] = field(default_factory=dict)
    commands: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    streams: set[asyncio.Queue[dict[str, Any] | None]] = field(default_factory=set)
    packed: dict[tuple[str, str, int], bytes] = field(default_factory=dict)

    def send(self, event: dict[str, Any] | None) -> None:
        """Send an event to each page, or None to end their streams. For the thread of the server."""
        for stream in self.streams:
            stream.put_nowait(event)


def points_of(run: str, key: str, steps: int, at_most: int) -> bytes:
    """Points of a metric, packed as `/v1` packs them."""
    every = max(1, steps // at_most) if at_most else 1
    taken = range(0, steps, every)
    seed = (int(run, 16) * 7 + sum(key.encode())) % 97
    started = STARTED - int(run, 16) * 60_000
    values = array("d", (_value(key, seed, step / steps) for step in taken))
    times = array("q", (started + step * 72 for step in taken))
    return struct.pack("<q", len(taken)) + array("q", taken).tobytes() + times.tobytes() + values.tobytes()


def _value(key: str, seed: int, part: float) -> float:
    wave = math.sin(part * 900 + seed) * 0.03 + math.sin(part * 6011 * (1 + seed)) * 0.04
    if "loss" in key or "norm" in key:
        return (2.4 + seed / 60) * math.exp(-5 * part) + 0.15 + seed / 900 + wave * (1.2 - part)
    if key.startswith("system"):
        return 60 + 20 * math.sin(part * 40 + seed) + 100 * wave
    if key == "learning_rate":
        return 3e-4 * min(1.0, part * 20) * (0.5 + 0.5 * math.cos(math.pi * part))
    if key == "tokens_per_s":
        return 41_000 + 30_000 * wave
    return 1 - (0.8 + seed / 500) * math.exp(-6 * part) + wave / 3


def _response(answer: FileAnswer) -> Response:
    return Response(answer.body, answer.status, answer.headers)


def _problem(status: int, message: str, fix: str = "", field_: str | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": "invalid", "message": message, "field": field_, "fix": fix}}, status)


class Answers:
    """Handlers of the application."""

    def __init__(self, canned: Canned) -> None:
        self.canned = canned
        self.files = PageFiles()

    def named_run(self, index: int) -> dict[str, Any]:
        """The run of that number, with the names that a test chose."""
        run = run_of(index)
        names = self.canned.names
        run |= {"experiment": names.experiment, "project": names.project}
        if names.run:
            run |= {"name": names.run, "user_id": names.user}
            run["metrics"].insert(0, {**run["metrics"][0], "key": names.metric})
            run["params"][names.param] = run["tags"][names.param] = names.value + str(index)
            run["inputs"] = [{"name": names.run, "digest": "9f2c" * 16, "source": names.value}]
        return run

    async def page(self, request: Request) -> Response:
        return _response(self.files.document())

    async def file(self, request: Request) -> Response:
        seen = request.headers.get("if-none-match", "")
        return _response(self.files.file(request.path_params["name"], seen, request.headers.get("accept-encoding", "")))

    async def me(self, request: Request) -> Response:
        names = self.canned.names
        who = {"user": names.user, "role": "owner", "project": names.project, "organization": "default"}
        return JSONResponse({**who, "authentication": self.canned.authentication})

    async def projects(self, request: Request) -> Response:
        names = dict.fromkeys(("default", self.canned.names.project))
        listed = [{"name": name, "role": "owner", "created_at": STARTED} for name in names]
        return JSONResponse({"projects": listed})

    async def experiments(self, request: Request) -> Response:
        usual = (self.canned.names.experiment, "fine-tuning", "ablations", "data mixtures")
        names = usual if self.canned.runs else ()
        listed = [_experiment(str(i + 1), name) for i, name in enumerate(names)]
        return JSONResponse({"experiments": listed, "next_page_token": None})

    async def experiment(self, request: Request) -> Response:
        return JSONResponse(_experiment(request.path_params["id"], self.canned.names.experiment))

    async def runs(self, request: Request) -> Response:
        self.canned.asked.append(str(request.url.query))
        text = request.query_params.get("filter", "")
        if text and "=" not in text and "<" not in text and ">" not in text:
            return _problem(400, f"filter={text!r}: no comparison", "Write for example metrics.loss < 0.1.", "filter")
        first = int(request.query_params.get("page_token") or 0)
        limit = int(request.query_params.get("limit") or 100)
        last = min(self.canned.runs, first + limit)
        by_group = "params" in "".join(request.query_params.getlist("order_by"))
        listed = [self.named_run(_grouped(i, self.canned.runs) if by_group else i) for i in range(first, last)]
        return JSONResponse({"runs": listed, "next_page_token": str(last) if last < self.canned.runs else None})

    async def compare(self, request: Request) -> Response:
        return JSONResponse({"runs": [self.named_run(int(name, 16)) for name in request.query_params.getlist("run")]})

    async def run(self, request: Request) -> Response:
        return JSONResponse(self.named_run(int(request.path_params["id"], 16)))

    async def points(self, request: Request) -> Response:
        run, key = request.path_params["id"], request.query_params["key"]
        at_most = int(request.query_params.get("at_most") or 0)
        packed = self.canned.packed.get((run, key, at_most))
        if packed is None:
            packed = self.canned.packed[run, key, at_most] = points_of(run, key, self.canned.steps, at_most)
        return Response(packed, media_type="application/octet-stream")

    async def artifacts(self, request: Request) -> Response:
        prefix = request.query_params.get("prefix", "")
        listed: dict[str, dict[str, Any]] = {}
        for key, content in self.canned.artifacts.items():
            if not key.startswith(f"{prefix}/" if prefix else ""):
                continue
            rest = key[len(prefix) + 1 if prefix else 0 :]
            head, slash, _ = rest.partition("/")
            whole = f"{prefix}/{head}" if prefix else head
            listed[whole] = {
                "key": whole,
                "size": 0 if slash else len(content),
                "sha256": "",
                "is_directory": bool(slash),
            }
        return JSONResponse({"artifacts": list(listed.values())})

    async def artifact(self, request: Request) -> Response:
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        content = self.canned.artifacts[request.path_params["key"]]
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def commands(self, request: Request) -> Response:
        if request.method == "POST":
            action = (await request.json())["action"]
            self.canned.commands.append({"number": 1, "action": action, "created_at": 1, "acknowledged_at": None})
            return JSONResponse(self.canned.commands[-1])
        return JSONResponse({"commands": self.canned.commands})

    async def tokens(self, request: Request) -> Response:
        if request.method == "POST":
            return JSONResponse({"id": "a1", "secret": "sky_a1_secret"}, 201)
        token = {
            "id": "a1",
            "name": self.canned.names.token,
            "user": self.canned.names.user,
            "project": self.canned.names.project,
            "role": "researcher",
            "used_at": STARTED,
            "expires_at": STARTED + 10**10,
        }
        unused = {**token, "id": "b2", "name": "", "project": None, "role": None, "used_at": None, "expires_at": None}
        return JSONResponse({"tokens": [token, unused]})

    async def members(self, request: Request) -> Response:
        names = self.canned.names
        listed = [{"user": names.user, "role": "owner"}, {"user": names.member, "role": "researcher"}]
        return JSONResponse({"members": listed})

    async def users(self, request: Request) -> Response:
        names = self.canned.names
        ada = {"name": names.user, "kind": "person", "is_owner": True, "created_at": STARTED, "disabled_at": None}
        grace = {**ada, "name": names.member, "is_owner": False}
        robot = {**grace, "name": "ci", "kind": "service", "disabled_at": STARTED}
        return JSONResponse({"users": [ada, grace, robot]})

    async def audit(self, request: Request) -> Response:
        names = self.canned.names
        entry = {"number": 1, "at": STARTED, "actor": names.user, "action": "sign in", "resource": "session"}
        detail = {"name": names.run or "x"}
        listed = [
            {**entry, "number": 3, "action": "read", "resource": f"artifact/{names.file}", "detail": None},
            {**entry, "number": 2, "action": "create", "resource": f"run/{run_id(1)}", "detail": detail},
            {**entry, "detail": None},
        ]
        return JSONResponse({"audit": listed, "next_page_token": None})

    async def pools(self, request: Request) -> Response:
        return JSONResponse({"pools": [_pool(self.canned.names)], "next_page_token": None})

    async def pool(self, request: Request) -> Response:
        nodes = [{"node": i, "state": "ready", "address": "10.0.0.1", "ready_at": STARTED, "losses": i} for i in (0, 1)]
        call = {"task": 1, "name": "train", "node": 0, "rank": 0, "calls": 1, "started_at": STARTED + 1000}
        calls = [
            {**call, "ended_at": STARTED + 9000, "ok": True},
            {**call, "task": 2, "node": 1, "rank": None, "ended_at": STARTED + 5000, "ok": False},
        ]
        machine = {"node": 0, "instance": "i-0a1b", "instance_type": "g5.xlarge", "price_usd_per_hour": 1.006}
        machines = [{**machine, "is_spot": True, "launched_at": STARTED, "ended_at": None}]
        events = [{"number": 1, "at": STARTED, "kind": "node.lost", "node": 1, "detail": {"reason": "preempted"}}]
        history = {"nodes": nodes, "machines": machines, "calls": calls, "events": events}
        return JSONResponse({"pool": _pool(self.canned.names), **history})

    async def session(self, request: Request) -> Response:
        if request.method == "POST" and (await request.json())["code"] != "right":
            return _problem(401, "code: not valid or used already", "Print a new one.", "code")
        return JSONResponse({})

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        stream: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.canned.streams.add(stream)
        try:
            yield ": hello\n\n"
            while (event := await stream.get()) is not None:
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            self.canned.streams.discard(stream)


def _grouped(index: int, runs: int) -> int:
    """Order runs by their optimizer, as the store does when it is asked for groups."""
    share = (runs + 2) // 3
    return min(runs - 1, index % share * 3 + index // share)


def _pool(names: Names) -> Mapping[str, Any]:
    facts = {"id": "p1", "name": names.pool, "provider": "AWS", "user": names.user, "state": "open", "nodes": 2}
    times = {"started_at": STARTED, "ready_at": STARTED + 60_000, "ended_at": STARTED + 600_000}
    sums = {"calls": 2, "failed": 1, "lost_nodes": 1, "replaced_nodes": 1}
    money = {"price_usd_per_hour": 2.012, "spent_usd": 0.335}
    return {**facts, **times, **sums, **money, "heard_at": STARTED, "reason": ""}


def _experiment(number: str, name: str) -> Mapping[str, Any]:
    now = int(time.time() * 1000) - int(number) * 3_700_000
    tags = {"team": "language"}
    about = {"id": number, "name": name, "project": "default", "lifecycle": "active"}
    return {**about, "created_at": now, "updated_at": now, "tags": tags}


def canned_app(canned: Canned) -> Starlette:
    """Make the application."""
    answers = Answers(canned)
    run = "/v1/runs/{id}"
    return Starlette(
        routes=[
            Route("/v1/me", answers.me),
            Route("/v1/projects", answers.projects),
            Route("/v1/projects/{name}/members", answers.members),
            Route("/v1/experiments", answers.experiments),
            Route("/v1/experiments/{id}", answers.experiment),
            Route("/v1/runs", answers.runs),
            Route("/v1/runs/compare", answers.compare),
            Route(run, answers.run),
            Route(f"{run}/points", answers.points),
            Route(f"{run}/artifacts", answers.artifacts),
            Route(f"{run}/artifacts/{{key:path}}", answers.artifact),
            Route(f"{run}/commands", answers.commands, methods=["GET", "POST"]),
            Route("/v1/tokens", answers.tokens, methods=["GET", "POST"]),
            Route("/v1/users", answers.users),
            Route("/v1/audit", answers.audit),
            Route("/v1/pools", answers.pools),
            Route("/v1/pools/{id}", answers.pool),
            Route("/v1/session", answers.session, methods=["POST", "DELETE"]),
            Route("/v1/events", answers.events),
            *(Route(path, answers.page) for path in PAGE_PATHS),
            Route(FILE_PATH, answers.file),
        ]
    )
