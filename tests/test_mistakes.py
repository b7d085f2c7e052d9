"""Frequent mistakes of users, and the error messages about them: one table for each kind of place."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import skyward as sky
from skyward.core.spellings import FOREIGN
from skyward.errors import ArgumentNotPicklable, NotRun, ResultNotPicklable, UsageError, WrongArguments
from skyward.pool.options import ALIASES
from skyward.providers import PROVIDERS

untyped: Any = sky  # a checker finds most of these mistakes by itself


class Mistake(NamedTuple):
    """A mistake. `write` is called with a pool of two nodes, and every one of `says` is in the message."""

    what: str
    write: Callable[[Any], object]
    kind: type[BaseException]
    says: tuple[str, ...]


def _area(width: Any, height: Any = 1) -> Any:
    return width * height


def plain(width: Any, height: Any = 1) -> Any:
    return width * height


@sky.compute
def passed(value: Any) -> Any:
    return value


@sky.compute
def returns_call() -> Any:
    return [area(2, 3)]


@sky.compute
def returns_generator() -> Any:
    return (item for item in "abc")


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def with_height(width: Any) -> Any:
        return function(width, 7)

    return with_height


area: Any = sky.compute(_area)
quiet_area: Any = sky.compute(sky.silent(_area))
USES: list[tuple[str, Callable[[Any], object]]] = [
    ("`+`", lambda call: call + 1),
    ("`+`", lambda call: 1 + call),
    ("`+`", lambda call: sum([call, call])),
    ("`*`", lambda call: 2 * call),
    ("`-`", lambda call: -call),
    ("`==`", lambda call: call == 12),
    ("`==`", lambda call: call != 12),
    ("`<`", lambda call: call < 12),
    ("`<`", lambda call: min(12, call)),
    ("`[]`", lambda call: call[0]),
    ("`in`", lambda call: 1 in call),
    ("`.shape`", lambda call: call.shape),
    ("`.result`", lambda call: call.result()),
    ("`len()`", len),
    ("`iter()`", lambda call: [item for item in call]),  # noqa: C416  # as it is written
    ("`float()`", float),
    ("`int()`", int),
    ("`hash()`", lambda call: {call: 1}),
    ("`format '.2f'`", lambda call: f"{call:.2f}"),
    ("`if`", lambda call: 1 if call else 2),
    ("`()`", lambda call: call()),
    ("`with`", lambda call: call.__enter__()),
]


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, logs=False)


@pytest.mark.parametrize(("use", "write"), USES, ids=[use for use, _ in USES])
def test_every_use_of_a_call_that_has_not_run_reports_that(use: str, write: Callable[[Any], object]) -> None:
    with pytest.raises(NotRun) as raised:
        write(area(3, 4))
    assert str(raised.value).startswith(f"{use}: _area(3, 4) has not run")
    assert "(_area(3, 4) >> pool)" in str(raised.value)
    assert ".local(...)" in str(raised.value)


def test_awaiting_a_call_says_what_can_be_awaited() -> None:
    async def main() -> None:
        await area(3, 4)

    with pytest.raises(NotRun, match=r"`await`: .* write: await pool\.run_async\(_area\(3, 4\)\)"):
        asyncio.run(main())


def test_calls_that_have_not_run_have_honest_reprs() -> None:
    both = area(3, 4) & area(1)
    assert f"{area(3, height=4)}" == "<_area(3, height=4), not run: send it with `>> pool`>"
    assert repr(both) == "<(_area(3, 4) & _area(1)), 2 calls that have not run: send them with `>> pool`>"
    assert len(both) == len(list(both)) == 2
    assert repr(area(area(1), range(10**9)).as_written) == repr("_area(_area(1), range(0, 1000000000))")
    with pytest.raises(NotRun, match="`if`"):
        bool(both)
    with pytest.raises(NotRun, match="`@`"):
        _ = both @ untyped


def test_libraries_that_probe_a_call_get_the_answer_they_expect() -> None:
    call = area(3, 4)
    assert not hasattr(call, "shape")
    assert call != None  # noqa: E711  # as libraries ask
    assert copy.copy(call) == copy.deepcopy(call) == call
    with pytest.raises(TypeError):
        iter(call)


SENT = [
    Mistake(
        "in an object of a map",
        lambda p: p.map(passed, [SimpleNamespace(call=area(1))]),
        ArgumentNotPicklable,
        ("item between 0 and 0",),
    ),
    Mistake("as a value", lambda p: returns_call() >> p, ResultNotPicklable, ("returned a list", ".local(...)")),
    Mistake("as a value of a map", lambda p: p.map(lambda x: area(x, 2), [1, 2]), ResultNotPicklable, (".local(...)",)),
]
"""Each says what to write instead, too."""


@pytest.mark.parametrize("mistake", SENT, ids=lambda mistake: mistake.what)
def test_a_call_cannot_travel_as_a_value(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake._replace(says=(*mistake.says, "has not run", "value = _area(", " >> pool")))


def test_a_call_is_refused_by_pickle_itself() -> None:
    with pytest.raises(NotRun, match="has no value to pass on"):
        pickle.dumps({"calls": [area(1)]})


ARGUMENTS = [
    Mistake("one too few", lambda _: area(), WrongArguments, ("_area(): missing", "'width'", "_area(width, height=1)")),
    Mistake("one too many", lambda _: area(1, 2, 3), WrongArguments, ("too many positional arguments",)),
    Mistake("another name", lambda _: area(1, hieght=2), WrongArguments, ("'hieght'", "did you mean height=?")),
    Mistake("twice", lambda _: area(1, width=2), WrongArguments, ("multiple values for argument 'width'",)),
    Mistake("below our decorators", lambda _: quiet_area(), WrongArguments, ("missing", "'width'")),
    Mistake("to submit", lambda p: p.submit(plain), WrongArguments, ("plain(): missing", "'width'")),
    Mistake("to map", lambda p: p.map(area, [1], [2], [3]), WrongArguments, ("too many positional arguments",)),
    Mistake(
        "a call to map",
        lambda p: p.map(area(1), [1]),
        UsageError,
        ("_area(1): a call, not a function", "the function itself"),
    ),
    Mistake("a call to compute", lambda _: sky.compute(area(1)), UsageError, ("_area(1): a call, not a function",)),
    Mistake("a generator", lambda p: passed(x for x in "ab") >> p, ArgumentNotPicklable, ("Iterator[...]",)),
    Mistake("returned", lambda p: returns_generator() >> p, ResultNotPicklable, ("a generator", "yield")),
    Mistake("no call", lambda p: p.submit(3), UsageError, ("call=3: neither a function nor a call",)),
    Mistake("a group", lambda p: p.run(area(1) & area(2)), UsageError, ("run_group()",)),
    Mistake("call and arguments", lambda p: p.run(area(1), 2), UsageError, ("this call has its arguments already",)),
]


@pytest.mark.parametrize("mistake", ARGUMENTS, ids=lambda mistake: mistake.what)
def test_wrong_arguments_are_refused_when_the_call_is_made(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake)


def no_value(width: Any) -> Any:
    return None


NO_CALL = "without @sky.compute, a function runs here and at once"
OPERANDS = [
    Mistake("an undecorated function", lambda p: plain(3, 4) >> p, UsageError, ("`>>`: 12 is a value (int)", NO_CALL)),
    Mistake("for a future", lambda p: plain(3, 4) > p, UsageError, ("`>`: 12 is a value (int)", NO_CALL)),
    Mistake("for all nodes", lambda p: plain(3, 4) @ p, UsageError, ("`@`: 12 is a value (int)", NO_CALL)),
    Mistake("for a node", lambda p: plain(3, 4) >> p.node(1), UsageError, ("12 is a value (int)", NO_CALL)),
    Mistake("without a value", lambda p: no_value(3) >> p, UsageError, ("None is a value", NO_CALL)),
    Mistake("for the module", lambda p: plain(3, 4) >> untyped, UsageError, ("`>>`: 12 is a value (int)", NO_CALL)),
    Mistake("a future of it", lambda p: plain(3, 4) > untyped, UsageError, ("`>`: 12 is a value (int)", NO_CALL)),
    Mistake("on its nodes", lambda p: plain(3, 4) @ untyped, UsageError, ("`@`: 12 is a value (int)", NO_CALL)),
    Mistake("an array", lambda p: np.ones(3) >> p, UsageError, ("array([1., 1., 1.]) is a value (ndarray)", NO_CALL)),
    Mistake("times a pool", lambda p: np.ones(3) @ p, UsageError, ("array([1., 1., 1.]) is a value", NO_CALL)),
    Mistake("a function", lambda p: plain >> p, UsageError, ("plain is a function", "sky.compute(plain)(...) >> pool")),
    Mistake("not called", lambda p: area >> p, UsageError, ("was not called", "write _area(...) >> pool")),
    Mistake("not called, all nodes", lambda p: area @ p, UsageError, ("was not called", "_area(...) @ pool")),
    Mistake("a list of calls", lambda p: [area(1), area(2)] >> p, UsageError, ("2 calls", "sky.gather(*calls)")),
    Mistake("a future", lambda p: (area(1) > p) >> p, UsageError, ("sent already", ".result()")),
    Mistake("to the class", lambda p: area(1) >> sky.ComputePool, UsageError, ("is not a pool",)),
    Mistake("to a provider", lambda p: area(1) >> untyped.Local(), UsageError, ("is not a pool", "sky.ComputePool(p")),
    Mistake("the wrong way round", lambda p: p >> area(1), NotRun, ("(_area(1) >> pool)",)),
    Mistake("a list to gather", lambda _: untyped.gather([area(1)]), UsageError, ("sky.gather(*calls)",)),
    Mistake("a function to gather", lambda _: sky.gather(area), UsageError, ("call a @compute function",)),
    Mistake("a group to gather", lambda _: untyped.gather(area(1) & area(2)), UsageError, ("join groups with &",)),
]


@pytest.mark.parametrize("mistake", OPERANDS, ids=lambda mistake: mistake.what)
def test_an_operator_names_operands_that_are_no_call_or_target(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake)


LATER = "does not exist yet"


def _imports(line: str) -> Callable[[sky.ComputePool], object]:
    return lambda _: exec(line, {})


NAMES = [
    Mistake("sky.Worker", lambda _: untyped.Worker, AttributeError, ("concurrency=4, executor=",)),
    Mistake("from skyward", _imports("from skyward import Worker"), ImportError, ("concurrency=4, executor=",)),
    Mistake("from training", _imports("from skyward.training import DDPTrainr"), ImportError, ("mean DDPTrainer?",)),
    Mistake("sky.Spec", lambda _: untyped.Spec, AttributeError, ("ComputePool(any_of=[",)),
    Mistake("sky.attach", lambda _: untyped.attach, AttributeError, ('sky.ComputePool.attach("train")',)),
    Mistake("sky.Ray", lambda _: untyped.Ray, AttributeError, ('engine="ray"', "sky.RayCluster(")),
    Mistake("sky.volumes", lambda _: untyped.volumes, AttributeError, ("volumes={", "sky.Volume(")),
    Mistake("sky.storage", lambda _: untyped.storage, AttributeError, ("sky.Volume(",)),
    Mistake("sky.Actor", lambda _: untyped.Actor, AttributeError, ("write @sky.actor above the class",)),
    Mistake("sky.function", lambda _: untyped.function, AttributeError, ("@sky.compute",)),
    Mistake("sky.remote", lambda _: untyped.remote, AttributeError, ("@sky.compute",)),
    Mistake("sky.Compute", lambda _: untyped.Compute, AttributeError, ("sky.ComputePool(...)", ".named(")),
    Mistake("sky.plugins", lambda _: untyped.plugins, AttributeError, ("@sky.integrations.torch",)),
    Mistake("sky.GCP", lambda _: untyped.GCP, AttributeError, (LATER, "sky.SSH")),
    Mistake("sky.VastAI", lambda _: untyped.VastAI, AttributeError, (LATER, "sky.SSH")),
    Mistake("sky.Container", lambda _: untyped.Container, AttributeError, (LATER, "sky.Local")),
    Mistake("sky.Executor", lambda _: untyped.Executor, AttributeError, ("pool.executor()",)),
    Mistake("sky.MultiPool", lambda _: untyped.MultiPool, AttributeError, ("as a, sky.ComputePool",)),
    Mistake("sky.LogConfig", lambda _: untyped.LogConfig, AttributeError, ("sky.LogFiles",)),
    Mistake("sky.main", lambda _: untyped.main, AttributeError, ("open a pool",)),
    Mistake("sky.torch", lambda _: untyped.torch, AttributeError, ("sky.integrations.torch",)),
    Mistake("sky.A100", lambda _: untyped.A100, AttributeError, ("sky.accelerators.A100()",)),
    Mistake("sky.Computepool", lambda _: untyped.Computepool, AttributeError, ("did you mean ComputePool?",)),
    Mistake("sklearn", lambda _: untyped.integrations.sklearn, AttributeError, ("ScikitLearnPool",)),
    Mistake("tourch", lambda _: untyped.integrations.tourch, AttributeError, ("did you mean torch?",)),
    Mistake("A1000", lambda _: untyped.accelerators.A1000, AttributeError, ("did you mean A100?",)),
    Mistake("DDPTrainr", lambda _: untyped.training.DDPTrainr, AttributeError, ("did you mean DDPTrainer?",)),
    Mistake("pool.starmap", lambda p: p.starmap, AttributeError, ("pool.map(f, *zip(*pairs))",)),
    Mistake("pool.on", lambda p: p.on, AttributeError, ("pool.events()", "on_event=")),
    Mistake("pool.run_parallel", lambda p: p.run_parallel, AttributeError, ("run_group",)),
    Mistake("pool.resize", lambda p: p.resize, AttributeError, ("write pool.scale(4)",)),
    Mistake("pool.sumbit", lambda p: p.sumbit, AttributeError, ("did you mean submit?",)),
    Mistake("node.starmap", lambda p: p.node(0).starmap, AttributeError, ("'NodeTarget'", "pool.map(")),
    Mistake("Volume(bucket=)", lambda _: untyped.Volume(bucket="b"), WrongArguments, ("s3://bucket/prefix",)),
    Mistake("f.remote", lambda _: area.remote, AttributeError, ("f(x) >> pool",)),
    Mistake("f.map", lambda _: area.map, AttributeError, ("pool.map(f, xs)",)),
    Mistake("f.locl", lambda _: area.locl, AttributeError, ("did you mean local?",)),
]


@pytest.mark.parametrize("mistake", NAMES, ids=lambda mistake: mistake.what)
def test_a_name_of_another_library_is_refused_with_ours(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake)


def test_tables_of_missing_names_hold_no_existing_name(pool: sky.ComputePool) -> None:
    pool_options = set(inspect.signature(sky.ComputePool).parameters) - {"provider"}
    places: dict[str, Any] = {
        "skyward": sky.__all__,
        "pool": dir(pool),
        "function": dir(area),
        "integrations": dir(sky.integrations),
        "a call": sky.CallOptions.__dataclass_fields__,
        "an actor": sky.ActorOptions.__dataclass_fields__,
        "ComputePool": pool_options | set(ALIASES),
        "provider": PROVIDERS,
        **{
            kind.__name__: inspect.signature(kind).parameters
            for kind in (sky.Image, sky.Volume, sky.AWS, sky.SSH, sky.Local, sky.RayCluster)
        },
    }
    places["SSH"] = set(places["SSH"]) - {"hosts"}
    places["RayCluster"] = set(places["RayCluster"]) - {"shell"}
    assert set(places) == set(FOREIGN)
    for place, names in places.items():
        assert not set(names) & set(FOREIGN[place]), place


def made(**options: Any) -> sky.ComputePool:
    return sky.ComputePool(sky.Local(), **options)


OPTIONS = [
    Mistake("mounts=", lambda _: made(mounts={}), UsageError, ("volumes={",)),
    Mistake("volumes=[]", lambda _: made(volumes=["cache"]), UsageError, ("volumes=['cache']: not a dict", "sky.Vol")),
    Mistake("volume path", lambda _: made(volumes={"/": "x"}), UsageError, ("volumes='/'", "such as '/data'")),
    Mistake("volume ..", lambda _: made(volumes={"a/../b": "x"}), UsageError, ("volumes='a/../b'",)),
    Mistake("volumes", lambda _: made(volumes={"a": "x", "a/b": "y"}), UsageError, ("'a/b']: overlaps volumes['a']",)),
    Mistake("volume", lambda _: made(volumes={"a": 1}), UsageError, ("volumes['a']=1", "pass sky.Volume(")),
    Mistake("Volume(url)", lambda _: sky.Volume("s3://k:v@b/x"), UsageError, ("has credentials", "sky.Secret(")),
    Mistake("Volume(file)", lambda _: sky.Volume("file://x/y"), UsageError, ("a folder of a disk is no store",)),
    Mistake("Volume(memory)", lambda _: sky.Volume("memory://x"), UsageError, ("its own memory",)),
    Mistake("cache_gib=", lambda _: sky.Volume("s3://b", cache_gib=0), UsageError, ("Volume.cache_gib=0", "> 0")),
    Mistake("read_only=", lambda _: sky.Volume("s3://b", read_only=untyped), UsageError, ("use True, False",)),
    Mistake(
        "mount=", lambda _: sky.Volume("s3://b", mount=True, read_only=False), UsageError, ("for read-only stores",)
    ),
    Mistake("nfs", lambda _: sky.Volume("nfs://a/b", cache_gib=1), UsageError, ("NFS is always mounted",)),
    Mistake("read_only", lambda _: sky.Volume("x", read_only=True), UsageError, ("is for object stores",)),
    Mistake("Volume()", lambda _: sky.Volume("a/b"), UsageError, ("Volume.source='a/b'", "not the name of a volume")),
    Mistake("selection=", lambda _: made(selection="frist"), UsageError, ("did you mean 'first'?",)),
    Mistake("lease_s=", lambda _: sky.Local(lease_s=0), UsageError, ("Local.lease_s=0", "set lease_s=5.0")),
    Mistake("gpus=", lambda _: made(gpus=8), UsageError, ("sky.accelerators.A100(count=8)",)),
    Mistake("takeover=", lambda _: untyped.ComputePool.attach("x", takeover=True), UsageError, ("mean take_over=?",)),
    Mistake("ssh_timeout=", lambda _: made(ssh_timeout=9), UsageError, ("provision_timeout_s=",)),
    Mistake("worker=", lambda _: made(worker=1), UsageError, ("concurrency=4",)),
    Mistake("region=", lambda _: made(region="x"), UsageError, ("'local' has no regions",)),
    Mistake("pip=", lambda _: made(pip=["x"]), UsageError, ("set this option of the image",)),
    Mistake("retries=", lambda _: made(retries=1), UsageError, ("@sky.compute(retries=3",)),
    Mistake("concurency=", lambda _: made(concurency=1), UsageError, ("did you mean concurrency=?",)),
    Mistake("nodes=(4, 1)", lambda _: made(nodes=(4, 1)), UsageError, ("nodes.min=4", "exceeds max=1")),
    Mistake("ray=", lambda _: made(ray=True), UsageError, ('engine="ray"', "sky.RayCluster(")),
    Mistake("min=", lambda _: made(min=0), UsageError, ("write nodes=(2, 8)",)),
    Mistake("min_nodes=", lambda _: made(min_nodes=2), UsageError, ("write nodes=(2, 8)",)),
    Mistake("idle_timeout=", lambda _: made(idle_timeout=60), UsageError, ("write idle_timeout_s=600",)),
    Mistake("A100:8", lambda _: made(accelerator="A100:8"), UsageError, ("sky.accelerators.A100(count=8)",)),
    Mistake("8x rtx 4090", lambda _: made(accelerator="8x rtx 4090"), UsageError, ("RTX_4090(count=8)",)),
    Mistake("two kinds", lambda _: made(accelerator={"A100": 8}), UsageError, ("or a list of them",)),
    Mistake(
        "no provider", lambda _: untyped.ComputePool(), UsageError, ("provider: ComputePool requires it", "sky.Local")
    ),
    Mistake("by name", lambda _: untyped.ComputePool(name="x"), UsageError, (".named(",)),
    Mistake("two", lambda _: untyped.ComputePool(sky.Local(), sky.Local()), UsageError, ("any_of=[",)),
    Mistake("pips=", lambda _: untyped.Image(pips=["x"]), UsageError, ("not an option of Image", "did you mean pip=?")),
    Mistake("packages=", lambda _: untyped.Image(packages=["x"]), UsageError, ('pip=["torch"]',)),
    Mistake("Image(list)", lambda _: untyped.Image(["torch"]), UsageError, ("by name", "pip=")),
    Mistake("pip_indexes=", lambda _: untyped.Image(pip_indexes=["x"]), UsageError, ("sky.PipIndex(",)),
    Mistake("PipIndex(package=)", lambda _: untyped.PipIndex("https://x", package="a"), UsageError, ("packages",)),
    Mistake("lockfile=", lambda _: untyped.Image(lockfile="uv.lock"), UsageError, ('write lock="uv.lock"',)),
    Mistake("docker_image=", lambda _: untyped.Image(docker_image="a"), UsageError, ('container="debian:12"',)),
    Mistake("SSH(list)", lambda _: untyped.SSH(["gpu1"]), UsageError, ('hosts=["gpu1"]',)),
    Mistake("SSH()", lambda _: untyped.SSH(), UsageError, ("hosts: SSH requires it", "hosts=[")),
    Mistake("SSH(host=)", lambda _: untyped.SSH(host="gpu1"), UsageError, ("hosts=[",)),
    Mistake("password=", lambda _: untyped.SSH(hosts=["a"], password="p4ss"), UsageError, ("ssh-copy-id",)),
    Mistake("RayCluster()", lambda _: untyped.RayCluster(), UsageError, ('sky.RayCluster("me@head")',)),
    Mistake("RayCluster(ray)", lambda _: sky.RayCluster("ray://h:1"), UsageError, ("address='ray://h:1'",)),
    Mistake(
        "RayCluster(text)", lambda _: sky.RayCluster("kubectl exec a --"), UsageError, ("list: ['kubectl', 'exec'",)
    ),
    Mistake("disks", lambda _: untyped.RayCluster("a", resources=["x"]), UsageError, ("resources=['x']: must be a d",)),
    Mistake("reigon=", lambda _: untyped.AWS(reigon="x"), UsageError, ("did you mean region=?",)),
    Mistake("AWS(region)", lambda _: untyped.AWS("us-east-1"), UsageError, ('region="us-east-1"',)),
    Mistake("Local(nodes=)", lambda _: untyped.Local(nodes=2), UsageError, ("set this option of the pool",)),
    Mistake("lease=", lambda _: untyped.Local(lease=2), UsageError, ("did you mean lease_s=?",)),
    Mistake("retry=", lambda _: untyped.compute(retry=2), UsageError, ("write retries=3",)),
    Mistake("gpu=", lambda _: untyped.compute(gpu=2), UsageError, ("write gpus=1",)),
    Mistake(
        "retries={}", lambda _: untyped.compute(retries={"max": 2}), UsageError, ("whole number", "set retry_delay_s=2")
    ),
    Mistake("backnd=", lambda _: untyped.integrations.torch(backnd="x"), UsageError, ("did you mean backend=?",)),
    Mistake("onyl=", lambda _: untyped.stdout(onyl="head"), UsageError, ("did you mean only=?",)),
    Mistake("stdout(head)", lambda _: untyped.stdout("head"), UsageError, ('@sky.stdout(only="head")',)),
    Mistake("retires=", lambda _: untyped.CallOptions(retires=1), UsageError, ("did you mean retries=?",)),
    Mistake("CallOptions(3)", lambda _: untyped.CallOptions(3), UsageError, ("by name", "retries=")),
    Mistake("ecko=", lambda _: untyped.LogFiles("logs", ecko=True), UsageError, ("did you mean echo=?",)),
    Mistake("LogFiles()", lambda _: untyped.LogFiles(), UsageError, ("folder: LogFiles requires it",)),
    Mistake("factry=", lambda _: untyped.once("key", factry=dict), UsageError, ("did you mean factory=?",)),
    Mistake("memroy=", lambda _: untyped.accelerators.A100(memroy="80GB"), UsageError, ("did you mean memory=?",)),
    Mistake("A100(8)", lambda _: untyped.accelerators.A100(8), UsageError, ("by name", "count=")),
    Mistake("counts=", lambda _: untyped.accelerators.Custom("X", counts=2), UsageError, ("did you mean count=?",)),
    Mistake("JoblibPool()", lambda _: untyped.integrations.JoblibPool(), UsageError, ("JoblibPool requires it",)),
]


@pytest.mark.parametrize("mistake", OPTIONS, ids=lambda mistake: mistake.what)
def test_an_option_that_does_not_exist_is_refused_with_advice(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake)


def test_a_value_that_may_be_a_secret_is_not_repeated() -> None:
    with pytest.raises(UsageError) as raised:
        untyped.SSH(hosts=["a"], password="p4ss")
    assert "p4ss" not in str(raised.value)


def test_arguments_that_python_would_accept_are_never_refused() -> None:
    """A decorator may pass on unknown arguments, and functions outside Python have no exact signature."""

    @sky.compute
    def anything(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    assert sky.compute(_decorated(_area))(3).args == (3,)
    assert quiet_area(3, height=4).kwargs == {"height": 4}
    for count in range(200):
        assert anything(*range(count), **{f"a{count}": 1}).kwargs == {f"a{count}": 1}
    for function in (min, dict, str.upper, functools.partial(_area, 3), "".join):
        assert sky.compute(function)(1, 2, 3).args == (1, 2, 3)


def test_a_target_takes_a_function_and_its_arguments_like_an_executor(pool: sky.ComputePool) -> None:
    assert pool.submit(plain, 3, height=4).result() == 12
    assert pool.run(plain, 3) == pool.run(area, 3) == pool.run(area(3)) == 3
    assert pool.broadcast(plain, 3, 4) == [12, 12]
    assert pool.node(1).submit(abs, -3).result() == 3
    assert asyncio.run(pool.run_async(plain, 3, height=4)) == 12

    def counted(limit: int) -> Iterator[int]:
        yield from range(limit)

    assert list(pool.run(counted, 3)) == [0, 1, 2]

    @sky.compute
    def inside(target: Any) -> list[Any]:
        return [target.run(plain, 3, height=4), target.submit(plain, 3).result(), target.broadcast(plain, 2)]

    assert inside(pool.node(1)) >> pool.node(0) == [12, 3, [2]]


OVERLOOKED = """
import sys
import skyward as sky

@sky.compute
def inverse(x):
    return 1 / x

def tried(wait):
    try:
        wait()
    except ZeroDivisionError:
        print("read", file=sys.stderr)

with sky.ComputePool(sky.Local(), logs=False, name="read") as pool:
    future, group = inverse(0) > pool, (inverse(0) & inverse(0)) > pool
    tried(future.result)
    tried(lambda: sys.stderr.write(f"{type(group.exception()).__name__}\\n"))
    tried(lambda: inverse(0) >> pool)
    tried(lambda: (inverse(0) & inverse(0)) >> pool)
    (inverse(0) > pool).cancel()
    other = sky.ComputePool(sky.Local(), logs=False, name="one").start()
    dropped = inverse(0) > other
    other.close()
with sky.ComputePool(sky.Local(), logs=False, name="many") as pool:
    held = [inverse(0) > pool for _ in range(20)]
    (inverse(0) & inverse(1)) > pool
    pool.executor().submit(inverse, 0)
with sky.ComputePool(sky.Local(), logs=False, name="none") as pool:
    inverse(1, )
    sky.compute(lambda x: x)(1)
with sky.ComputePool(sky.Local(), logs=False, name="some") as pool:
    sky.compute(max)(1, 2)
    inverse(1) >> pool
"""


def test_a_closing_pool_reports_unread_values_and_unsent_calls(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OVERLOOKED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=100)
    division = "ZeroDivisionError: division by zero"
    assert done.stderr.splitlines() == [
        "read",
        "ZeroDivisionError",
        "read",
        "read",
        f"skyward: one: 1 call failed and its future was not read: {division}",
        f"skyward: many: 22 calls failed and their futures were not read, the first with {division}",
        "skyward: none: no call was sent, and <lambda>(...) alone runs nothing; write <lambda>(...) >> pool",
    ]


@pytest.mark.parametrize("open_pool", [sky.ComputePool, sky.integrations.JoblibPool])
def test_a_warning_about_the_image_names_the_line_that_opens_the_pool(open_pool: Callable[..., Any]) -> None:
    def opened() -> None:
        with open_pool(sky.Local(), image=sky.Image(pip=["polars"]), logs=False):
            pass

    with pytest.warns(UserWarning, match="Image: pip has no effect") as told:
        opened()
    line = opened.__code__.co_firstlineno + 1
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


def test_a_partial_keeps_the_integration_and_the_options_of_its_function() -> None:
    @sky.compute(retries=3)
    @sky.integrations.torch
    def train(epochs: int, rate: float) -> None: ...

    bound: Any = sky.compute(functools.partial(train, 3))
    assert bound.launch.is_gang
    assert bound(rate=0.1).options.retries == 3
    assert sky.compute(functools.partial(train.fn, 3)).launch.is_gang


def test_a_future_shows_no_internal_class(pool: sky.ComputePool) -> None:
    good, bad = pool.submit(plain, 3), pool.submit(plain, None, None)
    concurrent.futures.wait([good, bad], timeout=60)
    assert repr(good).endswith(" state=finished returned>")
    assert repr(bad).endswith(" state=finished raised>")
    assert isinstance(bad.exception(), TypeError)


def _expect(pool: sky.ComputePool, mistake: Mistake) -> None:
    with pytest.raises(mistake.kind) as raised:
        mistake.write(pool)
    for words in mistake.says:
        assert words in str(raised.value)


def test_a_missing_name_is_suggested_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import skyward; skyward.Locale"], capture_output=True, text=True, check=False
    )
    assert done.stderr.lower().count("did you mean") == 1
