"""Trains a model whose states exceed this machine's RAM, after a small twin was seen to be exact.

    python -m bench.large [--config configs/large.json] [--swap DIR] [--steps N] [--json]

The twin has the same config with a smaller decoder: it is trained from NVMe, then with every state in memory, and both
must agree bit for bit. The large one must stay below 6 GiB of resident memory, mapped files included, while each arena
peaks at what the plan says. The last line of ``--json`` holds the verdicts with the numbers behind them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.cli.summary import Summary
from infinity.cli.train import decoder_config, seed_everything, train
from infinity.config import Config
from infinity.config.size import format_bytes
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan import Plan
from infinity.plan.ram import installed_host_memory
from infinity.tier import Tier

RESIDENT_LIMIT = 6 << 30
TWIN = DecoderConfig(d_model=256, n_layers=4, n_heads=4, d_ff=704)
TWIN_STEPS = 3
IN_MEMORY = ("offload_param.device", "offload_optimizer.device")


def main() -> int:
    """Zero if the twin is exact, the plan is kept, the process stays small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/large.json")
    parser.add_argument("--swap", help="directory for swap files instead of the config's")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the config's")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    overrides = [f"infinity.nvme_path={given.swap}"] if given.swap else []
    overrides += [f"run.steps={given.steps}"] if given.steps else []
    config = Config.load(given.config).with_overrides(overrides)
    console = Console(stderr=given.json, emoji=False)

    exact = twin_is_exact(config)
    verdict = "the same bits" if exact else "DIFFERENT BITS"
    console.print(f"twin of {TWIN.parameters:,} parameters, {TWIN_STEPS} steps: from NVMe and in memory give {verdict}")
    plan = planned(config)
    states = sum(line.total for line in plan.lines if line.tier is Tier.NVME and "unit inputs" not in line.purpose)
    ram = installed_host_memory()
    console.print(f"\n{plan.render()}\n", highlight=False)
    console.print(
        f"states: {format_bytes(states)} for {plan.parameters:,} parameters, {states / ram:.2f} times this machine's "
        f"{format_bytes(ram)} of RAM",
        highlight=False,
    )
    summary = train(config, console, saves=False)  # a checkpoint would take another 30 GB
    summary.show(console)
    found = verdicts(exact, plan, states, summary)
    for name, (kept, told) in found.items():
        console.print(f"{name}: {told}: {'kept' if kept else 'NOT KEPT'}", highlight=False)
    if given.json:
        print(json.dumps(_numbers(found, plan, states, ram, summary)))
    return 0 if all(kept for kept, _ in found.values()) else 1


def planned(config: Config) -> Plan:
    """The plan of the config's decoder for its own micro-batch."""
    with torch.device("meta"):
        model = Decoder(decoder_config(config))
    tokens = torch.zeros(1, config.run.sequence_length, dtype=torch.long, device="meta")
    size = config.resolve_batch(1).micro_batch_size
    return infinity.plan(model, config, micro_batch=(tokens.expand(size, -1), tokens.expand(size, -1)))


def twin_is_exact(config: Config) -> bool:
    """Whether the small decoder trains alike from NVMe and in memory: losses, every weight."""
    with tempfile.TemporaryDirectory(prefix="infinity-twin-", dir=".") as swap:
        away = config.with_overrides([f"infinity.nvme_path={swap}", "steps_per_print=0"])
        at_home = away.with_overrides(
            [f"zero_optimization.{key}=none" for key in IN_MEMORY]
            + ['infinity.placement={"grad": "device"}', "infinity.activations=device", "infinity.device_memory=auto"]
        )
        first, second = _trained(away), _trained(at_home)
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def _trained(config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    seed_everything(config.run.seed)
    engine, *_ = infinity.initialize(Decoder(TWIN), config)
    losses = []
    with engine:
        for step in range(TWIN_STEPS):
            shape = config.resolve_batch(1).micro_batch_size, config.run.sequence_length
            tokens = torch.randint(0, TWIN.vocabulary, shape, generator=torch.Generator().manual_seed(step))
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.state_dict()


def verdicts(exact: bool, plan: Plan, states: int, summary: Summary) -> dict[str, tuple[bool, str]]:
    """What was promised, whether it was kept."""
    resident = summary.memory.resident_peak
    differences = {name: use.peak - plan.total(Tier(name)) for name, use in summary.tiers.items()}
    return {
        "exactness of the twin": (exact, "every loss and weight equal"),
        "states beyond 24 GiB by half": (states >= 36 << 30, format_bytes(states)),
        "resident memory below 6 GiB": (resident < RESIDENT_LIMIT, format_bytes(resident)),
        "every arena as planned": (not any(differences.values()), f"bytes of difference {differences}"),
        "no swap left": (not summary.swap_left, ", ".join(summary.swap_left) or "none"),
    }


def _numbers(found: dict[str, tuple[bool, str]], plan: Plan, states: int, ram: int, summary: Summary) -> dict[str, Any]:
    return {
        "verdicts": {name: kept for name, (kept, _) in found.items()},
        "parameters": plan.parameters,
        "states_bytes": states,
        "ram_bytes": ram,
        "plan": plan.as_json(),
        "run": summary.as_json(),
    }


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    sys.exit(main())
