"""The command on two ranks trains what it trains on one with the same global batch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from infinity.checkpoint.folder import Folder
from infinity.checkpoint.read import Checkpoint
from infinity.config.size import format_bytes
from tests.dist.helpers import Launcher
from tests.faults.helpers import leftovers, tiny_run


def steps_of(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "gradient_norm" in line]


def source(directory: Path, *overrides: str) -> str:
    """The command as a rank runs it; its settings are written to ``directory``."""
    directory.mkdir()
    tiny = tiny_run(directory)
    return "from tests.faults.zygote import command\n" + tiny.code(*overrides)


def test_the_command_gives_the_same_steps_as_one_rank(launcher: Launcher, tmp_path: Path) -> None:
    launcher.succeed(1, source(tmp_path / "one", "gradient_accumulation_steps=2"))
    said = launcher.succeed(2, source(tmp_path / "two", "gradient_accumulation_steps=1"))
    alone, together = steps_of(tmp_path / "one" / "out"), steps_of(tmp_path / "two" / "out")
    assert len(alone) == len(together) == 2
    for one, other in zip(alone, together, strict=True):
        assert one["gradient_norm"] == other["gradient_norm"]
        assert abs(one["loss"] - other["loss"]) < 1e-6
    assert "loss" in said[0]
    with Checkpoint(Folder(tmp_path / "two" / "out" / "checkpoints").find()) as checkpoint:
        nbytes = format_bytes(checkpoint.verify())
    assert f"checkpoint {checkpoint.path}: {nbytes} in " in said[0].replace("\n", ""), "the share of both"
    assert said[1] == ""
    assert leftovers(tmp_path / "two" / "swap") == []


def test_a_signal_to_one_rank_stops_both_after_a_step(launcher: Launcher, tmp_path: Path) -> None:
    children = launcher.start(2, source(tmp_path / "run", "run.steps=1000000"))
    children[0].await_line("step")
    children[1].send(signal.SIGTERM)
    finished = [child.finish() for child in children]
    assert [one.code for one in finished] == [128 + signal.SIGTERM] * 2, [(one.out, one.err) for one in finished]
    assert leftovers(tmp_path / "run" / "swap") == []


def test_a_run_that_may_not_write_more_ends_on_both_with_a_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    limits = ("infinity.nvme_writes_per_day=5MB", "infinity.nvme_writes_stop=true", "run.steps=1000")
    finished = launcher.run(2, source(tmp_path / "run", *limits))
    steps = len(steps_of(tmp_path / "run" / "out"))
    for one in finished:
        assert one.code == 1, (one.out, one.err)
        (told,) = [line for line in one.err.splitlines() if line.startswith("error: ")]
        assert "more than infinity.nvme_writes_per_day (5000000)" in told
        assert f"global_step{steps} holds the {steps} steps done" in told
    assert Folder(tmp_path / "run" / "out" / "checkpoints").latest() == f"global_step{steps}"
    assert leftovers(tmp_path / "run" / "swap") == []
