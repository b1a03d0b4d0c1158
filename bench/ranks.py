"""Measures what each ZeRO stage keeps per rank, what it sends per step, beside what the formulas say.

    python -m bench.ranks [--ranks 1,2,4] [--dtype bf16] [--json]

Memory is model state alone: what the arenas hold for good and the swap files reserve. With P parameters of p bytes,
gradient sums of 4 bytes (they are fp32) and s bytes of optimizer state each rank keeps, of N,

    stage 0: (p + 4 + s) P    stage 1: (p + 4) P + s P / N    stage 2: p P + (4 + s) P / N    stage 3: (p + 4 + s) P / N

Traffic is counted as by the ZeRO papers: a reduce-scatter or an all-gather of P elements moves P elements, of which a
rank really sends (N - 1) / N, which is what is measured. Stages 0 to 2 move 2 P per step, stage 3 moves 3 P less the
parameters of units that are on the device from forward to backward, so that they are gathered once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.rank_processes import run_ranks
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.tier import StateKind, Tier

SHAPE = DecoderConfig(d_model=256, n_layers=8, n_heads=4, d_ff=704)
STATES = (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
SUM_BYTES = 4
PLACES = {"none": (0, 1, 2, 3), "cpu": (1, 2, 3), "nvme": (1, 2, 3)}
"""Offload of the optimizer, from stage 3 on of the parameters too, with the stages that allow it."""


def config_of(stage: int, place: str, dtype: str, swap: str) -> dict[str, Any]:
    """One cell's config; one slab per size, so that only the last block stays for backward."""
    zero: dict[str, Any] = {"stage": stage}
    where = {"device": place, "nvme_path": swap} if place == "nvme" else {"device": place}
    if stage >= 1:
        zero["offload_optimizer"] = where
    if stage == 3:
        zero["offload_param"] = where
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "infinity": {"slabs": 1},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config


def formula_bytes(stage: int, ranks: int, parameters: int, dtype: str) -> float:
    """Bytes of model state per rank."""
    param, state = (4, 8) if dtype == "fp32" else (2, 12)
    shares = [param, SUM_BYTES, state]
    sharded_from = [3, 2, 1]
    return sum(
        share * parameters / (ranks if stage >= least else 1) for share, least in zip(shares, sharded_from, strict=True)
    )


def formula_elements(engine: Engine, stage: int) -> int:
    """Elements moved per step."""
    units = engine._parts.partition.units
    total = sum(unit.numel for unit in units)
    if stage < 3:
        return 2 * total
    blocks = [unit for unit in units if unit.name.startswith("blocks.")]
    kept = total - sum(unit.numel for unit in blocks) + blocks[-1].numel
    return 3 * total - kept


def state_bytes(engine: Engine) -> int:
    """Model state of this rank, wherever it is."""
    held = sum(
        engine._parts.arenas[tier].residents.get(kind.value, 0) for tier in (Tier.DEVICE, Tier.HOST) for kind in STATES
    )
    return held + int(engine.report()["tiers"]["nvme"]["planned_bytes"])


def measure(stage: int, place: str, dtype: str, swap: str, steps: int) -> dict[str, Any]:
    """One cell on this rank."""
    torch.manual_seed(0)
    engine = initialize(Decoder(SHAPE), config_of(stage, place, dtype, swap))[0]
    ranks, ledger = engine._parts.group.world_size, engine._parts.ledger
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(engine._parts.group.rank))
    seconds, moved = [], 0.0
    item = 4 if dtype == "fp32" else 2
    with engine:
        for step in range(steps):
            before, start = dict(ledger.bytes), time.perf_counter()
            engine.backward(engine(tokens, tokens))
            engine.step()
            engine.settle()
            seconds.append(time.perf_counter() - start)
            gathered = ledger.bytes["gather_sent"] - before.get("gather_sent", 0)
            reduced = ledger.bytes["reduce_sent"] - before.get("reduce_sent", 0)
            if step == steps - 1 and ranks > 1:
                moved = (gathered / (SUM_BYTES if stage == 0 else item) + reduced / item) * ranks / (ranks - 1)
        expected_bytes = formula_bytes(stage, ranks, engine._parts.partition.parameters, dtype)
        expected = formula_elements(engine, stage) if ranks > 1 else 0
        return {
            "stage": stage, "ranks": ranks, "offload": place, "parameters": engine._parts.partition.parameters,
            "bytes": state_bytes(engine), "bytes_formula": expected_bytes,
            "memory_relative_error": state_bytes(engine) / expected_bytes - 1,
            "elements": moved, "elements_formula": expected,
            "traffic_relative_error": moved / expected - 1 if expected else 0.0,
            "step_seconds": statistics.median(seconds[1:]),
        }  # fmt: skip


def cells() -> list[tuple[int, str]]:
    """Every stage with every offload it allows."""
    return [(stage, place) for place, stages in PLACES.items() for stage in stages]


def work(results: str, swap: str, dtype: str, steps: int) -> None:
    """What one rank does: every cell; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    rows = [measure(stage, place, dtype, swap, steps) for stage, place in cells()]
    if os.environ.get("RANK", "0") == "0":
        Path(results).write_text(json.dumps(rows))


def run(counts: Sequence[int], *, dtype: str, steps: int, swap: str) -> dict[str, Any]:
    """Every cell of every number of ranks, with the worst errors."""
    rows: list[dict[str, Any]] = []
    for ranks in counts:
        results = str(Path(swap) / f"{ranks}.json")
        if ranks == 1:
            work(results, swap, dtype, steps)
        else:
            run_ranks(
                "bench.ranks", ranks, ["--worker", results, "--swap", swap, "--dtype", dtype, "--steps", str(steps)]
            )
        rows += json.loads(Path(results).read_text())
    worst = {name: max(abs(row[name]) for row in rows) for name in ("memory_relative_error", "traffic_relative_error")}
    return {"dtype": dtype, "cells": rows, "worst": worst}


def table(found: dict[str, Any]) -> str:
    """The cells as plain text."""
    lines = ["stage  ranks  offload      state per rank  / formula       elements sent  / formula    step"]
    for row in found["cells"]:
        memory = f"{row['bytes'] / 1e6:9.2f} MB  {1 + row['memory_relative_error']:9.4f}"
        traffic = f"{row['elements'] / row['parameters']:9.3f} P  {1 + row['traffic_relative_error']:9.4f}"
        if row["ranks"] == 1:
            traffic = f"{'-':>9}    {'-':>9}"
        lines.append(
            f"{row['stage']:>5}  {row['ranks']:>5}  {row['offload']:<8}  {memory:>24}  {traffic:>26}"
            f"  {row['step_seconds'] * 1e3:7.1f} ms"
        )
    worst = found["worst"]
    lines.append(
        f"largest error: memory {worst['memory_relative_error']:.4f}, traffic {worst['traffic_relative_error']:.4f} "
        f"({found['cells'][0]['parameters']:,} parameters, {found['dtype']})"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--swap", default=".", help="directory for swap files (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(given.worker, given.swap, given.dtype, given.steps)
        return 0
    counts = [int(count) for count in given.ranks.split(",")]
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=os.path.abspath(given.swap)) as swap:
        found = run(counts, dtype=given.dtype, steps=given.steps, swap=swap)
    print(json.dumps(found) if given.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
