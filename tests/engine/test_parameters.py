"""A parameter that is away looks like itself, or says where it is."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.engine.helpers import PLACEMENTS, attached, configure

D = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(self.frozen(x))


def batch() -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=PLACEMENTS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return configure(tmp_path, request.param)


def test_a_parameter_shows_what_it_is(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    model.blocks[0].weight.note = "kept"
    listed = list(model.parameters())
    with attached(model, config):
        for (name, p), (same, wanted), mine in zip(
            model.named_parameters(), plain.named_parameters(), listed, strict=True
        ):
            assert name == same
            assert p is mine, "a reference taken before initialize() is no longer the model's parameter"
            assert isinstance(p, nn.Parameter)
            assert (p.shape, p.dtype, p.device, p.requires_grad) == (
                wanted.shape, wanted.dtype, wanted.device, wanted.requires_grad,
            )  # fmt: skip
            assert (p.numel(), p.dim(), p.size(0), p.stride(), p.nbytes, p.is_leaf) == (
                wanted.numel(), wanted.dim(), wanted.size(0), wanted.stride(), wanted.nbytes, True,
            )  # fmt: skip
            assert p.grad is None
            assert name in repr(p)
        assert model.blocks[0].weight.note == "kept"
        assert "Linear" in repr(model)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 3 * (D * D + D) + 2 * D


@pytest.mark.parametrize(
    "touch",
    [
        lambda p: p + 1, lambda p: p.sum(), lambda p: p.data, lambda p: p.detach(), lambda p: p[0], list,
        lambda p: p.numpy(), lambda p: p.data_ptr(), lambda p: p.to(torch.bfloat16), lambda p: p.clone(),
        lambda p: p.copy_(p), lambda p: nn.init.zeros_(p), lambda p: torch.linalg.norm(p), lambda p: p == p,
        lambda p: p.untyped_storage(), lambda p: torch.cat([p, p]), lambda p: p.mul_(2), lambda p: p.T @ p,
    ],
)  # fmt: skip
def test_arithmetic_on_a_parameter_names_it_and_what_to_call(tmp_path: Path, touch: Any) -> None:
    model = Net()
    with (
        attached(model, configure(tmp_path)),
        pytest.raises(infinity.OffloadedError, match=r"blocks\.1\.weight \(8, 8\) is on the nvme tier.*get_full_param"),
        torch.no_grad(),
    ):
        touch(model.blocks[1].weight)


def test_what_would_copy_the_model_is_refused(config: dict[str, Any]) -> None:
    model = Net()
    with attached(model, config) as engine:
        for act in (
            model.state_dict,
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model.blocks[1]),
            lambda: pickle.dumps(model),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model.half(),
            lambda: copy.deepcopy(model.norm.weight),
        ):
            with pytest.raises(infinity.OffloadedError, match=r"engine\.state_dict\(\)"):
                act()
        with pytest.raises(RuntimeError, match=r"infinity\.|engine\."):
            model.load_state_dict(Net().state_dict())
        assert engine(batch()).isfinite().all()


def test_values_in_and_out(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with attached(model, config) as engine:
        for (name, p), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.get_full_param(p), wanted), name
        state = engine.state_dict()
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        with torch.no_grad():
            plain.blocks[1].weight.fill_(0.5)
            plain.frozen.bias.fill_(2)
        infinity.set_full_param(model.blocks[1].weight, torch.full((D, D), 0.5))
        infinity.set_full_param(model.frozen.bias, torch.full((D,), 2.0))
        assert torch.equal(engine(batch()), plain(batch()))
        with pytest.raises(ValueError, match=r"blocks\.1\.weight has shape \(8, 8\)"):
            infinity.set_full_param(model.blocks[1].weight, torch.zeros(3))


def test_setting_a_value_between_forward_and_backward_is_refused(config: dict[str, Any]) -> None:
    model = Net()
    with attached(model, config) as engine:
        loss = engine(batch()).sum()
        infinity.set_full_param(model.blocks[1].weight, torch.zeros(D, D))
        with pytest.raises(infinity.ScheduleError, match=r"blocks\.1"):
            loss.backward()


def test_gathered_values_are_real_and_changes_are_kept(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    weight, other = model.blocks[1].weight, model.blocks[2].weight
    with attached(model, config) as engine:
        with infinity.gathered(model.blocks):
            assert torch.equal(weight + 0, plain.blocks[1].weight)
            assert torch.equal(model.blocks[1].weight, plain.blocks[1].weight)
            assert torch.equal(torch.stack([p.sum() for p in model.blocks.parameters()]).detach(),
                               torch.stack([p.sum() for p in plain.blocks.parameters()]).detach())  # fmt: skip
            with torch.no_grad():
                weight.mul_(2)
                plain.blocks[1].weight.mul_(2)
            other.data.add_(1)
            plain.blocks[2].weight.data.add_(1)
            model.blocks[0].bias.data = torch.ones(D)
            plain.blocks[0].bias.data = torch.ones(D)
        with pytest.raises(infinity.OffloadedError):
            weight + 0
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.get_full_param(p), wanted)
        assert torch.equal(engine(batch()), plain(batch()))
        with pytest.raises(IndexError), infinity.gathered(weight):
            weight.data.fill_(7)[9]
        assert torch.equal(engine(batch()), plain(batch())), "a block that failed changed a weight"


def test_gathered_keeps_the_precision_of_masters(tmp_path: Path) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with attached(model, {**configure(tmp_path), "bf16": {"enabled": True}}):
        assert model.blocks[0].weight.dtype == torch.bfloat16
        with infinity.gathered(model):
            assert model.blocks[0].weight.sum().dtype == torch.bfloat16
            model.blocks[1].weight.data.fill_(1.0)
        assert torch.equal(infinity.get_full_param(model.blocks[0].weight), plain.blocks[0].weight)
        assert torch.equal(infinity.get_full_param(model.blocks[1].weight), torch.ones(D, D))


def test_a_forward_inside_gathered(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with attached(model, config) as engine:
        with infinity.gathered(model):
            assert torch.equal(engine(batch()), plain(batch()))
            assert torch.equal(model.blocks[0].weight + 0, plain.blocks[0].weight)
        assert torch.equal(engine(batch()), plain(batch()))


def test_gradients_of_a_parameter(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with attached(model, config) as engine:
        weight = model.blocks[1].weight
        assert infinity.get_full_grad(weight) is None
        engine.backward(engine(batch()).pow(2).mean())
        plain(batch()).pow(2).mean().backward()
        with pytest.raises(infinity.OffloadedError, match=r"gradient of blocks\.1\.weight.*get_full_grad.*clipping"):
            _ = weight.grad
        with pytest.raises(infinity.OffloadedError, match="gradient_clipping"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(infinity.OffloadedError, match="cannot be assigned"):
            weight.grad = torch.zeros(D, D)
        assert model.frozen.weight.grad is None
        assert infinity.get_full_grad(model.frozen.weight) is None
        gradient = infinity.get_full_grad(weight)
        assert gradient is not None
        assert torch.equal(gradient, plain.blocks[1].weight.grad)
        weight.grad = None
        assert weight.grad is None
        before = infinity.get_full_param(weight)
        engine.step()
        assert torch.equal(infinity.get_full_param(weight), before), "a parameter without a gradient was updated"
        assert weight.grad is None


@pytest.mark.parametrize("forget", ["model", "engine", "optimizer", "parameters"])
def test_gradients_are_forgotten(config: dict[str, Any], forget: str) -> None:
    model = Net()
    with attached(model, config) as engine:
        engine.backward(engine(batch()).pow(2).mean())
        if forget == "parameters":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            {"model": model, "engine": engine, "optimizer": engine.optimizer}[forget].zero_grad()
        assert all(infinity.get_full_grad(p) is None for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())


def test_optimizer_states_of_a_parameter(config: dict[str, Any]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    with attached(model, config) as engine:
        engine.backward(engine(batch()).pow(2).mean())
        engine.step()
        plain(batch()).pow(2).mean().backward()
        weight, gradient = model.blocks[1].weight, plain.blocks[1].weight.grad
        assert gradient is not None
        moment = infinity.get_full_optimizer_state(weight, "exp_avg")
        torch.testing.assert_close(moment, gradient * 0.1)
        torch.testing.assert_close(infinity.get_full_optimizer_state(weight, "exp_avg_sq"), gradient**2 * 0.001)
        with pytest.raises(ValueError, match="exp_avg, exp_avg_sq"):
            infinity.get_full_optimizer_state(weight, "momentum")
        with pytest.raises(infinity.OffloadedError, match=r"frozen\.weight is frozen"):
            infinity.get_full_optimizer_state(model.frozen.weight, "exp_avg")


def test_freezing_while_training(config: dict[str, Any]) -> None:
    model = Net()
    with attached(model, config) as engine:
        model.blocks[1].requires_grad_(False)
        engine.backward(engine(batch()).pow(2).mean())
        assert infinity.get_full_grad(model.blocks[1].weight) is None
        assert infinity.get_full_grad(model.blocks[0].weight) is not None
        model.blocks[1].requires_grad_(True)
        engine.backward(engine(batch()).pow(2).mean())
        assert infinity.get_full_grad(model.blocks[1].weight) is not None
        with pytest.raises(infinity.OffloadedError, match=r"frozen\.weight was frozen.*initialize"):
            model.frozen.requires_grad_(True)
        with pytest.raises(infinity.OffloadedError, match=r"frozen\.weight was frozen.*initialize"):
            model.frozen.weight.requires_grad = True


def test_hooks_on_parameters(config: dict[str, Any]) -> None:
    mask = torch.eye(D)
    seen: dict[str, list[torch.Tensor]] = {"plain": [], "attached": []}

    def hook(model: Net, who: str) -> None:
        model.blocks[0].weight.register_hook(lambda gradient: gradient * mask)
        model.blocks[1].weight.register_hook(lambda gradient: seen[who].append(gradient.clone()))

    model = Net()
    plain = copy.deepcopy(model)
    hook(plain, "plain")
    model.blocks[0].weight.register_hook(lambda gradient: gradient * mask)
    with attached(model, config) as engine:
        handle = model.blocks[1].weight.register_hook(lambda gradient: seen["attached"].append(gradient.clone()))
        plain(batch()).pow(2).mean().backward()
        engine.backward(engine(batch()).pow(2).mean())
        gradient = infinity.get_full_grad(model.blocks[0].weight)
        assert gradient is not None
        assert torch.equal(gradient, plain.blocks[0].weight.grad)
        assert torch.equal(seen["plain"][0], seen["attached"][0])
        handle.remove()
        engine.backward(engine(batch()).pow(2).mean())
        assert len(seen["attached"]) == 1
        with pytest.raises(infinity.OffloadedError, match="get_full_grad"):
            model.blocks[1].weight.register_post_accumulate_grad_hook(print)


def test_a_hook_that_needs_the_gradient_of_a_parameter_is_refused(config: dict[str, Any]) -> None:
    model = Net()
    model.blocks[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(infinity.ConfigError, match=r"blocks\.1\.weight.*register_post_accumulate_grad_hook"):
        infinity.initialize(model, config)
    assert type(model.blocks[0].weight) is nn.Parameter


def test_lazy_parameters_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(infinity.ConfigError, match=r"0\.weight.*forward"):
        infinity.initialize(nn.Sequential(nn.LazyLinear(3)), config)


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(5, D, max_norm=0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


def test_a_unit_that_writes_to_its_weight_is_refused_by_name(config: dict[str, Any]) -> None:
    with attached(Clamping(), config) as engine:
        for _ in range(2):
            with pytest.raises(infinity.ScheduleError, match=r"unit \"layers\.0\" was written"):
                engine(torch.arange(4))


def test_a_parameter_put_in_the_place_of_another_is_refused(config: dict[str, Any]) -> None:
    model = Net()
    with attached(model, config) as engine:
        model.blocks[1].weight = nn.Parameter(torch.zeros(D, D))
        with pytest.raises(infinity.OffloadedError, match=r"blocks\.1\.weight.*set_full_param"):
            engine(batch())
