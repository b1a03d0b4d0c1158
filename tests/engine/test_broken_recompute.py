"""What a unit's second forward could see otherwise than its first did."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.errors import ScheduleError
from tests.engine.helpers import attached, check_model, configure

WIDTH = 8


class Block(nn.Module):
    """Multiplies its branch by whatever ``factor`` gives."""

    def __init__(self, factor: Callable[[Any, torch.Tensor], Any], memory: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = factor
        self.memory = memory()
        self.register_buffer("gain", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor(self, x)


class Net(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        random.seed(1)
        np.random.seed(1)
        self.blocks = nn.ModuleList(Block(*arguments) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def batches(number: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(number)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def append(block: Any, x: torch.Tensor) -> float:
    block.memory.append(len(block.memory) + 1.0)
    return sum(block.memory)


def add(block: Any, x: torch.Tensor) -> int:
    block.memory["calls"] += 1
    return block.memory["calls"]


@pytest.mark.parametrize(
    "arguments",
    [
        (lambda block, x: random.random(),),
        (lambda block, x: float(np.random.rand()),),
        (lambda block, x: torch.rand(x.shape, generator=block.memory), lambda: torch.Generator().manual_seed(1)),
        (append, lambda: deque([1.0], maxlen=3)),
        (add, lambda: defaultdict(int)),
    ],
    ids=["random", "numpy", "generator", "deque", "defaultdict"],
)
def test_what_a_second_forward_would_not_see_again_is_kept(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    check_model(lambda: Net(*arguments), batches(), loss_of, tmp_path)


def dropped(block: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.ones_like(x), 0.5, block.training)


def test_backward_runs_a_unit_in_the_mode_of_its_forward(tmp_path: Path) -> None:
    def in_both_modes(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        training = model.train()(batch)
        return training + 2 * model.eval()(batch)

    check_model(lambda: Net(dropped), batches(), in_both_modes, tmp_path)


def test_the_users_mode_is_left_alone_by_backward(tmp_path: Path) -> None:
    with attached(Net(dropped), configure(tmp_path)) as engine:
        loss = engine.train()(batches()[0])
        engine.eval()
        engine.backward(loss)
        assert not any(module.training for module in engine.module.modules())


def counted(block: Any, x: torch.Tensor) -> int:
    block.memory.calls += 1
    return block.memory.calls


@pytest.mark.parametrize(
    "arguments",
    [(counted, lambda: SimpleNamespace(calls=0)), (lambda block, x: next(block.memory), lambda: count(1))],
    ids=["object", "iterator"],
)
def test_a_second_forward_with_other_values_is_refused(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    with attached(Net(*arguments), configure(tmp_path)) as engine, pytest.raises(ScheduleError, match=r"blocks\.2"):
        engine.backward(engine(batches()[0]))


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
def test_a_unit_that_was_changed_between_forward_and_backward_is_refused(tmp_path: Path, kind: str) -> None:
    with attached(Net(lambda block, x: block.gain * (block.memory or 1.0)), configure(tmp_path)) as engine:
        engine.backward(engine(batches()[0]))
        loss = engine(batches()[0])
        for block in engine.module.blocks:
            if kind == "buffer":
                block.gain.fill_(3.0)
            else:
                block.memory = 3.0
        with pytest.raises(ScheduleError, match="computed other values"):
            engine.backward(loss)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_model_without_parameters(tmp_path: Path, device: str) -> None:
    engine, *_ = infinity.initialize(nn.Sequential(nn.ReLU()), configure(tmp_path, device))
    with engine:
        x = torch.ones(2, requires_grad=True)
        engine.backward(engine(x).sum())
        engine.step()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones(2))
        assert engine.get_global_grad_norm() == 0.0
