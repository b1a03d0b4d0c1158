"""The growth bench measures what it names; the Adam bench leaves DeepSpeed out by name where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import adam
from bench.growth import DIALS, measure


def test_a_point_holds_the_bytes_of_one_step_as_its_dial_makes_them(tmp_path: Path) -> None:
    value, options = DIALS["parameter slabs"][0]
    point = measure("parameter slabs", value, "tiny", str(tmp_path), 1, options)
    # With one slab of each size 2 + 2 bytes of a parameter are read, 12 of states; 14 are written. Pages round up.
    assert 28 * point.parameters <= point.moved_bytes <= 32 * point.parameters
    assert 0 < point.planned_bytes < point.peak_bytes


def test_adam_without_deepspeed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(adam, "find_python", lambda: None)
    assert adam.start_deepspeed() is None
    assert "setup_deepspeed.sh" in capsys.readouterr().err
    cases = [adam.measure(1 << 12, kind, 1, "auto", 3) for kind in (torch.float32, torch.bfloat16)]
    assert set(cases[0].seconds) == {"ours", "mover", "torch_fused_sequence", "torch_fused_bare"}
    assert "torch_fused_bare" not in cases[1].seconds
    assert set(adam.worst_ratios(cases)) == {"mover", "torch_fused_sequence", "torch_fused_bare"}
