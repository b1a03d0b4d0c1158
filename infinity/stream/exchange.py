"""Collects each unit's gradients, sends every rank its slice of them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infinity._native.cpu_adam import Kernels
from infinity.comm import Group
from infinity.device.lane import Ticket
from infinity.errors import ScheduleError
from infinity.memory.arena import Slab, SlabPool
from infinity.shard.ownership import shard_of, shard_range
from infinity.shard.partition import Unit
from infinity.stream.grads import GradientSum, GradStream

log = logging.getLogger("infinity")

_HEAD = struct.Struct("<ii")
"""The first unit whose gradient is not finite, its slot: what goes before the parts of the norm."""
_NOBODY = 1 << 30
_DIGEST_BYTES = 8
_SUMMED = 2
"""The flag of a slot whose gradient is the sum of several, in fp32."""


@dataclass
class Layer:
    """Gradients of one unit, in the dtype they were computed in, at most one per slot; ``flags`` says of which."""

    slab: Slab
    flat: torch.Tensor
    flags: bytearray


class GradExchange:
    """A ``GradStream`` for several ranks, in front of the one that adds up this rank's slices.

    When a unit's backward is over its gradients go to the ranks that own them, in the dtype they were computed in.
    The owner adds them to its fp32 slice one rank after the other, in the order of the ranks, so the sum is that of
    one process that takes the ranks' micro-batches in turn. So it is for units that a backward comes to several times
    (``shared``, as by tied weights): their gradients stay apart, in layers, until the backward is over. A parameter
    counts as used if any rank has used it.

    ``sums`` are the units' whole fp32 accumulators where every rank has them (stages 0, 1): in ``unsynced`` a rank adds
    up in them by itself what belongs to others, and sends it with the next gradients that are exchanged.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        own: GradStream,
        own_units: Sequence[Unit],
        group: Group,
        pools: dict[int, SlabPool],
        slab_bytes: dict[int, int],
        shared: Collection[int],
        sums: Mapping[int, torch.Tensor],
        kernels: Kernels,
    ) -> None:
        self._units = units
        self._own = own
        self._own_units = own_units
        self._group = group
        self._pools = pools
        self._slab_bytes = slab_bytes
        self._shared = shared
        self._sums = sums
        self._kernels = kernels
        self._summed: dict[int, bytearray] = {}
        self._sums_sent: dict[int, Ticket] = {}
        self._syncs = True
        self._layers: dict[int, list[Layer]] = {}
        self._keeps_open = False
        self._sent: list[Ticket] = []
        self._guard = threading.Lock()
        self._slots = {
            slot.name: (unit.index, number) for unit in own_units for number, slot in enumerate(unit.layout.slots)
        }
        self._told = False

    def expect(self, index: int) -> None:
        """What is added to waits on its own tier until the gradients of all ranks are there."""

    def deposit(self, index: int, slot: int, gradient: torch.Tensor) -> None:
        """Puts one parameter's gradient, in any floating dtype, beside the others of its unit."""
        if not self._syncs and index in self._sums:
            return self._add_up(index, slot, gradient)
        layers = self._layers.get(index, [])
        layer = next((layer for layer in layers if not layer.flags[slot]), None) or self._begin(index)
        where = self._units[index].layout.slots[slot]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        layer.flat[where.offset : where.stop].view(where.shape).copy_(gradient.detach())
        layer.flags[slot] = 1

    @contextmanager
    def open_for_long(self) -> Iterator[None]:
        """As ``GradStream.open_for_long``."""
        self._keeps_open = True
        try:
            with self._own.open_for_long():
                yield
        finally:
            self._keeps_open = False

    def begin(self, call: object, indices: Iterable[int]) -> None:
        """As ``GradStream.begin``."""

    def finish(self, call: Any, indices: Iterable[int], *, again: bool) -> None:
        """Says that a backward is over for now: the gradients of its units go out behind what follows.

        Those of units that it comes to several times go when it is over as a whole.
        """
        for index in indices:
            if self._syncs and (self._keeps_open or index not in self._shared):
                self._send(index)
        if call.outermost and self._syncs:
            self._send_all()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Inside, gradients are not exchanged but summed by each rank alone, where there is room for it."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def receive(self, index: int, rank: int, flags: bytes, chunk: torch.Tensor) -> None:
        """Adds one rank's gradients of this rank's slice; called on the comm lane, rank after rank."""
        unit = self._own_units[index]
        is_sum = _SUMMED in flags
        if is_sum and rank == self._group.rank:
            return  # added up where it lies
        values = chunk.view(torch.float32 if is_sum else unit.layout.dtype)
        with self._guard:
            for number, slot in enumerate(unit.layout.slots):
                if not flags[number]:
                    continue
                if slot.numel:
                    self._own.deposit(index, number, values[slot.offset : slot.stop])
                else:
                    self._own.note(index, number)
            self._own.close(index)

    def deposited(self, index: int) -> bytes:
        """One flag per slot: whether any rank has a gradient of it in this step."""
        self._drain()
        flags = self._own.deposited(index)
        held = [layer.flags for layer in self._layers.get(index, [])]
        for more in [*held, self._summed.get(index, b"")]:
            flags = bytes(a or b for a, b in zip(flags, more, strict=True)) if more else flags
        return flags

    def total(self, numbers: bytes = b"") -> GradientSum:
        """The squared norm over all ranks, in fp64, the same number on each; a collective.

        Raises on every rank if one is about to step with other ``numbers``.
        """
        self._send_all()
        self._drain()
        digest = hashlib.blake2b(numbers, digest_size=_DIGEST_BYTES).digest()
        words = self._group.talk("the end of backward", digest + self._group.trace())
        if any(word[:_DIGEST_BYTES] != digest for word in words):
            raise ScheduleError(_differing(self._group.talk("the numbers of the step", numbers)))
        traces = [word[_DIGEST_BYTES:] for word in words]
        differing = [rank for rank, trace in enumerate(traces) if trace != traces[0]]
        if differing and not self._told:
            self._told = True
            log.warning(
                "ranks %s used other units than rank 0 in this step, or in another order; they were helped out, what "
                "they left out counts as zero",
                differing,
            )
        with self._guard:
            parts, culprit = self._own.parts()
        index, slot = (_NOBODY, 0) if culprit is None else self._slots[culprit]
        mine = _HEAD.pack(index, slot) + struct.pack(f"<{len(parts)}d", *parts)
        squares: list[float] = []
        worst = (_NOBODY, 0)
        for word in self._group.talk("the norm of the gradient", mine):
            index, slot = _HEAD.unpack_from(word)
            worst = min(worst, (index, slot))
            squares += struct.unpack_from(f"<{(len(word) - _HEAD.size) // 8}d", word, _HEAD.size)
        if worst[0] != _NOBODY:
            return GradientSum(math.nan, self._own_units[worst[0]].layout.slots[worst[1]].name)
        return GradientSum(math.fsum(squares), None)

    def read(self, index: int, slot: int) -> torch.Tensor | None:
        """A copy of one parameter's gradient as summed over the ranks, fp32 in its shape, or None; a collective."""
        self._send(index)
        self._drain()
        where = self._units[index].layout.slots[slot]
        self._group.barrier(f"reading the gradient of {where.name}")
        if not self._own.deposited(index)[slot]:
            return None
        with self._guard:
            own = self._own.read(index, slot)
        assert own is not None
        return assembled(self._group, f"the gradient of {where.name}", self._units[index], slot, own)

    def discard(self, index: int, slot: int) -> None:
        """Forgets one parameter's gradient."""
        for layer in self._layers.get(index, []):
            layer.flags[slot] = 0
        if index in self._summed:
            self._summed[index][slot] = 0
        self._drain()
        self._own.discard(index, slot)

    def reset(self) -> None:
        """Forgets every gradient."""
        for index in tuple(self._layers):
            for layer in self._layers.pop(index):
                self._pools[self._slab_bytes[index]].put(layer.slab)
        self._summed.clear()
        self._drain()
        with self._guard:
            self._own.reset()

    def forget(self) -> None:
        """As ``GradStream.forget``."""
        self.reset()

    def check_whole(self, what: str) -> None:
        """As ``GradStream.check_whole``: no update begins before the end of backward."""

    def settle(self) -> None:
        """Waits until every gradient that was sent has been added up."""
        self._drain()
        with self._guard:
            self._own.settle()

    def _begin(self, index: int) -> Layer:
        if self._keeps_open and index in self._layers:
            self._send(index)
        pool = self._pools[self._slab_bytes[index]]
        slab = pool.try_take()
        if slab is None:
            same = [other for other in self._layers if self._slab_bytes[other] == self._slab_bytes[index]]
            if same:
                self._send(same[0])
            slab = pool.take()
        layout = self._units[index].layout
        flat = slab.memory[: layout.nbytes()].view(layout.dtype)
        layer = Layer(slab, flat, bytearray(len(layout.slots)))
        self._layers.setdefault(index, []).append(layer)
        return layer

    def _add_up(self, index: int, slot: int, gradient: torch.Tensor) -> None:
        """Adds a gradient to this rank's own slice, to the sums that it keeps for the others."""
        layout = self._units[index].layout
        where, (start, stop) = layout.slots[slot], shard_range(layout, self._group.rank)
        if index in self._sums_sent:
            self._sums_sent.pop(index).wait()
        summed = self._summed.setdefault(index, bytearray(len(layout.slots)))
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().contiguous().view(-1)
        for low, high in ((where.offset, min(where.stop, start)), (max(where.offset, stop), where.stop)):
            if low < high:
                part = flat[low - where.offset : high - where.offset]
                self._kernels.accumulate(self._sums[index][low:high], part, first=not summed[slot])
        summed[slot] = _SUMMED
        own = self._own_units[index].layout.slots[slot]
        with self._guard:
            if own.numel:
                self._own.deposit(index, slot, flat[own.first : own.first + own.numel])
            else:
                self._own.note(index, slot)

    def _send(self, index: int) -> None:
        """Sends what there is of a unit."""
        summed = self._summed.pop(index, None)
        if summed is not None:
            flat = self._sums[index].view(torch.uint8)
            sent = self._group.reduce(index, self._units[index].name, [bytes(summed)], [flat])
            self._sums_sent[index] = sent
            self._sent.append(sent)
        if index not in self._layers:
            return
        layers = self._layers.pop(index)
        flags = [bytes(layer.flags) for layer in layers]
        flats = [layer.flat.view(torch.uint8) for layer in layers]
        sent = self._group.reduce(index, self._units[index].name, flags, flats)
        for layer in layers:
            self._pools[self._slab_bytes[index]].put(layer.slab, sent)
        self._sent = [ticket for ticket in self._sent if not ticket.done()]
        self._sent.append(sent)

    def _send_all(self) -> None:
        for index in sorted({*self._layers, *self._summed}, reverse=True):
            self._send(index)

    def _drain(self) -> None:
        for ticket in self._sent:
            ticket.wait()
        self._sent = []


def _differing(words: Sequence[bytes]) -> str:
    """Which rank steps with other numbers than rank 0, which they are."""
    first, *others = [json.loads(word) for word in words]
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    listed = ", ".join(f"{name} is {other.get(name)} (rank 0: {first.get(name)})" for name in names[:4])
    return (
        f"rank {rank} would step with other numbers than rank 0: {listed}. Give all ranks the same; what each measures "
        "for itself, such as a loss that decides on the learning rate, goes through engine.averaged(value) first"
    )


def assembled(group: Group, name: str, unit: Unit, slot: int, own: torch.Tensor) -> torch.Tensor:
    """One slot's whole value, of which each rank has the elements ``own`` (1-D) in its slice; a collective."""
    whole = torch.empty(unit.layout.slots[slot].numel, dtype=own.dtype)
    pieces = []
    for rank in range(group.world_size):
        part = shard_of(unit, rank).layout.slots[slot]
        pieces.append(whole[part.first : part.first + part.numel])
    pieces[group.rank].copy_(own.view(-1))
    group.pieces(name, pieces)
    return whole.view(unit.layout.slots[slot].shape)
