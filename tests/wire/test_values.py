"""Narrowing and widening of rows against numpy's binary16 and torch's
bfloat16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.structs import Wire

FP32, FP16, BF16 = range(3)
SMALLEST = np.float32(2.0**-126)
lib = Wire().lib
Array = np.ndarray[Any, Any]


def pointer(array: Array | None) -> ctypes.c_void_p:
    """The address of an array."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def narrow(dtype: int, rows: Array) -> tuple[Array, Array | None]:
    """Wire values, [n, dim] bits, and scales [n] of fp16."""
    n, dim = rows.shape
    out = np.empty((n, dim), np.uint32 if dtype == FP32 else np.uint16)
    scales = np.empty(n, np.float32) if dtype == FP16 else None
    lib.persia_wire_narrow(
        ctypes.c_uint32(dtype),
        ctypes.c_size_t(n),
        ctypes.c_uint32(dim),
        pointer(rows),
        ctypes.c_size_t(rows.strides[0] // 4 if n > 1 else dim),
        pointer(out),
        pointer(scales),
    )
    return out, scales


def widen(dtype: int, bits: Array, scales: Array | None, gap: int = 0):
    """fp32 rows [n, dim] that lie `gap` floats apart."""
    n, dim = bits.shape
    out = np.full((n, dim + gap), 777, np.float32)
    lib.persia_wire_widen(
        ctypes.c_uint32(dtype),
        ctypes.c_size_t(n),
        ctypes.c_uint32(dim),
        pointer(bits),
        pointer(scales),
        pointer(out),
        ctypes.c_size_t(dim + gap),
    )
    assert (out[:, dim:] == 777).all()
    return out[:, :dim]


def same_floats(a: Array, b: Array) -> None:
    """Equal bits; any NaN equals any other."""
    assert a.dtype == b.dtype
    unsigned = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    differ = (a.view(unsigned) != b.view(unsigned)) & ~(
        np.isnan(a) & np.isnan(b)
    )
    assert not differ.any(), (a[differ][:5], b[differ][:5])


def all_halves() -> Array:
    """Every binary16 number."""
    return np.arange(65536, dtype=np.uint32).astype(np.uint16)


def test_every_half_is_widened() -> None:
    """To the number that numpy says, times the scale."""
    bits = all_halves()
    for dim in 1, 3, 4, 8, 16, 64:
        rows = np.ascontiguousarray(bits[: len(bits) // dim * dim])
        rows = rows.reshape(-1, dim)
        for scale in 1.0, 3.7e-5, 1e30, float(SMALLEST):
            scales = np.full(len(rows), scale, np.float32)
            with np.errstate(all="ignore"):
                expected = (
                    rows.view(np.float16).astype(np.float32) * scales[:, None]
                )
            same_floats(widen(FP16, rows, scales, gap=3), expected)


def test_numbers_beside_every_half_are_rounded_to_nearest_even() -> None:
    """Halves themselves, ties between two, and what lies just beside."""
    halves = all_halves().view(np.float16).astype(np.float32)
    halves = halves[np.abs(halves) <= 32768]
    up = np.nextafter(halves.astype(np.float16), np.float16(np.inf))
    ties = (halves.astype(np.float64) + up.astype(np.float64)) / 2
    ties = ties.astype(np.float32)
    numbers = np.concatenate(
        [
            halves,
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            np.nextafter(ties, np.float32(-np.inf)),
            np.nextafter(halves, np.float32(np.inf)),
        ]
    )
    numbers = numbers[np.abs(numbers) <= 32768]
    for dim in 4, 8, 13, 64:
        # One column of 32768 makes the scale 1.
        room = numbers[: len(numbers) // (dim - 1) * (dim - 1)]
        rows = np.full((len(room) // (dim - 1), dim), 32768, np.float32)
        rows[:, 1:] = room.reshape(-1, dim - 1)
        bits, scales = narrow(FP16, rows)
        assert scales is not None and (scales == 1).all()
        same_floats(bits.view(np.float16), rows.astype(np.float16))


@settings(max_examples=300)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-38, 1e-44, 1e30, 3e38, 0.0]),
)
def test_a_row_is_scaled_by_its_largest_value(
    n: int, dim: int, seed: int, size: float
) -> None:
    """scale = max |row| / 32768, and at least the smallest normal number."""
    random = np.random.default_rng(seed)
    rows = random.uniform(-1, 1, (n, dim)) * 10 ** random.uniform(-6, 0, dim)
    rows = (rows * size).astype(np.float32)
    bits, scales = narrow(FP16, rows)
    largest = np.abs(rows).max(axis=1)
    expected = np.maximum(largest * np.float32(2.0**-15), SMALLEST)
    assert scales is not None
    same_floats(scales, expected)
    halves = bits.view(np.float16)
    assert np.isfinite(halves).all()
    same_floats(halves, (rows / scales[:, None]).astype(np.float16))
    back = widen(FP16, bits, scales)
    # Half an ulp of the value, or of the smallest half times the scale.
    error = np.abs(back.astype(np.float64) - rows)
    bound = np.maximum(
        np.abs(rows) * 2.0**-11, scales[:, None].astype(np.float64) * 2.0**-25
    )
    # And the rounding of the fp32 division and product.
    assert (error <= bound * 1.001 + np.abs(rows) * 2.0**-22 + 1e-45).all()


def test_nan_and_inf_stay_what_they_are() -> None:
    """Their row gets scale 1; its other values may become Inf, too."""
    for dim in 3, 4, 8, 32:
        rows = np.ones((4, dim), np.float32)
        rows[0, 1], rows[1, 1], rows[2, 1] = np.nan, np.inf, -np.inf
        rows[2, 2] = 1e9
        bits, scales = narrow(FP16, rows)
        assert scales is not None
        assert list(scales) == [1, 1, 1, np.float32(2.0**-15)]
        with np.errstate(over="ignore"):
            rows[2, 2] = np.inf
        same_floats(widen(FP16, bits, scales), rows)
        rows[2, 2] = 1.5
        bits, none = narrow(BF16, rows)
        assert none is None
        same_floats(widen(BF16, bits, None), rows)


def test_bf16_is_rounded_as_torch_does() -> None:
    """Nearest, ties to even; subnormal numbers, Inf and NaN too."""
    random = np.random.default_rng(3)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:65536] = np.arange(65536, dtype=np.uint32) << 16
    bits[65536:131072] = bits[:65536] | 0x8000
    for dim in 1, 4, 8, 25, 64:
        room = np.ascontiguousarray(bits[: len(bits) // dim * dim])
        rows = room.view(np.float32).reshape(-1, dim)
        got, _ = narrow(BF16, rows)
        expected = torch.from_numpy(rows).to(torch.bfloat16)
        back = widen(BF16, got, None, gap=1)
        same_floats(back.copy(), expected.float().numpy())


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_rows_may_lie_apart(dtype: int) -> None:
    """The stride of fp32 rows is the caller's."""
    random = np.random.default_rng(5)
    wide = random.normal(size=(9, 50)).astype(np.float32)
    rows, packed = wide[:, :20], wide[:, :20].copy()
    apart, scales = narrow(dtype, rows)
    together, scales_too = narrow(dtype, packed)
    assert (apart == together).all()
    if dtype == FP16:
        assert scales is not None and (scales == scales_too).all()
    if dtype == FP32:
        assert (apart.view(np.float32) == packed).all()
    for gap in 0, 30:
        back = widen(dtype, apart, scales, gap)
        assert np.allclose(back, packed, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_no_rows_are_no_work(dtype: int) -> None:
    """Also without any memory."""
    size, dim = ctypes.c_size_t, ctypes.c_uint32(8)
    lib.persia_wire_narrow(dtype, size(0), dim, None, size(8), None, None)
    lib.persia_wire_widen(dtype, size(0), dim, None, None, None, size(8))
