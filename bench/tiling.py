"""Trains layers wider than the device budget, tile by tile; measures peak device memory, exactness, time.

    python -m bench.tiling [--widths 1024,2048] [--splits 1,4,16] [--steps 7] [--swap-dir DIR] [--json]

The model is one feed-forward block in bf16: a norm, ``width`` to ``4 * width``, GELU, back again. Parameters are on
NVMe, optimizer states in host memory. Two slabs per size: one is computed with while the next one is read. Each cell
trains the same steps with its two matrices whole, each a unit of its own (1), or cut into 4 or 16 tiles each; peaks are
high-water marks of the device arena, times the median of the steps behind the first two. Losses are compared with those
of the whole matrices: tiles differ by the order of the sum that the input's gradient is.

Then the budget is set so that the widest block does not fit whole: the whole is refused in words, tiles train. The last
line of ``--json`` holds, for the widest, ``ratios.peak_16_over_1`` (of the most splits over none), ``time_16_over_1``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.config.size import format_bytes

TOKENS = 512
SLABS = 2
WARM_UP = 2


class FeedForward(nn.Module):
    """The wide part of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """One block, with the distance of its output from what it is to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(FeedForward(width))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x).float(), target)


@dataclass
class Cell:
    """One training: what it held at most on the device, how long a step took, its losses."""

    width: int
    splits: int
    matrix_bytes: int
    tile_bytes: int
    peak_bytes: int
    planned_bytes: int
    seconds: float
    read_bytes_per_step: int
    losses: list[float]
    loss_difference: float = 0.0

    @property
    def tiles_held(self) -> float:
        """The peak in tiles; everything else on the device is in it too."""
        return self.peak_bytes / self.tile_bytes

    def __str__(self) -> str:
        return (
            f"{self.width:>6}  {self.splits:>5}  {format_bytes(self.matrix_bytes):>10}  "
            f"{format_bytes(self.tile_bytes):>10}  {format_bytes(self.peak_bytes):>10}  {self.tiles_held:>5.2f}  "
            f"{self.seconds * 1e3:>8.0f}  {format_bytes(self.read_bytes_per_step):>10}  {self.loss_difference:>9.1e}"
        )


HEADER = " width  tiles      matrix    one tile        peak  tiles   ms/step   read/step    d(loss)"


def config(swap: str, splits: int, **block: Any) -> dict[str, Any]:
    """Two matrices are two units, unless their tiles are units anyway."""
    units = ["Linear"] if splits == 1 else ["FeedForward"]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": swap},
            "offload_optimizer": {"device": "cpu"},
        },
        "infinity": {"slabs": SLABS, "recompute": False, "units": units, **block},
    }


def train(width: int, splits: int, steps: int, settings: dict[str, Any]) -> Cell:
    """``steps`` steps on one batch after another, the same for every number of splits."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    engine, *_ = infinity.initialize(Model(width), settings)
    losses, ends = [], [time.perf_counter()]
    with engine:
        for _ in range(steps):
            x = torch.randn(1, TOKENS, width, generator=generator).to(torch.bfloat16)
            loss = engine(x, torch.randn(1, TOKENS, width, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            ends.append(time.perf_counter())
        engine.settle()
        report = engine.report()
        tiles = [line.nbytes for line in engine.plan.lines if line.purpose == "parameter slabs"]
    times = [after - before for before, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    device = report["tiers"]["device"]
    return Cell(
        width, splits, 8 * width**2, max(tiles), device["peak_bytes"], device["planned_bytes"],
        statistics.median(times or [ends[-1] - ends[-2]]), report["nvme_last_step"]["read"], losses,
    )  # fmt: skip


def table(widths: list[int], splits: list[int], steps: int, swap: str, as_json: bool) -> list[Cell]:
    cells: list[Cell] = []
    for width in widths:
        whole: list[float] = []
        for count in splits:
            cell = train(width, count, steps, config(swap, count, tile_bytes=8 * width**2 // count))
            whole = whole or cell.losses
            cell.loss_difference = max(abs(a - b) / abs(b) for a, b in zip(cell.losses, whole, strict=True))
            cells.append(cell)
            print(json.dumps(asdict(cell)) if as_json else cell, flush=True)
    return cells


def beyond_the_budget(width: int, whole: Cell, tiled: Cell, swap: str) -> dict[str, Any]:
    """Refuses the whole, trains tiles, in less than one whole matrix."""
    budget = (whole.matrix_bytes + tiled.peak_bytes) // 2
    refusal = ""
    try:
        train(width, 1, 1, config(swap, 1, tile_bytes=whole.matrix_bytes, device_memory=budget, slabs="auto"))
    except infinity.CapacityError as error:
        refusal = str(error)
    given = train(width, tiled.splits, 2, config(swap, tiled.splits, tile_bytes=tiled.tile_bytes, device_memory=budget))
    auto = train(width, 0, 2, config(swap, 0, device_memory=budget, slabs="auto"))
    return {
        "budget_bytes": budget, "refusal": refusal, "peak_bytes": given.peak_bytes, "losses": given.losses,
        "auto_tile_bytes": auto.tile_bytes, "auto_peak_bytes": auto.peak_bytes, "auto_losses": auto.losses,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default="1024,2048", help="model widths, comma-separated")
    parser.add_argument("--splits", default="1,4,16", help="tiles per matrix, comma-separated, 1 first")
    parser.add_argument("--steps", type=int, default=7, help="steps per cell, more than two")
    parser.add_argument("--swap-dir", help="where the swap files go; a temporary directory by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object per cell, the ratios last")
    chosen = parser.parse_args(arguments)
    widths, splits = ([int(text) for text in given.split(",")] for given in (chosen.widths, chosen.splits))
    with tempfile.TemporaryDirectory(dir=chosen.swap_dir) as swap:
        if not chosen.json:
            print(HEADER)
        cells = table(widths, splits, chosen.steps, swap, chosen.json)
        whole, most = cells[-len(splits)], cells[-1]
        beyond = beyond_the_budget(widths[-1], whole, most, swap)
    ratios = {
        f"peak_{most.splits}_over_1": most.peak_bytes / whole.peak_bytes,
        f"time_{most.splits}_over_1": most.seconds / whole.seconds,
    }
    trained = most.losses[:2] == beyond["losses"]
    if chosen.json:
        last = {"ratios": ratios, "beyond_the_budget": beyond, "same_losses": trained, "load_average": os.getloadavg()}
        print(json.dumps(last))
    else:
        budget = format_bytes(beyond["budget_bytes"])
        print(f"\nwidth {widths[-1]} in {budget} of device memory, whole: {beyond['refusal'] or 'not refused'}")
        print(
            f"in {most.splits} tiles per matrix it trains in {format_bytes(beyond['peak_bytes'])}, with "
            f'{"the same" if trained else "OTHER"} losses; tile_bytes "auto" takes tiles of '
            f"{format_bytes(beyond['auto_tile_bytes'])}, in all {format_bytes(beyond['auto_peak_bytes'])}"
        )
        print(", ".join(f"{name} {value:.3f}" for name, value in ratios.items()))
    return 0 if beyond["refusal"] and trained else 1


if __name__ == "__main__":
    raise SystemExit(main())
