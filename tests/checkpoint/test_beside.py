"""A save beside training keeps the values of its call, to the byte; whoever would change them waits for it."""

from __future__ import annotations

import errno
import gc
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import save as saving
from infinity.checkpoint.disk import Disk
from infinity.checkpoint.folder import Folder
from infinity.engine import persistence
from infinity.engine.engine import Engine
from tests.checkpoint.helpers import Model, configure, engine_of, everything, same, train
from tests.checkpoint.test_disk_faults import FaultyDisk, complete, failing


class HeldDisk(Disk):
    """Writes nothing before ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.go.wait()
        return super().write(descriptor, data, offset)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of several windows, some in a file of their own."""
    monkeypatch.setattr(saving, "WINDOW_BYTES", 1 << 14)
    monkeypatch.setattr(saving, "FILE_BYTES", 1 << 18)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    """What saves beside training write to; one that waits writes to a disk of its own."""
    held = HeldDisk()
    monkeypatch.setattr(persistence, "Folder", partial(Folder, disk=held))
    return held


def save(engine: Engine, folder: Path, disk: HeldDisk) -> None:
    """The same state twice: as "first" by a save that waits, as "beside" by one that has written nothing yet."""
    disk.go.set()
    engine.save_checkpoint(folder, "first")
    disk.go.clear()
    assert engine.save_checkpoint(folder, "beside", wait=False) == str(folder / "beside")
    assert Folder(folder).tags() == ["first"]


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def release_when_asked(engine: Engine, disk: HeldDisk) -> list[int]:
    """Lets the disk write when the first update asks whether it may begin; the units that asked."""
    asked: list[int] = []
    held = engine._parts.updater.held

    def ask(unit: int) -> Any:
        asked.append(unit)
        ticket = held(unit)
        disk.go.set()
        return ticket

    engine._parts.updater.held = ask
    return asked


def release_when_awaited(engine: Engine, disk: HeldDisk) -> None:
    """Lets the disk write when somebody is about to wait for the save."""
    wait = engine._saving._wait

    def waiting() -> None:
        disk.go.set()
        wait()

    engine._saving._wait = waiting  # type: ignore[method-assign]


TORCH = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, "scheduler": None}


def variant(swap: Path, device: str, how: str) -> dict[str, Any]:
    config = configure(swap, device, **(TORCH if how == "torch" else {}))
    if how == "in backward":
        config["gradient_clipping"] = 0.0
        config["infinity"]["update_in_backward"] = True
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize("how", ["at step", "in backward", "torch"])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme", "mixed"])
def test_training_goes_on_and_nothing_of_it_is_saved(tmp_path: Path, disk: HeldDisk, device: str, how: str) -> None:
    with engine_of(variant(tmp_path / "swap", device, how)) as engine:
        train(engine, 0, 2)
        expected = train(engine, 2, 5), everything(engine)
    with engine_of(variant(tmp_path / "swap", device, how)) as engine:
        train(engine, 0, 2)
        save(engine, tmp_path / "ckpt", disk)
        asked = release_when_asked(engine, disk)
        losses = train(engine, 2, 5)
        engine.settle()
        assert len(asked) > 3
        assert losses == expected[0]
        assert same(everything(engine), expected[1]) == []
    assert files(tmp_path / "ckpt" / "beside") == files(tmp_path / "ckpt" / "first")
    assert Folder(tmp_path / "ckpt").latest() == "beside"


def test_forward_and_backward_do_not_wait(tmp_path: Path, disk: HeldDisk) -> None:
    with engine_of(configure(tmp_path / "swap", "nvme")) as engine:
        train(engine, 0, 1)
        told = torch.ones(3)
        engine.save_checkpoint(tmp_path / "ckpt", "beside", {"told": told}, wait=False)
        told.zero_()
        engine.backward(engine(torch.ones(2, 12, dtype=torch.int64)))
        engine.eval()
        engine(torch.ones(2, 12, dtype=torch.int64))
        assert Folder(tmp_path / "ckpt").tags() == []
        disk.go.set()
        engine.zero_grad()
        _, client = engine.load_checkpoint(tmp_path / "ckpt")
        assert client["told"].tolist() == [1.0, 1.0, 1.0]


WAITING: dict[str, Callable[[Engine, Path], Any]] = {
    "settle": lambda engine, folder: engine.settle(),
    "another save": lambda engine, folder: engine.save_checkpoint(folder, "later"),
    "another beside": lambda engine, folder: engine.save_checkpoint(folder, "later", wait=False),
    "load": lambda engine, folder: engine.load_checkpoint(folder, "first"),
    "weights": lambda engine, folder: engine.load_weights(folder / "first"),
    "set": lambda engine, folder: infinity.set_full_param(engine.module.gain, torch.tensor(7.0)),
    "gathered": lambda engine, folder: change(engine),
    "export": lambda engine, folder: engine.save_pretrained(folder.parent / "out"),
    "destroy": lambda engine, folder: engine.destroy(),
    "restore": lambda engine, folder: engine.destroy(restore_parameters=True),
}


def change(engine: Engine) -> None:
    with infinity.gathered(engine.module.frozen.weight), torch.no_grad():
        engine.module.frozen.weight.zero_()


@pytest.mark.parametrize("what", WAITING)
def test_whoever_else_would_change_values_waits(tmp_path: Path, disk: HeldDisk, what: str) -> None:
    with engine_of(configure(tmp_path / "swap", "mixed")) as engine:
        train(engine, 0, 2)
        save(engine, tmp_path / "ckpt", disk)
        release_when_awaited(engine, disk)
        WAITING[what](engine, tmp_path / "ckpt")
        assert files(tmp_path / "ckpt" / "beside") == files(tmp_path / "ckpt" / "first")


def test_an_engine_that_nobody_keeps_ends_its_save(tmp_path: Path, disk: HeldDisk) -> None:
    engine = infinity.initialize(Model(), configure(tmp_path / "swap", "cpu"))[0]
    save(engine, tmp_path / "ckpt", disk)
    del engine
    gc.collect()
    (end,) = [thread for thread in threading.enumerate() if thread.name == "infinity-end"]
    disk.go.set()
    end.join()
    assert complete(tmp_path / "ckpt") == ["beside", "first"]


def test_an_interrupt_gives_the_save_up(tmp_path: Path, disk: HeldDisk) -> None:
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        train(engine, 0, 1)
        save(engine, tmp_path / "ckpt", disk)
        release_when_awaited(engine, disk)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            engine.destroy()
    assert complete(tmp_path / "ckpt") == ["first"]
    assert Folder(tmp_path / "ckpt").latest() == "first"


TELLING: dict[str, Callable[[Engine, Path], Any]] = {
    "step": lambda engine, folder: engine.step(),
    "settle": lambda engine, folder: engine.settle(),
    "save": lambda engine, folder: engine.save_checkpoint(folder, "later"),
    "batch": lambda engine, folder: engine.train_batch([torch.ones(2, 12, dtype=torch.int64)]),
    "destroy": lambda engine, folder: engine.destroy(),
}


@pytest.mark.parametrize("where", TELLING)
def test_a_failure_is_told_once_and_is_none_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(configure(tmp_path / "swap", "mixed")) as engine:
        expected = train(engine, 0, 4)
    with engine_of(configure(tmp_path / "swap", "mixed")) as engine:
        losses = train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt", "first")
        faulty = FaultyDisk(9, failing(errno.ENOSPC))
        monkeypatch.setattr(persistence, "Folder", partial(Folder, disk=faulty))
        engine.save_checkpoint(tmp_path / "ckpt", "beside", wait=False)
        engine._saving._wait()
        with pytest.raises(infinity.CheckpointError, match=r"beside could not be saved .* No space left") as caught:
            TELLING[where](engine, tmp_path / "ckpt")
        assert isinstance(caught.value.__cause__, infinity.StorageError)
        assert "checkpoint" in caplog.text
        assert complete(tmp_path / "ckpt") == ["first"]
        if where != "destroy":
            losses += train(engine, 2, 4)
            engine.settle()
            assert losses == expected


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_call_in_turn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    every: int,
    record_property: Callable[[str, object], None],
) -> None:
    former, folder = tmp_path / "former", tmp_path / "ckpt"
    with engine_of(configure(tmp_path / "swap", "mixed")) as engine:
        train(engine, 0, 1)
        states = [everything(engine)]
        engine.save_checkpoint(former, "first")
        train(engine, 1, 2)
        states.append(everything(engine))
        engine.save_checkpoint(tmp_path / "newer", "second")
        expected = train(engine, 2, 3)
        counted = FaultyDisk(-1, failing(number))
        with monkeypatch.context() as patch:
            patch.setattr(persistence, "Folder", partial(Folder, disk=counted))
            engine.save_checkpoint(tmp_path / "counted", "second")
        outcomes = [0, 0]
        for at in range(len(counted.calls))[::-every]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(former, folder)
            engine.load_checkpoint(tmp_path / "newer")
            with monkeypatch.context() as patch:
                patch.setattr(persistence, "Folder", partial(Folder, disk=FaultyDisk(at, failing(number))))
                engine.save_checkpoint(folder, "second", wait=False)
            losses = []
            told = False
            while not losses:
                try:
                    losses = train(engine, 2, 3)
                except infinity.CheckpointError:
                    engine.load_checkpoint(tmp_path / "newer")  # whose backward comes again
                    told = True
            try:
                engine.settle()
            except infinity.CheckpointError:
                told = True
            assert told, at
            assert losses == expected
            assert complete(folder), at
            engine.load_checkpoint(folder)
            (found,) = [place for place, state in enumerate(states) if same(state, everything(engine)) == []]
            outcomes[found] += 1
    record_property("outcomes", outcomes)
    assert outcomes[0] > 0


def test_progress_comes_to_its_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with engine_of(configure(tmp_path / "swap", "mixed")) as engine:
        for wait in (True, False):
            told.clear()
            path = engine.save_checkpoint(tmp_path / "ckpt", wait=wait, progress=lambda *words: told.append(words))
            engine.settle()
            (total,) = {whole for _, whole in told}
            written = [done for done, _ in told]
            assert written == sorted(written)
            assert len(written) > 20
            assert written[-1] == total
            assert max(written[:-1]) < total
            assert 0 <= sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) - total < 1 << 16

        def refuse(done: int, total: int) -> None:
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            engine.save_checkpoint(tmp_path / "ckpt", "other", progress=refuse)
        assert len(complete(tmp_path / "ckpt")) == 1
