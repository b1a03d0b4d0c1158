"""Cuts requests into blocks for the engines written in Python."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.errors import StorageError
from infinity.storage.faults import Draw, Faults
from infinity.storage.swap_file import Descriptors, SwapFile
from infinity.storage.transfer import check_process, check_request, transfer_error
from infinity.tier import PAGE_BYTES

log = logging.getLogger(__name__)

MAX_RETRIES = 64
"""How often in a row the kernel may say "again" to one block that does not move."""


class BlockTicket:
    """One request: the blocks it has left to start, those on their way, the first failure in the file."""

    def __init__(self, file: SwapFile, offset: int, tensor: torch.Tensor, write: bool) -> None:
        self.failure: StorageError | None = None
        self.file = file
        self.offset = offset
        self.write = write
        self.length = tensor.numel()
        self.memory = tensor.numpy().data
        self.descriptors: Descriptors | None = file.descriptors
        # Direct I/O moves whole pages only and buffered I/O the rest, so that no page is ever shared by the two: the
        # page cache could write an old page over what direct I/O had just written.
        self.multiple = max(PAGE_BYTES, file.offset_alignment)
        aligned = offset % self.multiple == 0 and tensor.data_ptr() % file.memory_alignment == 0
        self.direct_fd = file.descriptors.direct if aligned else -1
        self.buffered_fd = file.descriptors.buffered
        self.first_index = 0
        self.started_bytes = self.started_blocks = self.in_flight = 0
        self._event = threading.Event()
        self._finished_at = 0.0
        self._waited = False

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event.is_set()

    def finished_at(self) -> float:
        """When the transfer ended, on the clock of ``time.perf_counter``; only once it is done."""
        return self._finished_at

    def wait(self) -> None:
        """Returns when nothing touches the tensor any more; raises StorageError when a block failed."""
        self._event.wait()
        self._waited = True
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def __del__(self) -> None:
        if self.failure is not None and not self._waited:
            log.error("nobody waited for an I/O request that failed: %s", self.failure)

    def complete(self) -> None:
        """Lets go of tensor and file, which the ticket may outlive, and wakes whoever waits."""
        self.memory = memoryview(b"")
        self.descriptors = None
        self._finished_at = time.perf_counter()
        self._event.set()

    def block_length(self, at: int, block_size: int) -> int:
        """Bytes of the block that begins at ``at``; odd bytes at the end of a direct request are their own block."""
        length = min(block_size, self.length - at)
        tail = length % self.multiple
        return length - tail if self.direct_fd >= 0 and tail and tail != length else length

    def count_blocks(self, block_size: int) -> int:
        at, count = self.length - self.length % block_size, self.length // block_size
        while at < self.length:
            at += self.block_length(at, block_size)
            count += 1
        return count

    def fail(self, offset: int, length: int, number: int) -> None:
        """Notes a failed block. Of several the first in the file counts, whatever their order in time."""
        known = self.failure
        if known is None or known.offset is None or offset < known.offset:
            self.failure = transfer_error(
                write=self.write, path=self.file.path, offset=offset, length=length, number=number
            )


@dataclass(eq=False)
class Block:
    """A piece of a request on its way; ``offset`` and ``memory`` are what is left of it."""

    ticket: BlockTicket
    index: int
    first_offset: int
    length: int
    fd: int
    offset: int
    memory: memoryview
    attempt: int = 0
    retries: int = 0


@dataclass(eq=False)
class _Lane:
    waiting: deque[BlockTicket] = field(default_factory=deque)
    in_flight: int = 0
    last_turn: int = 0


class BlockQueue:
    """Hands out the blocks of all requests, fairly between file systems and between reads and writes.

    Each of these lanes gets an equal share of the blocks in flight, so none starves and a slow disk cannot hold up
    the others.
    """

    def __init__(self, block_size: int, faults: Faults | None, wake: Callable[[], None] | None = None) -> None:
        self._block_size = block_size
        self._faults = faults
        self._wake = wake
        self._changed = threading.Condition()
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._next_index = 0
        self._turn = 0
        self.closed = False
        self.owner = os.getpid()

    def put(self, ticket: BlockTicket) -> None:
        """Appends a request."""
        check_process(self.owner, ticket.file)
        if ticket.length == 0:
            return ticket.complete()
        with self._changed:
            if self.closed:
                raise StorageError("the I/O engine is closed", path=ticket.file.path, offset=ticket.offset)
            ticket.first_index = self._next_index
            self._next_index += ticket.count_blocks(self._block_size)
            self._lanes.setdefault((ticket.file.device, ticket.write), _Lane()).waiting.append(ticket)
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()
        return None

    def close(self) -> None:
        """Takes no more requests; those there are still handed out."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()

    def take(self, *, block: bool) -> Block | None:
        """The next block to start. None: there is none now, or, when ``block``, there never will be one again."""
        with self._changed:
            while (lane := self._next_lane()) is None:
                if not block or self.closed:
                    return None
                self._changed.wait()
            self._turn += 1
            lane.last_turn = self._turn
            lane.in_flight += 1
            return self._cut(lane)

    def memory_to_move(self, block: Block) -> memoryview:
        """What is left of the block, or less where a fault says so."""
        pages = (len(block.memory) - 1) // PAGE_BYTES
        faults = self._faults
        if faults is None or pages == 0 or faults.chance(block.index, block.attempt, Draw.SHORT) >= faults.short:
            return block.memory
        return block.memory[: PAGE_BYTES * (1 + faults.draw(block.index, block.attempt, Draw.CUT) % pages)]

    def finish(self, block: Block, result: int) -> bool:
        """Takes bytes moved or -errno. True: the block must be started again, for the rest of it."""
        faults = self._faults
        if faults is not None:
            if faults.fails(block.index, block.attempt):
                result = -faults.errno
            time.sleep(faults.delay_seconds * faults.chance(block.index, block.attempt, Draw.DELAY))
        ticket = block.ticket
        if result == len(block.memory):
            return self._end(block, 0)
        if result == 0:
            return self._end(block, errno.EIO if ticket.write else errno.ENODATA)
        if result > 0:
            block.retries = 0
            block.offset += result
            block.memory = block.memory[result:]
            if block.offset % ticket.multiple:
                block.fd = ticket.buffered_fd
        else:
            block.retries += 1
            if result not in (-errno.EAGAIN, -errno.EINTR) or block.retries > MAX_RETRIES:
                return self._end(block, -result)
        block.attempt += 1
        return True

    def _next_lane(self) -> _Lane | None:
        """Of the lanes with something waiting, the one with the fewest blocks in flight; equals take turns."""
        lanes = [lane for lane in self._lanes.values() if lane.waiting]
        return min(lanes, key=lambda lane: (lane.in_flight, lane.last_turn), default=None)

    def _cut(self, lane: _Lane) -> Block:
        ticket = lane.waiting[0]
        at = ticket.started_bytes
        length = ticket.block_length(at, self._block_size)
        direct = ticket.direct_fd >= 0 and length % ticket.multiple == 0
        block = Block(
            ticket,
            index=ticket.first_index + ticket.started_blocks,
            first_offset=ticket.offset + at,
            length=length,
            fd=ticket.direct_fd if direct else ticket.buffered_fd,
            offset=ticket.offset + at,
            memory=ticket.memory[at : at + length],
        )
        ticket.started_bytes += length
        ticket.started_blocks += 1
        ticket.in_flight += 1
        if ticket.started_bytes == ticket.length:
            lane.waiting.popleft()
        return block

    def _end(self, block: Block, error: int) -> bool:
        ticket = block.ticket
        block.memory = memoryview(b"")
        with self._changed:
            lane = self._lanes[ticket.file.device, ticket.write]
            lane.in_flight -= 1
            ticket.in_flight -= 1
            if error:
                ticket.fail(block.first_offset, block.length, error)
                if ticket.started_bytes < ticket.length:  # it is the first of its lane: start no more of its blocks
                    ticket.started_bytes = ticket.length
                    lane.waiting.popleft()
            if ticket.in_flight == 0 and ticket.started_bytes == ticket.length:
                ticket.complete()
        return False


class BlockEngine:
    """Submits to a queue that threads of a subclass serve. They know the queue only, so the engine can be collected."""

    def __init__(self, queue: BlockQueue) -> None:
        self._queue = queue

    def register(self, memory: Sequence[torch.Tensor]) -> None:
        """Makes no difference here."""

    def read(self, file: SwapFile, offset: int, into: torch.Tensor) -> BlockTicket:
        """Fills ``into`` from ``offset`` on. It must not be touched until the ticket is done."""
        return self._submit(file, offset, into, write=False)

    def write(self, file: SwapFile, offset: int, source: torch.Tensor) -> BlockTicket:
        """Writes ``source`` to ``offset``. It must not change until the ticket is done."""
        return self._submit(file, offset, source, write=True)

    def _submit(self, file: SwapFile, offset: int, tensor: torch.Tensor, *, write: bool) -> BlockTicket:
        check_request(file, offset, tensor, write=write)
        ticket = BlockTicket(file, offset, tensor, write)
        self._queue.put(ticket)
        return ticket


def refuse_reordering(backend: str, faults: Faults | None) -> None:
    """Raises for the one fault that only native engines inject."""
    if faults is not None and faults.reorder:
        raise StorageError(
            f"I/O backend {backend} cannot reorder completions", action="Use io_uring, aio or threads, or reorder=False"
        )
