"""What hangs is named, with the time it has been hanging."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from infinity.device.lane import Lane
from infinity.storage.watchdog import Watchdog
from tests.checkpoint.helpers import configure, engine_of


class Source:
    def __init__(self) -> None:
        self.entries: list[tuple[str, float]] = []

    def waiting(self) -> list[tuple[str, float]]:
        return self.entries


def test_each_doubling_is_told_once() -> None:
    source = Source()
    watchdog = Watchdog([source], 100.0)
    try:
        source.entries = [("reading a", 0.0), ("reading b", 50.0)]
        assert watchdog.look(99.0) == []
        assert watchdog.look(101.0) == ["reading a: under way for 101 s"]
        assert watchdog.look(140.0) == []
        assert watchdog.look(160.0) == ["reading b: under way for 110 s"]
        assert watchdog.look(203.0) == ["reading a: under way for 203 s"]
        source.entries = [("reading b", 50.0)]
        assert watchdog.look(280.0) == ["reading b: under way for 230 s"]
        source.entries = [("reading b", 300.0)]
        assert watchdog.look(399.0) == []
        assert watchdog.look(400.0) == ["reading b: under way for 100 s"]
    finally:
        watchdog.close()


def test_a_lane_that_hangs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    told, go_on = threading.Event(), threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    lane = Lane("update")
    watchdog = Watchdog([lane], 0.01)
    handler = Told()
    logging.getLogger("infinity").addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, "infinity"):
            lane.submit(go_on.wait)
            assert told.wait(60)
        assert "lane update: under way for " in caplog.text
    finally:
        go_on.set()
        logging.getLogger("infinity").removeHandler(handler)
        watchdog.close()
        lane.close()
    assert lane.waiting() == []


def test_a_transfer_under_way_is_named(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        store = engine._parts.stores[next(iter(engine._parts.stores))]
        assert store.waiting() == []  # type: ignore[attr-defined]
        extent = store._extents[1]  # type: ignore[attr-defined]
        ticket = extent.reads[0][2] if extent.reads else None

        class Hanging:
            started = 3.0

            def done(self) -> bool:
                return False

        extent.reads.append((0, 4096, Hanging()))
        ((what, since),) = store.waiting()  # type: ignore[attr-defined]
        extent.reads.pop()
        assert since == 3.0
        assert what.startswith('reading param of unit "embedding" (bfloat16, ')
        assert what.endswith(f"bytes 0 to 4096 in {extent.file.path}")
        assert ticket is None or ticket.done()
