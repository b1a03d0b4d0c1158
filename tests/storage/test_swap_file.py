"""Swap files are opened safely, directly where the file system allows it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.storage.swap_file import open_file


def test_mode_and_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(StorageError) as caught:
        open_file(str(path))
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(path))
    file = open_file(str(path), create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not os.get_inheritable(file.fileno())
    assert not os.get_inheritable(file.descriptors.buffered)
    descriptors = [file.descriptors.direct, file.descriptors.buffered]
    file.close()
    file.close()
    assert file.closed
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_dropped_file_closes_its_descriptors(tmp_path: Path) -> None:
    file = open_file(str(tmp_path / "a"), create=True)
    descriptor = file.fileno()
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_create_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"kept")
    open_file(str(path), create=True).close()
    assert path.read_bytes() == b"kept"


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError, match="symbolic link") as caught:
        open_file(str(tmp_path / "link"), create=True)
    assert caught.value.errno == errno.ELOOP
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="regular"):
        open_file(str(tmp_path / "pipe"))
    with pytest.raises(StorageError):
        open_file(str(tmp_path))


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without O_DIRECT does."""
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)


def refuse_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As statx does for a file that can be opened with O_DIRECT but takes no direct I/O."""

    def refusing(fd: int) -> tuple[int, int]:
        raise OSError(errno.EOPNOTSUPP, "statx")

    monkeypatch.setattr("infinity._native.aio.direct_alignment", refusing)


@pytest.mark.parametrize("refuse", [refuse_direct, refuse_alignment])
def test_refused_direct_io_is_buffered_and_said_once_per_directory(
    refuse: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(refuse)
    refuse(monkeypatch)
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
        for name in ("a", "b"):
            file = open_file(str(tmp_path / directory / name), create=True)
            assert not file.direct
            assert file.fileno() == file.descriptors.buffered
            file.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert str(tmp_path / "first") in said[0]
    assert str(tmp_path / "second") in said[1]


def test_other_errors_of_direct_open_are_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StorageError, match="ulimit -n"):
        open_file(str(tmp_path / "a"), create=True)


def test_a_file_replaced_in_between_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    real = os.open

    def replacing(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            path.rename(tmp_path / "moved")
            path.write_bytes(b"")
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", replacing)
    with pytest.raises(StorageError, match="replaced"):
        open_file(str(path), create=True)
