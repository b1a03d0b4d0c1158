"""Every stage on several ranks is one rank with more micro-batches, in what it computes, keeps, sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import parity, parity_ranks
from bench.parity_cells import Cell
from bench.parity_ranks import RECIPES, stage
from bench.parity_recipes import Trace
from tests.dist.helpers import Launcher

CELLS = """
import sys
import torch
from pathlib import Path
from bench.parity_ranks import BARE, RECIPES, cells, trace_of
torch.set_num_threads(1)
by_name = {cell.name: cell for cell in cells(quick=True)}
traces = {}
for number, name in WANTED:
    traces[f"{number} {name}"] = trace_of(RECIPES[number], by_name[name], SWAP, RANK, RANKS)
torch.save(traces, Path(SWAP) / f"{RANK}.pt")
"""

WANTED = {
    2: [
        *((number, "stage 0") for number in range(3)),
        (0, "stage 1, optimizer nvme"),
        (1, "stage 2, optimizer cpu"),
        (2, "stage 3, params cpu, optimizer cpu"),
        (3, "stage 1, delays"),
        (4, "stage 3, all on nvme, delays"),
        (5, "stage 3, all on nvme, one slab"),
        (6, "stage 2, optimizer none"),
    ],
    4: [
        (0, "stage 3, all on nvme, delays"),
        (1, "stage 0"),
        (2, "stage 1, optimizer cpu"),
        (4, "stage 3, params nvme, optimizer cpu"),
    ],
}


@pytest.fixture(scope="module")
def references() -> dict[int, Trace]:
    return {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_cells_equal_one_rank(ranks: int, references: dict[int, Trace], launcher: Launcher, tmp_path: Path) -> None:
    code = f"WANTED, SWAP = {WANTED[ranks]!r}, {str(tmp_path)!r}\n{CELLS}"
    launcher.succeed(ranks, code)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for number, name in WANTED[ranks]:
        recipe = RECIPES[number]
        if number not in references:
            references[number] = parity_ranks.trace_of(recipe, Cell("", rest=stage(3)), str(tmp_path), 0, 1)
        given = {key: value for part in parts for key, value in part[f"{number} {name}"].items()}
        found = parity.differences(references[number], given)
        if recipe.name in parity_ranks.APART:
            found = [one for one in found if not one.largest <= parity_ranks.TOLERANCE]
        assert not found, (recipe.name, name, [str(one) for one in found])


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
