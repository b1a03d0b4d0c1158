"""The tiling bench measures what it says, on a model of a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import tiling


def test_peaks_fall_with_the_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--widths", "256", "--steps", "3", "--swap-dir", str(tmp_path), "--json"]
    assert tiling.main(arguments) == 0
    *cells, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [cell["splits"] for cell in cells] == [1, 4, 16]
    for cell in cells:
        assert cell["matrix_bytes"] == 4 * 256 * 256 * 2
        assert cell["tile_bytes"] == cell["matrix_bytes"] // cell["splits"]
        assert cell["peak_bytes"] == cell["planned_bytes"]
        assert 2.0 <= cell["peak_bytes"] / cell["tile_bytes"] < 2.5, "two tiles, with a norm"
        assert cell["loss_difference"] < 1e-2
    assert cells[0]["loss_difference"] == 0.0
    assert 1 / 16 < last["ratios"]["peak_16_over_1"] < 0.08
    beyond = last["beyond_the_budget"]
    assert "device memory: the plan needs" in beyond["refusal"]
    assert beyond["peak_bytes"] <= beyond["budget_bytes"]
    assert beyond["auto_peak_bytes"] <= beyond["budget_bytes"]
    assert beyond["auto_tile_bytes"] < cells[0]["matrix_bytes"]


def test_the_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiling.main(["--widths", "256", "--splits", "1,4", "--steps", "3", "--swap-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == tiling.HEADER
    assert len({len(line) for line in lines[:3]}) == 1
    assert "with the same losses" in lines[-2]
    assert lines[-1].startswith("peak_4_over_1 0.2")
