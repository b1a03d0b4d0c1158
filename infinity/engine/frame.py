"""One running call, with what it has been lent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from infinity.engine.bound_unit import BoundUnit
from infinity.errors import ScheduleError
from infinity.stream.exchange import GradExchange
from infinity.stream.grads import GradStream
from infinity.stream.params import ParamStream, Phase


class Lender(Protocol):
    """Whoever has the units."""

    @property
    def units(self) -> Sequence[BoundUnit]: ...
    @property
    def params(self) -> ParamStream: ...
    @property
    def grads(self) -> GradStream | GradExchange: ...

    def leaves(
        self, bound: BoundUnit, flat: torch.Tensor, *, differentiable: bool, shares: bool, joined: str = ""
    ) -> list[nn.Parameter]:
        """Parameters over a lent unit's memory, whose gradients are deposited."""
        ...


class Frame:
    """One running call: the units it has been lent, as leaf tensors of its own.

    ``packs`` says that no tensor which autograd saves in it refers to lent memory; ``own`` are the units lent to it
    or to an operation in it, ``used`` those and the ones of calls in it; it ``strays`` if it needed units that are not
    lent to every call of its module. One that ``shares`` not has leaves that no other call has.
    """

    def __init__(
        self, lender: Lender, name: str, phase: Phase, *, differentiable: bool, packs: bool, shares: bool = True
    ) -> None:
        self.lender = lender
        self.name = name
        self.phase = phase
        self.differentiable = differentiable
        self.packs = packs
        self.shares = shares
        self.strays = False
        self.own: set[int] = set()
        self.used: set[int] = set()
        self.leaves: dict[int, list[nn.Parameter]] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        self.joined: set[str] = set()
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}

    def lend(self, indices: Iterable[int]) -> None:
        """Brings units to the device, then shows them in the module tree."""
        self._lend([index for index in dict.fromkeys(indices) if index not in self.leaves])

    @contextmanager
    def join(self, name: str, indices: Sequence[int]) -> Iterator[None]:
        """A call of another entry as a part of this one; its parameters are leaves of their own for this once."""
        self.joined.add(name)
        outer = {index: self.leaves[index] for index in indices if index in self.leaves}
        self._lend(indices, name)
        try:
            yield
        finally:
            for index in indices:
                self.lender.units[index].unbind(self.leaves.pop(index))
            self.lender.params.release(indices)
            self.leaves |= outer

    def _lend(self, indices: Sequence[int], joined: str = "") -> None:
        for index in indices:
            self.lender.units[index].check_homes()
        self.lender.params.lend(indices, self.phase)
        self.own.update(indices)
        self.used.update(indices)
        for index in indices:
            bound = self.lender.units[index]
            with torch.inference_mode(False):
                flat = self.lender.params.flat(index)
                leaves = self.lender.leaves(
                    bound, flat, differentiable=self.differentiable, shares=self.shares, joined=joined
                )
            self.leaves[index] = leaves
            if index not in self._lent:
                self._lent[index] = flat, flat._version
                self.ranges[index] = flat.data_ptr(), flat.data_ptr() + flat.nbytes
            bound.bind(leaves)
            if self.phase is Phase.BACKWARD:
                self.lender.grads.expect(index)

    def show(self) -> None:
        """Puts this frame's own leaves into the module tree again, after another frame's were shown."""
        for index, leaves in self.leaves.items():
            self.lender.units[index].show(leaves)

    def adopt(self, inner: Frame) -> None:
        """Takes over what was lent to a frame within this one."""
        self.leaves |= inner.leaves
        self.ranges |= inner.ranges
        self._lent |= inner._lent
        inner.leaves = {}

    def check_unwritten(self) -> None:
        """Raises if something wrote to lent memory, which would be lost with the loan on some tiers, kept on others."""
        for index, (flat, version) in self._lent.items():
            if flat._version != version:
                unit = self.lender.units[index].unit
                raise ScheduleError(
                    f'a weight of unit "{unit.name}" was written to while "{self.name}" ran. Weights change in '
                    "engine.step(), by infinity.set_full_param(p, value) or inside infinity.gathered(p)"
                )

    def close(self) -> None:
        """Takes the units back out of the module tree."""
        for index, leaves in self.leaves.items():
            self.lender.units[index].unbind(leaves)
        self.lender.params.release(self.leaves)
