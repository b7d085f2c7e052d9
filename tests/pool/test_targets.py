"""Calls to chosen nodes of a pool, and nodes that are reserved for a role."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward as sky
from skyward.errors import NodeLost, PoolClosed, UsageError
from skyward.integrations.base import IntegrationBase, integrate
from skyward.node.slot.runtime import current_rank
from skyward.testing import Faults
from skyward.values.launch import RankValues, Returns
from skyward.values.machine import LogLine
from skyward.values.topology import Rank
from tests.waiting import until

pytestmark = pytest.mark.by_reference  # `Plain` is pickled again, within a task, by the name of its class


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=4, concurrency=1, roles={"evaluation": (3,)}, logs=False)


@sky.compute
def node_of(_: object = None) -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def node_and_shard(data: list[int]) -> tuple[int, list[int], bool]:
    info = sky.instance_info()
    assert info is not None
    return info.node, sky.shard(data), bool(sky.is_head)


@sky.compute
def count_on_node(count: int) -> Iterator[tuple[int, int]]:
    info = sky.instance_info()
    assert info is not None
    for number in range(count):
        yield info.node, number


def wait_for(path: Path) -> int:
    info = sky.instance_info()
    assert info is not None
    Path(f"{path}.{info.node}").touch()
    until(path.exists)
    return info.node


class Plain(IntegrationBase):
    """Integration whose gang is only processes."""

    name: ClassVar[str] = "plain-ranks"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def place_of_rank() -> tuple[int, int, int]:
    rank = current_rank()
    assert rank is not None
    return rank.node, rank.rank, rank.world_size


ranks = sky.compute(integrate(place_of_rank, Plain()))


def two_ranks(returns: Returns) -> sky.ComputeFunction[[], Any]:
    return sky.compute(integrate(place_of_rank, Plain(processes_per_node=2, returns=returns)))


@sky.compute
@sky.stdout(only="head")
def opinions_on_the_head() -> tuple[int, bool, bool, bool]:
    info = sky.instance_info()
    assert info is not None
    print(f"only=head: node {info.node}")
    return info.node, bool(sky.is_head), info.is_head, sky.is_head(info)


opinions_in_ranks = sky.compute(integrate(opinions_on_the_head.fn, Plain()))


class TestValuesOfRanks:
    def test_a_broadcast_returns_the_values_of_the_chosen_ranks(self, pool: sky.ComputePool) -> None:
        places = [(0, 0, 4), (0, 1, 4), (1, 2, 4), (1, 3, 4)]
        some = pool.nodes([0, 1])
        assert two_ranks("nodes")() @ some == [places[0], places[2]]
        assert two_ranks("ranks")() @ some == places
        assert two_ranks("head")() @ some == [places[0]]

    def test_a_call_to_one_node_returns_a_value_or_those_of_its_ranks(self, pool: sky.ComputePool) -> None:
        one = pool.node(2)
        assert two_ranks("nodes")() >> one == (2, 0, 2)
        values = two_ranks("ranks")() >> one
        assert values == [(2, 0, 2), (2, 1, 2)]
        assert type(values) is RankValues
        assert (two_ranks("head")() > one).result() == (2, 0, 2)

    def test_a_task_that_sends_the_gang_gets_the_same(self, pool: sky.ComputePool) -> None:
        one, some = pool.node(1), pool.nodes([0, 1])

        def parent() -> Any:
            return two_ranks("ranks")() >> one, two_ranks("ranks")() @ some, two_ranks("head")() @ some

        assert sky.compute(parent)() >> pool.node(2) == (
            [(1, 0, 2), (1, 1, 2)],
            [(0, 0, 4), (0, 1, 4), (1, 2, 4), (1, 3, 4)],
            [(0, 0, 4)],
        )


class TestHead:
    @pytest.mark.parametrize("call", [opinions_on_the_head, opinions_in_ranks], ids=["broadcast", "gang"])
    @pytest.mark.parametrize(
        "target",
        [
            pytest.param(lambda pool: pool, id="pool"),
            pytest.param(lambda pool: pool.nodes([2, 1]), id="nodes"),
            pytest.param(lambda pool: pool.role("training"), id="role"),
        ],
    )
    def test_exactly_one_process_is_the_head_by_every_name(
        self, call: Any, target: Callable[[sky.ComputePool], Any]
    ) -> None:
        lines: list[LogLine] = []
        # Node 0 has a role, so it is no node of `@ pool`.
        roles = {"evaluation": (0,), "training": (3, 1)}
        with sky.ComputePool(sky.Local(), nodes=5, roles=roles, logs=lines.append) as pool:
            told = call() @ target(pool)
            first = target(pool).node_numbers[0]
        assert [(node, *set(names)) for node, *names in told] == [
            (node, node == first) for node in target(pool).node_numbers
        ]
        assert [line.text for line in lines] == [f"only=head: node {first}"]


class TestNodes:
    def test_a_call_goes_to_the_named_node(self, pool: sky.ComputePool) -> None:
        for node in (2, 0, 3, 1):
            assert node_of() >> pool.node(node) == node
            assert (node_of() > pool.node(node)).result(timeout=60) == node
            assert asyncio.run(pool.node(node).run_async(node_of())) == node

    def test_calls_go_to_one_of_the_named_nodes(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        target = pool.nodes([2, 0])
        go = tmp_path / "go"
        futures = [sky.compute(wait_for)(go) > target for _ in range(3)]
        until(lambda: Path(f"{go}.0").exists() and Path(f"{go}.2").exists())
        assert node_of() >> pool == 1, "it is free for others"
        go.touch()
        assert sorted(future.result(timeout=60) for future in futures) in ([0, 0, 2], [0, 2, 2])
        assert target.total_slots == 2
        assert target.node_numbers == (2, 0)

    def test_a_group_and_a_generator_run_on_named_nodes(self, pool: sky.ComputePool) -> None:
        assert (node_of() & node_of() & node_of()) >> pool.node(2) == (2, 2, 2)
        assert (sky.gather(node_of(), node_of()) > pool.node(0)).result(timeout=60) == (0, 0)
        assert list(sky.gather(node_of(), node_of(), stream=True) >> pool.node(1)) == [1, 1]
        assert list(count_on_node(3) >> pool.node(2)) == [(2, 0), (2, 1), (2, 2)]

    def test_a_broadcast_goes_to_the_named_nodes_in_their_order(self, pool: sky.ComputePool) -> None:
        data = list(range(7))
        told = node_and_shard(data) @ pool.nodes([2, 0])
        assert told == [(2, [0, 2, 4, 6], True), (0, [1, 3, 5], False)], "together the shards are everything"

    def test_map_and_executor_use_the_named_slots(self, pool: sky.ComputePool) -> None:
        assert set(pool.nodes([0, 2]).map(node_of, range(300))) <= {0, 2}
        assert set(pool.node(1).imap(node_of, range(50))) == {1}
        with pool.node(2).executor() as executor:
            assert list(executor.map(node_of.fn, range(5))) == [2] * 5

    def test_a_gang_runs_on_the_named_nodes_or_on_one_of_them(self, pool: sky.ComputePool) -> None:
        assert ranks() @ pool.nodes([2, 0]) == [(2, 0, 2), (0, 1, 2)]
        assert ranks() >> pool.node(1) == (1, 0, 1)
        node, *place = ranks() >> pool.nodes([0, 2])
        assert node in (0, 2)
        assert place == [0, 1]

    def test_a_call_that_waits_for_one_node_blocks_no_other(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        go = tmp_path / "go"
        held = [sky.compute(wait_for)(go) > pool.node(1) for _ in range(200)]
        until(Path(f"{go}.1").exists)
        assert pool.nodes([0, 2]).map(abs, range(-50, 0)) == list(range(50, 0, -1))
        assert node_of() >> pool.node(0) == 0
        go.touch()
        assert [future.result(timeout=60) for future in held] == [1] * 200

    @pytest.mark.parametrize(
        ("choose", "message"),
        [
            (lambda pool: pool.node(4), "node=4: no such node; use nodes 0 to 3"),
            (lambda pool: pool.node(-1), "node=-1: no such node"),
            (lambda pool: pool.node("1"), "node='1': no such node"),
            (lambda pool: pool.nodes([0, 7]), "nodes=7: no such node; use nodes 0 to 3"),
            (lambda pool: pool.nodes([]), r"nodes=\[\]: empty; name at least one node"),
            (lambda pool: pool.nodes([1, 1]), r"nodes=\[1, 1\]: repeats a node"),
            (lambda pool: pool.nodes(1), r"nodes=1: not a list of node numbers"),
            (lambda pool: pool.role("x"), "role='x': no such role in this pool; use 'evaluation'"),
        ],
    )
    def test_a_missing_node_is_named_with_the_existing_ones(
        self, pool: sky.ComputePool, choose: Callable[[Any], object], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            choose(pool)

    def test_a_target_may_be_made_before_its_pool_is_open(self) -> None:
        closed = sky.ComputePool(sky.Local(), nodes=1)
        with pytest.raises(PoolClosed):
            node_of() >> closed.node(0)
        with pytest.raises(UsageError, match=r"nodes=1: no such node; use node 0, the only one"):
            closed.nodes([1])

    def test_the_number_of_nodes_is_a_number(self, pool: sky.ComputePool) -> None:
        assert pool.nodes == 4
        assert f"{pool.nodes}" == json.dumps(pool.nodes) == "4"
        assert isinstance(pool.nodes, int)


class TestRoles:
    def test_ordinary_calls_avoid_the_nodes_of_a_role(self, pool: sky.ComputePool) -> None:
        assert node_of() @ pool == [0, 1, 2]
        assert 3 not in set(pool.map(node_of, range(300)))
        assert 3 not in {future.result(timeout=60) for future in [node_of() > pool for _ in range(40)]}
        assert 3 not in {node_of() >> pool for _ in range(40)}, "nor by the direct line"
        assert ranks() @ pool == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
        assert ranks() >> pool != (3, 0, 1)
        assert [shard for _, shard, _ in node_and_shard([0, 1, 2]) @ pool] == [[0], [1], [2]]

    def test_a_role_is_a_target(self, pool: sky.ComputePool) -> None:
        role = pool.role("evaluation")
        assert node_of() >> role == 3
        assert node_of() @ role == [3]
        assert role.map(node_of, range(5)) == [3] * 5
        assert ranks() >> role == (3, 0, 1)
        assert role == pool.node(3)
        assert pool.roles == {"evaluation": (3,)}

    def test_slots_are_counted_for_the_calls_that_may_use_them(self, pool: sky.ComputePool) -> None:
        assert (pool.total_slots, pool.role("evaluation").total_slots, pool.node_numbers) == (3, 1, (0, 1, 2))

    def test_a_role_and_the_other_calls_use_only_their_own_slots(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        go = tmp_path / "go"
        held = [sky.compute(wait_for)(go) > pool for _ in range(5)]
        until(lambda: all(Path(f"{go}.{node}").exists() for node in range(3)))
        assert node_of() >> pool.role("evaluation") == 3
        go.touch()
        assert 3 not in {future.result(timeout=60) for future in held}

    @pytest.mark.parametrize(
        ("roles", "message"),
        [
            ({"a": [3]}, r"roles\['a'\]=3: no such node; use nodes 0 to 2"),
            ({"a": [1], "b": [2, 1]}, "roles: node 1 is in 'a' and in 'b'; give each node one role"),
            ({"a": [0, 1], "b": [2]}, "roles: all 3 nodes have a role, so none is left for ordinary calls"),
            ({"a": []}, r"roles\['a'\]=\[\]: empty; name at least one node"),
            ({"a": "1"}, r"roles\['a'\]='1': not a list of node numbers"),
            ({"a": 1}, r"roles\['a'\]=1: not a list of node numbers"),
            ({"": [1]}, "roles: '' is not a role name"),
            ([1], r"roles=\[1\]: not a dict"),
        ],
    )
    def test_impossible_roles_are_refused(self, roles: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            sky.ComputePool(sky.Local(), nodes=3, roles=roles)
        assert getattr(caught.value, "field", "").startswith("roles")

    def test_a_pool_without_roles_says_so(self) -> None:
        with pytest.raises(UsageError, match=r"role='x': no such role in this pool; set roles with"):
            sky.ComputePool(sky.Local()).role("x")


class TestLosses:
    def test_a_call_to_a_lost_node_fails_and_the_next_waits_for_its_successor(self, tmp_path: Path) -> None:
        with sky.ComputePool(sky.Local(), nodes=2, roles={"side": [1]}, logs=False) as pool:
            never, faults = tmp_path / "never", Faults(pool)
            running = sky.compute(wait_for)(never) > pool.role("side")
            until(Path(f"{never}.1").exists)
            waiting = node_of() > pool.node(1)
            faults.kill_node(1)
            with pytest.raises(NodeLost) as caught:
                running.result(timeout=60)
            assert caught.value.node == 1
            assert waiting.result(timeout=60) == 1
            assert node_of() >> pool.role("side") == 1, "its successor is kept for the role, too"
            faults.wait_until_whole()
            assert node_of() @ pool == [0]

    def test_many_threads_may_send_to_many_targets(self, pool: sky.ComputePool) -> None:
        wrong: list[Mapping[str, int]] = []

        def send(node: int) -> None:
            for _ in range(60):
                came = node_of() >> pool.node(node)
                if came != node:
                    wrong.append({"asked": node, "came": came})

        threads = [threading.Thread(target=send, args=(node,)) for node in (0, 1, 2, 3, 3, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
