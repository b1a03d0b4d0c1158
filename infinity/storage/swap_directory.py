"""The directory under an NVMe path that one engine owns for as long as it lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infinity.errors import StorageError
from infinity.storage.swap_file import SwapFile, open_file
from infinity.storage.transfer import ACTIONS

log = logging.getLogger(__name__)

OWNER_DIRECTORY = re.compile(r"infinity-swap-rank\d+-\d+-[0-9a-f]{8}")
SWAP_SUFFIX = ".swap"
LOCK_NAME = "owner.lock"


class SwapDirectory:
    """One engine's swap files below ``root``, which the user names in ``nvme_path``.

    The engine works in a subdirectory of its own, held by a file lock. Subdirectories whose owner is gone (killed
    runs) are reclaimed on the way in: only files with names this class gives are ever removed. ``root`` itself is
    created if only its last component is missing, so that a forgotten mount is an error instead of a full system
    disk.
    """

    def __init__(self, root: str, *, rank: int, nbytes: int) -> None:
        self.root = os.path.abspath(root)
        self.path = os.path.join(self.root, f"infinity-swap-rank{rank}-{os.getpid()}-{secrets.token_hex(4)}")
        self._files: list[SwapFile] = []
        self._lock = -1
        self._made_root = False
        self._owner = os.getpid()
        root_lock = self._lock_root()
        try:
            self.reclaimed_bytes = self._reclaim()
            self._check_space(nbytes)
            self._lock = self._make_owner_directory()
        finally:
            os.close(root_lock)

    def create(self, name: str, nbytes: int) -> SwapFile:
        """A new file of exactly ``nbytes``, all allocated now so that a full disk is known before the first step."""
        path = os.path.join(self.path, name + SWAP_SUFFIX)
        file = open_file(path, create=True)
        self._files.append(file)
        if not nbytes:
            return file  # posix_fallocate takes no zero; this one grows later
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            free = _free_bytes(self.root)
            raise StorageError(
                "cannot reserve swap file",
                path=path,
                length=nbytes,
                errno=error.errno,
                action=ACTIONS[errno.EFBIG]
                if error.errno == errno.EFBIG
                else f"{free} bytes are free there; free more, choose another nvme_path, or keep a state kind in host "
                "memory (infinity.placement)",
            ) from None
        return file

    def remove(self) -> None:
        """Closes and removes every file made here; ``root`` stays unless it was made here too.

        Whatever was removed already, by whomever, is no error. In a child made by fork nothing is removed: the files
        are its parent's.
        """
        for file in self._files:
            file.close()
        self._files = []
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        if os.getpid() != self._owner:
            return
        try:
            with suppress(FileNotFoundError), _locked(self.root):
                _remove_owner_directory(self.path)
                if self._made_root:
                    # Not if another engine still works there, or the user put something in.
                    with suppress(OSError):
                        os.rmdir(self.root)
        finally:
            os.close(lock)

    def _make_owner_directory(self) -> int:
        """Makes ``path`` with the lock file whose descriptor, given back, says that its owner lives."""
        try:
            os.mkdir(self.path, 0o700)
        except OSError as error:
            raise self._refused("cannot create a swap directory in", error) from None
        lock = os.path.join(self.path, LOCK_NAME)
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            _remove_owner_directory(self.path)
            raise self._refused("cannot create a lock file in", error) from None
        return descriptor

    def _lock_root(self) -> int:
        """A descriptor that serialises reclaiming, creation, removal, so that a newcomer is never a leftover.

        Another engine that made ``root`` may remove it while this one waits, so what was locked is looked at again.
        """
        while True:
            self._made_root |= self._ensure_root()
            try:
                descriptor = _lock(self.root)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._refused("cannot lock", error) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.root)):
                    return descriptor
            os.close(descriptor)

    def _ensure_root(self) -> bool:
        try:
            os.mkdir(self.root, 0o700)
            return True
        except FileExistsError:
            if not os.path.isdir(self.root):
                raise StorageError(
                    "nvme_path is not a directory:", path=self.root, action="Name a directory on a fast local disk"
                ) from None
            return False
        except NotADirectoryError:
            raise StorageError(
                "nvme_path is below something that is not a directory:",
                path=self.root,
                action="Name a directory on a fast local disk",
            ) from None
        except FileNotFoundError as error:
            if os.path.isdir(os.path.dirname(self.root)):
                raise self._refused("cannot create", error) from None
            raise StorageError(
                "nvme_path does not exist, nor does the directory above it:",
                path=self.root,
                action="Mount the disk or create it with mkdir -p; it is not created here because a forgotten mount "
                "would fill another disk",
            ) from None
        except OSError as error:
            raise self._refused("cannot create", error) from None

    def _refused(self, what: str, error: OSError) -> StorageError:
        return StorageError(
            what,
            path=self.root,
            errno=error.errno,
            action="Choose an nvme_path this user may write to, or change its owner or mode",
        )

    def _reclaim(self) -> int:
        reclaimed = 0
        for entry in self._entries():
            if not OWNER_DIRECTORY.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            try:
                lock = os.open(os.path.join(entry.path, LOCK_NAME), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                with suppress(OSError):
                    os.rmdir(entry.path)  # killed before the lock was made, or after it was removed
                continue
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reclaimed += _remove_owner_directory(entry.path)
            except BlockingIOError:
                continue  # its owner is alive
            finally:
                os.close(lock)
        if reclaimed:
            log.warning("reclaimed %d bytes of swap files left by a killed run in %s", reclaimed, self.root)
        return reclaimed

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root) as entries:
                return list(entries)
        except OSError as error:
            raise self._refused("cannot list", error) from None

    def _check_space(self, nbytes: int) -> None:
        free = _free_bytes(self.root)
        if free < nbytes:
            raise StorageError(
                f"swap needs {nbytes} bytes but only {free} are free in",
                path=self.root,
                errno=errno.ENOSPC,
                action="Free the difference, choose another nvme_path, or keep a state kind in host memory "
                "(infinity.placement)",
            )


def _lock(directory: str) -> int:
    """A descriptor of ``directory`` that holds its lock until it is closed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    descriptor = _lock(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _free_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _remove_owner_directory(path: str) -> int:
    """Removes our own files in ``path``, then the directory if nothing else is in it; returns the bytes freed.

    The lock goes last: a directory without one holds nothing of ours, wherever a kill came.
    """
    freed = 0
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith(SWAP_SUFFIX) and stat.S_ISREG(status.st_mode):
                os.unlink(entry.path)
                freed += status.st_blocks * 512
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(path, LOCK_NAME))
    try:
        os.rmdir(path)
    except OSError:
        log.warning("left %s in place: it holds files that are not swap files", path)
    return freed
