"""A run taken up again sees the batch that would have come next, to the bit of every loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from tests.checkpoint.helpers import Model, configure

PASS = 6
"""Batches of a pass over 11 samples, of which the last batch has one."""


class Texts(Dataset[torch.Tensor]):
    def __init__(self, samples: int = 11) -> None:
        self.rows = torch.randint(0, 96, (samples, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(Texts().rows)


def start(tmp_path: Path, data: Any = None) -> tuple[Engine, Any]:
    torch.manual_seed(1)
    config = configure(tmp_path / "swap", "cpu")
    engine, _, loader, _ = initialize(Model(), config, training_data=Texts() if data is None else data)
    torch.manual_seed(2)
    return engine, loader


def go(engine: Engine, loader: Any, passes: int, save: Path | None = None, steps: tuple[int, ...] = ()) -> list[float]:
    """Losses by the loop that a user writes; it saves after some ``steps``."""
    losses = []
    for _ in range(loader.passes, passes):
        for rows in loader:
            loss = engine(rows)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps in steps:
                engine.save_checkpoint(save, f"{engine.global_steps}")
    return losses


def test_the_loader_is_torchs_own_but_for_its_place(tmp_path: Path) -> None:
    engine, loader = start(tmp_path)
    ours = [rows.tolist() for _ in range(2) for rows in loader]
    torch.manual_seed(2)
    plain = DataLoader(Texts(), batch_size=2, shuffle=True)
    assert ours == [rows.tolist() for _ in range(2) for rows in plain]
    assert (len(loader), loader.batch_size) == (len(plain), 2) == (PASS, 2)
    assert engine.training_dataloader is loader
    engine.destroy()


@pytest.mark.parametrize("step", [1, PASS + 2, PASS, 2 * PASS])
def test_goes_on_in_the_middle_of_a_pass(tmp_path: Path, step: int) -> None:
    """Dropout draws from the generator that shuffles, so that one number drawn too many is seen."""
    engine, loader = start(tmp_path)
    losses = go(engine, loader, 3, tmp_path / "ckpt", (step,))
    assert loader.passes == 3
    engine.destroy()
    engine, loader = start(tmp_path)
    torch.manual_seed(99)
    go(engine, loader, 1)  # whatever was served before the load must not matter
    engine.load_checkpoint(tmp_path / "ckpt")
    assert loader.passes == step // PASS
    assert go(engine, loader, 3) == losses[step:]
    assert loader.passes == 3
    engine.destroy()


def test_a_load_inside_the_loop_goes_back(tmp_path: Path) -> None:
    engine, loader = start(tmp_path)
    losses = go(engine, loader, 1, tmp_path / "ckpt", (2,))
    again, loaded = [], False
    for rows in loader:
        if not loaded:
            engine.load_checkpoint(tmp_path / "ckpt")
            loaded = True
            continue
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        again.append(loss.item())
    assert again == losses[2:]
    assert loader.passes == 1
    engine.destroy()


def test_saved_again_before_the_first_batch(tmp_path: Path) -> None:
    engine, loader = start(tmp_path)
    losses = go(engine, loader, 2, tmp_path / "ckpt", (4,))
    engine.load_checkpoint(tmp_path / "ckpt")
    engine.save_checkpoint(tmp_path / "ckpt", "again")
    go(engine, loader, 1)
    engine.load_checkpoint(tmp_path / "ckpt", "again")
    assert go(engine, loader, 2) == losses[4:]
    engine.destroy()


def test_where_the_place_cannot_be_kept_a_new_pass_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, loader = start(tmp_path)
    go(engine, loader, 1, tmp_path / "ckpt", (2,))
    engine.destroy()
    for data, told in ((Texts(13), "a pass over 11 samples but training_data has 13"), (Stream(), "IterableDataset")):
        engine, loader = start(tmp_path, data)
        with caplog.at_level(logging.WARNING, "infinity"):
            engine.load_checkpoint(tmp_path / "ckpt")
        assert told in caplog.messages[-1]
        assert sum(len(rows) for rows in loader) == (13 if loader.samples else 11)
        engine.destroy()
