"""A save that fails, or dies, at any of its I/O calls leaves the checkpoints before it, and a next save that works."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint import save as saving
from infinity.checkpoint.disk import Disk
from infinity.checkpoint.folder import Folder
from infinity.checkpoint.read import Checkpoint
from infinity.engine import persistence
from infinity.engine.engine import Engine
from tests.checkpoint.helpers import configure, engine_of, everything, same, train

CALLS = ("make_directory", "create", "write", "sync", "close", "sync_directory", "rename", "remove")


class Killed(BaseException):
    """The process is dead: nothing that it would do afterwards happens."""


class FaultyDisk(Disk):
    """Counts calls; does something else at call ``at``."""

    def __init__(self, at: int, fault: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self.calls: list[str] = []
        self._at, self._fault = at, fault
        self._counting = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in CALLS:
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            with self._counting:
                self.calls.append(name)
                is_it = len(self.calls) - 1 == self._at
            if is_it:
                return self._fault(name, partial(value, **options), arguments)
            return value(*arguments, **options)

        return call


def failing(number: int) -> Callable[..., Any]:
    def fault(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "close":
            call(*arguments)  # as on Linux: the descriptor is gone in any case
        raise OSError(number, os.strerror(number))

    return fault


def short(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if name != "write":
        return call(*arguments)
    descriptor, data, offset = arguments
    return call(descriptor, data[: max(1, len(data) // 3)], offset)


class DyingDisk(FaultyDisk):
    """From call ``at`` on nothing happens any more, as after SIGKILL."""

    def __init__(self, at: int) -> None:
        super().__init__(at, self._die)

    def _die(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        raise Killed

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS and len(super().__getattribute__("calls")) > super().__getattribute__("_at") >= 0:

            def dead(*arguments: Any, **options: Any) -> Any:
                raise Killed

            return dead
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit in a file of its own, so that there are more calls to fail."""
    monkeypatch.setattr(saving, "FILE_BYTES", 1)


def save(engine: Engine, path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, tag: str, keep: int | None) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(persistence, "Folder", partial(Folder, disk=disk))
        return engine.save_checkpoint(path, tag, keep_last=keep)


def complete(path: Path) -> list[str]:
    """The tags of all complete checkpoints, of which each is whole."""
    folder = Folder(path)
    for tag in folder.tags():
        with Checkpoint(folder.find(tag)) as checkpoint:
            checkpoint.verify()
    return folder.tags()


FAULTS = {"EIO": failing(errno.EIO), "ENOSPC": failing(errno.ENOSPC), "short": short, "killed": None}


@pytest.mark.parametrize(
    "every", [20, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["some", "all"]
)
@pytest.mark.parametrize("tag", ["second", "first"], ids=["new", "replaced"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_in_turn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    tag: str,
    every: int,
    record_property: Callable[..., None],
) -> None:
    folder, former, newer = tmp_path / "ckpt", tmp_path / "former", tmp_path / "newer"
    keep = None if tag == "first" else 1
    choice = FAULTS[fault]
    outcomes = {"former": 0, "new": 0}
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        train(engine, 0, 1)
        states = {"former": everything(engine)}
        engine.save_checkpoint(former, "first")
        train(engine, 1, 2)
        states["new"] = everything(engine)
        engine.save_checkpoint(newer, "second")

        def fresh() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(former, folder)
            engine.load_checkpoint(newer)

        fresh()
        counted = FaultyDisk(-1, short)
        save(engine, folder, counted, monkeypatch, tag, keep)
        assert len(counted.calls) > 40
        for at, call in list(enumerate(counted.calls))[::-every]:
            fresh()
            disk = DyingDisk(at) if choice is None else FaultyDisk(at, choice)
            failed = False
            try:
                save(engine, folder, disk, monkeypatch, tag, keep)
            except infinity.StorageError:
                failed = True
                assert choice is not None
            except Killed:
                failed = True
                assert choice is None
            assert failed == (fault != "short"), (at, disk.calls)
            assert complete(folder), (at, call)
            engine.load_checkpoint(folder)
            now = everything(engine)
            found = [name for name, state in states.items() if same(state, now) == []]
            assert found == ["new"] if not failed else len(found) == 1, (at, call)
            outcomes[found[0]] += 1
            engine.load_checkpoint(newer)
            engine.save_checkpoint(folder, tag)  # what was left is no obstacle
            assert complete(folder)
            assert not [name for name in os.listdir(folder) if "." in name], os.listdir(folder)
    record_property("outcomes", outcomes)
    assert fault == "short" or every > 1 or min(outcomes.values()) > 0


def test_a_disk_with_too_little_space_is_told_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        engine.save_checkpoint(tmp_path / "ckpt", "first")
        real = os.statvfs(tmp_path)

        class Full:
            f_bavail, f_frsize = 1, real.f_frsize

        monkeypatch.setattr(os, "statvfs", lambda path: Full)
        with pytest.raises(infinity.StorageError, match=r"a checkpoint needs \d+ bytes but only \d+ are free"):
            engine.save_checkpoint(tmp_path / "ckpt", "second")
        monkeypatch.undo()
        assert complete(tmp_path / "ckpt") == ["first"]
        assert sorted(os.listdir(tmp_path / "ckpt")) == ["first", "latest"]
        train(engine, 0, 1)


def test_two_processes_do_not_save_into_one_directory(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine, Folder(tmp_path / "ckpt").writing():
        others = tmp_path / "ckpt" / "a.incomplete"
        others.mkdir()
        with pytest.raises(infinity.StorageError, match="another process is saving"):
            engine.save_checkpoint(tmp_path / "ckpt", "a")
        assert others.exists()


def test_what_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    (folder / "step.incomplete").mkdir(parents=True)
    (folder / "step.incomplete" / "thesis.tex").touch()
    (folder / "mine").mkdir()
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        with pytest.raises(infinity.StorageError, match=r"holds thesis\.tex"):
            engine.save_checkpoint(folder, "step")
        (folder / "step.incomplete").rename(folder / "other")
        for tag in ("a", "b", "c"):
            engine.save_checkpoint(folder, tag, keep_last=1)
    assert sorted(os.listdir(folder)) == ["c", "latest", "mine", "other"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "manifest.json").write_text("precious")
    (folder / "a.incomplete").symlink_to(victim)
    (folder / "latest.incomplete").symlink_to(victim / "manifest.json")
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        engine.save_checkpoint(folder, "a")
        assert (victim / "manifest.json").read_text() == "precious"
        (folder / "b").symlink_to(folder / "a")
        with pytest.raises(infinity.CheckpointError, match="no complete checkpoint"):
            engine.load_checkpoint(folder, "b")


@pytest.mark.parametrize("tag", ["../outside", "a/b", "", ".hidden", "latest", "x.incomplete", "x.replaced", "a\nb"])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: str) -> None:
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        if tag:
            with pytest.raises(infinity.CheckpointError, match="cannot be the tag"):
                engine.save_checkpoint(tmp_path / "ckpt", tag)
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        (tmp_path / "ckpt" / "latest").write_text(tag)
        with pytest.raises(infinity.CheckpointError, match="cannot be the tag"):
            engine.load_checkpoint(tmp_path / "ckpt")
