"""Holds the plan against what is measured: every arena, the anonymous memory of the process.

    python -m bench.memory [--steps 4] [--swap DIR] [--json]

Eleven configurations (states in device memory, on the host, on NVMe; units recomputed or kept, whole or tiled; unit
inputs on the host or on NVMe; what waits for backward chosen from the budgets), each trained in a process of its own.
An arena's peak must be the plan to the byte. The process is predicted as what it took after one layer was trained, plus
the arenas, plus what the plan says that torch takes beside them. Then budgets that are too small are refused; the
number that each refusal names is applied and must train. The last line of ``--json`` holds the worst of both, with
every row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.config.size import format_bytes

SHAPE = {"d_model": 768, "n_layers": 8, "n_heads": 12, "d_ff": 2048, "vocabulary": 8192}
MICRO_BATCH = (2, 256)
TILE_BYTES = 1 << 20
TOLERANCE = 0.05

WHOLE = {"tile_bytes": "1TiB"}
"""Without it a small budget would be met by tiles."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "none, recompute": {"device": "none"},
    "none, keep": {"device": "none", "recompute": False},
    "cpu, recompute": {"device": "cpu"},
    "cpu, keep": {"device": "cpu", "recompute": False},
    "cpu, inputs on host": {"device": "cpu", "activations": "host"},
    "nvme, recompute": {"device": "nvme"},
    "nvme, keep": {"device": "nvme", "recompute": False},
    "nvme, inputs on nvme": {"device": "nvme", "activations": "nvme"},
    "nvme, auto": {"device": "nvme", "device_memory": "128MB", "host_memory": "400MB", "activations": "auto"},
    "nvme, recompute, tiled": {"device": "nvme", "tile_bytes": TILE_BYTES},
    "nvme, keep, tiled": {"device": "nvme", "recompute": False, "tile_bytes": TILE_BYTES},
}
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "device budget": ("device_memory", {"device": "nvme", **WHOLE}),
    "host budget": ("host_memory", {"device": "nvme", **WHOLE}),
    "host budget, inputs on host": ("host_memory", {"device": "nvme", "activations": "host", **WHOLE}),
    "disk budget": ("nvme_space", {"device": "nvme", "activations": "nvme", **WHOLE}),
}
TIER_OF = {"device_memory": "device", "host_memory": "host", "nvme_space": "nvme"}


def configured(swap: str, device: str, **own: Any) -> dict[str, Any]:
    """A config with every state on ``device`` (none, cpu, nvme)."""
    offload = {"device": device, "nvme_path": swap}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH[0],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"nvme_path": swap, **({"placement": {"grad": "nvme"}} if device == "nvme" else {}), **own},
    }


def predicted(config: dict[str, Any]) -> Any:
    """The plan for the decoder above, activations included."""
    import torch

    import infinity
    from infinity.nn.decoder import Decoder, DecoderConfig

    with torch.device("meta"):
        model = Decoder(DecoderConfig(**SHAPE))
        tokens = torch.zeros(MICRO_BATCH, dtype=torch.long)
    return infinity.plan(model, config, micro_batch=(tokens, tokens))


def trained(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Trains in a process of its own; bytes by tier, anonymous memory before the model and at its peak."""
    order = json.dumps({"config": config, "steps": steps})
    # What torch frees goes back to the system at once, so that the process shows what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory", "--child", order], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"the process that trained failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(order: dict[str, Any]) -> dict[str, Any]:
    """What ``trained`` runs."""
    import gc

    import torch

    import infinity
    from infinity.nn.decoder import Decoder, DecoderConfig
    from infinity.obs.process_memory import AnonymousPeak, status_bytes

    # Everything that the first step leaves behind whatever the depth: threads, lazily imported modules, the kernels
    # that oneDNN compiles for each shape of matrix, at a quarter of a MiB each.
    unlimited = {key: value for key, value in order["config"]["infinity"].items() if key not in TIER_OF}
    tokens = torch.zeros(MICRO_BATCH, dtype=torch.long)
    engine, *_ = infinity.initialize(
        Decoder(DecoderConfig(**{**SHAPE, "n_layers": 1})),
        {**order["config"], "infinity": {**unlimited, "host_memory": "1GiB"}},
        micro_batch=(tokens, tokens),
    )
    with engine:
        for _ in range(2):
            engine.backward(engine(tokens, tokens))
            engine.step()
    del engine
    gc.collect()
    with infinity.Init(order["config"]):
        model = Decoder(DecoderConfig(**SHAPE))
    window = sum(parameter.nbytes for parameter in model.parameters() if type(parameter) is torch.nn.Parameter)
    gc.collect()
    before = status_bytes("RssAnon") - window
    tokens = torch.randint(0, SHAPE["vocabulary"], MICRO_BATCH)
    engine, *_ = infinity.initialize(model, order["config"], micro_batch=(tokens, tokens))
    with engine, AnonymousPeak(0.0005) as peak:
        for _ in range(order["steps"]):
            loss = engine(tokens, tokens)
            engine.backward(loss)
            del loss
            engine.step()
        engine.settle()
        tiers = {name: use["peak_bytes"] for name, use in engine.report()["tiers"].items()}
        return {"tiers": tiers, "before": before, "peak": peak.peak_bytes}


def rows(swap: str, steps: int) -> Iterator[dict[str, Any]]:
    """Plan against measurement, a configuration at a time."""
    from infinity.tier import Tier

    for name, own in CONFIGURATIONS.items():
        config = configured(swap, **own)
        plan = predicted(config)
        seen = trained(config, steps)
        planned = {tier.value: plan.total(tier) for tier in Tier}
        process = seen["before"] + planned["device"] + planned["host"] + plan.waiting.outside
        yield {
            "name": name,
            "planned": planned,
            "measured": seen["tiers"],
            "arena_bytes_difference": max(abs(seen["tiers"][tier] - planned[tier]) for tier in planned),
            "before": seen["before"],
            "outside": plan.waiting.outside,
            "process_planned": process,
            "process_measured": seen["peak"],
            "process_relative_error": seen["peak"] / process - 1,
        }


def refusals(swap: str, steps: int) -> Iterator[dict[str, Any]]:
    """Budgets a page too small: the refusal, then training with the number that it names."""
    from infinity.errors import CapacityError
    from infinity.tier import Tier

    for name, (key, own) in REFUSALS.items():
        tight = {} if key == "device_memory" else {"device_memory": "100MB"}
        plan = predicted(configured(swap, **own, **tight, slabs=1))
        budget = plan.total(Tier(TIER_OF[key])) // 20
        try:
            predicted(configured(swap, **own, **tight, slabs=1, **{key: budget}))
        except CapacityError as error:
            message = str(error)
        else:
            raise RuntimeError(f"{name}: {budget} bytes were not refused")
        number = re.search(r"Raise it to at least (\d+) bytes", message)
        if number is None:
            raise RuntimeError(f"{name}: no number in {message!r}")
        remedied = configured(swap, **own, **tight, slabs=1, **{key: int(number[1])})
        used = trained(remedied, steps)["tiers"][TIER_OF[key]]
        yield {"name": name, "message": message, "remedy": {f"infinity.{key}": int(number[1])}, "used": used}


def main() -> int:
    """Zero if every arena is equal, every process within 5 %, every remedy works."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--swap", help="directory for swap files; one on the disk of the current directory by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(json.loads(given.child))))
        return 0
    out = sys.stderr if given.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="infinity-memory-", dir=given.swap or ".") as swap:
        print(f"{'configuration':<24}{'device':>12}{'host':>12}{'nvme':>12}{'arenas':>10}{'process':>24}", file=out)
        measured = []
        for row in rows(str(Path(swap).resolve()), given.steps):
            measured.append(row)
            print(_line(row), file=out, flush=True)
        refused = []
        for row in refusals(str(Path(swap).resolve()), 1):
            refused.append(row)
            print(f"\n{row['name']}: {row['message']}\n  applied {row['remedy']}: trained", file=out, flush=True)
    worst = {
        "arena_bytes_difference": max(row["arena_bytes_difference"] for row in measured),
        "process_relative_error": max(abs(row["process_relative_error"]) for row in measured),
    }
    print(f"\nworst: arenas off by {worst['arena_bytes_difference']} bytes, process by ", end="", file=out)
    print(f"{worst['process_relative_error']:.1%}", file=out)
    if given.json:
        print(json.dumps({"worst": worst, "configurations": measured, "refusals": refused}))
    return 0 if not worst["arena_bytes_difference"] and worst["process_relative_error"] <= TOLERANCE else 1


def _line(row: dict[str, Any]) -> str:
    tiers = "".join(f"{format_bytes(row['measured'][tier]):>12}" for tier in ("device", "host", "nvme"))
    arenas = "equal" if not row["arena_bytes_difference"] else f"{row['arena_bytes_difference']:+d} B"
    process = f"{format_bytes(row['process_measured'])} ({row['process_relative_error']:+.1%})"
    return f"{row['name']:<24}{tiers}{arenas:>10}{process:>24}"


if __name__ == "__main__":
    sys.exit(main())
