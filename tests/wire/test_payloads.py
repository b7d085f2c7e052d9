"""Values pass through `encode` and `decode` unchanged."""

from __future__ import annotations

import datetime
import decimal
import gc
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.wire import payloads
from skyward.wire.blobs import Blob
from skyward.wire.frames import INLINE_LIMIT, MAX_BODY
from skyward.wire.payloads import Encoded, decode, encode, paused_collector
from skyward.wire.tasks import REFERENCE, parse

Point = namedtuple("Point", "x y")  # noqa: PYI024  # the kind that users have


@dataclass
class Record:
    name: str
    data: Any


def round_trip(value: Any) -> Any:
    encoded = encode(value, Blob.snapshot)
    assert len(encoded.body) <= MAX_BODY
    return received(encoded)


def received(encoded: Encoded) -> Any:
    parsed = parse(encoded.body)
    assert parsed.references == tuple((blob.digest, blob.size) for blob in encoded.blobs)
    return decode(parsed, encoded.blobs)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(value=plain)
def test_plain_values_come_back_equal_and_of_their_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({3}),
        Point(1, 2),
        [Point(1, 2)],
        OrderedDict(a=1),
        defaultdict(list, {"a": [1]}),
        Record("a", [1, 2]),
        {"k": Record("b", None)},
        decimal.Decimal("1.10"),
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        range(3),
        1 + 2j,
        (1, (2, [3, {"a": (4,)}])),
        np.float32(1.5),
        len,
        Record,
        float("inf"),
    ],
    ids=repr,
)
def test_other_values_come_back_equal_and_of_their_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_shared_and_circular_references_stay() -> None:
    shared = [1]
    for one in (shared, [shared], {"k": [shared]}, [np.zeros(100_000), shared]):
        back = round_trip([one, one, Record("r", one)])
        assert back[0] is back[1]
        assert back[0] is back[2].data
    circle: list[Any] = []
    circle.append(circle)
    again = round_trip(circle)
    assert again[0] is again
    assert math.isnan(round_trip(float("nan")))


@pytest.mark.parametrize("size", [0, 1, INLINE_LIMIT - 1, INLINE_LIMIT, INLINE_LIMIT + 1, 1_000_000])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: (v, 1), lambda v: {"k": [v, v]}, lambda v: Record("r", v)])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_any_size_anywhere(size: int, wrap: Callable[[Any], Any], kind: Callable[[bytes], Any]) -> None:
    value = wrap(kind(bytes(range(256)) * (size // 256) + bytes(size % 256)))
    back = round_trip(value)
    assert back == value


def test_text_larger_than_a_frame_is_a_blob() -> None:
    text = "x" * 1_000_000
    encoded = encode(text, Blob.snapshot)
    assert len(encoded.body) < 1000
    assert received(encoded) == text


@pytest.mark.parametrize("dtype", ["u1", "i4", "f8", "c16", "M8[s]", "U3", "S5", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_type_and_order(dtype: str, order: Any) -> None:
    large = np.zeros((400, 1000), dtype=dtype, order=order)
    small = np.ones((2, 3), dtype=dtype, order=order)
    for array in (large, small, large[::2, ::3], large[:0], large.T):
        back = round_trip(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_a_large_array_is_not_in_the_frame_and_may_be_written() -> None:
    array = np.arange(1_000_000, dtype=np.float64)
    encoded = encode({"a": array}, Blob.snapshot)
    assert len(encoded.body) < 1000
    assert [blob.size for blob in encoded.blobs] == [array.nbytes]
    first, second = received(encoded)["a"], received(encoded)["a"]
    first[:] = -1
    assert np.array_equal(second, array), "mappings are private"
    assert second.flags.writeable


def test_a_value_of_very_many_arrays_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.full(INLINE_LIMIT, number, dtype=np.uint8) for number in range(5)]
    monkeypatch.setattr(payloads, "_MOST_BUFFERS", 3)  # private: thousands take gigabytes
    encoded = encode(arrays, Blob.snapshot)
    assert len(encoded.blobs) == 4, "the rest is in the pickle"
    assert all(map(np.array_equal, received(encoded), arrays))
    monkeypatch.setattr(payloads, "_MOST_BYTES", 4 * REFERENCE.size)  # private: as above
    small = [*arrays[:3], "a text"]
    encoded = encode(small, Blob.snapshot)
    assert len(encoded.blobs) == 4, "the pickle finds no room beside the names of the others"
    assert received(encoded)[3] == "a text"
    monkeypatch.setattr(payloads, "_MOST_BLOBS", 2)  # private: as above
    with pytest.raises(
        UsageError, match="call: 4 kept values in its arguments or its value; pass at most 1, and combine"
    ):
        encode(small, Blob.snapshot)


def test_a_read_only_array_and_a_view_come_back_equal() -> None:
    array = np.arange(500_000)
    array.flags.writeable = False
    assert np.array_equal(round_trip(array), array)
    assert np.array_equal(round_trip(memoryview(bytes(600_000)).tobytes()), bytes(600_000))


def test_small_arrays_and_numbers_of_numpy_are_as_from_pickle() -> None:
    array = np.zeros((3, 4), dtype=[("a", "i4"), ("b", "f8")], order="F")
    array["b"] = np.arange(12).reshape(3, 4)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    first, second, third, (number, truth) = round_trip([array, array, frozen, (np.float32(1.5), np.bool_(True))])
    assert first is second
    assert (first == array).all()
    assert first.flags.f_contiguous
    assert first.flags.writeable
    assert not third.flags.writeable
    assert (type(number), number, type(truth), bool(truth)) == (np.float32, 1.5, np.bool_, True)
    functions = round_trip(np.array([lambda: 1, lambda: 2]))
    assert [function() for function in functions] == [1, 2]


def test_object_arrays_travel_in_the_pickle() -> None:
    array = np.array([{"a": 1}, [2], None], dtype=object)
    assert list(round_trip(array)) == list(array)


def test_a_value_that_cannot_be_pickled_is_reported() -> None:
    import threading

    with pytest.raises(TypeError, match="cannot pickle"):
        encode([threading.Lock()], Blob.snapshot)


def test_the_elapsed_time_can_be_filled_in_later() -> None:
    encoded = encode([1, 2], Blob.snapshot)
    parsed = parse(encoded.with_elapsed(12345))
    assert parsed.elapsed_ns == 12345
    assert decode(parsed, ()) == [1, 2]


class TestTorch:
    torch = pytest.importorskip("torch")

    def test_tensors_come_back_equal_and_writable(self) -> None:
        torch = self.torch
        for tensor in (torch.arange(1_000_000), torch.ones(3), torch.zeros(0), torch.ones(600, 600).t()[::2]):
            back = round_trip(tensor)
            assert torch.equal(back, tensor)
            assert back.dtype == tensor.dtype
            back += 1

    def test_tensors_come_back_whatever_the_default_device_is(self) -> None:
        with self.torch.device("meta"):  # a device that a machine without an accelerator has, too
            assert round_trip(self.torch.ones(3, device="cpu")).tolist() == [1.0, 1.0, 1.0]

    def test_a_large_tensor_is_not_in_the_frame(self) -> None:
        encoded = encode(self.torch.zeros(1_000_000), Blob.snapshot)
        assert len(encoded.body) < 2000
        assert len(encoded.blobs) == 1

    def test_views_of_one_tensor_share_memory_on_the_other_side(self) -> None:
        base = self.torch.zeros(1000, 1000)
        whole, row = round_trip((base, base[3]))
        row += 1
        assert whole[3].sum() == 1000
        assert len(encode((base, base[3]), Blob.snapshot).blobs) == 1

    def test_parameters_and_modules_come_back(self) -> None:
        layer = self.torch.nn.Linear(400, 400)
        back = round_trip(layer)
        assert self.torch.equal(back.weight, layer.weight)
        assert back.weight.requires_grad


def test_garbage_collection_is_off_during_imports_and_restored_afterwards() -> None:
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            with pytest.raises(ZeroDivisionError), paused_collector():
                assert not gc.isenabled()
                raise ZeroDivisionError
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()
