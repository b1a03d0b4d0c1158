"""Typed face of native/aio: asynchronous block I/O by file descriptor."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infinity._native import library

NativeBackend = Literal["io_uring", "aio", "threads"]

BACKEND_CODES: dict[NativeBackend, int] = {"io_uring": 0, "aio": 1, "threads": 2}

WAIT_SLICE_MILLISECONDS = 500
"""How long a wait stays in native code at a time: between slices Python runs signal handlers, so Ctrl-C works."""

_NOT_YET = 1


class _Options(ctypes.Structure):
    _fields_ = (
        ("backend", ctypes.c_int64),
        ("queue_depth", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("faults", ctypes.c_void_p),
    )


class Faults(ctypes.Structure):
    """Faults to inject; the fields are those of ``infinity_aio_faults``."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("short_probability", ctypes.c_double),
        ("fail_probability", ctypes.c_double),
        ("error", ctypes.c_int64),
        ("delay_seconds", ctypes.c_double),
        ("reorder", ctypes.c_int64),
        ("fail_at", ctypes.c_int64),
    )


class _Transfer(ctypes.Structure):
    _fields_ = (
        ("direct_fd", ctypes.c_int64),
        ("buffered_fd", ctypes.c_int64),
        ("memory_alignment", ctypes.c_int64),
        ("offset_alignment", ctypes.c_int64),
        ("device", ctypes.c_uint64),
        ("direction", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_int64))


class _Failure(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int64), ("offset", ctypes.c_int64), ("length", ctypes.c_int64))


@dataclass(frozen=True)
class Failure:
    """What went wrong with which block of a request."""

    errno: int
    offset: int
    length: int


class _Library:
    """The functions of the library with their types."""

    def __init__(self) -> None:
        loaded = library.load("aio")
        if loaded is None:
            raise OSError(errno.ENOSYS, library.why_missing("aio"))
        self.open = loaded.infinity_aio_open
        self.close = loaded.infinity_aio_close
        self.register = loaded.infinity_aio_register
        self.submit = loaded.infinity_aio_submit
        self.done = loaded.infinity_aio_done
        self.finished = loaded.infinity_aio_finished
        self.wait = loaded.infinity_aio_wait
        self.release = loaded.infinity_aio_release
        self.alignment = loaded.infinity_aio_alignment
        handle, integer = ctypes.c_void_p, ctypes.c_int64
        self.open.argtypes = (ctypes.POINTER(_Options), ctypes.POINTER(handle))
        self.close.argtypes = (handle,)
        self.register.argtypes = (handle, ctypes.POINTER(_Region), integer)
        self.submit.argtypes = (handle, ctypes.POINTER(_Transfer), ctypes.POINTER(handle))
        self.done.argtypes = (handle,)
        self.finished.argtypes = (handle,)
        self.wait.argtypes = (handle, integer, ctypes.POINTER(_Failure))
        self.release.argtypes = (handle,)
        self.alignment.argtypes = (integer, ctypes.POINTER(integer), ctypes.POINTER(integer))
        answers = (
            self.open,
            self.close,
            self.register,
            self.submit,
            self.done,
            self.finished,
            self.wait,
            self.release,
            self.alignment,
        )
        for function in answers:
            function.restype = integer


def missing() -> str | None:
    """Why there is no native library, or None when there is one."""
    return library.why_missing("aio")


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """What direct I/O on ``fd`` needs memory addresses and file offsets to be multiples of; None: nobody can say.

    Raises OSError with EOPNOTSUPP where the file takes no direct I/O at all.
    """
    if missing() is not None:
        return None
    memory, offset = ctypes.c_int64(), ctypes.c_int64()
    result = _Library().alignment(fd, memory, offset)
    if result == -errno.ENOSYS:
        return None
    if result < 0:
        raise OSError(-result, "statx")
    return memory.value, offset.value


class Request:
    """One transfer on its way. Dropping it does not stop it: the buffer must live until ``done``."""

    __slots__ = ("_handle", "_library")

    def __init__(self, functions: _Library, handle: ctypes.c_void_p) -> None:
        self._library = functions
        self._handle = handle

    def done(self) -> bool:
        return bool(self._library.done(self._handle))

    def finished_at(self) -> float:
        """When the last block finished, on the clock of ``time.perf_counter``; only once it is done."""
        return float(self._library.finished(self._handle)) / 1e9

    def wait(self) -> Failure | None:
        """Blocks, without the interpreter lock, until no block is on its way any more; any number of times."""
        failure = _Failure()
        while (result := self._library.wait(self._handle, WAIT_SLICE_MILLISECONDS, failure)) == _NOT_YET:
            pass
        return None if result == 0 else Failure(-result, failure.offset, failure.length)

    def __del__(self) -> None:
        self._library.release(self._handle)


class Engine:
    """A native engine; raises OSError with the errno the machine gave when it cannot be opened."""

    def __init__(
        self, backend: NativeBackend, *, queue_depth: int, block_size: int, threads: int, faults: Faults | None
    ) -> None:
        self._library = _Library()
        self._handle = ctypes.c_void_p()
        options = _Options(
            BACKEND_CODES[backend],
            queue_depth,
            block_size,
            threads,
            None if faults is None else ctypes.addressof(faults),
        )
        result = self._library.open(options, self._handle)
        if result < 0:
            raise OSError(-result, "infinity_aio_open")

    def register(self, regions: Sequence[tuple[int, int]]) -> bool:
        """Lets memory, as addresses with lengths, be pinned from its first use until the end; whether it can be."""
        given = (_Region * len(regions))(*(_Region(*region) for region in regions))
        result = self._library.register(self._handle, given, len(regions))
        if result < 0:
            raise OSError(-result, "infinity_aio_register")
        return bool(result)

    def submit(
        self,
        *,
        write: bool,
        direct_fd: int,
        buffered_fd: int,
        memory_alignment: int,
        offset_alignment: int,
        device: int,
        offset: int,
        address: int,
        length: int,
    ) -> Request:
        """Starts one transfer; ``direct_fd`` is -1 where the file takes no direct I/O."""
        transfer = _Transfer(
            direct_fd,
            buffered_fd,
            memory_alignment,
            offset_alignment,
            device,
            int(write),
            offset,
            address,
            length,
        )
        handle = ctypes.c_void_p()
        result = self._library.submit(self._handle, transfer, handle)
        if result < 0:
            raise OSError(-result, "infinity_aio_submit")
        return Request(self._library, handle)

    def close(self) -> None:
        """Waits for everything in flight and ends the threads; not to be called twice, nor while others submit."""
        self._library.close(self._handle)
