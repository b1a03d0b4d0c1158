"""Shows how a step's time and memory grow with the model, how they depend on the sizes of buffers.

    python -m bench.growth [--swap DIR] [--shapes 50m,185m,400m,800m] [--dials] [--plot growth.svg] [--json]

All states are on NVMe, bf16, 256 tokens; each unit is updated in backward. The first table grows the model; time should
follow the bytes on the link, memory the largest unit and the activations, not the number of parameters. The others turn
one dial at a time on the 185 M model: sub-group size, queue depth, parameter slabs. A time is the median of a few
rounds of consecutive steps. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.arguments import end_on_sigterm, one_of, positive, several
from bench.step import ALL_ON_NVME, one_round
from bench.step_contestants import Field, Spec, Task
from bench.step_model import SHAPES

STEPS = 3
DIALS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "sub-group, elements": tuple(
        (f"{size >> 10} Ki", {"zero": {"sub_group_size": size}}) for size in (256 << 10, 1 << 20, 2 << 20, 8 << 20)
    ),
    "queue depth": tuple((str(depth), {"aio": {"queue_depth": depth}}) for depth in (2, 8, 32, 128)),
    "parameter slabs": tuple((str(count), {"override": {"slabs": count}}) for count in (1, 2, 4, 8)),
}


@dataclass(frozen=True)
class Point:
    """One measured configuration; bytes are per step, memory is the peak over the import of torch."""

    dial: str
    value: str
    parameters: int
    seconds: float
    moved_bytes: int
    peak_bytes: int
    planned_bytes: int

    def row(self) -> str:
        cells = (
            self.value,
            f"{self.parameters / 1e6:.0f}",
            f"{self.seconds:.3f}",
            f"{self.seconds / self.parameters * 1e9:.2f}",
            f"{self.moved_bytes / 1e9:.2f}",
            f"{self.moved_bytes / self.seconds / 1e9:.2f}",
            f"{self.planned_bytes / 2**20:.0f}",
            f"{self.peak_bytes / 2**20:.0f}",
        )
        return f"| {' | '.join(cells)} |"


COLUMNS = "M parameters | s/step | ns per parameter | GB moved | GB/s of the step | planned, MiB | peak RSS, MiB |"
HEADER = f"| {{}} | {COLUMNS}\n|---|---|---|---|---|---|---|---|"


def measure(dial: str, value: str, shape: str, swap: str, rounds: int, options: dict[str, Any]) -> Point:
    """Trains alone; the first steps do not count."""
    override = {"placement": ALL_ON_NVME, "update_in_backward": True} | options.get("override", {})
    given = {"placement": "nvme", "swap": swap, "recompute": True} | options | {"override": override}
    spec = Spec(value, "ours", given)
    with Field() as field:
        field.enter(spec, Task(SHAPES[shape], "bf16", 256, os.cpu_count() or 1))
        if not field.running:
            raise SystemExit(f"{value}: {field.missing}")
        contestant = field.running[value]
        one_round(contestant, STEPS)
        before = moved(contestant.ask("facts"))
        times = [one_round(contestant, STEPS).seconds_per_step for _ in range(rounds)]
        facts = contestant.ask("facts")
    report, tiers = facts["report"], facts["report"]["tiers"]
    return Point(
        dial,
        value,
        report["parameters"],
        statistics.median(times),
        (moved(facts) - before) // (rounds * STEPS),
        facts["peak_rss"] - facts["import_rss"],
        tiers["device"]["planned_bytes"] + tiers["host"]["planned_bytes"],
    )


def moved(facts: dict[str, Any]) -> int:
    """NVMe bytes so far, both ways; after each round everything has arrived."""
    return sum(int(facts["links"][link]["bytes"]) for link in ("nvme_read", "nvme_write"))


def plot(points: Sequence[Point], path: Path) -> None:
    """Step time with peak memory, a panel for the size of the model, one for each dial."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dials = list(dict.fromkeys(point.dial for point in points))
    figure, panels = pyplot.subplots(1, len(dials), figsize=(4.2 * len(dials), 3.4), squeeze=False)
    for panel, dial in zip(panels[0], dials, strict=True):
        mine = [point for point in points if point.dial == dial]
        grows = dial == "model"
        where: list[Any] = [point.parameters / 1e6 if grows else point.value for point in mine]
        panel.plot(where, [point.seconds for point in mine], "o-", color="#1f5fa8", label="s/step")
        panel.set_xlabel("million parameters" if grows else dial)
        panel.set_ylabel("seconds per step", color="#1f5fa8")
        panel.set_ylim(bottom=0)
        memory = panel.twinx()
        memory.plot(where, [point.peak_bytes / 2**20 for point in mine], "s--", color="#b4501e", label="peak RSS")
        memory.set_ylabel("peak RSS, MiB", color="#b4501e")
        memory.set_ylim(bottom=0)
        panel.set_title("model size" if grows else dial)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swap", default="runs/bench-growth", help="a directory on the disk to measure")
    parser.add_argument(
        "--shapes",
        type=several(one_of(SHAPES)),
        default="50m,185m,400m,800m",
        help=f"of {', '.join(SHAPES)}, comma-separated",
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--dials", action="store_true", help="also turn sub-group size, queue depth, slabs")
    parser.add_argument("--plot", type=Path, help="write a picture, .svg or .png (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per point")
    chosen = parser.parse_args()
    end_on_sigterm()
    os.makedirs(chosen.swap, exist_ok=True)
    wanted = [("model", shape, shape, {}) for shape in chosen.shapes]
    if chosen.dials:
        wanted += [(dial, value, "185m", options) for dial, points in DIALS.items() for value, options in points]
    points: list[Point] = []
    for dial, value, shape, options in wanted:
        if not points or points[-1].dial != dial:
            print(f"\n{HEADER.format(dial)}", file=sys.stderr if chosen.json else sys.stdout, flush=True)
        points.append(measure(dial, value, shape, os.path.abspath(chosen.swap), chosen.rounds, options))
        print(points[-1].row(), file=sys.stderr if chosen.json else sys.stdout, flush=True)
        if chosen.json:
            print(json.dumps(asdict(points[-1])), flush=True)
    if chosen.plot is not None:
        plot(points, chosen.plot)


if __name__ == "__main__":
    main()
