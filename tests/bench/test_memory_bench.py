"""The bench that holds the plan against the process: one configuration, one refusal, the verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import large, memory
from infinity.config import Config

SMALL = {"d_model": 256, "n_layers": 8, "n_heads": 4, "d_ff": 704, "vocabulary": 2048}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu, inputs on host", "nvme, inputs on nvme"])
def test_a_row_has_equal_arenas_and_a_process_as_predicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CONFIGURATIONS", {name: memory.CONFIGURATIONS[name]})
    (row,) = memory.rows(str(tmp_path), 3)
    assert row["arena_bytes_difference"] == 0
    assert abs(row["process_relative_error"]) <= memory.TOLERANCE


@pytest.mark.slow
def test_a_refusal_names_a_number_that_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[dict[str, Any]] = []

    def trained(config: dict[str, Any], steps: int) -> dict[str, Any]:
        applied.append(config["infinity"])
        return {"tiers": dict.fromkeys(("device", "host", "nvme"), 1)}

    monkeypatch.setattr(memory, "SHAPE", SMALL)
    monkeypatch.setattr(memory, "trained", trained)
    found = list(memory.refusals(str(tmp_path), 1))
    assert [row["name"] for row in found] == list(memory.REFUSALS)
    for row, own in zip(found, applied, strict=True):
        ((key, number),) = row["remedy"].items()
        assert f"Raise it to at least {number} bytes" in row["message"]
        assert own[key.removeprefix("infinity.")] == number
        assert memory.predicted({**memory.configured(str(tmp_path), "nvme"), "infinity": own})


def test_the_last_line_is_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "one", "measured": dict.fromkeys(("device", "host", "nvme"), 4096), "process_measured": 1 << 20}
    rows = [{**row, "arena_bytes_difference": 0, "process_relative_error": -0.04}]
    monkeypatch.setattr(memory, "rows", lambda swap, steps: iter(rows))
    monkeypatch.setattr(memory, "refusals", lambda swap, steps: iter([]))
    monkeypatch.setattr(sys, "argv", ["bench.memory", "--json"])
    assert memory.main() == 0
    worst = json.loads(capsys.readouterr().out.splitlines()[-1])["worst"]
    assert worst == {"arena_bytes_difference": 0, "process_relative_error": 0.04}
    rows[0]["process_relative_error"] = 0.06
    assert memory.main() == 1


@pytest.mark.slow
def test_the_twin_of_the_large_model_is_exact() -> None:
    assert large.twin_is_exact(Config.load("configs/large.json"))
