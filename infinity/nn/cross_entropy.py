"""Cross-entropy of an output head whose logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from infinity.nn.tiled import SplitWeight, Tiles

CHUNK_TOKENS = 1024
"""Tokens whose logits of one tile exist at once."""

VOCABULARY_TILE = 8192
"""Rows of a head in memory that make up one tile."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight).float(), targets)`` in the memory of a part of the logits.

    ``hidden`` is ``(..., width)``, ``weight`` ``(vocabulary, width)`` (a parameter, be it offloaded, in tiles, or tied
    to an embedding), ``targets`` ``(...)`` of class numbers, of which ``ignore_index`` counts for nothing.
    ``reduction`` is "mean" over the others, "sum", or "none", which gives fp32 ``(...)``. Logits of at most
    ``chunk_tokens`` tokens by one tile exist at a time; backward computes them again, so neither they nor their
    gradient are ever kept. Raises ``IndexError`` for a target that is no class.
    """
    if has_torch_function_unary(weight):
        found: Tensor = handle_torch_function(
            linear_cross_entropy, (weight,), hidden, weight, targets, ignore_index=ignore_index, reduction=reduction,
            chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return found
    shape = (weight.shape[0], weight.shape[1])
    tiles = SplitWeight(shape, (-(-shape[0] // VOCABULARY_TILE), 1))
    return tiled_cross_entropy(tiles, hidden, weight, targets, ignore_index, reduction, chunk_tokens)


def tiled_cross_entropy(
    tiles: Tiles,
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    chunk_tokens: int,
) -> Tensor:
    """The same over ``tiles``; ``weight`` as for ``tiled_linear``."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "{reduction}"; expected "mean", "sum" or "none"')
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; expected at least 1")
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    if bool((counted & ((flat < 0) | (flat >= tiles.shape[0]))).any()):
        raise IndexError(f"a target is out of range: classes are 0 to {tiles.shape[0] - 1}, or {ignore_index}")
    states = hidden.reshape(-1, hidden.shape[-1])
    cast: torch.dtype | None = None
    if torch.is_autocast_enabled(hidden.device.type):
        cast = torch.get_autocast_dtype(hidden.device.type)
        states = states.to(cast)
    with torch.autocast(hidden.device.type, enabled=False):
        losses: Tensor = _CrossEntropy.apply(tiles, states, weight, flat, counted, chunk_tokens, cast)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """Loss per token. Forward keeps one number per token, the log of the sum of exponentials, found tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        counted: Tensor,
        chunk: int,
        cast: torch.dtype | None,
    ) -> Tensor:
        ctx.tiles, ctx.chunk, ctx.cast = tiles, chunk, cast
        tiles.attach(weight)
        tokens = hidden.shape[0]
        largest = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=hidden.device)
        total = torch.zeros_like(largest)
        own = torch.zeros_like(largest)
        for number in range(len(tiles.regions)):
            with tiles.lend(number) as lent:
                tile = lent if cast is None else lent.to(cast)
                for part in _chunks(tokens, chunk):
                    logits = _logits(tiles, number, hidden, tile, part)
                    above = torch.maximum(largest[part], logits.amax(1))
                    total[part] = total[part] * (largest[part] - above).exp() + (logits - above[:, None]).exp().sum(1)
                    largest[part] = above
                    inside, column = _inside(tiles, number, targets[part])
                    own[part] += logits.gather(1, column[:, None])[:, 0].where(inside, 0.0)
        tiles.attach(None)
        normaliser = largest + total.log()
        ctx.save_for_backward(hidden, weight, targets, counted, normaliser)
        return (normaliser - own).where(counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tiles: Tiles = ctx.tiles
        hidden, weight, targets, counted, normaliser = ctx.saved_tensors
        tiles.attach(weight)
        _, wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        deposits = wants_weight and tiles.wants_gradient
        upstream = gradient.where(counted, 0.0)
        to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants_hidden else None
        for number in reversed(range(len(tiles.regions))):
            rows, _ = tiles.regions[number]
            to_tile: Tensor | None = None
            with tiles.lend(number) as lent:
                tile = lent if ctx.cast is None else lent.to(ctx.cast)
                for part in _chunks(hidden.shape[0], ctx.chunk):
                    share = (_logits(tiles, number, hidden, tile, part) - normaliser[part, None]).exp()
                    inside, column = _inside(tiles, number, targets[part])
                    share.scatter_add_(1, column[:, None], -inside.float()[:, None])
                    slope = (share * upstream[part, None]).to(hidden.dtype)
                    if to_hidden is not None:
                        to_hidden[part] += slope @ tile
                    if deposits:
                        if to_tile is None:
                            to_tile = torch.zeros(rows.stop - rows.start, hidden.shape[1], device=hidden.device)
                        to_tile += slope.t() @ hidden[part]
            if to_tile is not None:
                tiles.deposit(number, to_tile)
        to_states = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return None, to_states, tiles.gradient(), None, None, None, None


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _logits(tiles: Tiles, number: int, hidden: Tensor, tile: Tensor, part: slice) -> Tensor:
    """fp32 logits of some tokens for the classes of one tile."""
    if tiles.regions[number][1] != slice(0, tiles.shape[1]):
        raise ValueError("a head that is cut along its inputs cannot be used by linear_cross_entropy")
    return F.linear(hidden[part], tile).float()


def _inside(tiles: Tiles, number: int, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are classes of the tile, and the column of each (0 for the others)."""
    rows, _ = tiles.regions[number]
    inside = (targets >= rows.start) & (targets < rows.stop)
    return inside, (targets - rows.start).where(inside, 0)


class LinearCrossEntropy(nn.Linear):
    """An output head without a bias that also computes the loss: ``head(hidden, targets)``, or ``head(hidden)``.

    ``state_dict`` and initial values are those of ``nn.Linear(in_features, out_features, bias=False)``; the weight may
    be tied to an embedding's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ignore_index: int = -100,
        chunk_tokens: int = CHUNK_TOKENS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, False, device, dtype)
        self.ignore_index, self.chunk_tokens = ignore_index, chunk_tokens

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits ``(..., out_features)``; with targets of ``(...)`` the mean loss, fp32."""
        if targets is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(
            hidden, self.weight, targets, ignore_index=self.ignore_index, chunk_tokens=self.chunk_tokens
        )
