"""Kills training at random instants again and again, checks what is left each time.

``python -m tests.faults.kill_harness --kills 200 --seed 0`` prints the figures as one JSON object, exits 1 if a
checkpoint was lost, one that does not verify was taken for complete, or a resumed loss differs from that of a run that
was never interrupted by as much as a bit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infinity.checkpoint.folder import INCOMPLETE, REPLACED, Folder
from infinity.checkpoint.read import Checkpoint
from infinity.errors import InfinityError
from infinity.obs.metrics import read_metrics
from tests.faults.helpers import Child, TinyRun, Zygote, tiny_run

STEPS = 12
OPTIONS = ("run.checkpoint_every=1", f"run.steps={STEPS}", f"scheduler.params.total_num_steps={STEPS}")

TELL = """
import infinity.cli.checkpoints as checkpoints, os, time
class Telling(checkpoints.RunCheckpoints):
    def save(self, engine, loader):
        os.write(1, f"saving {engine.global_steps}\\n".encode())
        path = super().save(engine, loader)
        os.write(1, f"saved {engine.global_steps}\\n".encode())
        return path
import infinity.cli.train
infinity.cli.train.RunCheckpoints = Telling
"""
"""What a child does beside training: it says when a save begins, when it has returned."""


@dataclass
class Figures:
    """What happened; the last three are to be zero."""

    kills: int = 0
    in_a_save: int = 0
    before_the_first_checkpoint: int = 0
    runs_to_the_end: int = 0
    incomplete_recognised: int = 0
    steps_at_death: dict[int, int] = field(default_factory=dict)
    corrupt_accepted: int = 0
    checkpoints_lost: int = 0
    losses_that_differ: int = 0

    @property
    def ok(self) -> bool:
        return not (self.corrupt_accepted or self.checkpoints_lost or self.losses_that_differ)


def harness(zygote: Zygote, directory: Path, kills: int, seed: int) -> Figures:
    """Kills children of ``zygote`` that train below ``directory``, which is empty."""
    chance, figures = random.Random(seed), Figures()
    (directory / "whole").mkdir()
    whole = tiny_run(directory / "whole")
    start = time.monotonic()
    done = zygote.run(whole.code(*OPTIONS))
    assert done.code == 0, done.err
    longest = time.monotonic() - start
    expected = losses(whole)
    (directory / "killed").mkdir()
    run = tiny_run(directory / "killed")
    checkpoints = run.output / "checkpoints"
    while figures.kills < kills:
        before = latest_step(checkpoints)
        child = zygote.start(run.code(*OPTIONS, before=TELL, resume=True))
        timer = threading.Timer(chance.random() * longest, kill, [child])
        timer.start()
        start = time.monotonic()
        ended = child.finish()
        timer.cancel()
        assert ended.code in (0, -9), ended.err
        told = [line.split() for line in ended.out.splitlines() if line.startswith(("saving ", "saved "))]
        saved = max([int(number) for word, number in told if word == "saved"], default=before)
        examine(figures, checkpoints, saved)
        figures.losses_that_differ += differing(run, expected)
        if ended.code == 0:
            figures.runs_to_the_end += 1
            longest = time.monotonic() - start  # the machine is faster or slower than it was
            figures.losses_that_differ += losses(run) != expected
            shutil.rmtree(run.output)
            continue
        figures.kills += 1
        figures.in_a_save += bool(told) and told[-1][0] == "saving"
        figures.before_the_first_checkpoint += latest_step(checkpoints) == 0
        figures.steps_at_death[saved] = figures.steps_at_death.get(saved, 0) + 1
    done = zygote.run(run.code(*OPTIONS, resume=True))
    assert done.code == 0, done.err
    figures.losses_that_differ += losses(run) != expected
    run.check_nothing_left()
    return figures


def kill(child: Child) -> None:
    with suppress(ProcessLookupError):  # it came to its end just now
        child.send(signal.SIGKILL)


def examine(figures: Figures, checkpoints: Path, saved: int) -> None:
    """Every checkpoint that passes for complete is whole; none that was completed is gone."""
    folder = Folder(checkpoints)
    for tag in folder.tags():
        try:
            with Checkpoint(folder.find(tag)) as checkpoint:
                checkpoint.verify()
        except InfinityError:
            figures.corrupt_accepted += 1
    if checkpoints.exists():
        left = [path.name for path in checkpoints.iterdir()]
        figures.incomplete_recognised += any(name.endswith((INCOMPLETE, REPLACED)) for name in left)
    figures.checkpoints_lost += latest_step(checkpoints) < saved


def latest_step(checkpoints: Path) -> int:
    folder = Folder(checkpoints)
    try:
        return folder.manifest(folder.latest()).step
    except InfinityError:
        return 0


def losses(run: TinyRun) -> list[float]:
    return [record["loss"] for record in read_metrics(run.output / "metrics.jsonl") if record["event"] == "step"]


def differing(run: TinyRun, expected: list[float]) -> int:
    """How many losses on record are not those of the run that nobody killed."""
    try:
        found = losses(run)
    except FileNotFoundError:
        return 0
    return sum(a != b for a, b in zip(found, expected, strict=False))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "children").mkdir()
        zygote = Zygote(directory / "children")
        try:
            (directory / "runs").mkdir()
            figures = harness(zygote, directory / "runs", options.kills, options.seed)
        finally:
            zygote.close()
    print(json.dumps({"seed": options.seed, **asdict(figures)}, indent=2))
    return 0 if figures.ok else 1


if __name__ == "__main__":
    sys.exit(main())
