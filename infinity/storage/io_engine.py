"""Chooses the engine that moves bytes between swap files, host memory."""

from __future__ import annotations

import difflib
import logging
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from infinity.errors import ConfigError, StorageError
from infinity.storage.faults import Faults as Faults
from infinity.storage.libaio_engine import LibaioIoEngine
from infinity.storage.native_engine import NativeIoEngine
from infinity.storage.swap_file import SwapFile, open_file
from infinity.storage.thread_engine import ThreadIoEngine
from infinity.tier import PAGE_BYTES

log = logging.getLogger(__name__)

ENVIRONMENT = "INFINITY_IO"


class IoTicket(Protocol):
    """The completion of one request. The engine keeps the tensor alive until then, even when the ticket is dropped."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def finished_at(self) -> float:
        """When the transfer ended, on the clock of ``time.perf_counter``; only once it is done."""
        ...

    def wait(self) -> None:
        """Returns when nothing touches the tensor any more; raises StorageError, every time, when a block failed."""
        ...


class IoEngine(Protocol):
    """Moves bytes in the background. Any thread may submit and wait; none of it survives a fork.

    Requests are cut into blocks of ``block_size`` bytes, of which ``queue_depth`` are in flight at once, shared
    equally between file systems and between reads and writes. Requests that overlap must be ordered by the caller.
    """

    @property
    def backend(self) -> str: ...

    def register(self, memory: Sequence[torch.Tensor]) -> None:
        """Says which memory requests are going to use, before the first of them; some engines then need less time."""
        ...

    def read(self, file: SwapFile, offset: int, into: torch.Tensor) -> IoTicket:
        """Fills ``into`` (1-D uint8) from ``offset`` on; a file that ends first is an error."""
        ...

    def write(self, file: SwapFile, offset: int, source: torch.Tensor) -> IoTicket:
        """Writes ``source`` (1-D uint8), which must not change until the ticket is done."""
        ...

    def close(self) -> None:
        """Waits for everything in flight, then ends the threads."""
        ...


class Open(Protocol):
    """Opens one kind of engine; raises StorageError where this machine cannot run it."""

    def __call__(self, *, queue_depth: int, block_size: int, threads: int, faults: Faults | None) -> IoEngine: ...


BACKENDS: dict[str, Open] = {
    "io_uring": partial(NativeIoEngine, "io_uring"),
    "aio": partial(NativeIoEngine, "aio"),
    "threads": partial(NativeIoEngine, "threads"),
    "libaio": LibaioIoEngine,
    "python": ThreadIoEngine,
}
"""In the order in which ``auto`` tries them."""


def open_io_engine(
    backend: str = "auto",
    *,
    queue_depth: int = 32,
    block_size: int = 1 << 20,
    threads: int = 4,
    faults: Faults | None = None,
) -> IoEngine:
    """Opens an engine.

    ``auto`` takes what INFINITY_IO names, otherwise the first of BACKENDS that carries out a real transfer here. One
    that is named, here or there, is used or it is an error. ``threads`` counts only for the pools of threads.
    """
    _check_options(queue_depth=queue_depth, block_size=block_size, threads=threads)
    chosen, by = backend, "infinity.io_engine"
    if backend == "auto":
        chosen, by = os.environ.get(ENVIRONMENT, "").strip() or "auto", ENVIRONMENT
    candidates = list(BACKENDS) if chosen == "auto" else [_known(chosen, by)]
    reasons: dict[str, str] = {}
    for name in candidates:
        reason = probe(name)
        if reason is None:
            for other, why in reasons.items():
                log.info("I/O backend %s was passed over: %s", other, why)
            return BACKENDS[name](queue_depth=queue_depth, block_size=block_size, threads=threads, faults=faults)
        reasons[name] = reason
    if chosen != "auto":
        raise StorageError(f"{by} asks for {chosen}. {reasons[chosen]}", action="Choose another one, or auto")
    raise StorageError("no I/O backend works here: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def probe(backend: str) -> str | None:
    """Why ``backend`` cannot be used on this machine, found by a small write and read; None when it can."""
    open_engine = BACKENDS[_known(backend, "infinity.io_engine")]
    try:
        engine = open_engine(queue_depth=4, block_size=PAGE_BYTES, threads=1, faults=None)
    except (StorageError, OSError, RuntimeError) as error:  # RuntimeError: no more threads can be started
        return str(error)
    try:
        return _try(engine)
    except (StorageError, OSError) as error:
        return f"a small transfer failed: {error}"
    finally:
        engine.close()


def _try(engine: IoEngine) -> str | None:
    with tempfile.TemporaryDirectory(prefix="infinity-probe-") as directory:
        file = open_file(os.path.join(directory, "probe"), create=True)
    try:  # the file has no name any more, so that one who is killed here leaves none
        memory = torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        source, into = memory[start:][: 2 * PAGE_BYTES], memory[start:][2 * PAGE_BYTES : 4 * PAGE_BYTES]
        source.copy_(torch.arange(source.numel()) % 251)
        engine.write(file, 0, source).wait()
        engine.read(file, 0, into).wait()
        return None if torch.equal(source, into) else "it read back other bytes than it had written"
    finally:
        file.close()


def _known(backend: str, by: str) -> str:
    if backend in BACKENDS:
        return backend
    near = difflib.get_close_matches(backend, BACKENDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"{by} is {backend!r}, which does not exist{hint} Known: auto, {', '.join(BACKENDS)}")


def _check_options(*, queue_depth: int, block_size: int, threads: int) -> None:
    problems = []
    if not 1 <= queue_depth <= 4096:
        problems.append(f"aio.queue_depth is {queue_depth}, expected 1 to 4096")
    if not PAGE_BYTES <= block_size <= 1 << 30 or block_size % PAGE_BYTES:
        problems.append(f"aio.block_size is {block_size}, expected a multiple of {PAGE_BYTES} up to 1 GiB")
    if not 1 <= threads <= 256:
        problems.append(f"aio.thread_count is {threads}, expected 1 to 256")
    if problems:
        raise ConfigError(problems)
