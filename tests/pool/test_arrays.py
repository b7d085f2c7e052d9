"""Arrays, tensors and frames arrive whole and writable, and nobody else sees the writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky

np = pytest.importorskip("numpy")

LARGE = 200_000  # float64: 1.6 MB, beside the frames


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=1, logs=False)


def same(x: Any) -> Any:
    return x


echo = sky.compute(same)


def arrays() -> dict[str, Any]:
    base = np.arange(LARGE, dtype=np.float64)
    readonly = base.copy()
    readonly.flags.writeable = False
    return {
        "plain": base,
        "small": np.arange(5),
        "fortran": np.asfortranarray(base.reshape(400, -1)),
        "strided": base[::3],
        "reversed": base[::-1],
        "empty": np.zeros((0, 3)),
        "scalar": np.array(3.5),
        "readonly": readonly,
        "bools": base > 5,
        "complex": base * 1j,
        "strings": np.array(["a", "bcd"] * 1000),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "times": np.arange(LARGE).astype("datetime64[s]"),
        "records": np.zeros(LARGE, dtype=[("a", "i4"), ("b", "f8")]),
    }


@pytest.mark.parametrize("name", sorted(arrays()))
def test_an_array_comes_back_unchanged(pool: sky.ComputePool, name: str) -> None:
    array = arrays()[name]
    back = echo(array) >> pool
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.f_contiguous == array.flags.f_contiguous or name in ("strided", "reversed")


def test_a_task_may_write_and_nobody_sees_it(pool: sky.ComputePool) -> None:
    def spoil(x: Any) -> float:
        before = float(x.sum())
        x[:] = -1
        return before

    array = np.ones(LARGE)
    assert [sky.compute(spoil)(array) >> pool for _ in range(3)] == [LARGE] * 3
    assert array.sum() == LARGE


def test_a_result_may_be_written(pool: sky.ComputePool) -> None:
    back = echo(np.ones(LARGE)) >> pool
    back[:] = 2
    assert back.sum() == 2 * LARGE


def test_the_task_sees_the_array_as_it_was_at_submission(pool: sky.ComputePool) -> None:
    array = np.ones(LARGE)
    futures = []
    for i in range(5):
        array[:] = i
        futures.append(sky.compute(np.sum)(array) > pool)
    array[:] = -1
    assert [float(f.result(timeout=60)) for f in futures] == [i * LARGE for i in range(5)]


def test_arrays_within_containers_and_objects_arrive(pool: sky.ComputePool) -> None:
    array = np.arange(LARGE)
    back = echo({"list": [array, array], "tuple": (1, array), "bytes": bytes(LARGE)}) >> pool
    assert np.array_equal(back["list"][0], array)
    assert np.array_equal(back["tuple"][1], array)
    assert back["bytes"] == bytes(LARGE)


def test_an_array_in_a_closure_arrives(pool: sky.ComputePool) -> None:
    weights = np.full(LARGE, 2.0)

    def total(x: float) -> float:
        return float(weights.sum() * x)

    assert pool.map(total, [1, 2, 3]) == [2.0 * LARGE * x for x in (1, 2, 3)]
    weights[:] = 3.0
    assert pool.map(total, [1]) == [3.0 * LARGE]


def test_frames_arrive(pool: sky.ComputePool) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": np.arange(LARGE), "b": np.arange(LARGE) * 0.5, "c": ["x", "y"] * (LARGE // 2)})

    def add(f: Any) -> Any:
        f["d"] = f["a"] + f["b"]
        return f

    back = sky.compute(add)(frame) >> pool
    assert list(frame.columns) == ["a", "b", "c"]
    pd.testing.assert_frame_equal(back[["a", "b", "c"]], frame)
    assert back["d"].iloc[-1] == frame["a"].iloc[-1] * 1.5


class TestTensors:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("n", [4, LARGE])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
    def test_a_tensor_comes_back_unchanged(self, pool: sky.ComputePool, torch: Any, n: int, dtype: str) -> None:
        tensor = torch.arange(n).to(getattr(torch, dtype))
        back = echo(tensor) >> pool
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        back.zero_()

    def test_views_share_their_storage_on_the_node_too(self, pool: sky.ComputePool, torch: Any) -> None:
        def write_through(whole: Any, part: Any) -> float:
            part.fill_(7)
            return float(whole[10])

        whole = torch.zeros(LARGE)
        assert sky.compute(write_through)(whole, whole[5:20]) >> pool == 7
        assert float(whole.sum()) == 0

    def test_strided_empty_and_differentiable_tensors_arrive(self, pool: sky.ComputePool, torch: Any) -> None:
        tensor = torch.arange(LARGE, dtype=torch.float32).reshape(400, -1).t()
        back = echo(tensor) >> pool
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)
        assert (echo(torch.ones(LARGE, requires_grad=True)) >> pool).requires_grad
        assert (echo(torch.empty(0, 3)) >> pool).shape == (0, 3)

    def test_a_module_arrives(self, pool: sky.ComputePool, torch: Any) -> None:
        def one_step(model: Any, x: Any) -> Any:
            model(x).sum().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(0.1 * weight.grad)
            return model

        model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.ReLU(), torch.nn.Linear(600, 1))
        before = model[0].weight.detach().clone()
        trained = sky.compute(one_step)(model, torch.ones(2, 600)) >> pool
        assert torch.equal(model[0].weight, before)
        assert not torch.equal(trained[0].weight, before)
        assert trained(torch.ones(1, 600)).shape == (1, 1)
