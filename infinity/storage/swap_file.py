"""One open swap file."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat

from infinity._native import aio
from infinity.errors import StorageError
from infinity.tier import PAGE_BYTES

log = logging.getLogger(__name__)


class Descriptors:
    """The two descriptors of one file, closed when nobody holds this object any more.

    A request holds it until it is done, so a descriptor's number is never given to another file in the meantime.
    """

    def __init__(self, buffered: int) -> None:
        self.buffered = buffered
        self.direct = -1

    def __del__(self) -> None:
        for descriptor in (self.direct, self.buffered):
            if descriptor >= 0:
                os.close(descriptor)


class SwapFile:
    """A regular file, open for direct and for buffered I/O.

    Direct I/O takes only aligned requests; an engine sends the rest through the buffered descriptor.
    """

    def __init__(self, path: str, descriptors: Descriptors, device: int) -> None:
        self.path = path
        self.device = device
        """Number of the file system; requests to different ones do not wait for each other."""
        self.memory_alignment = 1
        """What direct I/O needs memory addresses to be multiples of."""
        self.offset_alignment = 1
        self._descriptors: Descriptors | None = descriptors

    @property
    def descriptors(self) -> Descriptors:
        """What a request must hold until it is done; StorageError when the file is closed."""
        if self._descriptors is None:
            raise StorageError(
                "swap file is closed:", path=self.path, errno=errno.EBADF, action="Close it after its last use"
            )
        return self._descriptors

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        return self.descriptors.direct >= 0

    @property
    def closed(self) -> bool:
        return self._descriptors is None

    def fileno(self) -> int:
        """The descriptor that aligned requests use."""
        return self.descriptors.direct if self.direct else self.descriptors.buffered

    def close(self) -> None:
        """Requests in flight go on; the descriptors close with the last of them. A second time does nothing."""
        self._descriptors = None


def open_file(path: str, *, create: bool = False, direct: bool = True) -> SwapFile:
    """Opens ``path`` for reading and writing, never through a symbolic link, never inherited by a child.

    ``create`` makes it (mode 0600) where it does not exist. Where the file system refuses O_DIRECT, all I/O is
    buffered, which is logged once per directory.
    """
    descriptors = Descriptors(_open(path, os.O_CREAT if create else 0))
    status = os.fstat(descriptors.buffered)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError("not a regular file:", path=path, action="Swap files must be ordinary files; move it away")
    file = SwapFile(path, descriptors, status.st_dev)
    if direct:
        _open_direct(file, status)
    return file


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        action = {
            errno.ELOOP: "It is a symbolic link, which swap files must not be; move it away",
            errno.EMFILE: "Raise the limit on open files (ulimit -n)",
            errno.EACCES: "Choose a directory this user may write to",
        }.get(error.errno or 0)
        raise StorageError("cannot open", path=path, errno=error.errno, action=action) from None


def _open_direct(file: SwapFile, status: os.stat_result) -> None:
    """Adds the direct descriptor, where the file system has such a thing."""
    directory = os.path.dirname(file.path)
    try:
        descriptor = _open(file.path, os.O_DIRECT)
    except StorageError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return _say_buffered(directory)
    keep = Descriptors(descriptor)
    if not os.path.samestat(os.fstat(descriptor), status):
        raise StorageError("was replaced while it was being opened:", path=file.path, action="Look for another writer")
    try:
        alignment = aio.direct_alignment(descriptor)
    except OSError:
        return _say_buffered(directory)
    # Without an answer from the kernel, whole pages suit every disk.
    file.memory_alignment, file.offset_alignment = alignment or (PAGE_BYTES, PAGE_BYTES)
    file.descriptors.direct, keep.buffered = descriptor, -1
    return None


@functools.cache
def _say_buffered(directory: str) -> None:
    """Cached, so that each directory is named once."""
    log.warning(
        "%s does not support direct I/O (O_DIRECT): swap files there go through the page cache, which costs host "
        "memory and bandwidth. A directory on a local ext4 or XFS disk avoids that.",
        directory or ".",
    )
