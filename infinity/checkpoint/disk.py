"""The file operations that checkpoints are written with."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infinity.errors import StorageError

ACTIONS = {
    errno.ENOSPC: "Free space on that file system or save elsewhere; the checkpoints before this one are as they were",
    errno.EDQUOT: "Raise this user's quota on that file system or save elsewhere",
    errno.EFBIG: "Raise the file size limit of this process (ulimit -f)",
    errno.EIO: "The disk or its driver reported an error: look at dmesg",
    errno.EACCES: "Choose a directory this user may write to",
    errno.EROFS: "Choose a directory on a file system that is not read-only",
    errno.ELOOP: "It is a symbolic link, which is not followed here; move it away",
}


class Disk:
    """Every operation that a save makes, so that a test can put a failing one in its place.

    Errors are those of the system; ``told`` turns them into ``StorageError``. Files are made with mode 0600,
    directories with 0700, and nothing is ever opened through a symbolic link.
    """

    def make_directory(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: str, *, direct: bool) -> tuple[int, bool]:
        """A descriptor of a new file, with whether it takes direct I/O only."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                with suppress(FileNotFoundError):
                    os.unlink(path)
        return os.open(path, flags, 0o600), False

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """How many of the bytes were written. What direct I/O cannot do, as after a short write, goes the other way."""
        try:
            return os.pwrite(descriptor, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        """Removes a directory of files, or one file or link, if it is there; never follows a link."""
        try:
            kind = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(kind):
            os.unlink(path)
            return
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


@contextmanager
def told(what: str, path: str) -> Iterator[None]:
    """Turns an error of the system into one that says what was being done to which file."""
    try:
        yield
    except OSError as error:
        action = ACTIONS.get(error.errno or 0)
        raise StorageError(what, path=path, errno=error.errno, action=action) from None


def write_all(disk: Disk, descriptor: int, data: memoryview, offset: int) -> None:
    """Writes every byte, however many calls it takes."""
    done = 0
    while done < len(data):
        count = disk.write(descriptor, data[done:], offset + done)
        if count <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """A new small file, durable when this returns."""
    with told("cannot write", path):
        descriptor, _ = disk.create(path, direct=False)
        try:
            write_all(disk, descriptor, memoryview(data), 0)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """The same for a file that may exist: whoever reads it sees the old bytes or the new ones."""
    new = f"{path}.incomplete"
    with told("cannot replace", path):
        disk.remove(new)
    write_file(disk, new, data)
    with told("cannot rename", new):
        disk.rename(new, path)
        disk.sync_directory(os.path.dirname(path))


def read_file(path: str, limit: int) -> bytes:
    """A whole regular file of at most ``limit`` bytes, never through a symbolic link."""
    with told("cannot read", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError("not a regular file:", path=path)
            if status.st_size > limit:
                raise StorageError(f"larger than {limit} bytes, which no such file is:", path=path)
            return file.read(limit)
