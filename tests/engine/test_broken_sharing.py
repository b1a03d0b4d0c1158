"""One model seen from several threads, processes, micro-batches, optimizers at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.initialize import initialize
from infinity.errors import OffloadedError, ScheduleError
from tests.engine.helpers import ADAM, attached, configure

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def batches(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_inference_in_another_thread_while_training(tmp_path: Path, device: str) -> None:
    data = batches(60)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    for batch in data:
        plain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with attached(Net(), configure(tmp_path, device)) as engine:
        over = threading.Event()
        failures: list[BaseException] = []

        def infer() -> None:
            try:
                while not over.is_set():
                    with torch.no_grad():
                        assert torch.isfinite(engine(data[0]))
            except BaseException as error:
                failures.append(error)

        other = threading.Thread(target=infer)
        other.start()
        try:
            for batch in data:
                engine.backward(engine(batch))
                engine.step()
            state = engine.state_dict()
        finally:
            over.set()
            other.join()
        assert not failures
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


def test_a_forward_that_waits_for_a_thread_inside_the_model_ends(tmp_path: Path) -> None:
    class Parallel(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[Any] = []

            def call() -> None:
                try:
                    found.append(self.linear(x))
                except ScheduleError as error:
                    found.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            if isinstance(found[0], Exception):
                raise found[0]
            return x + torch.tanh(found[0])

    config = configure(tmp_path, timeout_seconds=0.2, units=["Linear"])
    with attached(Net(Parallel), config) as engine, pytest.raises(ScheduleError, match="another thread"):
        engine(batches(1)[0])


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_a_forked_process_is_told_that_the_engine_is_not_its_own(tmp_path: Path, device: str) -> None:
    with attached(Net(), configure(tmp_path, device)) as engine:
        engine.backward(engine(batches(1)[0]))
        engine.step()
        child = os.fork()
        if child == 0:
            try:
                engine(batches(1)[0])
            except ScheduleError as error:
                os._exit(7 if "forked" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        engine.backward(engine(batches(1)[0]))
        engine.step()
        engine.settle()


class WithLoss(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.extra = y.square().mean()
        return y


class Sum(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(block.extra for block in self.blocks)


class Target(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.target = x.sum()
        return super().forward(x) * self.target


@pytest.mark.parametrize("build", [lambda: Sum(WithLoss), Target], ids=["unit", "root"])
def test_micro_batches_that_would_see_each_others_attributes_are_refused(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    with attached(build(), configure(tmp_path, gas=3)) as engine:
        with pytest.raises(ScheduleError, match="micro-batches side by side"):
            engine.train_batch(batches(3))
        for batch in batches(3):
            engine.backward(engine(batch))
            engine.step()
        assert engine.was_step_applied()


def test_an_optimizer_does_not_pretend_to_have_its_states(tmp_path: Path) -> None:
    with attached(Net(), configure(tmp_path)) as engine:
        optimizer = engine.optimizer
        assert optimizer is not None
        optimizer.load_state_dict(optimizer.state_dict())
        engine.backward(engine(batches(1)[0]))
        engine.step()
        with pytest.raises(OffloadedError, match="get_full_optimizer_state"):
            optimizer.state_dict()
        plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
        plain.param_groups[0]["params"][0].grad = torch.ones(1)
        plain.step()
        with pytest.raises(OffloadedError, match="dropped"):
            optimizer.load_state_dict(plain.state_dict())


def test_a_group_added_later_is_refused(tmp_path: Path) -> None:
    model = Net()
    with attached(model, configure(tmp_path), model_parameters=list(model.blocks.parameters())) as engine:
        assert engine.optimizer is not None
        with pytest.raises(OffloadedError, match="add_param_group"):
            engine.optimizer.add_param_group({"params": list(model.head.parameters())})


class Remembering(torch.optim.SGD):
    """Keeps a number in its group from one step to the next."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1


def test_an_optimizer_that_remembers_in_its_groups_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = Remembering(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["calls"] = 0
    engine, *_ = infinity.initialize(model, configure(tmp_path), optimizer=optimizer)
    engine.backward(engine(batches(1)[0]))

    def update() -> None:
        engine.step()  # finds it already if the update was quick
        engine.settle()

    with pytest.raises(ScheduleError, match="calls"):
        update()
    engine.destroy()


def test_a_learning_rate_in_a_tensor_is_read_at_the_step(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Any, rate: torch.Tensor, step: Callable[[torch.Tensor], None]) -> None:
        for batch in batches(4):
            step(model(batch))
            rate.mul_(0.5)

    plain, model = Net(), Net()
    rates = torch.tensor(0.1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=rates[0])

    def step_plain(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train(plain, optimizer, rates[0], step_plain)
    engine, *_ = initialize(model, configure(tmp_path), optimizer=torch.optim.SGD(model.parameters(), lr=rates[1]))
    with engine:

        def step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        train(model, engine.optimizer, rates[1], step)
        state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def test_groups_of_another_optimizer_are_its_own(tmp_path: Path) -> None:
    """Adafactor's eps is a pair; the config's Adam must not judge it."""
    model = Net()
    engine, *_ = initialize(model, configure(tmp_path), optimizer=torch.optim.Adafactor(model.parameters(), lr=1e-2))
    with engine:
        engine.backward(engine(batches(1)[0]))
        engine.step()
        engine.settle()
        assert engine.was_step_applied()
