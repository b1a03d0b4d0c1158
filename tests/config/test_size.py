"""Amounts of bytes: what is read, what is refused, what is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import format_bytes, parse_bytes
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        (0, 0),
        (4096, 4096),
        (5e8, 500_000_000),
        ("4096", 4096),
        ("100 B", 100),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("8GB", 8_000_000_000),
        ("1.5GiB", 3 << 29),
        ("0.1KiB", 102),
        ("2TiB", 2 << 40),
        ("1PB", 10**15),
    ],
)
def test_read(amount: object, size: int) -> None:
    assert parse_bytes(amount) == size


@pytest.mark.parametrize(
    "amount", [-1, True, None, 1.5, float("inf"), float("nan"), "", "GiB", "-1GiB", "1 GiBs", "1e3", "8 bits", "٣", [8]]
)
def test_refused(amount: object) -> None:
    with pytest.raises(ConfigError, match="not a size; expected a number of bytes"):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", ["8G", "8 g"])
def test_an_ambiguous_unit_names_both_meanings(amount: str) -> None:
    with pytest.raises(ConfigError, match=r'write "8GiB" \(binary\) or "8GB" \(decimal\)'):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8 << 30, "8.00 GiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (3 << 49, "1.50 PiB"),
        (5000 << 50, "5000.00 PiB"),
        (-(1 << 20), "-1.00 MiB"),
    ],
)
def test_written(size: int, written: str) -> None:
    assert format_bytes(size) == written


@given(st.integers(0, 2**60))
def test_what_is_written_reads_back_within_its_two_decimals(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * max(size, 1) + 1
