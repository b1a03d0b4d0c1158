"""What people try in their first hours gets a sentence they can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

ADAM: dict[str, Any] = {"optimizer": {"type": "AdamW"}}


def test_a_second_engine_on_the_same_model_is_refused() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = infinity.initialize(model, ADAM)
    with engine:
        with pytest.raises(infinity.ConfigError, match=r"weight belongs to an engine already.*restore_parameters"):
            infinity.initialize(model, ADAM)
        assert engine(torch.zeros(1, 4)).shape == (1, 4)


def test_activations_on_another_tier_can_be_asked_for_in_three_ways(tmp_path: Path) -> None:
    own = {"placement": {"activation": "nvme"}, "nvme_path": str(tmp_path)}
    for asked in (
        {"infinity": own},
        {"infinity": {"activations": "host"}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
    ):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        engine, *_ = infinity.initialize(model, {**ADAM, "zero_optimization": {"stage": 3}, **asked})
        with engine:
            engine.backward(engine(torch.ones(16, 64)).sum())
            assert any(line.purpose.startswith("unit inputs") for line in engine.plan.lines)


def test_train_batch_takes_what_it_needs_from_an_iterator() -> None:
    class Loss(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value).square().mean()

    engine, *_ = infinity.initialize(Loss(4, 4), {**ADAM, "gradient_accumulation_steps": 2})
    with engine:
        source = iter([torch.ones(1, 4) * number for number in range(5)])
        assert engine.train_batch(source).shape == (2,)
        assert next(source)[0, 0] == 2
        with pytest.raises(infinity.ScheduleError, match=r"a list of 2, one per gradient accumulation step"):
            engine.train_batch([torch.ones(1, 4)])


def test_a_swap_path_in_a_directory_that_takes_none_says_so() -> None:
    offload = {"device": "nvme", "nvme_path": "/proc/infinity-swap"}
    config = {**ADAM, "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload}}
    with pytest.raises(infinity.StorageError, match="cannot create /proc/infinity-swap"):
        infinity.initialize(nn.Linear(4, 4), config)
