"""Multiplies by a matrix that is only ever there tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

from infinity.shard.tiles import Splits, tiles_of

Region = tuple[slice, slice]
"""Rows and columns of a tile in its matrix."""


class Tiles(Protocol):
    """A matrix in tiles, row-major. At most one is lent at a time."""

    shape: tuple[int, ...]
    regions: Sequence[Region]

    @property
    def wants_gradient(self) -> bool:
        """Whether the backward that is running is to deposit gradients."""
        ...

    def lend(self, number: int) -> Any:
        """Context with the values of tile ``number``, which must not be referred to afterwards."""
        ...

    def deposit(self, number: int, gradient: Tensor) -> None:
        """Takes the gradient of tile ``number``; in one backward every tile gets one."""
        ...

    def attach(self, weight: Tensor | None) -> None:
        """Is told the matrix, by whoever has it in memory."""
        ...

    def gradient(self) -> Tensor | None:
        """The gradient of the matrix told to ``attach``, if this backward is to return one."""
        ...


class SplitWeight:
    """Tiles of a matrix that is in memory as a whole."""

    def __init__(self, shape: tuple[int, ...], splits: Splits) -> None:
        self.shape = shape
        self.regions: Sequence[Region] = [
            (slice(start[0], stop[0]), slice(start[1], stop[1])) for start, stop in tiles_of(shape, splits)
        ]
        self._weight: Tensor | None = None
        self._gradient: Tensor | None = None

    @property
    def wants_gradient(self) -> bool:
        return True

    @contextmanager
    def lend(self, number: int) -> Iterator[Tensor]:
        assert self._weight is not None
        yield self._weight[self.regions[number]]

    def deposit(self, number: int, gradient: Tensor) -> None:
        assert self._weight is not None
        if self._gradient is None:
            self._gradient = torch.empty(self.shape, dtype=self._weight.dtype, device=self._weight.device)
        self._gradient[self.regions[number]] = gradient

    def attach(self, weight: Tensor | None) -> None:
        self._weight = weight

    def gradient(self) -> Tensor | None:
        found, self._gradient, self._weight = self._gradient, None, None
        return found


def tiled_linear(tiles: Tiles, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, transposed: bool) -> Tensor:
    """``x @ W.T + bias``, or ``x @ W + bias`` if ``transposed``, for ``x`` of ``(..., inputs)``.

    ``weight`` is the matrix where it is in memory, else a tensor that requires a gradient if anything is to have one.
    Each tile is lent once in forward, once in backward, there in the opposite order. Where the tiles share their
    inputs, output and the gradients of weight and bias are those of one multiplication, bit for bit, if the BLAS
    computes an element of a narrow matrix as it does that of a wide one (MKL does, from 16 outputs on); what several
    tiles add up to (the gradient of ``x``, outputs of tiles that differ in their inputs) is summed in fp32.
    """
    cast = None
    if torch.is_autocast_enabled(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(cast), None if bias is None else bias.to(cast)
    with torch.autocast(x.device.type, enabled=False):
        out = TiledProduct.apply(tiles, x.reshape(-1, x.shape[-1]), weight, bias, transposed, cast)  # type: ignore[no-untyped-call]
    shaped: Tensor = out.view(*x.shape[:-1], out.shape[-1])
    return shaped


class TiledProduct(torch.autograd.Function):
    """The product of a 2-D tensor with a matrix in tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        transposed: bool,
        cast: torch.dtype | None,
    ) -> Tensor:
        ctx.tiles, ctx.transposed, ctx.cast = tiles, transposed, cast
        ctx.save_for_backward(x, weight)
        tiles.attach(weight)
        out = x.new_empty(x.shape[0], tiles.shape[1 if transposed else 0])
        by_output = sorted(range(len(tiles.regions)), key=lambda number: _in_out(tiles, number, transposed)[1].start)
        parts = _partial_sums(x.dtype, len({_in_out(tiles, number, transposed)[0].start for number in by_output}))
        for number in by_output:
            inputs, outputs = _in_out(tiles, number, transposed)
            with tiles.lend(number) as tile:
                own_bias = bias[outputs] if bias is not None and inputs.start == 0 else None
                part = _multiplied(x[:, inputs], tile if cast is None else tile.to(cast), own_bias, transposed)
            parts.add(out, outputs, part, first=inputs.start == 0, last=inputs.stop == x.shape[1])
        tiles.attach(None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tiles, transposed = ctx.tiles, ctx.transposed
        x, weight = ctx.saved_tensors
        tiles.attach(weight)
        _, wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        deposits = wants_weight and tiles.wants_gradient
        to_x = torch.empty_like(x) if wants_x else None
        numbers = range(len(tiles.regions))
        by_input = sorted(numbers, key=lambda number: _in_out(tiles, number, transposed)[0].start)
        count = len({_in_out(tiles, number, transposed)[1].start for number in by_input})
        parts = _partial_sums(x.dtype, count)
        for number in reversed(by_input):
            inputs, outputs = _in_out(tiles, number, transposed)
            own = gradient[:, outputs]
            if to_x is not None:
                with tiles.lend(number) as tile:
                    factor = tile if ctx.cast is None else tile.to(ctx.cast)
                    part = own @ (factor.t() if transposed else factor)
                parts.add(to_x, inputs, part, first=outputs.stop == gradient.shape[1], last=outputs.start == 0)
            if deposits:
                left, right = (x[:, inputs], own) if transposed else (own, x[:, inputs])
                tiles.deposit(number, left.t() @ right)
        return None, to_x, tiles.gradient(), gradient.sum(0) if wants_bias else None, None, None


class _PartialSums:
    """Adds up the columns of a 2-D result, in the order in which they come."""

    def add(self, into: Tensor, columns: slice, part: Tensor, *, first: bool, last: bool) -> None:
        if first:
            into[:, columns] = part
        else:
            into[:, columns] += part


class _WideSums(_PartialSums):
    """The same for 16-bit results, rounded once."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, into: Tensor, columns: slice, part: Tensor, *, first: bool, last: bool) -> None:
        self._sum = part.float() if self._sum is None or first else self._sum.add_(part)
        if last:
            into[:, columns] = self._sum
            self._sum = None


def _partial_sums(dtype: torch.dtype, terms: int) -> _PartialSums:
    return _WideSums() if terms > 1 and dtype.itemsize < 4 else _PartialSums()


def _in_out(tiles: Tiles, number: int, transposed: bool) -> Region:
    """The inputs, the outputs of a tile."""
    rows, columns = tiles.regions[number]
    return (rows, columns) if transposed else (columns, rows)


def _multiplied(x: Tensor, tile: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, tile, bias)
    return x @ tile if bias is None else torch.addmm(bias, x, tile)


class TiledEmbedding(torch.autograd.Function):
    """Rows of a matrix in tiles, looked up by number."""

    @staticmethod
    def forward(ctx: Any, tiles: Tiles, indices: Tensor, anchor: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
        """``indices`` of any shape; ``padding`` is the row that gets no gradient, -1 for none."""
        ctx.tiles, ctx.padding = tiles, padding
        ctx.save_for_backward(indices)
        flat = indices.reshape(-1)
        if flat.numel() and (flat.min() < 0 or flat.max() >= tiles.shape[0]):
            raise IndexError("index out of range in self")
        out = torch.empty(flat.numel(), tiles.shape[1], dtype=dtype, device=indices.device)
        for number, (rows, columns) in enumerate(tiles.regions):
            found = _found(flat, rows)
            with tiles.lend(number) as tile:  # even if no row of it is asked for: the order does not depend on data
                out[found, columns] = tile[flat[found] - rows.start]
        shaped: Tensor = out.view(*indices.shape, tiles.shape[1])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tiles: Tiles = ctx.tiles
        if tiles.wants_gradient:
            flat = ctx.saved_tensors[0].reshape(-1)
            given = gradient.reshape(flat.numel(), -1)
            for number, (rows, columns) in reversed(list(enumerate(tiles.regions))):
                found = _found(flat, rows)
                padding = ctx.padding - rows.start if rows.start <= ctx.padding < rows.stop else -1
                local = flat[found] - rows.start
                size = rows.stop - rows.start
                own = given[found, columns].contiguous()
                tiles.deposit(number, torch.ops.aten.embedding_dense_backward(own, local, size, padding, False))
        return None, None, None, None, None


def _found(indices: Tensor, rows: slice) -> Tensor:
    """Where in ``indices``, 1-D, there is one of ``rows``."""
    found: Tensor = ((indices >= rows.start) & (indices < rows.stop)).nonzero().view(-1)
    return found


class Assembled(torch.autograd.Function):
    """The whole matrix, for an operation that knows nothing of tiles."""

    @staticmethod
    def forward(ctx: Any, tiles: Tiles, anchor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.tiles = tiles
        whole = torch.empty(tiles.shape, dtype=dtype, device=anchor.device)
        for number, region in enumerate(tiles.regions):
            with tiles.lend(number) as tile:
                whole[region] = tile
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.tiles.wants_gradient:
            for number, region in reversed(list(enumerate(ctx.tiles.regions))):
                ctx.tiles.deposit(number, gradient[region])
        return None, None, None


class TiledLinear(nn.Linear):
    """``nn.Linear`` that works through its weight in a grid of ``out_splits`` by ``in_splits`` tiles.

    The same parameters, initial values and ``state_dict`` as ``nn.Linear(in_features, out_features, bias)``. In a model
    that an engine trains each tile is fetched, used, released by itself, forward as well as backward, so that the
    device holds one tile of the layer at a time, two with read-ahead. Outside of one it computes the same bits from
    the weight in memory. With ``in_splits=1`` the output is that of ``nn.Linear``, bit for bit.

    Raises ``ValueError`` for a number of splits below one or above the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ValueError(
                    f"TiledLinear: {name}_splits is {splits}; expected 1 to {features}, as many as {name}_features"
                )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.in_splits, self.out_splits = in_splits, out_splits

    @property
    def tile_splits(self) -> Splits:
        """How often the weight's outputs and inputs are cut."""
        return self.out_splits, self.in_splits

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``."""
        if has_torch_function_unary(self.weight):
            out: Tensor = F.linear(x, self.weight, self.bias)
            return out
        tiles = SplitWeight(tuple(self.weight.shape), self.tile_splits)
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(x.device.type):
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        return tiled_linear(tiles, x, weight, self.bias, transposed=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in_splits={self.in_splits}, out_splits={self.out_splits}"
