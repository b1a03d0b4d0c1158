"""Parameter groups, the optimizer in front of the engine, steps that must change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.errors import ConfigError, NonFiniteError

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers, a head, a factor on the loss that a test may spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).float().square().mean() * self.factor


def config(swap: Path, **rest: Any) -> dict[str, Any]:
    kinds = dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "nvme")
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
        "infinity": {"placement": kinds, "nvme_path": str(swap), **rest.pop("infinity", {})},
        **rest,
    }


@contextmanager
def started(swap: Path, groups: Any = None, **rest: Any) -> Iterator[tuple[Net, Engine, Any]]:
    net = Net()
    given = groups(net) if groups else None
    engine, optimizer, _, _ = initialize(net, config(swap, **rest), model_parameters=given)
    with engine:
        yield net, engine, optimizer


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)


def train(engine: Engine, steps: int, dtype: torch.dtype = torch.float32) -> None:
    for number in range(steps):
        engine.backward(engine(batch(number, dtype)))
        engine.step()


def state(net: Net) -> State:
    found = {f"master {name}": infinity.get_full_param(p) for name, p in net.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {f"{kind} {name}": infinity.get_full_optimizer_state(p, kind) for name, p in net.named_parameters()}
    return found


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def decay_apart(net: Net) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "lr": 3e-3},
        {"params": []},
        {
            "params": [p for name, p in named if name.endswith("bias")],
            "weight_decay": 0.0,
            "betas": (0.5, 0.9),
            "eps": 1.0,
        },
    ]


def test_groups_are_trained_by_their_own_numbers(tmp_path: Path) -> None:
    plain = Net()
    optimizer = torch.optim.AdamW(decay_apart(plain), lr=1e-2, eps=0.1, weight_decay=0.1)
    for number in range(5):
        plain(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[2]["lr"] *= 0.5
    with started(tmp_path, decay_apart) as (net, engine, streamed):
        assert [len(group["params"]) for group in streamed.param_groups] == [3, 0, 3]
        assert engine.get_lr() == [3e-3, 1e-2, 1e-2]
        for number in range(5):
            engine.backward(engine(batch(number)))
            streamed.step()
            streamed.zero_grad()
            streamed.param_groups[2]["lr"] *= 0.5
        assert engine.get_lr() == [3e-3, 1e-2, 1e-2 / 32]
        for (name, expected), given in zip(plain.named_parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(infinity.get_full_param(given), expected.detach(), atol=1e-6, rtol=0, msg=name)


def test_what_no_group_holds_is_frozen(tmp_path: Path) -> None:
    with started(tmp_path, lambda net: list(net.layers.parameters())) as (net, engine, _):
        before = infinity.get_full_param(net.head.weight)
        train(engine, 2)
        assert torch.equal(infinity.get_full_param(net.head.weight), before)
        assert not net.head.weight.requires_grad
        assert engine.report()["trained_parameters"] == 2 * (16 * 16 + 16)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            lambda net: [{"params": net.parameters()}, {"params": [net.head.bias]}],
            r"head\.bias is in parameter group 0",
        ),
        (lambda net: [nn.Parameter(torch.ones(3))], r"group 0 holds a tensor of shape \(3,\) that is no parameter"),
        (lambda net: [{"params": net.parameters(), "betas": (1.0, 0.9)}], r"group 0: betas=\(1\.0, 0\.9\)"),
        (lambda net: [{"params": net.parameters(), "amsgrad": True}], r"group 0: amsgrad=True is not supported"),
        (lambda net: [{"params": net.parameters(), "lr": -1.0}], r"group 0: lr=-1\.0; expected"),
    ],
)
def test_groups_that_cannot_be_honoured(groups: Callable[[Net], Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said), started(tmp_path, groups):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_that_refuses_gives_the_model_back(tmp_path: Path) -> None:
    net, expected = Net(), Net()
    with pytest.raises(ConfigError, match=r"scheduler\.params"):
        initialize(net, config(tmp_path, scheduler={"type": "StepLR", "params": {"size": 3}}))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(net(batch(0)), expected(batch(0)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_non_finite_gradient_never_reaches_the_state(bad: float, dtype: str, tmp_path: Path) -> None:
    rest = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    with started(tmp_path, infinity={"non_finite_limit": 2}, **rest) as (net, engine, _):
        train(engine, 2, torch_dtype)
        before = state(net)
        net.factor = bad
        train(engine, 1, torch_dtype)
        assert not engine.was_step_applied()
        assert engine.skipped_steps == 1
        assert engine.get_global_grad_norm() == float("inf")
        assert same(state(net), before)
        net.factor = 1.0
        train(engine, 1, torch_dtype)
        assert engine.was_step_applied()
        assert not same(state(net), before)
        before = state(net)
        net.factor = bad
        with pytest.raises(NonFiniteError, match=r"2 steps in a row .* first seen in (head|layers)\S* *\."):
            train(engine, 2, torch_dtype)
        assert same(state(net), before), "the state can still be saved"
        assert engine.skipped_steps == 3


def test_the_first_bad_parameter_is_named(tmp_path: Path) -> None:
    with started(tmp_path, infinity={"non_finite_limit": 1}) as (net, engine, _):
        engine.backward(engine(batch(0)))
        index, slot = net.layers[1].bias._place
        engine._parts.grads.deposit(index, slot, torch.full((16,), float("inf")))
        with pytest.raises(NonFiniteError, match=r"first seen in layers\.1\.bias\."):
            engine.step()


def test_fp16_finds_its_scale_and_skips_exactly_the_overflows(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 1000}
    with started(tmp_path, fp16=fp16, infinity={"non_finite_limit": 1}) as (net, engine, _):
        before, scale = state(net), engine.loss_scale
        assert scale == 2.0**40
        for _ in range(30):
            train(engine, 1, torch.float16)
            if engine.was_step_applied():
                break
            scale /= 2
            assert engine.loss_scale == scale
            assert same(state(net), before)
        assert engine.was_step_applied()
        assert engine.skipped_steps == engine.global_steps - 1 > 5
        assert not same(state(net), before)


def test_fp16_at_its_smallest_scale_counts(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1.0}
    with started(tmp_path, fp16=fp16, infinity={"non_finite_limit": 3}) as (net, engine, _):
        net.factor = float("nan")
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            train(engine, 9, torch.float16)
        assert engine.skipped_steps == 3


def test_the_schedule_of_the_config_drives_the_rate(tmp_path: Path) -> None:
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    with started(tmp_path, scheduler={"type": "WarmupLR", "params": schedule}) as (_, engine, _):
        seen = []
        for _ in range(6):
            seen += engine.get_lr()
            train(engine, 1)
        assert seen == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_skipped_step_does_not_advance_the_schedule(tmp_path: Path) -> None:
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    with started(tmp_path, scheduler={"type": "WarmupLR", "params": schedule}) as (net, engine, _):
        train(engine, 2)
        rate = engine.get_lr()
        net.factor = float("nan")
        train(engine, 1)
        assert engine.get_lr() == rate
