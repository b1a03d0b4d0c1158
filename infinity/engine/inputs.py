"""Makes the tensors that stand for a call's arguments inside the call's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that has reached a leaf; the leaf has none afterwards."""
    gradient, tensor.grad = tensor.grad, None
    return gradient


class Alias(torch.autograd.Function):
    """The same tensor as no leaf, so that a forward may write to it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def leaves_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves with the same values; a tensor given twice stays one tensor."""
    fresh: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in fresh:
            fresh[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
    return [fresh[id(tensor)] for tensor in tensors]


def aliases(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a forward is given for ``leaves``, so that it may write to it."""
    fresh: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if id(leaf) not in fresh:
            fresh[id(leaf)] = Alias.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
    return [fresh[id(leaf)] for leaf in leaves]
