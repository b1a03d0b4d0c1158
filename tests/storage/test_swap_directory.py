"""Swap files of killed runs are reclaimed; whatever is not ours is left alone."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.storage.swap_directory import LOCK_NAME, OWNER_DIRECTORY, SwapDirectory
from infinity.tier import PAGE_BYTES

SIZE = 16 * PAGE_BYTES


def owned(root: Path, nbytes: int = SIZE, rank: int = 0) -> SwapDirectory:
    made = SwapDirectory(str(root), rank=rank, nbytes=nbytes)
    made.create("param", nbytes)
    return made


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that has done ``work`` and lives on until it is killed, here or by the caller."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(tell, b"+" if kept else b"-")
            signal.pause()
        finally:
            os._exit(0)
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"+"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def killed(root: Path) -> Path:
    """The directory that a killed owner left below ``root``."""
    before = set(root.iterdir())
    with child(lambda: owned(root)):
        pass
    (left,) = set(root.iterdir()) - before
    assert sorted(path.name for path in left.iterdir()) == [LOCK_NAME, "param.swap"]
    return left


def test_files_are_private_allocated_and_removed(tmp_path: Path) -> None:
    made = owned(tmp_path, rank=3)
    path = Path(made.path)
    assert OWNER_DIRECTORY.fullmatch(path.name)
    assert path.name.startswith(f"infinity-swap-rank3-{os.getpid()}-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    file = path / "param.swap"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == SIZE
    assert file.stat().st_blocks * 512 == SIZE, "allocated now, so that a full disk is known now"
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_is_reclaimed(tmp_path: Path) -> None:
    left = killed(tmp_path)
    made = owned(tmp_path)
    assert not left.exists()
    assert made.reclaimed_bytes >= SIZE
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    with child(lambda: owned(tmp_path)):
        (theirs,) = tmp_path.iterdir()
        mine = owned(tmp_path)
        other = owned(tmp_path, rank=1)
        assert mine.reclaimed_bytes == other.reclaimed_bytes == 0
        assert sorted(path.name for path in theirs.iterdir()) == [LOCK_NAME, "param.swap"]
        mine.remove()
        other.remove()
        assert list(tmp_path.iterdir()) == [theirs]
    again = owned(tmp_path)
    assert not theirs.exists()
    again.remove()


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    left = killed(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "param.swap").write_text("mine, whatever it is called")
    (tmp_path / "infinity-swap-of-mine").mkdir()
    (tmp_path / "infinity-swap-of-mine" / "a.swap").write_text("mine")
    (left / "notes.txt").write_text("mine")
    (left / "folder.swap").mkdir()
    made = owned(tmp_path)
    assert made.reclaimed_bytes >= SIZE
    made.remove()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "infinity-swap-of-mine/a.swap",
        f"{left.name}/notes.txt",
        "notes.txt",
        "param.swap",
    ]
    assert (left / "folder.swap").is_dir()


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "weights.swap").write_text("mine")
    (precious / LOCK_NAME).write_text("")
    root = tmp_path / "root"
    root.mkdir()
    (root / "infinity-swap-rank0-1-00000000").symlink_to(precious)
    left = killed(root)
    (left / "linked.swap").symlink_to(precious / "weights.swap")
    trap = root / "infinity-swap-rank0-2-00000000"
    trap.mkdir()
    (trap / LOCK_NAME).symlink_to(precious / LOCK_NAME)
    (trap / "x.swap").write_text("whose lock is a link")
    owned(root).remove()
    assert (precious / "weights.swap").read_text() == "mine"
    assert (trap / "x.swap").exists()
    assert (left / "linked.swap").is_symlink()
    assert not (left / "param.swap").exists()


def test_a_swap_file_is_never_opened_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    made = owned(tmp_path / "root")
    (Path(made.path) / "grad.swap").symlink_to(victim)
    with pytest.raises(StorageError, match="symbolic link"):
        made.create("grad", SIZE)
    assert victim.read_text() == "mine"
    made.remove()


@pytest.mark.parametrize("killed_after", ["mkdir", "lock", "unlink"])
def test_an_owner_killed_half_way_leaves_nothing_that_stays(killed_after: str, tmp_path: Path) -> None:
    half = tmp_path / "infinity-swap-rank0-1-00000000"
    half.mkdir()
    if killed_after != "mkdir":
        (half / LOCK_NAME).write_text("")
    if killed_after == "unlink":
        (half / "grad.swap").write_text("removed half way")
    owned(tmp_path).remove()
    assert not half.exists()


def test_root_is_created_one_level_deep_and_removed_again(tmp_path: Path) -> None:
    root = tmp_path / "swap"
    made = owned(root)
    second = owned(root, rank=1)
    made.remove()
    assert root.is_dir(), "another engine works there"
    second.remove()
    made = owned(root)
    (root / "notes.txt").write_text("mine")
    made.remove()
    assert (root / "notes.txt").read_text() == "mine"


def test_what_cannot_be_a_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, said in (("file", "nvme_path is not a directory"), ("not/there", "nvme_path does not exist")):
        with pytest.raises(StorageError, match=rf"{said}.* {re.escape(str(tmp_path / path))}"):
            owned(tmp_path / path)
    assert not (tmp_path / "not").exists()


def test_more_than_is_free_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    wanted = status.f_blocks * status.f_frsize * 2
    with pytest.raises(StorageError, match=rf"swap needs {wanted} bytes but only \d+ are free in") as caught:
        SwapDirectory(str(tmp_path), rank=0, nbytes=wanted)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_met_when_files_are_made(tmp_path: Path) -> None:
    def limited() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, PAGE_BYTES))
        made = SwapDirectory(str(tmp_path), rank=0, nbytes=SIZE)
        try:
            made.create("param", SIZE)
        except StorageError as error:
            made.remove()
            return error.errno == errno.EFBIG and "ulimit -f" in str(error) and error.length == SIZE
        return False

    with child(limited):
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = SwapDirectory(str(tmp_path), rank=0, nbytes=SIZE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    said = rf"cannot reserve swap file \S+grad\.swap, {SIZE} bytes: No space left .*\d+ bytes are free there; free more"
    with pytest.raises(StorageError, match=said) as caught:
        made.create("grad", SIZE)
    assert caught.value.errno == errno.ENOSPC
    made.remove()
    assert list(tmp_path.iterdir()) == []
