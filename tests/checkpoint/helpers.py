"""A small model with everything a checkpoint must keep, trained in any placement and precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.engine.build import Injected
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class Model(nn.Module):
    """Tied embedding and head, dropout, a frozen layer, a buffer, a scalar."""

    def __init__(self, width: int = 48, vocabulary: int = 96, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += tokens.numel()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.frozen(x)) * self.gain
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def configure(
    swap: Path, device: str = "nvme", precision: str = "bf16", units: Any = "auto", **others: Any
) -> dict[str, Any]:
    """All states on ``device`` (none, cpu, nvme); ``mixed``: optimizer on NVMe, parameters in host memory."""
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    param = nvme if device == "nvme" else {"device": "cpu" if device == "mixed" else device}
    optimizer = nvme if device in ("nvme", "mixed") else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": param, "offload_optimizer": optimizer},
        "infinity": {"adam_threads": 1, "units": units},
        **PRECISIONS[precision],
        **others,
    }


@contextmanager
def engine_of(config: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> Iterator[Engine]:
    engine, *_ = initialize(model or Model(), config, injected=Injected(poison=True), **arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(step))


def train(engine: Engine, start: int, stop: int) -> list[float]:
    """Losses of steps ``start`` to ``stop``; a batch is known by its step."""
    losses = []
    for step in range(start, stop):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Every value that training depends on."""
    import infinity

    found = engine.state_dict()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and engine.plan.placement.moments:
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{state}"] = infinity.get_full_optimizer_state(parameter, state)
    for unit in engine._runtime.units:
        for slot, placeholder in zip(unit.unit.layout.slots, unit.placeholders, strict=True):
            with infinity.gathered(placeholder):
                value = unit.gathered[placeholder._place[1]]
                found[f"{slot.name}.param"] = value.detach().clone()
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """The names of values that differ by a bit."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]
