"""Nothing of a destroyed engine stays."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.helpers import PLACEMENTS, attached, configure


@pytest.mark.parametrize("device", PLACEMENTS)
def test_a_destroyed_engine_is_collected_after_it_trained(tmp_path: Path, device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with attached(model, configure(tmp_path, device)) as engine:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        runtime = weakref.ref(engine._runtime)
    del engine, model
    gc.collect()
    assert runtime() is None
