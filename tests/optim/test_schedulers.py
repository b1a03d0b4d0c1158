"""Learning rates against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from infinity.errors import ConfigError
from infinity.optim.schedulers import build_scheduler


def rates(kind: str, steps: int, groups: int = 1, lr: float = 0.5, **params: Any) -> list[list[float]]:
    """Each group's rate in step 0, 1, ..."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(groups)], lr=lr)
    scheduler = build_scheduler(kind, params, optimizer)
    seen: list[list[float]] = [[] for _ in range(groups)]
    for _ in range(steps):
        for number, group in enumerate(optimizer.param_groups):
            seen[number].append(group["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_linear_warmup_then_constant() -> None:
    (seen,) = rates("WarmupLR", 7, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_logarithmic_warmup() -> None:
    (seen,) = rates("WarmupLR", 5, warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=4)
    assert seen == pytest.approx([0.0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1.0, 1.0])


def test_warmup_then_linear_decay() -> None:
    (seen,) = rates(
        "WarmupDecayLR", 8, total_num_steps=6, warmup_min_lr=0.0, warmup_max_lr=0.8, warmup_num_steps=2,
        warmup_type="linear",
    )  # fmt: skip
    assert seen == pytest.approx([0.0, 0.4, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_warmup_then_cosine_of_the_own_rate() -> None:
    (seen,) = rates(
        "WarmupCosineLR", 8, total_num_steps=6, warmup_min_ratio=0.2, warmup_num_steps=2, cos_min_ratio=0.1,
        warmup_type="linear", lr=0.5,
    )  # fmt: skip
    share = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 5)) / 2 for done in range(1, 6)]
    assert seen == pytest.approx([0.1, 0.3, *(0.5 * one for one in share), 0.05])


def test_one_rate_for_each_group() -> None:
    first, second = rates(
        "WarmupLR", 3, groups=2, warmup_min_lr=[0.0, 0.2], warmup_max_lr=[0.4, 0.6], warmup_num_steps=2,
        warmup_type="linear",
    )  # fmt: skip
    assert first == pytest.approx([0.0, 0.2, 0.4])
    assert second == pytest.approx([0.2, 0.4, 0.6])


def test_no_warmup_at_all() -> None:
    assert rates("WarmupLR", 2, warmup_max_lr=0.3, warmup_num_steps=0)[0] == pytest.approx([0.3, 0.3])
    assert rates("WarmupLR", 3, warmup_max_lr=0.3, warmup_num_steps=1)[0] == pytest.approx([0.0, 0.3, 0.3])


def test_schedulers_of_torch_by_name() -> None:
    assert rates("StepLR", 4, step_size=2, gamma=0.1)[0] == pytest.approx([0.5, 0.5, 0.05, 0.05])


def test_a_resumed_schedule_goes_on() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    params = {"total_num_steps": 9, "warmup_num_steps": 3}
    first = build_scheduler("WarmupDecayLR", params, optimizer)
    for _ in range(4):
        optimizer.step()
        first.step()
    state, expected = first.state_dict(), []
    for _ in range(4):
        first.step()
        expected.append(optimizer.param_groups[0]["lr"])
    second = build_scheduler("WarmupDecayLR", params, optimizer)
    second.load_state_dict(state)
    seen = []
    for _ in range(4):
        second.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == expected


def test_arguments_it_refuses_are_told() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params: WarmupDecayLR refused them: .*total_num_steps"):
        rates("WarmupDecayLR", 1)
    with pytest.raises(ConfigError, match=r"scheduler\.params: StepLR refused them"):
        rates("StepLR", 1, size=3)
    with pytest.raises(ConfigError, match=r"refused them"):
        rates("WarmupLR", 1, groups=2, warmup_max_lr=[0.1])
