"""The step bench pairs rounds, counts without the warm-up, leaves a missing contestant out, trains everyone alike."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import bench.step as bench_step
from bench.step import add_floor, agree, compete, last_read, ours, quiet_round, since
from bench.step_contestants import Spec, Task
from bench.step_floor import largest_cost, link_bytes
from bench.step_model import SHAPES, build_decoder
from bench.step_results import Group, Ratio, Round, where

TASK = Task(SHAPES["tiny"], "fp32", tokens=16, threads=1)
PLAIN = Spec("plain", "plain")


def timed(*seconds: float) -> list[Round]:
    return [Round(each, each, (1.0,)) for each in seconds]


def test_a_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    ratio = Ratio.of([1.0, 4.0, 9.0], [1.0, 2.0, 10.0])
    assert ratio == Ratio(1.0, 0.9, 2.0)


def test_a_ratio_with_a_missing_side_is_none() -> None:
    group = Group("t", TASK, rounds={"plain": timed(1.0)})
    assert group.ratio("plain", "ours/none") is None
    assert group.ratio("plain", "plain") == Ratio(1.0, 1.0, 1.0)


def test_losses_are_compared_from_the_first_step_on() -> None:
    group = Group("t", TASK)
    group.rounds = {"plain": timed(1.0), "other": timed(1.0)}
    group.losses = {"plain": [5.0, 4.0, 3.0], "other": [5.0, 4.5, 3.25, 2.0]}
    assert group.apart() == {"other": 0.5}


def test_counters_start_after_the_warm_up() -> None:
    before = {
        "steps": 3, "read_bytes": 10, "write_bytes": 1, "peak_rss": 5, "seconds": {"forward": 1.0},
        "links": {"nvme_read": {"bytes": 7, "seconds": 0.5}},
    }  # fmt: skip
    now = {
        "steps": 9, "read_bytes": 40, "write_bytes": 4, "peak_rss": 8, "seconds": {"forward": 4.0, "step": 2.0},
        "links": {"nvme_read": {"bytes": 19, "seconds": 1.0}},
    }  # fmt: skip
    assert since(before, now) == {
        "steps": 6, "read_bytes": 30, "write_bytes": 3, "peak_rss": 8, "seconds": {"forward": 3.0, "step": 2.0},
        "links": {"nvme_read": {"bytes": 12, "seconds": 0.5}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "adam", "nbytes", "name", "seconds"),
    [(3.0, 1.0, 4e9, "compute", 3.0), (1.0, 3.0, 4e9, "adam", 3.0), (1.0, 1.0, 8e9, "io", 4.0)],
)
def test_the_floor_is_the_largest_cost(compute: float, adam: float, nbytes: float, name: str, seconds: float) -> None:
    assert largest_cost(compute, adam, nbytes, rate=2.0) == (seconds, name)


def test_the_floor_takes_the_engines_own_bytes_per_step() -> None:
    links = {"nvme_read": {"bytes": 6e9, "seconds": 1}, "nvme_write": {"bytes": 2e9, "seconds": 1}}
    facts: dict[str, Any] = {"steps": 2, "links": links, "seconds": {}}
    assert link_bytes(facts) == 4e9
    group = Group("t", TASK, rounds={"plain": timed(1.0), "ours/nvme": timed(3.0)})
    group.rounds["plain"] = [Round(1.0, 1.0, (), split={"forward": 0.25, "backward": 0.5})]
    group.facts = {"ours/nvme": facts}
    group.floor = {"fio mixed GB/s": 2.0, "adam alone, s": 0.1}
    assert add_floor(group, "ours/nvme") == Ratio(1.5, 1.5, 1.5)


def test_contestants_train_alike_and_a_broken_one_is_named(tmp_path: Path) -> None:
    broken = Spec("broken", "ours", {"placement": "nowhere", "swap": str(tmp_path)})
    specs = [PLAIN, ours("none", str(tmp_path)), ours("all-nvme", str(tmp_path)), broken]
    group = compete("t", TASK, specs, 2, 2)
    assert list(group.rounds) == ["plain", "ours/none", "ours/all-nvme"]
    assert "nowhere" in group.missing["broken"]
    assert all(len(group.losses[name]) >= 6 for name in group.rounds)
    assert all(len(rounds) == 2 for rounds in group.rounds.values())
    assert max(group.apart().values()) < 1e-5
    assert group.facts["ours/all-nvme"]["links"]["nvme_read"]["bytes"] > 0
    assert last_read(group, "ours/all-nvme") > 0
    assert "skipped: broken" in group.table()
    assert group.as_json()["losses"]["plain"] == group.losses["plain"]
    assert not list(tmp_path.iterdir())


def test_fio_moves_bytes_beside_one_that_trains_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fio = tmp_path / "fio"
    fio.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec sleep 60\n')
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    swap = tmp_path / "swap"
    swap.mkdir()
    beside = Spec("beside", "plain", {"swap": str(swap), "nbytes": 3 << 20, "file_bytes": 1 << 20})
    group = compete("t", TASK, [PLAIN, beside], 1, 2)
    assert group.losses["beside"] == group.losses["plain"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2  # the round that does not count, the one that does
    assert all(line.endswith("--loops=3") for line in asked)  # two steps of 3 MiB, 2 MiB a loop
    assert not list(swap.iterdir())


def test_a_shape_knows_its_parameters() -> None:
    model = build_decoder(SHAPES["tiny"])
    assert SHAPES["tiny"].parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_layer_by_layer_has_the_same_losses(tmp_path: Path) -> None:
    task = Task(SHAPES["tiny"], "bf16", tokens=16, threads=1, micro_batches=3)
    layered = ours("all-nvme", str(tmp_path), "layered", layer_major=True)
    group = compete("t", task, [ours("all-nvme", str(tmp_path)), layered], 1, 2)
    assert agree(group, "layered", "ours/all-nvme")
    assert last_read(group, "layered") < last_read(group, "ours/all-nvme")


class Scripted:
    """Answers as a contestant would; somebody else keeps the processors busy during its first rounds."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, op: str, count: int) -> dict[str, Any]:
        self.asked += 1
        return {
            "seconds": 1.0,
            "interval": 0.25,
            "cpu_seconds": 0.0,
            "losses": [float(self.asked)] * count,
            "split": {},
        }


def test_a_disturbed_round_is_tried_again_its_losses_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0] * 3)  # each round lasts ten seconds
    used = iter([0.0, 15.0, 0.0, 9.0, 0.0, 1.0])  # of which others computed so much
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench_step, "busy_seconds", lambda: next(used))
    contestant = Scripted()
    kept, losses = quiet_round(contestant, 2, tries=5)  # type: ignore[arg-type]
    assert kept.foreign == pytest.approx(0.1)
    assert (kept.seconds_per_step, kept.settled) == (0.25, 0.5)
    assert losses == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    split = {"forward": 3.0, "backward": 2.0, "update": 9.0, "adam": 1.0, "wait optimizer": 1.5, "wall": 5.25}
    parts = where(split)
    assert parts["phases without waits"] == 3.5
    assert parts["elsewhere"] == 0.25
    assert sum(value for name, value in parts.items() if not name.startswith("(beside)")) == 5.25
    assert where({"forward": 1.0, "optimizer": 0.5, "wall": 2.0}) == {
        "forward": 1.0,
        "optimizer": 0.5,
        "elsewhere": 0.5,
    }


def test_a_trace_shows_our_lanes(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    spec = ours("all-nvme", str(tmp_path / "swap"), profile=str(tmp_path / "trace.json"))
    compete("t", TASK, [spec], 1, 1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"MainThread", "infinity-update", "nvme_read", "nvme_write"} <= lanes
    names = {event["name"] for event in events}
    assert {"forward", "backward", "step", "update", "adam", "blocks.0"} <= names
