"""Cuts large matrices into tiles that move one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

MIN_TILE_ROWS = 32
"""A tile has at least so many outputs while the inputs can be cut instead: thinner ones compute badly."""

Splits = tuple[int, int]
"""How often the first and the second dimension of a weight are cut."""

WHOLE: Splits = (1, 1)


@dataclass(frozen=True)
class Piece:
    """The part of the parameter ``name``, of ``shape``, that slot ``slot`` of unit ``unit`` holds: all, or a tile.

    A slot is contiguous in its unit and holds ``parameter[start[0]:stop[0], start[1]:stop[1], ...]`` in row-major
    order. ``Partition.pieces`` gives every parameter's pieces, which is all that is needed to store a model by the
    names and flat ranges its user knows, however it is cut.
    """

    name: str
    shape: tuple[int, ...]
    unit: int
    slot: int
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return not any(self.start) and self.stop == self.shape

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def region(self) -> tuple[slice, ...]:
        """What ``parameter[piece.region]`` is indexed with."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def position(self, at: int) -> int:
        """Where in the flat parameter element ``at`` of the slot is; greater ones are further on."""
        if len(self.shape) != 2:
            return at
        row, column = divmod(at, self.stop[1] - self.start[1])
        return (self.start[0] + row) * self.shape[1] + self.start[1] + column

    def runs(self, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int, int]]:
        """``(position in the flat parameter, position in the slot, elements)`` of each contiguous stretch, in order.

        ``low`` and ``high`` leave out what lies outside that range of the flat parameter.
        """
        high = math.prod(self.shape) if high is None else high
        width = self.shape[-1] if len(self.shape) == 2 else math.prod(self.shape)
        top, left, right = (*self.start, self.stop[1]) if len(self.shape) == 2 else (0, 0, width)
        rows = self.tile_shape[0] if len(self.shape) == 2 else 1
        if right - left == width:  # whole rows follow each other
            top, left, right, width, rows = 0, top * width, (top + rows) * width, (top + rows) * width, 1
        for number in range(max(0, low // max(width, 1) - top), min(rows, -(-high // max(width, 1)) - top)):
            start = (top + number) * width + left
            first, last = max(start, low), min(start + right - left, high)
            if first < last:
                yield first, number * (right - left) + first - start, last - first


def whole_piece(shape: tuple[int, ...], name: str = "", unit: int = 0, slot: int = 0) -> Piece:
    """All of a parameter."""
    return Piece(name, shape, unit, slot, (0,) * len(shape), shape)


@dataclass(frozen=True)
class TiledMatrix:
    """A parameter that is cut: its name, its shape, where modules know it, its tiles in row-major order.

    ``homes`` are the ``(module path, attribute)`` under which it is known, the first being its own.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    homes: tuple[tuple[str, str], ...]
    pieces: tuple[Piece, ...]


def splits_for(
    module: nn.Module, attribute: str, shape: tuple[int, ...], itemsize: int, tile_bytes: int | None
) -> Splits:
    """How the parameter ``attribute`` of ``module`` is to be cut so that no tile has more than ``tile_bytes``.

    Cut are the weights of ``nn.Linear`` and Hugging Face's ``Conv1D`` along the outputs, those of ``nn.Embedding``
    along the rows; along the inputs only where tiles would be thinner than ``MIN_TILE_ROWS`` outputs. A module with
    ``tile_splits``, such as ``TiledLinear``, says itself how. Everything else stays whole.
    """
    if attribute != "weight" or len(shape) != 2:
        return WHOLE
    wanted = getattr(module, "tile_splits", None)
    if wanted is not None:
        return wanted  # type: ignore[no-any-return]
    if tile_bytes is None or math.prod(shape) * itemsize <= tile_bytes:
        return WHOLE
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return (_parts(shape[0], shape[1] * itemsize, tile_bytes), 1) if plain else WHOLE
    if isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return _linear_splits(shape[0], shape[1], itemsize, tile_bytes)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        outputs, inputs = _linear_splits(shape[1], shape[0], itemsize, tile_bytes)
        return inputs, outputs
    return WHOLE


def tiles_of(shape: tuple[int, ...], splits: Splits) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """``(start, stop)`` of every tile, in row-major order; all but the last of a row or column have one size."""
    rows, columns = (_cuts(size, count) for size, count in zip(shape, splits, strict=True))
    return [((top, left), (bottom, right)) for top, bottom in rows for left, right in columns]


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    step = -(-size // min(count, size))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _linear_splits(outputs: int, inputs: int, itemsize: int, tile_bytes: int) -> Splits:
    thinnest = min(MIN_TILE_ROWS, outputs)
    columns = _parts(inputs, thinnest * itemsize, tile_bytes)
    width = -(-inputs // columns)
    return _parts(outputs, width * itemsize, tile_bytes), columns


def _parts(size: int, nbytes_each: int, tile_bytes: int) -> int:
    """The smallest number of parts of ``size`` things such that none is larger than ``tile_bytes``."""
    return -(-size // max(1, tile_bytes // nbytes_each))
