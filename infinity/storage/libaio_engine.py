"""Asynchronous I/O by kernel AIO through py-libaio, for machines without a compiler."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import Any

from infinity.errors import StorageError
from infinity.storage.blocks import Block, BlockEngine, BlockQueue, refuse_reordering
from infinity.storage.faults import Faults


class LibaioIoEngine(BlockEngine):
    """One thread keeps a kernel AIO context full. Completions and new requests wake it through one eventfd."""

    backend = "libaio"

    def __init__(self, *, queue_depth: int, block_size: int, threads: int, faults: Faults | None) -> None:
        refuse_reordering(self.backend, faults)
        try:
            import libaio
        except ImportError as error:
            raise _unusable(f"the Python package libaio is not installed ({error})", "pip install libaio") from None
        except OSError as error:
            raise _unusable(
                f"the C library libaio cannot be loaded ({error})", "Install it (Debian, Ubuntu: libaio1 or libaio1t64)"
            ) from None
        try:
            context = libaio.AIOContext(queue_depth)
        except OSError as error:
            action = "Raise the sysctl fs.aio-max-nr" if error.errno == errno.EAGAIN else None
            raise _unusable(f"io_setup failed ({error})", action) from None
        event = os.eventfd(0, os.EFD_CLOEXEC)
        queue = BlockQueue(block_size, faults, lambda: os.eventfd_write(event, 1))
        super().__init__(queue)
        driver = _Driver(libaio, context, event, queue, queue_depth)
        worker = threading.Thread(target=driver.run, name="infinity-io", daemon=True)
        worker.start()
        self._close = weakref.finalize(self, _close, queue, worker)

    def close(self) -> None:
        """Waits for everything in flight, then ends the thread; a second time does nothing."""
        self._close()


class _Driver:
    """The loop of the engine's thread."""

    def __init__(self, libaio: Any, context: Any, event: int, queue: BlockQueue, depth: int) -> None:
        self._libaio = libaio
        self._context = context
        self._event = event
        self._queue = queue
        self._depth = depth
        self._in_flight: dict[Any, Block] = {}

    def run(self) -> None:
        """Serves the queue until it is closed, then frees what it used."""
        try:
            self._serve()
        finally:
            self._context.close()
            os.close(self._event)

    def _serve(self) -> None:
        unsent: list[Block] = []
        while True:
            while len(unsent) + len(self._in_flight) < self._depth and (block := self._queue.take(block=False)):
                unsent.append(block)
            unsent = self._send(unsent)
            if not self._in_flight:
                if unsent:
                    continue
                if self._queue.closed:
                    # Closed before this look at the queue: nothing can have come since.
                    if (block := self._queue.take(block=False)) is None:
                        return
                    unsent = [block]
                    continue
            os.eventfd_read(self._event)
            for request, result, _ in self._context.getEvents(min_nr=0, timeout=0):
                block = self._in_flight.pop(request)
                if self._queue.finish(block, result):
                    unsent.append(block)

    def _send(self, blocks: list[Block]) -> list[Block]:
        """Hands blocks to the kernel; gives back those that must be sent again."""
        again: list[Block] = []
        while blocks:
            requests = [self._request(block) for block in blocks]
            try:
                taken = self._context.submit(requests)
            except OSError as error:
                if error.errno == errno.EAGAIN and self._in_flight:
                    return again + blocks  # no memory for more until something completes
                if self._queue.finish(blocks[0], -(error.errno or 0)):
                    again.append(blocks[0])
                blocks = blocks[1:]
            else:
                self._in_flight.update(zip(requests[:taken], blocks[:taken], strict=True))
                blocks = blocks[taken:]
        return again

    def _request(self, block: Block) -> Any:
        aio = self._libaio
        return aio.AIOBlock(
            mode=aio.AIOBLOCK_MODE_WRITE if block.ticket.write else aio.AIOBLOCK_MODE_READ,
            target_file=block.fd,
            buffer_list=[self._queue.memory_to_move(block)],
            offset=block.offset,
            eventfd=self._event,
        )


def _unusable(reason: str, action: str | None) -> StorageError:
    return StorageError(f"I/O backend libaio cannot run here: {reason}", action=action)


def _close(queue: BlockQueue, worker: threading.Thread) -> None:
    if os.getpid() != queue.owner:  # a child made by fork has none of the threads
        return
    queue.close()
    worker.join()
