"""Every stage on several ranks is one rank with more micro-batches, in what it computes, keeps, sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bench import parity, parity_ranks
from bench.parity_ranks import RECIPES
from bench.parity_recipes import Trace
from tests.dist.helpers import Launcher

CELLS = """
import torch
from pathlib import Path
from bench.parity_ranks import RECIPES, cells, trace_of
torch.set_num_threads(1)
by_name = {cell.name: cell for cell in cells(quick=True)}
traces = {}
for number, name in WANTED:
    traces[f"{number} {name}"] = trace_of(RECIPES[number], by_name[name], SWAP, RANK, RANKS)
torch.save(traces, Path(SWAP) / f"{RANK}.pt")
"""

WANTED = {
    1: [(number, "stage 0") for number in (0, 2, 3, 4, 5)],
    2: [
        (0, "stage 0"),
        (0, "stage 1, optimizer nvme"),
        (2, "stage 2, optimizer cpu"),
        (4, "stage 3, all on nvme, delays"),
        (5, "stage 3, all on nvme, one slab"),
    ],
    4: [
        (0, "stage 3, params cpu, optimizer cpu"),
        (3, "stage 1, delays"),
    ],
}


def test_cells_equal_one_rank(launcher: Launcher, tmp_path: Path) -> None:
    traces: dict[int, dict[str, Trace]] = {}
    for ranks, wanted in WANTED.items():
        launcher.succeed(ranks, f"WANTED, SWAP = {wanted!r}, {str(tmp_path)!r}\n{CELLS}")
        parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
        traces[ranks] = {key: {name: v for part in parts for name, v in part[key].items()} for key in parts[0]}
    for ranks in (2, 4):
        for number, name in WANTED[ranks]:
            found = parity.differences(traces[1][f"{number} stage 0"], traces[ranks][f"{number} {name}"])
            if RECIPES[number].name in parity_ranks.APART:
                found = [one for one in found if not one.largest <= parity_ranks.TOLERANCE]
            assert not found, (RECIPES[number].name, name, [str(one) for one in found])


MEASURED = """
import json
from bench.ranks import cells, measure
rows = [measure(stage, place, "bf16", SWAP, 2) for stage, place in cells()]
print(json.dumps(rows))
"""


def test_memory_and_traffic_are_the_formulas(launcher: Launcher, tmp_path: Path) -> None:
    told = launcher.succeed(2, f"SWAP = {str(tmp_path)!r}\n{MEASURED}")
    for out in told:
        rows: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
        assert len(rows) == 10
        for row in rows:
            assert 0 <= row["memory_relative_error"] < 0.01, row
            assert 0 <= row["traffic_relative_error"] < 0.01, row
