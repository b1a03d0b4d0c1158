"""A trace has every span, and no row in which two overlap without nesting."""

from __future__ import annotations

import json
from pathlib import Path

from infinity.obs.trace import Span, TracedLedger, chrome_events


def test_counts_as_a_plain_ledger_does_and_keeps_the_spans(tmp_path: Path) -> None:
    ledger = TracedLedger()
    with ledger.phase("forward"), ledger.span("block"):
        pass
    ledger.begin("nvme_read", 10)
    ledger.end("nvme_read", 1.0, 3.0)
    ledger.stalled("optimizer", 0.5)
    assert ledger.seconds["forward"] > 0
    assert ledger.busy["nvme_read"] == 2.0
    assert ledger.stalls["optimizer"] == 0.5
    assert [span.name for span in ledger.spans] == ["block", "forward", "nvme_read", "optimizer"]
    ledger.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    read = next(event for event in events if event["ph"] == "X" and event["name"] == "nvme_read")
    assert (read["ts"], read["dur"]) == (1e6, 2e6)
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert lanes == {"MainThread", "nvme_read", "waits"}


def test_overlapping_requests_get_rows_of_their_own() -> None:
    spans = [Span("link", "a", 0, 2), Span("link", "b", 1, 3), Span("link", "c", 2, 4), Span("link", "d", 2.5, 3.5)]
    rows = {event["name"]: event["tid"] for event in chrome_events(spans) if event["ph"] == "X"}
    assert rows["a"] == rows["c"] == rows["d"]
    assert rows["b"] != rows["a"]
