"""Asynchronous I/O by a pool of Python threads, for machines where nothing faster runs."""

from __future__ import annotations

import os
import threading
import weakref

from infinity.storage.blocks import BlockEngine, BlockQueue, refuse_reordering
from infinity.storage.faults import Faults


class ThreadIoEngine(BlockEngine):
    """Each thread moves one block at a time with preadv or pwritev, outside the interpreter lock."""

    backend = "python"

    def __init__(self, *, queue_depth: int, block_size: int, threads: int, faults: Faults | None) -> None:
        refuse_reordering(self.backend, faults)
        queue = BlockQueue(block_size, faults)
        super().__init__(queue)
        workers = [
            threading.Thread(target=_work, args=(queue,), name=f"infinity-io-{number}", daemon=True)
            for number in range(min(threads, queue_depth))
        ]
        for worker in workers:
            worker.start()
        self._close = weakref.finalize(self, _close, queue, workers)

    def close(self) -> None:
        """Waits for everything in flight, then ends the threads; a second time does nothing."""
        self._close()


def _work(queue: BlockQueue) -> None:
    while (block := queue.take(block=True)) is not None:
        while True:
            move = os.pwritev if block.ticket.write else os.preadv
            try:
                result = move(block.fd, [queue.memory_to_move(block)], block.offset)
            except OSError as error:
                result = -(error.errno or 0)
            if not queue.finish(block, result):
                break


def _close(queue: BlockQueue, workers: list[threading.Thread]) -> None:
    if os.getpid() != queue.owner:  # a child made by fork has none of the threads
        return
    queue.close()
    for worker in workers:
        worker.join()
