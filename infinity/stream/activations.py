"""Keeps the inputs of recomputed units from forward to backward."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol

import torch

from infinity.device.lane import DONE, Ticket
from infinity.errors import CapacityError
from infinity.memory.arena import Arena
from infinity.memory.heap import Heap
from infinity.obs.ledger import Ledger
from infinity.plan.micro_batch import WINDOW_CALLS, may_move
from infinity.storage.activation_file import ActivationFile, FilePiece
from infinity.tier import PAGE_BYTES, round_up

Stays = Callable[[torch.Tensor], bool]


class Inputs(Protocol):
    """The inputs of one unit call."""

    def tensors(self, staying: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All inputs, given those that autograd kept; valid until ``release``."""
        ...

    def release(self, *, again: bool) -> None:
        """Ends the use of what ``tensors`` gave; ``again`` says that it will be asked for once more."""
        ...


class Activations(Protocol):
    """Where unit inputs are from forward to backward."""

    def keep(self, tensors: Sequence[torch.Tensor], stays: Stays) -> tuple[Inputs, list[torch.Tensor]]:
        """Takes a call's inputs over; also returns those that autograd is to keep where they are."""
        ...

    def usage(self) -> dict[str, int]:
        """Peak bytes by purpose, for the plan: "host" and "nvme"."""
        ...

    def settle(self) -> None:
        """Waits until no transfer is under way."""
        ...


class _OnDevice:
    """Inputs that autograd keeps, all of them."""

    def tensors(self, staying: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(staying)

    def release(self, *, again: bool) -> None:
        pass


ON_DEVICE = _OnDevice()


class DeviceActivations:
    """Leaves every input to autograd, in device memory."""

    def keep(self, tensors: Sequence[torch.Tensor], stays: Stays) -> tuple[Inputs, list[torch.Tensor]]:
        return ON_DEVICE, list(tensors)

    def usage(self) -> dict[str, int]:
        return {"host": 0, "nvme": 0}

    def settle(self) -> None:
        pass


@dataclass(eq=False)
class Piece:
    """One tensor that was taken over: its bytes in the heap, in a file, or both.

    ``number`` counts what was kept since nothing was. ``moving`` is the last transfer of these bytes.
    """

    number: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool
    users: int = 1
    lent: int = 0
    start: int | None = None
    moving: Ticket = DONE
    file: FilePiece | None = field(default=None)


class MovedInputs:
    """A call's inputs of which some were taken over; ``pieces`` has None for each that autograd keeps."""

    def __init__(self, stream: ActivationStream, pieces: list[Piece | None]) -> None:
        self._stream = stream
        self._pieces = pieces
        self._given_up = False

    def tensors(self, staying: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(staying)
        lent: dict[int, torch.Tensor] = {}
        for piece in self._pieces:
            if piece is not None and id(piece) not in lent:
                lent[id(piece)] = self._stream.lend(piece)
        return [next(rest) if piece is None else lent[id(piece)] for piece in self._pieces]

    def release(self, *, again: bool) -> None:
        for piece in self._own():
            piece.lent -= 1
        if not again and not self._given_up:
            self._given_up = True
            self._stream.give_up(self._own())

    def _own(self) -> list[Piece]:
        return list({id(piece): piece for piece in self._pieces if piece is not None}.values())

    def __del__(self) -> None:
        # A graph that nobody went backward through. The collector may come at any instruction, so this only notes it.
        if not self._given_up:
            self._given_up = True
            self._stream.dropped.append(self._own())


class ActivationStream:
    """Owner of the unit inputs that leave the device: which bytes of the region and of the files hold which.

    Inputs are copied into a region of host memory; a tensor that several calls are given is copied once. Without
    ``files`` that is where they stay. With files a window of the region is enough: what is needed last goes to a file
    behind forward, and comes back ahead of backward in the order recorded in the step before (the reverse of forward
    until then). The inputs needed first never leave.

    Sizes depend on the data, so they are learnt: nothing of the region is touched before it is used, and whatever
    would go beyond it is refused. ``region`` is as large as what the budget leaves.
    """

    def __init__(
        self,
        arena: Arena,
        region: torch.Tensor,
        files: ActivationFile | None,
        ledger: Ledger,
        window: int | None = None,
        *,
        poison: bool = False,
    ) -> None:
        """``window`` are the bytes through which inputs go to files, by default four calls' worth."""
        self.dropped: deque[list[Piece]] = deque()
        self._arena = arena
        self._region = region
        self._files = files
        self._window = window or 0
        self._ledger = ledger
        self._poison = poison
        self._heap = Heap(region.numel())
        if files is not None:
            self._heap.limit = 0
        self._kept: dict[int, Piece] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, Piece]] = {}
        self._leaving: list[Piece] = []
        self._claimed = 0
        self._largest = 0
        self._next = 0
        self._order: list[int] = []
        self._place: dict[int, int] = {}

    # Forward ----------------------------------------------------------------------------------------------------

    def keep(self, tensors: Sequence[torch.Tensor], stays: Stays) -> tuple[Inputs, list[torch.Tensor]]:
        """Copies what may leave the device; a call that has nothing of the kind costs nothing."""
        self._take_in_dropped()
        movable = [type(tensor) is torch.Tensor and may_move(tensor) and not stays(tensor) for tensor in tensors]
        if not any(movable):
            return ON_DEVICE, list(tensors)
        if self._files is not None:
            together = {id(t): round_up(t.nbytes, PAGE_BYTES) for t, move in zip(tensors, movable, strict=True) if move}
            self._largest = max(self._largest, sum(together.values()))
            self._heap.limit = min(self._region.numel(), max(self._window, WINDOW_CALLS * self._largest))
            self._claim(self._heap.limit)
        pieces: list[Piece | None] = []
        mine: dict[int, Piece] = {}
        try:
            for tensor, move in zip(tensors, movable, strict=True):
                piece = None
                if move:
                    piece = mine.get(id(tensor)) or self._known(tensor) or self._take(tensor)
                    mine[id(tensor)] = piece
                pieces.append(piece)
        except BaseException:
            self.give_up(list(mine.values()))
            raise
        return MovedInputs(self, pieces), [tensor for tensor, p in zip(tensors, pieces, strict=True) if p is None]

    def _known(self, tensor: torch.Tensor) -> Piece | None:
        """The copy of this very tensor, unchanged since, that another call has."""
        seen = self._seen.get(id(tensor))
        if seen is None or seen[0]() is not tensor or seen[1] != tensor._version or not seen[2].users:
            return None
        seen[2].users += 1
        return seen[2]

    def _take(self, tensor: torch.Tensor) -> Piece:
        piece = Piece(
            self._next, tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
        )  # fmt: skip
        self._next += 1
        piece.start = self._room(piece.nbytes)
        self._view(piece).copy_(tensor.detach())
        self._kept[piece.number] = piece
        self._seen[id(tensor)] = weakref.ref(tensor), tensor._version, piece
        if self._files is not None:
            self._write_behind()
        return piece

    # Backward ---------------------------------------------------------------------------------------------------

    def lend(self, piece: Piece) -> torch.Tensor:
        """The tensor as it was given, in host memory until ``give_up``; the ones needed next are on their way."""
        piece.lent += 1
        self._order.append(piece.number)
        if piece.start is None:
            start = time.perf_counter()
            self._read(piece, self._room(piece.nbytes))
            self._ledger.stalled("budget", time.perf_counter() - start)
        if not piece.moving.done():
            start = time.perf_counter()
            piece.moving.wait()
            self._ledger.stalled("activation_read", time.perf_counter() - start)
        piece.moving.wait()
        if self._files is not None:
            self._read_ahead()
        return self._view(piece).requires_grad_(piece.requires_grad)

    def give_up(self, pieces: Sequence[Piece]) -> None:
        """One call fewer uses these."""
        for piece in pieces:
            piece.users -= 1
            if not piece.users:
                del self._kept[piece.number]
                self._leaving.append(piece)
        self._let_go()
        if not self._kept:  # a pass is over: the next one is likely to go the same way
            if self._order:
                places = reversed(list(enumerate(self._order)))  # so that the first of several uses counts
                self._place = {number: place - len(self._order) for place, number in places}
            self._order, self._next = [], 0
            self._seen.clear()
        elif self._files is not None:
            self._read_ahead()

    def usage(self) -> dict[str, int]:
        """Bytes of the region and of the files that were ever needed."""
        return {"host": self._claimed, "nvme": 0 if self._files is None else self._files.peak}

    def settle(self) -> None:
        """Waits until no transfer is under way."""
        self._take_in_dropped()
        for piece in [*self._kept.values(), *self._leaving]:
            piece.moving.wait()
        self._let_go()

    # The window -------------------------------------------------------------------------------------------------

    def _need(self, piece: Piece) -> int:
        """When backward needs a piece, sooner ones first: as recorded, or in reverse."""
        return self._place.get(piece.number, -1 - piece.number)

    def _room(self, nbytes: int) -> int:
        """A free place in the region, made by sending away what is needed last."""
        while (start := self._heap.take(nbytes)) is None:
            if self._leaving:
                self._leaving[0].moving.wait()
                self._let_go()
                continue
            here = [piece for piece in self._kept.values() if piece.start is not None and not piece.lent]
            if self._files is None or not here:
                raise self._too_small(nbytes)
            last = max(here, key=self._need)
            if last.file is None:
                self._write(last)
            waited = time.perf_counter()
            last.moving.wait()
            self._ledger.stalled("activation_write", time.perf_counter() - waited)
            self._free(last)
        if self._files is None:
            self._claim(self._heap.peak)
        return start

    def _claim(self, nbytes: int) -> None:
        """Counts the first ``nbytes`` of the region as in use, for good."""
        if nbytes > self._claimed:
            self._arena.occupy(nbytes - self._claimed)
            self._claimed = nbytes

    def _too_small(self, nbytes: int) -> CapacityError:
        used, limit = self._heap.in_use, self._region.numel()
        if self._files is None:
            return CapacityError(
                f"host memory: the inputs of recomputed units take {used} bytes and {nbytes} more are needed, but "
                f"infinity.host_memory leaves {limit} bytes for them beside the rest of the plan. Raise it by at least "
                f'{used + nbytes - limit} bytes, make micro-batches smaller, or set infinity.activations to "nvme"',
                used + nbytes - limit,
            )
        return CapacityError(
            f"host memory: the window through which unit inputs go to NVMe needs {used + nbytes} bytes for one unit, "
            f"but infinity.host_memory leaves {limit} bytes for it beside the rest of the plan. Raise it by at least "
            f"{used + nbytes - limit} bytes, or make micro-batches smaller",
            used + nbytes - limit,
        )

    def _write_behind(self) -> None:
        """Begins to write what is needed last, so that half of the window can be emptied without waiting."""
        unwritten = sorted(
            (piece for piece in self._kept.values() if piece.start is not None and piece.file is None),
            key=self._need,
        )
        ahead = 0
        for piece in unwritten:
            ahead += round_up(piece.nbytes, PAGE_BYTES)
            if 2 * ahead > self._heap.limit:
                self._write(piece)

    def _read_ahead(self) -> None:
        """Begins to read what is needed next, as far as there is room."""
        for piece in nsmallest(2 * WINDOW_CALLS, (p for p in self._kept.values() if p.start is None), key=self._need):
            start = self._heap.take(piece.nbytes)
            if start is None:
                return
            self._read(piece, start)

    def _write(self, piece: Piece) -> None:
        assert self._files is not None
        piece.file = self._files.take(piece.nbytes)
        piece.moving = self._files.write(piece.file, self._pages(piece))

    def _read(self, piece: Piece, start: int) -> None:
        assert self._files is not None
        assert piece.file is not None
        piece.start = start
        piece.moving = self._files.read(piece.file, self._pages(piece))

    def _free(self, piece: Piece) -> None:
        assert piece.start is not None
        if self._poison:
            self._pages(piece).fill_(0xFF)
        self._heap.give(piece.start)
        piece.start = None

    def _let_go(self) -> None:
        """Frees what nobody uses any more, once its last transfer is over."""
        staying = []
        for piece in self._leaving:
            if not piece.moving.done():
                staying.append(piece)
                continue
            piece.moving.wait()
            if piece.start is not None:
                self._free(piece)
            if piece.file is not None and self._files is not None:
                self._files.give(piece.file)
                piece.file = None
        self._leaving = staying

    def _take_in_dropped(self) -> None:
        while self.dropped:
            self.give_up(self.dropped.popleft())

    def _pages(self, piece: Piece) -> torch.Tensor:
        """Its place in the region, in whole pages, as direct I/O wants it."""
        assert piece.start is not None
        # .data, because views share a version counter: a write to one piece would make autograd refuse all others.
        return self._region[piece.start : piece.start + round_up(piece.nbytes, PAGE_BYTES)].data

    def _view(self, piece: Piece) -> torch.Tensor:
        return self._pages(piece)[: piece.nbytes].view(piece.dtype).as_strided(piece.shape, piece.stride)
