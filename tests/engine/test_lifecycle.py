"""An engine comes, shares the process with others, goes, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.engine.placeholder import OffloadedParameter
from tests.engine.helpers import ADAM, PLACEMENTS, assert_equal, attached, configure, train_attached, train_plain

D = 8


class Net(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D)
        self.tied = nn.Linear(D, D)
        self.other = nn.Linear(D, D)
        self.other.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.tied(self.lstm(x)[0]))


def vectors(count: int = 3, width: int = D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, width, generator=generator) for _ in range(count)]


def energy(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean() + model(batch).mean()


@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("build", [Net, Recurrent])
def test_a_restored_model_is_a_plain_one(tmp_path: Path, device: str, build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    first = next(model.parameters())
    first.note = "kept"  # type: ignore[attr-defined]
    with attached(model, configure(tmp_path, device)) as engine:
        train_attached(engine, vectors(), energy)
        engine.destroy(restore_parameters=True)
    train_plain(plain, vectors(), energy)
    for (name, p), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert type(p) is nn.Parameter, name
        torch.testing.assert_close(p, wanted, rtol=0, atol=1e-6)
    assert next(model.parameters()).note == "kept"
    assert "forward" not in model.__dict__
    assert "zero_grad" not in model.__dict__
    with torch.no_grad():
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            p.copy_(wanted)
    again = train_plain(copy.deepcopy(model), vectors(), energy)
    with attached(model, configure(tmp_path, device)) as engine:
        assert_equal(again, train_attached(engine, vectors(), energy), exact=False)
    assert os.listdir(tmp_path) == []


def test_a_forward_of_the_instance_comes_back(tmp_path: Path) -> None:
    model = Net()
    inner = model.blocks[1].forward
    model.blocks[1].forward = own = lambda x: inner(x) + 1
    expected = model(vectors(1)[0])
    with attached(model, configure(tmp_path)) as engine:
        torch.testing.assert_close(engine.train()(vectors(1)[0]), expected)
        engine.destroy(restore_parameters=True)
    assert model.blocks[1].forward is own


def test_a_destroyed_model_says_so(tmp_path: Path) -> None:
    model = Net()
    with attached(model, configure(tmp_path)) as engine:
        pass
    engine.destroy()
    for act in (
        lambda: model(vectors(1)[0]),
        lambda: engine(vectors(1)[0]),
        lambda: model.blocks[0].weight + 1,
        lambda: infinity.get_full_param(model.blocks[0].weight),
        engine.step,
    ):
        with pytest.raises(infinity.InfinityError, match="destroyed"):
            act()
    assert model.blocks[0].weight.shape == (D, D)


def test_destroy_returns_memory_threads_descriptors_and_swap(tmp_path: Path) -> None:
    process = psutil.Process()

    def cycle(device: str) -> None:
        width = 512
        with attached(Net(width), configure(tmp_path, device)) as engine:
            for batch in vectors(2, width):
                engine.backward(energy(engine.module, batch))
                engine.step()

    for device in PLACEMENTS:
        cycle(device)
    gc.collect()
    before = process.memory_info().rss, threading.active_count(), process.num_threads(), process.num_fds()
    for _ in range(4):
        for device in PLACEMENTS:
            cycle(device)
    gc.collect()
    after = process.memory_info().rss, threading.active_count(), process.num_threads(), process.num_fds()
    assert after[1:] == before[1:]
    one_engine = 4 * 4 * sum(p.numel() for p in Net(512).parameters())
    # An engine kept in each of the four rounds would be four of them; malloc's own coming and going is about one.
    assert after[0] - before[0] < 2 * one_engine, "memory of destroyed engines is still in use"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("device", PLACEMENTS)
def test_nothing_refers_to_a_destroyed_engine(tmp_path: Path, device: str) -> None:
    width = 64
    remains: list[weakref.ref[Any]] = []
    with attached(Net(width), configure(tmp_path, device)) as engine:
        for batch in vectors(2, width):
            engine.backward(energy(engine.module, batch))
            engine.step()
        remains += [weakref.ref(engine._runtime), weakref.ref(engine._parts), weakref.ref(engine._parts.params)]
    del engine
    gc.collect()
    assert [reference() for reference in remains] == [None, None, None]


def test_engines_side_by_side(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [Net(), Net()]
    expected = [train_plain(copy.deepcopy(model), vectors(), energy) for model in models]
    with (
        attached(models[0], configure(tmp_path, "nvme")) as first,
        attached(models[1], configure(tmp_path, "cpu")) as second,
    ):
        for batch in vectors():
            losses = [energy(engine.module, batch) for engine in (first, second)]
            (losses[0] + losses[1]).backward()
            first.step()
            second.step()
        for model, trace in zip(models, expected, strict=True):
            for name, p in model.named_parameters():
                torch.testing.assert_close(infinity.get_full_param(p), trace.weights[name], rtol=0, atol=1e-6)


class Student(nn.Module):
    """Calls a model of another engine inside its own forward."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.teach = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        teacher = self.teach[0]
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(self.blocks[1](self.blocks[0](x).tanh()), target) + teacher(self.blocks[0](x)).mean()


def test_a_model_inside_another_engines_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = Net().requires_grad_(False)
    teacher.eval()
    student = Student(teacher)
    expected = train_plain(copy.deepcopy(student), vectors(), lambda model, x: model(x))
    inference = {key: value for key, value in configure(tmp_path).items() if key != "optimizer"}
    with attached(teacher, inference), attached(student, configure(tmp_path)) as engine:
        assert_equal(expected, train_attached(engine, vectors(), lambda model, x: model(x)), exact=False)


def test_parts_of_a_model_are_called_on_their_own(tmp_path: Path) -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Net()
            self.decoder = Net()
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.encoder(x)) * self.scale

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model.encoder(batch)
        return model.decoder(model.encoder.norm(hidden)).pow(2).mean() + hidden.mean()

    torch.manual_seed(0)
    model = Coder()
    expected = train_plain(copy.deepcopy(model), vectors(), loss_of)
    for device in PLACEMENTS:
        with attached(copy.deepcopy(model), configure(tmp_path, device)) as engine:
            assert_equal(expected, train_attached(engine, vectors(), loss_of), exact=False)
            with pytest.raises(infinity.OffloadedError, match="scale"):
                engine.module.scale * 2


def test_inference_without_an_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    expected = model(vectors(1)[0])
    config = {key: value for key, value in configure(tmp_path).items() if key != "optimizer"}
    with attached(model, config) as engine:
        assert engine.optimizer is None
        assert torch.equal(engine(vectors(1)[0]), expected)
        with torch.inference_mode():
            assert torch.equal(model(vectors(1)[0]), expected)
        with pytest.raises(infinity.ScheduleError, match="needs an optimizer"):
            engine.step()
        assert all(isinstance(p, OffloadedParameter) for p in model.parameters())


@pytest.mark.parametrize("device", PLACEMENTS)
def test_plain_style(tmp_path: Path, device: str) -> None:
    """The user's loop as it was: loss.backward(), optimizer.step(), scheduler.step(), optimizer.zero_grad()."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[torch.Tensor]:
        losses = []
        for batch in vectors(5):
            optimizer.zero_grad()
            loss = energy(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    own = torch.optim.AdamW(plain.parameters(), **ADAM)
    expected = loop(plain, own, torch.optim.lr_scheduler.StepLR(own, 2, 0.5))
    with attached(model, configure(tmp_path, device)) as engine:
        assert engine.optimizer is not None
        found = loop(model, engine.optimizer, torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert engine.get_lr() == [group["lr"] for group in own.param_groups]
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(infinity.get_full_param(p), wanted.detach(), rtol=0, atol=1e-6)


def test_schedulers_made_for_the_users_own_optimizer(tmp_path: Path) -> None:
    schedulers = torch.optim.lr_scheduler

    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
        return schedulers.SequentialLR(optimizer, [warm, schedulers.ExponentialLR(optimizer, 0.5)], [2])

    rates: dict[str, list[float]] = {"plain": [], "attached": []}
    model = Net()
    plain = copy.deepcopy(model)
    own = torch.optim.AdamW(plain.parameters(), **ADAM)
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # torch's own, by its milestones
    scheduler = make(own)
    for batch in vectors(5):
        energy(plain, batch).backward()
        own.step()
        scheduler.step()
        rates["plain"].append(own.param_groups[0]["lr"])
    own = torch.optim.AdamW(model.parameters(), **ADAM)
    config = {key: value for key, value in configure(tmp_path).items() if key != "optimizer"}
    with warnings.catch_warnings(), attached(model, config, optimizer=own, lr_scheduler=make(own)) as engine:
        warnings.filterwarnings("error", message="Seems like")
        for batch in vectors(5):
            engine.backward(energy(model, batch))
            engine.step()
            rates["attached"].append(engine.get_lr()[0])
    assert rates["attached"] == rates["plain"]


def test_a_scheduler_that_waits_for_a_metric_is_the_users_to_step(tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model = Net()
    with attached(model, configure(tmp_path), lr_scheduler=lambda o: plateau(o, patience=0, factor=0.5)) as engine:
        for batch in vectors(3):
            engine.backward(energy(model, batch))
            engine.step()
            engine.lr_scheduler.step(1.0)
        assert engine.get_lr() == [ADAM["lr"] / 4]
