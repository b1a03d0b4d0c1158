"""One open swap file."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from dataclasses import dataclass

from infinity._native import aio
from infinity.errors import StorageError
from infinity.tier import PAGE_BYTES

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SwapFile:
    """A regular file, open for direct and for buffered I/O.

    Direct I/O takes only aligned requests; an engine sends the rest through the buffered descriptor. Close it when
    no request on it is in flight any more: its descriptors' numbers may then be given to other files.
    """

    path: str
    direct_fd: int
    """-1 where the file system takes no direct I/O."""
    buffered_fd: int
    memory_alignment: int
    offset_alignment: int
    device: int
    """Number of the file system; requests to different ones do not wait for each other."""

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        return self.direct_fd >= 0

    @property
    def closed(self) -> bool:
        return self.buffered_fd < 0

    def fileno(self) -> int:
        """The descriptor that aligned requests use."""
        return self.direct_fd if self.direct else self.buffered_fd

    def close(self) -> None:
        """Closes both descriptors; a second time does nothing."""
        for descriptor in (self.direct_fd, self.buffered_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct_fd = self.buffered_fd = -1

    def __del__(self) -> None:
        self.close()


def open_file(path: str, *, create: bool = False, direct: bool = True) -> SwapFile:
    """Opens ``path`` for reading and writing, never through a symbolic link, never inherited by a child.

    ``create`` makes it (mode 0600) where it does not exist. Where the file system refuses O_DIRECT, all I/O is
    buffered, which is logged once per directory.
    """
    buffered = _open(path, os.O_CREAT if create else 0)
    file = SwapFile(path, -1, buffered, 1, 1, 0)
    status = os.fstat(buffered)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError("not a regular file:", path=path, action="Swap files must be ordinary files; move it away")
    file.device = status.st_dev
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
    try:
        descriptor = _open(file.path, os.O_DIRECT)
    except StorageError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return _say_buffered(os.path.dirname(file.path))
    file.direct_fd = descriptor
    if not os.path.samestat(os.fstat(descriptor), status):
        raise StorageError("was replaced while it was being opened:", path=file.path, action="Look for another writer")
    try:
        alignment = aio.direct_alignment(descriptor)
    except OSError:
        os.close(descriptor)
        file.direct_fd = -1
        return _say_buffered(os.path.dirname(file.path))
    # Without an answer from the kernel, whole pages suit every disk.
    file.memory_alignment, file.offset_alignment = alignment or (PAGE_BYTES, PAGE_BYTES)
    return None


@functools.cache
def _say_buffered(directory: str) -> None:
    """Cached, so that each directory is named once."""
    log.warning(
        "%s does not support direct I/O (O_DIRECT): swap files there go through the page cache, which costs host "
        "memory and bandwidth. A directory on a local ext4 or XFS disk avoids that.",
        directory or ".",
    )
