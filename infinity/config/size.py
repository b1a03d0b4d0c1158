"""Reads amounts of bytes as people write them."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from infinity.errors import ConfigError

UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip
AMOUNT = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", re.ASCII)
EXPECTED = 'a number of bytes, or text such as "8GiB" (2^30) or "8GB" (10^9)'


def parse_bytes(amount: object) -> int:
    """Whole bytes: ``"1.5GiB"``, ``"512 MB"``, ``4096``, ``1e9``. A part of a byte is dropped."""
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    if isinstance(amount, float) and math.isfinite(amount) and amount >= 0 and amount.is_integer():
        return int(amount)
    if isinstance(amount, str) and (match := AMOUNT.fullmatch(amount)):
        number, unit = match.groups()
        if (scale := UNITS.get(unit.upper() or "B")) is not None:
            return math.floor(Fraction(number) * scale)
        if unit.upper() in ("K", "M", "G", "T", "P"):
            raise ConfigError(
                f'"{amount}" could mean two sizes; write "{number}{unit.upper()}iB" (binary) or '
                f'"{number}{unit.upper()}B" (decimal).'
            )
    raise ConfigError(f"{amount!r:.80} is not a size; expected {EXPECTED}.")


def is_decimal(amount: int) -> bool:
    """Whether a budget was written in decimal units, as "96MB" or 96000000 are, rather than in binary ones."""
    return amount >= 1000 and amount % 1000 == 0 and amount % (1 << 20) != 0


def format_bytes(amount: int, decimal: bool = False) -> str:
    """``"8.00 GiB"``: two decimals in the largest unit that leaves at least one; bytes stay whole.

    Units are binary, or ``decimal`` ones (``"8.59 GB"``).
    """
    base, names = (1000, ("kB", "MB", "GB", "TB", "PB")) if decimal else (1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))
    sign, size = ("-" if amount < 0 else ""), abs(amount)
    if size < base:
        return f"{sign}{size} B"
    value, name = float(size), "B"
    for name in names:  # noqa: B007  the last name is used after the loop
        value /= base
        if round(value, 2) < base:
            break
    return f"{sign}{value:.2f} {name}"
