"""Measures, in a process of its own, what torch with the activations of a decoder takes of memory.

Run as a script, without the package around it. All layers share one block's weights, so that activations are those of
the whole model while the weights are one block's, which are then subtracted.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

DECODER = Path(__file__).parents[1] / "nn" / "decoder.py"


def measure_floor(
    decoder: dict[str, Any], *, batch_size: int, sequence_length: int, dtype: str, recompute: bool
) -> int:
    """Peak of anonymous memory in bytes, without weights, gradients or optimizer."""
    shape = {
        "decoder": decoder,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "recompute": recompute,
    }
    done = subprocess.run(
        [sys.executable, "-P", __file__, json.dumps(shape)], stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout)


def _child(shape: dict[str, Any]) -> int:
    import torch
    from torch.utils.checkpoint import checkpoint

    spec = importlib.util.spec_from_file_location("decoder", DECODER)
    if spec is None or spec.loader is None:
        raise ImportError(f"{DECODER} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["decoder"] = module
    spec.loader.exec_module(module)

    config = module.DecoderConfig(**shape["decoder"])
    model = module.Decoder(replace(config, n_layers=1)).to(getattr(torch, shape["dtype"]))

    class Recomputed(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *inputs: torch.Tensor) -> Any:
            return checkpoint(self.block, *inputs, use_reentrant=True)

    layer = Recomputed(model.blocks[0]) if shape["recompute"] else model.blocks[0]
    model.blocks = torch.nn.ModuleList([layer] * config.n_layers)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    tokens = torch.randint(config.vocabulary, (shape["batch_size"], shape["sequence_length"]))
    closed, seen = threading.Event(), [0]

    def sample() -> None:
        while not closed.wait(0.005):
            seen.append(max(seen.pop(), _anonymous()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    model(tokens, tokens).backward()
    closed.set()
    sampler.join()
    return int(seen[0] - 2 * weights)  # the gradients take as much


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    print(_child(json.loads(sys.argv[1])))
