"""Runs a module over a long sequence a stretch of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def tile_sequence(module: nn.Module, tokens: int) -> nn.Module:
    """Makes ``module``, in place, work on ``tokens`` tokens at a time; returns it.

    For modules that treat every token by itself, such as the feed-forward part of a block: ``(..., length, width)`` to
    ``(..., length, any)``. Forward keeps the input only; backward computes each stretch again, so that what is inside
    the module (4 widths of activations or more) exists for one stretch, whatever the length. Parameters, names, bits
    of the output stay as they are; a weight's gradient is a sum over stretches. Call it before
    ``infinity.initialize``. In such a module tiles of a weight are read once per stretch.

    Raises ``ValueError`` for less than one token.
    """
    if tokens < 1:
        raise ValueError(f"tile_sequence: tokens is {tokens}; expected at least 1")
    module.forward = _Stretches(module.forward, tokens)
    return module


class _Stretches:
    """A forward that is called once per stretch."""

    def __init__(self, forward: Any, tokens: int) -> None:
        self._forward = forward
        self._tokens = tokens

    def __call__(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        if length <= self._tokens:
            out: Tensor = self._forward(x)
            return out
        parts = [
            checkpoint(self._forward, stretch, use_reentrant=False)
            if torch.is_grad_enabled()
            else self._forward(stretch)
            for stretch in torch.split(x, self._tokens, dim=-2)
        ]
        return torch.cat(parts, dim=-2)
