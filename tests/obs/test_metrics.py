"""Metrics survive a crash, an appended run, numbers JSON does not have; the memory sampler sees an allocation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from infinity.obs.metrics import MetricsWriter, read_metrics
from infinity.obs.process_memory import AnonymousPeak, status_bytes


def test_what_is_written_is_read_back_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": 2.5, "links": {"nvme_read": {"bytes": 3}}})
        assert read_metrics(path) == [{"step": 1, "loss": 2.5, "links": {"nvme_read": {"bytes": 3}}}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"loss": float("nan"), "norms": [1.0, float("inf")], "t": {"x": float("-inf")}})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=lambda name: name) == {"loss": None, "norms": [1.0, None], "t": {"x": None}}


def test_the_sampler_keeps_the_peak_of_memory_that_is_gone_again() -> None:
    with AnonymousPeak() as peak:
        before = peak.peak_bytes
        held = torch.ones(64 << 20, dtype=torch.uint8)
        during = peak.peak_bytes
        del held
        assert during - before > 60 << 20
    assert status_bytes("VmHWM") > 60 << 20
    assert status_bytes("NoSuchField") == 0
