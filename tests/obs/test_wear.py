"""The bytes of a day are counted; too many are told once a day."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import infinity
from infinity.errors import WearError
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


def test_a_run_that_may_not_write_more_ends_after_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configure(tmp_path / "swap")
    with engine_of(config) as engine:
        losses = train(engine, 0, 4)
        written = engine.report()["links"]["nvme_write"]["bytes"]
    config["infinity"] |= {"nvme_writes_per_day": written // 2, "nvme_writes_stop": True}
    with caplog.at_level(logging.WARNING, "infinity"), engine_of(config) as engine:
        with pytest.raises(WearError, match=r"more than infinity.nvme_writes_per_day .* this step was made") as told:
            train(engine, 0, 4)
        assert isinstance(told.value, infinity.StorageError)
        done = engine.global_steps
        assert 1 <= done < 4
        engine.save_checkpoint(tmp_path / "ckpt")
    assert "nvme_writes_per_day" not in caplog.text
    del config["infinity"]["nvme_writes_stop"]
    with engine_of(config) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert train(engine, done, 4) == losses[done:]


def test_to_stop_needs_a_number_to_stop_at(tmp_path: Path) -> None:
    config = configure(tmp_path / "swap")
    config["infinity"]["nvme_writes_stop"] = True
    with pytest.raises(infinity.ConfigError, match="says no number of bytes to stop at"):
        infinity.Config.load(config)
