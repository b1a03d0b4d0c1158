"""The names of optimizers and schedulers against the torch that is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from infinity.config import Config
from infinity.config.optimizer import NOT_FROM_A_CONFIG as OTHER_OPTIMIZERS
from infinity.config.optimizer import TORCH_OPTIMIZERS
from infinity.config.scheduler import NOT_FROM_A_CONFIG as OTHER_SCHEDULERS
from infinity.config.scheduler import TORCH_SCHEDULERS
from infinity.errors import ConfigError


def classes(module: Any, base: type) -> set[str]:
    found = inspect.getmembers(module, inspect.isclass)
    return {name for name, cls in found if issubclass(cls, base) and cls is not base and not name.startswith("_")}


def test_every_optimizer_of_torch_is_named_or_refused_with_a_reason() -> None:
    found = classes(torch.optim, torch.optim.Optimizer)
    assert found <= {*TORCH_OPTIMIZERS, *OTHER_OPTIMIZERS}
    assert set(TORCH_OPTIMIZERS) <= found


def test_every_scheduler_of_torch_is_named_or_refused_with_a_reason() -> None:
    found = classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler) - {"LRScheduler"}
    assert found <= {*TORCH_SCHEDULERS, *OTHER_SCHEDULERS}
    assert set(TORCH_SCHEDULERS) <= found


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_an_optimizer_is_found_whatever_its_capitals(name: str) -> None:
    config = Config.load({"optimizer": {"type": name.lower(), "params": {"lr": 0.1}}})
    assert config.optimizer is not None
    assert config.optimizer.type == name
    assert (config.optimizer.adam is not None) == (name in ("Adam", "AdamW"))


@pytest.mark.parametrize(("name", "reason"), [*OTHER_OPTIMIZERS.items()])
def test_an_optimizer_that_cannot_serve_says_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"optimizer": {"type": name}})
    assert reason in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [*OTHER_SCHEDULERS.items()])
def test_a_scheduler_that_cannot_serve_says_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"scheduler": {"type": name}})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("block", "decoupled", "weight_decay"),
    [
        ({"type": "AdamW"}, True, 0.0),
        ({"type": "Adam"}, True, 0.0),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, False, 0.1),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, True, 0.0),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, False, None),
    ],
)
def test_decoupled_decay_as_deepspeed_has_it(
    block: dict[str, Any], decoupled: bool, weight_decay: float | None
) -> None:
    optimizer = Config.load({"optimizer": block}).optimizer
    assert optimizer is not None
    assert optimizer.decoupled is decoupled
    assert (optimizer.adam.weight_decay if optimizer.adam else None) == weight_decay


def test_warmup_arguments_have_deepspeeds_defaults() -> None:
    scheduler = Config.load({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}}).scheduler
    assert scheduler is not None
    assert scheduler.resolved_params == {
        "total_num_steps": 5000,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "last_batch_iteration": -1,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 0.0001,
    }
    torch_scheduler = Config.load({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}).scheduler
    assert torch_scheduler is not None
    assert torch_scheduler.warmup is None
    assert torch_scheduler.resolved_params == {"step_size": 3}
