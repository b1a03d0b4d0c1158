"""The overhead bench times what it says, once each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import overhead


def test_every_contestant_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert overhead.main(["--rounds", "1", "--swap", str(tmp_path), "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    table = found["microseconds_per_unit_over_plain"]
    assert table.pop("plain") == {"forward": 0.0, "backward": 0.0, "both": 0.0}
    assert len(table) == 5
    for row in table.values():
        assert row["both"] == pytest.approx(row["forward"] + row["backward"])
