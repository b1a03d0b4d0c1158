"""Trains on several ranks what one rank trains alone, for comparison bit by bit.

Of the micro-batches of a step rank r of N takes numbers r, r + N, r + 2N, ...; the one rank takes all in turn, by
accumulation. Sums then have the same terms in the same order, whatever N is.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import infinity
from bench import parity
from bench.parity_cells import Cell, config_of, offload, placed
from bench.parity_recipes import Awkward, Recipe, Trace
from bench.rank_processes import run_ranks
from infinity.engine.initialize import initialize

MICRO_BATCHES = 4
TOLERANCE = 2e-6
"""Where ranks take different branches, so that they help each other out and add up in another order."""

RECIPES = (
    Recipe("fp32", accumulation=MICRO_BATCHES),
    Recipe("bf16", dtype="bf16", accumulation=MICRO_BATCHES),
    Recipe("fp16, an overflow on one rank", dtype="fp16", steps=5, overflow_at=1, accumulation=MICRO_BATCHES),
    Recipe("fp32, no clipping, groups", clipping=0.0, groups=True, accumulation=MICRO_BATCHES),
    Recipe("awkward model", model=Awkward, steps=4, groups=True, accumulation=MICRO_BATCHES),
    Recipe("awkward model, each rank its own branch", model=Awkward, steps=4, accumulation=MICRO_BATCHES),
    Recipe("awkward model, bf16", model=Awkward, dtype="bf16", steps=3, accumulation=MICRO_BATCHES),
)

APART = ("awkward model, each rank its own branch",)
"""Recipes in which ranks leave out different blocks."""


def stage(number: int, param: str = "none", optimizer: str = "none") -> dict[str, Any]:
    """The block that says what is partitioned, what is offloaded."""
    return {"zero_optimization": {"stage": number, **offload(param, optimizer)["zero_optimization"]}}


BARE = {"zero_optimization": {"stage": 3}}
"""Stage 3 with whatever placement the cell names itself."""


def cells(*, quick: bool) -> list[Cell]:
    """Every stage with every placement it allows, then choices that only move things in time."""
    found = [Cell("stage 0", rest=stage(0))]
    for number in (1, 2):
        found += [Cell(f"stage {number}, optimizer {where}", rest=stage(number, "none", where)) for where in OFFLOADS]
    found += [
        Cell(f"stage 3, params {param}, optimizer {other}", rest=stage(3, param, other))
        for param, other in (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("none", "nvme"), ("nvme", "cpu"))
    ]
    on_nvme = placed("nvme", "nvme", "nvme", "nvme", "nvme")
    found += [
        Cell("stage 3, all on nvme, one slab", {**on_nvme, "slabs": 1}, BARE),
        Cell("stage 3, all on nvme, delays", {**on_nvme, "slabs": 2}, BARE, delay_seed=1),
        Cell("stage 1, delays", rest=stage(1, "none", "nvme"), delay_seed=2),
    ]
    half = {"device": "nvme", "ratio": 0.5}
    found += [
        Cell("stage 3, half on nvme", rest=_with(stage(3), offload_param=half, offload_optimizer=half)),
        Cell("stage 2, half of the optimizer on nvme", rest=_with(stage(2), offload_optimizer=half)),
    ]
    if not quick:
        found += [
            Cell("stage 0, delays", rest=stage(0), delay_seed=3),
            Cell("stage 2, delays", rest=stage(2, "none", "cpu"), delay_seed=4),
            Cell("stage 3, delays", {"slabs": 1}, stage(3), delay_seed=5),
            Cell("stage 3, no prefetch", {"prefetch_units": 0}, stage(3)),
            Cell("stage 3, no recompute", {"recompute": False}, stage(3, "cpu", "cpu")),
            Cell("stage 3, moments apart", placed("host", "host", "nvme", "host", "nvme"), BARE),
            Cell("stage 2, small sub-groups", rest=_with(stage(2, "none", "nvme"), sub_group_size=2048)),
            Cell("stage 3, small sub-groups", on_nvme, _with(BARE, sub_group_size=2048)),
        ]
    return found


def recipes(ranks: int) -> list[Recipe]:
    """The recipes with as many micro-batches per step as are dealt out to so many ranks evenly."""
    micro_batches = math.lcm(MICRO_BATCHES, ranks)
    return [replace(recipe, accumulation=micro_batches) for recipe in RECIPES]


OFFLOADS = ("none", "cpu", "nvme")


def _with(rest: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {**rest["zero_optimization"], **keys}}


def chosen(ranks: int, *, quick: bool) -> Iterator[tuple[Recipe, Cell]]:
    """What is run with so many ranks; in the quick form every cell for the first recipe, some for the others."""
    for number, recipe in enumerate(recipes(ranks)):
        for place, cell in enumerate(cells(quick=quick)):
            if not quick or number == 0 or (number + place + ranks) % 4 == 0:
                yield recipe, cell


def trace_of(recipe: Recipe, cell: Cell, swap: str, rank: int, ranks: int) -> Trace:
    """One rank's losses; on rank 0 with them what all ranks have in common."""
    torch.manual_seed(rank)  # the model is rank 0's whatever the others draw
    model = recipe.model()
    own = replace(recipe, accumulation=recipe.accumulation // ranks)
    config = config_of(own.config(), cell, swap)
    engine, *_ = initialize(model, config, model_parameters=recipe.parameter_groups(model), injected=cell.injected())
    trace: Trace = {}
    common: Trace = {}
    with engine:
        for step in range(recipe.steps):
            for micro, batch in enumerate(recipe.batches(step)):
                if micro % ranks != rank:
                    continue
                if isinstance(model, Awkward):
                    model.turn = micro + step if recipe.name in APART else step
                for number, (tokens, targets, weight) in enumerate(batch):
                    torch.manual_seed(1000 * step + 10 * micro + number)
                    loss = engine(tokens, targets) * (weight if micro == 1 else 1.0)
                    trace[f"loss {step}.{micro}.{number}"] = loss.detach()
                    engine.backward(loss)
                if micro // ranks < own.accumulation - 1:
                    engine.step()
            if step == recipe.steps - 1:
                for name, parameter in model.named_parameters():
                    gradient = infinity.get_full_grad(parameter)
                    if gradient is not None:
                        common[f"gradient of {name}"] = gradient
            engine.step()
            norm = engine.get_global_grad_norm()
            common[f"norm {step}"] = torch.tensor(norm, dtype=torch.float64)
            common[f"loss scale {step}"] = torch.tensor(engine.loss_scale)
            common[f"applied {step}"] = torch.tensor(engine.was_step_applied())
        common.update(parity._state(model))
        common.update(parity._parameters(model))
    return {**trace, **common} if rank == 0 else trace


def check(counts: Sequence[int], *, quick: bool, swap: str, say: Callable[[str], None]) -> parity.Outcome:
    """Every cell of every number of ranks against one rank with everything on the device."""
    outcome = parity.Outcome()
    references: dict[tuple[str, int], Trace] = {}
    for ranks in counts:
        with tempfile.TemporaryDirectory(prefix="parity-", dir=swap) as results:
            if ranks == 1:
                _work(results, swap, quick=quick, rank=0, ranks=1)
            else:
                run_ranks("bench.parity_ranks", ranks, [results, swap, *(["--quick"] if quick else [])])
            parts = [torch.load(Path(results) / f"{rank}.pt") for rank in range(ranks)]
        for recipe, cell in chosen(ranks, quick=quick):
            key = f"{recipe.name} | {cell.name}"
            given = {name: value for part in parts for name, value in part[key].items()}
            which = recipe.name, recipe.accumulation
            if which not in references:
                references[which] = trace_of(recipe, Cell("", rest=stage(3)), swap, 0, 1)
            found = parity.differences(references[which], given)
            if recipe.name in APART:
                found = [one for one in found if not one.largest <= TOLERANCE]
            outcome.note(f"{ranks} ranks | {key}", found, say)
    return outcome


def _work(results: str, swap: str, *, quick: bool, rank: int, ranks: int) -> None:
    traces = {
        f"{recipe.name} | {cell.name}": trace_of(recipe, cell, swap, rank, ranks)
        for recipe, cell in chosen(ranks, quick=quick)
    }
    torch.save(traces, Path(results) / f"{rank}.pt")


def main(arguments: Sequence[str]) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    results, swap, *options = arguments
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _work(results, swap, quick="--quick" in options, rank=rank, ranks=ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
