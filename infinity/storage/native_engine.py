"""Asynchronous I/O by the native library."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity._native import aio
from infinity._native.aio import NativeBackend
from infinity.errors import StorageError
from infinity.storage.faults import Faults
from infinity.storage.swap_file import Descriptors, SwapFile
from infinity.storage.transfer import check_process, check_request, transfer_error

log = logging.getLogger(__name__)


class NativeIoEngine:
    """One native engine with its own thread. Not usable in a child made by fork."""

    def __init__(
        self, backend: NativeBackend, *, queue_depth: int, block_size: int, threads: int, faults: Faults | None
    ) -> None:
        self.backend: NativeBackend = backend
        try:
            self._native = aio.Engine(
                backend,
                queue_depth=queue_depth,
                block_size=block_size,
                threads=threads,
                faults=None if faults is None else _native_faults(faults),
            )
        except OSError as error:
            raise StorageError(f"I/O backend {backend} cannot run here: {_why(backend, error)}") from None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._abandoned: deque[Transfer] = deque()
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._close = weakref.finalize(self, _close, self._native, self._owner, self._abandoned, self._transfers)

    def register(self, memory: Sequence[torch.Tensor]) -> None:
        """Tells the kernel which regions requests are going to use: it looks up the pages of each once."""
        self._native.register([(region.data_ptr(), region.nbytes) for region in memory if region.nbytes])

    def read(self, file: SwapFile, offset: int, into: torch.Tensor) -> NativeTicket:
        """Fills ``into`` from ``offset`` on. It must not be touched until the ticket is done."""
        return self._submit(file, offset, into, write=False)

    def write(self, file: SwapFile, offset: int, source: torch.Tensor) -> NativeTicket:
        """Writes ``source`` to ``offset``. It must not change until the ticket is done."""
        return self._submit(file, offset, source, write=True)

    def close(self) -> None:
        """Waits for everything in flight, then ends the threads; a second time does nothing."""
        with self._lock:
            self._close()

    def _submit(self, file: SwapFile, offset: int, tensor: torch.Tensor, *, write: bool) -> NativeTicket:
        check_request(file, offset, tensor, write=write)
        check_process(self._owner, file)
        descriptors = file.descriptors
        with self._lock:
            if not self._close.alive:
                raise StorageError(f"the I/O engine ({self.backend}) is closed", path=file.path, offset=offset)
            try:
                request = self._native.submit(
                    write=write,
                    direct_fd=descriptors.direct,
                    buffered_fd=descriptors.buffered,
                    memory_alignment=file.memory_alignment,
                    offset_alignment=file.offset_alignment,
                    device=file.device,
                    offset=offset,
                    address=tensor.data_ptr(),
                    length=tensor.numel(),
                )
            except OSError as error:
                raise transfer_error(
                    write=write, path=file.path, offset=offset, length=tensor.numel(), number=error.errno or 0
                ) from None
            transfer = Transfer(request, file.path, write, (tensor, descriptors))
            self._transfers.add(transfer)
        _look_after(self._abandoned)
        return NativeTicket(transfer, self, self._abandoned)


@dataclass(eq=False)
class Transfer:
    """One request, with what must stay alive until it is done."""

    request: aio.Request
    path: str
    write: bool
    held: tuple[torch.Tensor, Descriptors] | None

    def error(self) -> StorageError | None:
        """Waits; what went wrong, if anything."""
        failure = self.request.wait()
        self.held = None
        if failure is None:
            return None
        return transfer_error(
            write=self.write,
            path=self.path,
            offset=failure.offset,
            length=failure.length,
            number=failure.errno,
        )


class NativeTicket:
    """One request on its way, which goes on when the ticket is dropped; an error is then logged."""

    def __init__(self, transfer: Transfer, engine: NativeIoEngine, abandoned: deque[Transfer]) -> None:
        self._transfer = transfer
        self._engine = engine  # must not be collected, and so closed, while somebody may wait
        self._abandoned = abandoned
        self._waited = False

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._transfer.request.done()

    def finished_at(self) -> float:
        """When the transfer ended, on the clock of ``time.perf_counter``; only once it is done."""
        return self._transfer.request.finished_at()

    def wait(self) -> None:
        """Returns when nothing touches the tensor any more; raises StorageError when a block failed."""
        error = self._transfer.error()
        self._waited = True
        if error is not None:
            raise error

    def __del__(self) -> None:
        if not self._waited:
            self._abandoned.append(self._transfer)


def _look_after(abandoned: deque[Transfer]) -> None:
    """Lets go of dropped transfers that are done."""
    for _ in range(len(abandoned)):
        try:
            transfer = abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        if not transfer.request.done():
            abandoned.append(transfer)
        elif (error := transfer.error()) is not None:
            log.error("nobody waited for an I/O request that failed: %s", error)


def _close(native: aio.Engine, owner: int, abandoned: deque[Transfer], transfers: weakref.WeakSet[Transfer]) -> None:
    if os.getpid() != owner:  # a child made by fork has none of the threads
        return
    native.close()
    _look_after(abandoned)
    for transfer in transfers:  # whoever keeps a ticket must not keep a file, so its disk space, with it
        transfer.held = None


def _native_faults(faults: Faults) -> aio.Faults:
    return aio.Faults(
        seed=faults.seed,
        short_probability=faults.short,
        fail_probability=faults.fail,
        error=faults.errno,
        delay_seconds=faults.delay_seconds,
        reorder=int(faults.reorder),
        fail_at=-1 if faults.fail_at is None else faults.fail_at,
    )


def _why(backend: NativeBackend, error: OSError) -> str:
    """The reason and the way out, for what the kernel or its sandbox said."""
    missing = aio.missing()
    if missing is not None:
        return missing
    number = error.errno or 0
    known = {
        ("io_uring", errno.EPERM): "it is forbidden, by seccomp (as in Docker's default profile) or by the sysctl "
        "kernel.io_uring_disabled; allow it there or use the backend aio or threads",
        ("io_uring", errno.ENOSYS): "the kernel lacks it or seccomp hides it; use the backend aio or threads",
        ("io_uring", errno.ENOMEM): "it needs more locked memory than this user may have; raise ulimit -l",
        ("io_uring", errno.EOPNOTSUPP): "the kernel is older than 5.6; use the backend aio or threads",
        ("aio", errno.EPERM): "it is forbidden, by seccomp; allow it there or use the backend threads",
        ("aio", errno.ENOSYS): "the kernel lacks it or seccomp hides it; use the backend io_uring or threads",
        ("aio", errno.EAGAIN): "all contexts of the machine are in use; raise the sysctl fs.aio-max-nr",
    }.get((backend, number))
    limit = {
        errno.EMFILE: "this process has too many open files; raise ulimit -n",
        errno.EAGAIN: "no more threads can be started; raise ulimit -u",
    }.get(number)
    return f"{known or limit or 'unexpected error'} ({errno.errorcode.get(number, number)})"
