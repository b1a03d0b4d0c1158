"""Reads any piece of a parameter from the pieces that it is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from infinity.checkpoint.load import Reader
from infinity.shard.tiles import Piece

Sources = Sequence[tuple[Piece, Reader]]
"""All the pieces of a parameter, each with what reads the slot that holds it."""


def piece_reader(wanted: Piece, sources: Sources) -> Reader:
    """Reads the slot that ``wanted`` is in, however the same parameter is cut in ``sources``.

    One source is read after the other, so that each is read in order. Rows that follow each other in a source come in
    one read, for which there is memory of at most the size that is asked for.
    """
    for source, reader in sources:
        if (source.start, source.stop) == (wanted.start, wanted.stop):
            return reader

    def read(start: int, into: torch.Tensor) -> None:
        if not into.numel():
            return
        for source, reader in sources:
            for at, stretch in _stretches(_common(wanted, source, start, start + into.numel())):
                target = into[stretch[0][0] - start : stretch[0][0] - start + stretch[0][1]]
                if len(stretch) == 1:
                    reader(at, target)
                    continue
                found = torch.empty(sum(count for _, count in stretch), dtype=into.dtype)
                reader(at, found)
                done = 0
                for position, count in stretch:
                    into[position - start : position - start + count] = found[done : done + count]
                    done += count

    return read


def _common(wanted: Piece, source: Piece, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """``(position in wanted, position in source, elements)`` of the runs that both have, from ``start`` to ``stop``."""
    if any(a >= d or c >= b for a, b, c, d in zip(wanted.start, wanted.stop, source.start, source.stop, strict=True)):
        return
    for flat, at, count in wanted.runs(wanted.position(start), wanted.position(stop - 1) + 1):
        for position, found, both in source.runs(flat, flat + count):
            yield at + position - flat, found, both


def _stretches(runs: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Runs that follow each other in the source: where they begin there, ``(position in wanted, elements)`` of each."""
    first = end = 0
    members: list[tuple[int, int]] = []
    for position, at, count in runs:
        if members and at != end:
            yield first, members
            members = []
        if not members:
            first = at
        members.append((position, count))
        end = at + count
    if members:
        yield first, members
