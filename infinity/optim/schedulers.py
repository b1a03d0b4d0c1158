"""Learning-rate schedules under DeepSpeed's names, as ordinary torch schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.errors import ConfigError


def warmup(step: int, steps: int, kind: str) -> float:
    """Share of the warm-up done: log(step + 1) / log(steps), or step / steps; 1 from ``steps`` on."""
    if step >= steps:
        return 1.0
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(max(steps, 2))


class WarmupSchedule(LRScheduler):
    """``rates[group](step, base_lr)`` as a torch scheduler; step k of training uses ``rate(k)``, counted from 0."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, rates: Sequence[Callable[[int, float], float]], last_epoch: int = -1
    ) -> None:
        self._rates = rates
        if last_epoch != -1:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate(self.last_epoch, float(base)) for rate, base in zip(self._rates, self.base_lrs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs, "_last_lr": self._last_lr}


def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[int, float], float]:
    """WarmupLR: from the least to the greatest rate, then constant."""
    return lambda step, base: (
        warmup_min_lr + (warmup_max_lr - warmup_min_lr) * warmup(step, warmup_num_steps, warmup_type)
    )


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[int, float], float]:
    """WarmupDecayLR: warm-up, then linearly to the least rate at ``total_num_steps``."""

    def rate(step: int, base: float) -> float:
        share = warmup(step, warmup_num_steps, warmup_type)
        if step >= warmup_num_steps:
            share = max(0.0, (total_num_steps - step) / max(1, total_num_steps - warmup_num_steps))
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share

    return rate


def warmup_cosine_lr(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: str = "log",
) -> Callable[[int, float], float]:
    """WarmupCosineLR: warm-up to the optimizer's own rate, then half a cosine down to ``cos_min_ratio`` of it."""

    def rate(step: int, base: float) -> float:
        if step < warmup_num_steps:
            return base * (warmup_min_ratio + (1 - warmup_min_ratio) * warmup(step, warmup_num_steps, warmup_type))
        share = min(1.0, (step - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps + 1))
        return base * (cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * share)) / 2)

    return rate


WARMUPS: dict[str, Callable[..., Callable[[int, float], float]]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
}


def build_scheduler(kind: str, parameters: dict[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler by config name: one of DeepSpeed's warm-ups or any class of ``torch.optim.lr_scheduler``."""
    try:
        if kind not in WARMUPS:
            return getattr(torch.optim.lr_scheduler, kind)(optimizer, **parameters)  # type: ignore[no-any-return]
        shared = {name: value for name, value in parameters.items() if name != "last_batch_iteration"}
        rates = [WARMUPS[kind](**_of_group(shared, number)) for number in range(len(optimizer.param_groups))]
        return WarmupSchedule(optimizer, rates, int(parameters.get("last_batch_iteration", -1)))
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"scheduler.params: {kind} refused them: {error}") from None


def _of_group(parameters: dict[str, Any], number: int) -> dict[str, Any]:
    """Rates may be given one per parameter group."""
    return {name: value[number] if isinstance(value, list | tuple) else value for name, value in parameters.items()}
