"""Kills training at random instants again and again, checks what is left each time.

``python -m tests.faults.kill_harness --kills 200 --ranks 1 2 --seed 0`` prints the figures as one JSON object, exits 1
if a checkpoint was lost, one that does not verify was taken for complete, a resumed loss differs from that of a run
that was never interrupted by as much as a bit, or a rank that was left alone did not end by itself with an error that
names the one that was killed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from infinity.checkpoint.folder import INCOMPLETE, REPLACED, Folder
from infinity.checkpoint.read import Checkpoint
from infinity.errors import InfinityError
from infinity.obs.metrics import read_metrics
from tests.dist.helpers import Launcher
from tests.faults.helpers import Child, Finished, TinyRun, Zygote, tiny_run

STEPS = 12
TIMEOUT_SECONDS = 5.0
"""``infinity.timeout_seconds``; ranks wait for each other at the start for 1.5 times as long, plus 10 s."""

OTHER_RANKS = 0.2
"""How often two ranks' checkpoint is taken up by one rank, which does both ranks' work."""

SLOWER = 1.2
"""By how much longer a run is taken to be after one that was killed before it had begun to save."""

TELL = """
import infinity.engine.persistence as persistence, os
save = persistence.save
def telling(folder, tag, contents, *options):
    os.write(1, f"saving {contents.step}\\n".encode())
    path = save(folder, tag, contents, *options)
    os.write(1, f"saved {contents.step}\\n".encode())
    return path
persistence.save = telling
"""
"""What a child does beside training: it says when a save begins, when its checkpoint is complete."""

Losses = list[tuple[float, float | None]]
"""The loss of each step, with the norm of its gradient."""


@dataclass
class Figures:
    """What happened; the last five are to be zero."""

    ranks: int
    kills: int = 0
    whom: Counter[str] = field(default_factory=Counter)
    in_a_save: int = 0
    before_the_first_checkpoint: int = 0
    runs_to_the_end: int = 0
    resumed_by_other_ranks: int = 0
    incomplete_recognised: int = 0
    steps_at_death: Counter[int] = field(default_factory=Counter)
    survivors: int = 0
    survivors_at_the_end: int = 0
    seconds_to_the_survivors_end: list[float] = field(default_factory=list)
    corrupt_accepted: int = 0
    checkpoints_lost: int = 0
    losses_that_differ: int = 0
    survivors_that_hung: int = 0
    survivors_that_named_nobody: int = 0

    @property
    def ok(self) -> bool:
        lost = self.corrupt_accepted or self.checkpoints_lost or self.losses_that_differ
        return not (lost or self.survivors_that_hung or self.survivors_that_named_nobody)

    def told(self) -> dict[str, object]:
        """As JSON, of the times the middle with the longest."""
        seconds = self.seconds_to_the_survivors_end
        middle = {"median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)} if seconds else {}
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "whom": dict(sorted(self.whom.items())),
            "steps_at_death": dict(sorted(self.steps_at_death.items())),
            "seconds_to_the_survivors_end": middle,
        }


class Harness:
    """Runs of ``ranks`` ranks below ``directory``, which is empty, on children of ``zygote``.

    The same seed makes the same choices; where in a run the instants fall is up to the machine.
    """

    def __init__(self, zygote: Zygote, directory: Path, ranks: int, seed: int) -> None:
        self.figures = Figures(ranks)
        self._launcher, self._ranks = Launcher(zygote), ranks
        self._chance = random.Random(seed)
        self._directory = directory
        self._longest: dict[int, float] = {}
        self._expected: dict[int, Losses] = {}
        (directory / "killed").mkdir()
        self._run = tiny_run(directory / "killed")
        self._checkpoints = self._run.output / "checkpoints"

    def kill(self, kills: int, earliest: float = 0.0) -> Figures:
        """Until that many runs have been killed, not before the share ``earliest`` of a run; then one to its end."""
        while self.figures.kills < kills:
            number = 1 if self._chance.random() < OTHER_RANKS else self._ranks
            self._run_whole(number)
            victims = self._chance.choice([[rank] for rank in range(number)] + [list(range(number))])
            self._kill_once(number, victims, earliest + (1 - earliest) * self._chance.random())
        self._run_whole(self._ranks)
        self._succeed(self._ranks, self._code(self._run, self._ranks))
        self._compare(whole=True)
        self._run.check_nothing_left()
        return self.figures

    def _run_whole(self, number: int) -> None:
        """What ``number`` ranks do when nobody kills them, once."""
        if number not in self._expected:
            (directory := self._directory / f"whole-{number}").mkdir()
            whole = tiny_run(directory)
            start = time.monotonic()
            self._succeed(number, self._code(whole, number))
            self._longest[number] = time.monotonic() - start
            self._expected[number] = losses(whole)[0]

    def _kill_once(self, number: int, victims: Sequence[int], share: float) -> None:
        figures, before, by = self.figures, *latest(self._checkpoints)
        figures.resumed_by_other_ranks += bool(by) and by != number
        children = self._launcher.start(number, self._code(self._run, number))
        killed: list[float] = []
        timer = threading.Timer(share * self._longest[number], kill, [[children[rank] for rank in victims], killed])
        timer.start()
        start = time.monotonic()
        finished: dict[int, tuple[Finished, float]] = {}
        for rank in sorted(range(number), key=lambda rank: rank in victims):  # those first whose end is timed
            finished[rank] = children[rank].finish(), time.monotonic()
        timer.cancel()
        timer.join()
        dead = [rank for rank in victims if finished[rank][0].code == -signal.SIGKILL and killed]
        told = {rank: marks(done) for rank, (done, _) in finished.items()}
        saved = max([step for said in told.values() for word, step in said if word == "saved"], default=before)
        self._examine(saved)
        self._compare(whole=not dead)
        for rank in set(range(number)) - set(dead):
            done, end = finished[rank]
            if dead:
                self._survived(done, rank, dead, end - killed[0])
            else:
                assert done.code == 0, done.err
        if not dead:
            figures.runs_to_the_end += 1
            seconds = time.monotonic() - start  # the machine is faster or slower than it was
            self._longest[number] = max(seconds, self._longest[number] if before else 0.0)
            shutil.rmtree(self._run.output)
            return
        if not any(told.values()):  # slower, so that kills do not all come before the first step
            self._longest[number] *= SLOWER
        figures.kills += 1
        figures.whom[f"{'all' if len(dead) == number else f'rank {dead[0]}'} of {number}"] += 1
        figures.in_a_save += any(told[rank] and told[rank][-1][0] == "saving" for rank in dead)
        figures.before_the_first_checkpoint += not latest(self._checkpoints)[0]
        figures.steps_at_death[saved] += 1

    def _survived(self, done: Finished, rank: int, dead: Sequence[int], seconds: float) -> None:
        """A rank whose peers are dead fails by itself in time, unless there was nothing left to do with them."""
        figures = self.figures
        figures.survivors += 1
        if done.code == -signal.SIGKILL:
            figures.survivors_that_hung += 1
            return
        figures.seconds_to_the_survivors_end.append(seconds)
        if done.code == 0:
            assert latest(self._checkpoints)[0] == STEPS, "a rank succeeded before the run was done"
            figures.survivors_at_the_end += 1
            return
        # torch's own log of the broken connection may go before it
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert done.code == 1, (done.code, done.err)
        assert len(errors) == 1, done.err
        named = errors[0].replace(f"error: [rank {rank}]", "")
        figures.survivors_that_named_nobody += not any(f"rank {one}" in named for one in dead)

    def _examine(self, saved: int) -> None:
        """Every checkpoint that passes for complete is whole; none that was completed is gone."""
        folder = Folder(self._checkpoints)
        for tag in folder.tags():
            try:
                with Checkpoint(folder.find(tag)) as checkpoint:
                    checkpoint.verify()
            except InfinityError:
                self.figures.corrupt_accepted += 1
        if self._checkpoints.exists():
            left = [path.name for path in self._checkpoints.iterdir()]
            self.figures.incomplete_recognised += any(name.endswith((INCOMPLETE, REPLACED)) for name in left)
        self.figures.checkpoints_lost += latest(self._checkpoints)[0] < saved

    def _compare(self, *, whole: bool) -> None:
        """Each loss on record is, to the bit, that of the run of as many ranks that nobody killed."""
        found, by = losses(self._run)
        differing = sum(
            one != self._expected[number][step] for step, (one, number) in enumerate(zip(found, by, strict=True))
        )
        self.figures.losses_that_differ += differing + (whole and len(found) != STEPS)

    def _code(self, run: TinyRun, number: int) -> str:
        accumulation = self._ranks // number
        options = {
            "run.checkpoint_every": 1, "run.steps": STEPS, "scheduler.params.total_num_steps": STEPS,
            "gradient_accumulation_steps": accumulation, "infinity.timeout_seconds": TIMEOUT_SECONDS,
        }  # fmt: skip
        return run.code(*(f"{name}={value}" for name, value in options.items()), before=TELL, resume=True)

    def _succeed(self, number: int, code: str) -> None:
        for done in self._launcher.run(number, code):
            assert done.code == 0, done.err


def kill(children: Sequence[Child], when: list[float]) -> None:
    for child in children:
        with suppress(ProcessLookupError):  # it came to its end just now
            child.send(signal.SIGKILL)
    when.append(time.monotonic())


def marks(done: Finished) -> list[tuple[str, int]]:
    """What a child said of its saves."""
    said = [line.split() for line in done.out.splitlines() if line.startswith(("saving ", "saved "))]
    return [(word, int(step)) for word, step in said]


def latest(checkpoints: Path) -> tuple[int, int]:
    """Step of the latest checkpoint, how many ranks saved it; zeros if there is none."""
    folder = Folder(checkpoints)
    try:
        manifest = folder.manifest(folder.latest())
    except InfinityError:
        return 0, 0
    return manifest.step, manifest.world_size


def losses(run: TinyRun) -> tuple[Losses, list[int]]:
    """What is on record for each step, how many ranks made it."""
    found: Losses = []
    by, ranks = [], 0
    with suppress(FileNotFoundError):
        for record in read_metrics(run.output / "metrics.jsonl"):
            if record["event"] == "start":
                ranks = record["world_size"]
            elif record["event"] == "step":
                found.append((record["loss"], record["gradient_norm"]))
                by.append(ranks)
    return found, by


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200, help="for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ok = True
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            (children := Path(name) / "children").mkdir()
            (runs := Path(name) / "runs").mkdir()
            zygote = Zygote(children)
            try:
                figures = Harness(zygote, runs, ranks, options.seed).kill(options.kills)
            finally:
                zygote.close()
        print(json.dumps({"seed": options.seed, **figures.told()}, indent=2), flush=True)
        ok &= figures.ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
