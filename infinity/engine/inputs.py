"""Makes the tensors that stand for a call's arguments inside the call's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Written(torch.autograd.Function):
    """A tensor that was written to by way of its alias: its gradient is the alias's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.of_view = tensor._is_view()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        # Torch takes None for a view as none for all that it is a view of.
        return torch.zeros_like(gradient) if ctx.of_view else None, gradient


def go_on(tensor: torch.Tensor, written: torch.Tensor, version: int) -> None:
    """Lets a caller's tensor, whose memory was written to ``version`` times, go on from what was written."""
    if written.requires_grad:
        Written.apply(tensor, written)  # type: ignore[no-untyped-call]
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # torch counted the write once more


class Rejoined:
    """A tensor whose gradients from one part of a graph are added up at its ``alias``, which that part is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.alias: torch.Tensor = _alias(tensor)

    def end(self) -> None:
        """Lets the tensor itself go on from what was written to the alias."""
        if self.tensor._version != self.version:
            go_on(self.tensor, self.alias, self.tensor._version)


_alias: Any = super(torch.autograd.Function, Alias).apply
"""Without what torch.func would need, which takes five times as long as the rest."""


def seen_through(alias: torch.Tensor, output: torch.Tensor) -> View | None:
    """How ``output`` looks at ``alias``, if it is a view of it that gradients know about."""
    if output._base is not alias or output.requires_grad != alias.requires_grad or output.dtype != alias.dtype:
        return None
    return View(output.size(), output.stride(), int(output.storage_offset()))


@dataclass(frozen=True)
class View:
    """A part of a tensor's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the caller's own tensor, so that a write to either is one to both."""
        return tensor.as_strided(self.size, self.stride, self.offset)


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
            fresh[id(leaf)] = _alias(leaf) if leaf.requires_grad else leaf
    return [fresh[id(leaf)] for leaf in leaves]


def reaches(outputs: Sequence[torch.Tensor], leaves: set[int]) -> bool:
    """Whether gradients of ``outputs`` flow to one of the leaves with these ids."""
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if id(getattr(node, "variable", None)) in leaves:
            return True
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        ahead += fresh
    return False
