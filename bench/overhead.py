"""Times what a unit costs beside its computing: Python, autograd nodes, lending.

    python -m bench.overhead [--swap DIR] [--rounds 40] [--json]

A decoder of 48 blocks so small that computing takes next to nothing, one thread, processor time (which a busy machine
disturbs less). What each contestant takes over plain PyTorch is divided by the number of units. All gradients are
deposited; nothing is updated. PyTorch's own ``checkpoint`` around each block is the peer of recomputing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from bench.arguments import positive
from infinity.nn.decoder import Decoder, DecoderConfig

BLOCKS = 48
UNITS = BLOCKS + 3  # embedding, norm, head


class Checkpointed(nn.Module):
    """A block that PyTorch computes again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(d_model=16, n_layers=BLOCKS, n_heads=2, d_ff=16))


def timed(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object], rounds: int) -> list[float]:
    """Median processor seconds of forward, of backward."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 3):
        start = time.process_time()
        loss = forward()
        between = time.process_time()
        backward(loss)
        times.append((between - start, time.process_time() - between))
    return [statistics.median(column) for column in zip(*times[3:], strict=True)]


def plain(rounds: int, *, checkpointed: bool) -> list[float]:
    model, tokens = decoder(), torch.zeros(1, 8, dtype=torch.long)
    for number, block in enumerate(model.blocks if checkpointed else ()):
        model.blocks[number] = Checkpointed(block)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return timed(lambda: model(tokens, tokens), backward, rounds)


def ours(rounds: int, device: str, swap: str, *, recompute: bool) -> list[float]:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    where = {"device": device, "nvme_path": swap} if device == "nvme" else {"device": device}
    engine, *_ = infinity.initialize(
        decoder(),
        {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": {"device": "none"}},
            "infinity": {"recompute": recompute, "slabs": UNITS},
        },
    )

    def backward(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.zero_grad()

    try:
        return timed(lambda: engine(tokens, tokens), backward, rounds)
    finally:
        engine.destroy()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swap", default="runs/bench-overhead", help="a directory for parameters on NVMe")
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    os.makedirs(given.swap, exist_ok=True)
    torch.set_num_threads(1)
    found = {
        "plain": plain(given.rounds, checkpointed=False),
        "plain, checkpoint": plain(given.rounds, checkpointed=True),
        "ours, kept, never moved": ours(given.rounds, "none", given.swap, recompute=False),
        "ours, kept, parameters on NVMe": ours(given.rounds, "nvme", given.swap, recompute=False),
        "ours, recomputed": ours(given.rounds, "none", given.swap, recompute=True),
        "ours, recomputed, parameters on NVMe": ours(given.rounds, "nvme", given.swap, recompute=True),
    }
    base = found["plain"]
    table = {
        name: {
            "forward": (forward - base[0]) / UNITS * 1e6,
            "backward": (backward - base[1]) / UNITS * 1e6,
            "both": (forward + backward - sum(base)) / UNITS * 1e6,
        }
        for name, (forward, backward) in found.items()
    }
    if given.json:
        print(json.dumps({"units": UNITS, "microseconds_per_unit_over_plain": table}))
        return 0
    print("| µs per unit over plain PyTorch | forward | backward | both |\n|---|---|---|---|")
    for name, row in table.items():
        print(f"| {name} | {row['forward']:.0f} | {row['backward']:.0f} | {row['both']:.0f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
