"""Reads any piece of a parameter from the pieces that it is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from infinity.checkpoint.load import Reader
from infinity.shard.tiles import Piece

Sources = Sequence[tuple[Piece, Reader]]
"""All the pieces of a parameter, each with what reads the slot that holds it."""

WITH_GAPS = 4
"""A read that begins costs as much as some KiB more of one that goes on, so what is between columns is read along."""


def piece_reader(wanted: Piece, sources: Sources) -> Reader:
    """Reads the slot that ``wanted`` is in, however the same parameter is cut in ``sources``.

    One source is read after the other, so that each is read in order. Rows that follow each other in a source come in
    one read, with what is between them where that is little: it takes memory of up to ``WITH_GAPS`` times what is asked
    for.
    """
    for source, reader in sources:
        if (source.start, source.stop) == (wanted.start, wanted.stop):
            return reader

    def read(start: int, into: torch.Tensor) -> None:
        if not into.numel():
            return
        for source, reader in sources:
            for at, stretch in _stretches(_common(wanted, source, start, start + into.numel())):
                position, _, count = stretch[0]
                target = into[position - start : position - start + count]
                if len(stretch) == 1:
                    reader(at, target)
                    continue
                last = stretch[-1]
                found = torch.empty(last[1] + last[2] - at, dtype=into.dtype)
                reader(at, found)
                for position, where, count in stretch:
                    into[position - start : position - start + count] = found[where - at : where - at + count]

    return read


def _common(wanted: Piece, source: Piece, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """``(position in wanted, position in source, elements)`` of the runs that both have, from ``start`` to ``stop``."""
    if any(a >= d or c >= b for a, b, c, d in zip(wanted.start, wanted.stop, source.start, source.stop, strict=True)):
        return
    for flat, at, count in wanted.runs(wanted.position(start), wanted.position(stop - 1) + 1):
        for position, found, both in source.runs(flat, flat + count):
            yield at + position - flat, found, both


def _stretches(runs: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Runs that follow each other in the source with little between: where they begin there, each of them."""
    members: list[tuple[int, int, int]] = []
    for position, at, count in runs:
        if members:
            gap = at - members[-1][1] - members[-1][2]
            if not 0 <= gap < WITH_GAPS * count:
                yield members[0][1], members
                members = []
        members.append((position, at, count))
    if members:
        yield members[0][1], members
