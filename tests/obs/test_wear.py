"""The bytes of a day are counted; too many are told once a day."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from infinity.obs.wear import DAY_SECONDS, WearMeter
from tests.checkpoint.helpers import configure, engine_of, train


def test_a_day_moves_on() -> None:
    meter = WearMeter(100)
    assert meter.note(60, 0.0) is None
    assert meter.note(100, 1000.0) is None
    told = meter.note(101, 7200.0)
    assert told is not None
    assert told.startswith(
        "101 bytes were written to NVMe in the last 2.0 h, more than infinity.nvme_writes_per_day (100)"
    )
    assert meter.note(150, 8000.0) is None  # told already
    assert meter.note(150, DAY_SECONDS + 1) is None
    assert meter.last_day == 90  # what was written in the first instant is a day old
    assert meter.note(250, DAY_SECONDS + 7300) is not None
    assert WearMeter(None).note(1 << 60, 0.0) is None


def test_a_run_that_writes_more_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configure(tmp_path / "swap")
    config["infinity"]["nvme_writes_per_day"] = "100KB"
    with caplog.at_level(logging.WARNING, "infinity"), engine_of(config) as engine:
        train(engine, 0, 4)
    assert caplog.text.count("more than infinity.nvme_writes_per_day (100000)") == 1
