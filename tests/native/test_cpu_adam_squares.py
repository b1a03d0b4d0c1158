"""The sum of squares is exact to fp64 and the same bits on any body, any number of threads."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._native.cpu_adam import SquareSum, TorchKernels, open_kernels, runnable_isas

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
each_isa = pytest.mark.parametrize("isa", runnable_isas())
each_body = pytest.mark.parametrize("isa", [*runnable_isas(), "torch"])


def numbers(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-4, 4, (n,), generator=generator)
    return wide.to(dtype)


@each_body
def test_it_is_as_good_as_an_exact_sum(isa: str) -> None:
    for n in (1, 1000, 1024, 100_003):
        x = numbers(n)
        exact = math.fsum(value * value for value in x.tolist())
        assert open_kernels(isa).sum_of_squares(x).value == pytest.approx(exact, rel=1e-14)


@each_body
def test_ten_million_equal_elements_lose_nothing(isa: str) -> None:
    n = 10_000_019
    total = open_kernels(isa, threads=2).sum_of_squares(torch.full((n,), 1.1))
    exact = n * Fraction(float(torch.tensor(1.1))) ** 2
    assert abs((Fraction(total.hi) + Fraction(total.lo)) / exact - 1) < Fraction(1, 10**15)


@each_isa
@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 5000), offset=st.integers(0, 17), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 2**31))
def test_any_length_at_any_offset_equals_the_reference(
    isa: str, n: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    x = numbers(n + offset, seed, dtype)[offset:]
    assert open_kernels(isa).sum_of_squares(x) == TorchKernels().sum_of_squares(x)


@each_isa
@pytest.mark.parametrize("n", [65_536, 65_537, 200_003, 17 * 2**20 + 12_345])
def test_threads_never_change_a_bit(isa: str, n: int) -> None:
    x = numbers(n)
    want = TorchKernels().sum_of_squares(x)
    assert want.lo != 0.0
    for threads in (1, 2, 3):
        assert open_kernels(isa, threads).sum_of_squares(x) == want


@each_body
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_element_anywhere_is_seen(isa: str, dtype: torch.dtype) -> None:
    kernels = open_kernels(isa, threads=2)
    n = 70_001
    assert kernels.sum_of_squares(numbers(n, dtype=dtype)).finite
    for bad, at in ((math.inf, 0), (-math.inf, 40_000), (math.nan, n - 1)):
        x = numbers(n, dtype=dtype)
        x[at] = bad
        total = kernels.sum_of_squares(x)
        assert not total.finite
        assert total.lo == 0.0
        assert math.isnan(total.hi) if math.isnan(bad) else total.hi == math.inf


@each_body
def test_the_largest_and_smallest_numbers_neither_overflow_nor_vanish(isa: str) -> None:
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    total = open_kernels(isa).sum_of_squares(torch.full((2048,), largest))
    assert total.finite
    assert total.value == 2048 * largest**2
    assert open_kernels(isa).sum_of_squares(torch.full((4,), smallest)).value == 4 * smallest**2


@each_body
def test_the_empty_sum_is_zero(isa: str) -> None:
    assert open_kernels(isa).sum_of_squares(torch.empty(0)) == SquareSum()


def test_sums_add_up_without_losing_digits() -> None:
    parts = [SquareSum(2.0**60), SquareSum(1.0), SquareSum(2.0**-40), SquareSum(1.0)]
    total = sum(parts, SquareSum())
    assert Fraction(total.hi) + Fraction(total.lo) == 2**60 + 2 + Fraction(1, 2**40)
    assert not (SquareSum(1.0) + SquareSum(math.inf, 0.0, False)).finite
    assert math.isnan((SquareSum(math.inf, 0.0, False) + SquareSum(math.nan, 0.0, False)).hi)
