"""Any torch optimizer trains offloaded parameters to the bits of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.build import Injected
from infinity.engine.initialize import initialize

STEPS = 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batches() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=random) for _ in range(STEPS)]


def plain(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = kind(model.parameters(), **arguments)
    for batch in batches():
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def offloaded(
    directory: Path, device: str, config: dict[str, Any], optimizer: Any = None, bf16: bool = False
) -> dict[str, torch.Tensor]:
    model = build()
    offload = {"device": device, "nvme_path": str(directory)}
    given = {
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        **config,
    }
    made = optimizer(model.parameters()) if optimizer else None
    engine, *_ = initialize(model, given, optimizer=made, injected=Injected(poison=True))
    with engine:
        for batch in batches():
            loss = engine(batch.bfloat16() if bf16 else batch).float().square().sum()
            engine.backward(loss)
            engine.step()
        assert engine.report()["tiers"]["nvme"]["planned_bytes"] == engine.plan.total(infinity.tier.Tier.NVME)
        return engine.state_dict()


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_equals_plain(
    tmp_path: Path, kind: type[torch.optim.Optimizer], arguments: dict[str, Any], device: str
) -> None:
    expected = plain(kind, arguments)
    named = offloaded(tmp_path, device, {"optimizer": {"type": kind.__name__, "params": arguments}})
    passed = offloaded(tmp_path, device, {}, lambda parameters: kind(parameters, **arguments))
    for name, value in expected.items():
        assert torch.equal(named[name], value), name
        assert torch.equal(passed[name], value), name


def test_sixteen_bit_weights_have_fp32_masters(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 1e-5}}}
    start = dict(build().state_dict())
    trained = [offloaded(tmp_path, device, config, bf16=True) for device in ("none", "nvme")]
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name
        assert not torch.equal(value, start[name]), name  # steps too small for bf16 are kept by the master
        assert not torch.equal(value, value.bfloat16().float()), name


def test_a_scheduler_and_groups_act_on_it(tmp_path: Path) -> None:
    arguments = {"lr": 0.1, "momentum": 0.5}

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters(), "lr": 0.02}, {"params": list(model[2:].parameters())}]

    reference = build()
    optimizer = torch.optim.SGD(groups(reference), **arguments)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for batch in batches():
        reference(batch).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    model = build()
    config = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": arguments},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.1}},
    }
    engine, *_ = infinity.initialize(model, config, model_parameters=groups(model))
    with engine:
        for batch in batches():
            engine.backward(engine(batch).square().sum())
            engine.step()
        assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
        for name, value in engine.state_dict().items():
            assert torch.equal(value, reference.state_dict()[name]), name


def test_one_that_needs_the_model_again_is_refused() -> None:
    model = build()
    with pytest.raises(infinity.ConfigError, match="LBFGS cannot run on offloaded parameters"):
        infinity.initialize(model, {}, optimizer=torch.optim.LBFGS(model.parameters()))
    assert model(torch.zeros(1, 8)).shape == (1, 4)


def test_wrong_arguments_are_refused_before_the_model_moves() -> None:
    model = build()
    with pytest.raises(infinity.ConfigError, match="SGD refused"):
        infinity.initialize(model, {"optimizer": {"type": "SGD", "params": {"lr": -1.0}}})
    with pytest.raises(infinity.ConfigError, match="momentun"):
        infinity.initialize(model, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}})
    assert model(torch.zeros(1, 8)).shape == (1, 4)
