"""A budget too small is an error that names the smallest one that works, to the byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine.initialize import initialize
from infinity.errors import CapacityError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan import Plan, plan_memory
from infinity.shard.partition import partition
from infinity.tier import PAGE_BYTES, StateKind, Tier

BUDGET = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_space"}
PLACEMENTS = {
    "nvme": dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "nvme"),
    "gradients host": {"param": "nvme", "grad": "host", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"},
    "host": dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "host"),
    "device": dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "device"),
    "params nvme, rest device": {
        "param": "nvme", "grad": "device", "master": "device", "exp_avg": "device", "exp_avg_sq": "device"
    },
}  # fmt: skip


class Nested(nn.Module):
    """Parameters of its own, as large as those of the blocks it calls: both are in use at once."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x @ self.mix))
        return x.square().mean()


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(d_model=128, n_layers=3, n_heads=2, d_ff=256))


def config(placement: Any, swap: object = "/nonexistent", dtype: str = "bf16", **own: Any) -> Config:
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
            "infinity": {"placement": placement, "nvme_path": str(swap), **own},
            **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        }
    )


def plan(model: nn.Module, given: Config) -> Plan:
    return plan_memory(partition(model, dtype=torch.bfloat16 if given.bf16.enabled else None), given)


def smallest(message: str, tier: Tier) -> int:
    lines = [line for line in message.splitlines() if line.startswith(f"{tier.value} memory: ")]
    assert len(lines) == 1
    found = re.search(r"Raise it to at least (\d+) bytes", lines[0])
    assert found is not None
    return int(found[1])


def cases() -> list[tuple[str, Tier]]:
    used = {"nvme": Tier, "gradients host": Tier, "host": [Tier.HOST], "device": [Tier.DEVICE]}
    used["params nvme, rest device"] = [Tier.DEVICE, Tier.NVME]
    return [(name, tier) for name, tiers in used.items() for tier in tiers]


@pytest.mark.parametrize(("name", "tier"), cases())
@pytest.mark.parametrize("model", [decoder, Nested])
def test_the_named_budget_works_and_one_byte_less_does_not(model: Any, name: str, tier: Tier) -> None:
    model = model()
    with pytest.raises(CapacityError) as refused:
        plan(model, config(PLACEMENTS[name], **{BUDGET[tier]: PAGE_BYTES}))
    needed = smallest(str(refused.value), tier)
    assert f"infinity.{BUDGET[tier]} is {PAGE_BYTES} " in str(refused.value)
    assert refused.value.missing == needed - PAGE_BYTES
    fitting = plan(model, config(PLACEMENTS[name], **{BUDGET[tier]: needed}))
    assert fitting.total(tier) <= needed
    with pytest.raises(CapacityError) as refused:
        plan(model, config(PLACEMENTS[name], **{BUDGET[tier]: needed - 1}))
    assert smallest(str(refused.value), tier) == needed


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("model", [decoder, Nested])
def test_the_smallest_budget_really_trains(model: Any, tier: Tier, tmp_path: Path) -> None:
    def train(**own: Any) -> None:
        torch.manual_seed(0)
        whole = model()
        engine, _, _, _ = initialize(whole, config(PLACEMENTS["nvme"], tmp_path, dtype="fp32", **own))
        tokens = torch.randint(0, 256, (1, 8))
        batch = (torch.randn(4, 64),) if model is Nested else (tokens, tokens)
        with engine:
            for _ in range(2):
                engine.backward(engine(*batch))
                engine.step()
            engine.settle()
            used = engine.report()["tiers"][tier.value]
            assert used["peak_bytes"] == used["planned_bytes"] <= used["budget_bytes"]

    with pytest.raises(CapacityError) as refused:
        train(**{BUDGET[tier]: PAGE_BYTES})
    assert list(tmp_path.iterdir()) == [], "refused before anything was created"
    train(**{BUDGET[tier]: smallest(str(refused.value), tier)})


def test_all_tiers_are_named_at_once_with_the_largest_unit() -> None:
    own = dict.fromkeys(BUDGET.values(), PAGE_BYTES)
    with pytest.raises(CapacityError) as refused:
        plan(decoder(), config(PLACEMENTS["nvme"], **own))
    lines = str(refused.value).splitlines()
    assert [line.split()[0] for line in lines] == ["device", "host", "nvme"]
    assert all('the largest unit is "blocks.' in line for line in lines)
    together = {BUDGET[tier]: smallest(str(refused.value), tier) for tier in Tier}
    assert plan(decoder(), config(PLACEMENTS["nvme"], **together))


def test_of_several_placements_the_nearest_to_fitting_is_told() -> None:
    model = decoder()
    with pytest.raises(CapacityError) as either:
        plan(model, config({**PLACEMENTS["nvme"], "grad": "nvme"}, host_memory=PAGE_BYTES))
    with pytest.raises(CapacityError) as other:
        plan(model, config({**PLACEMENTS["nvme"], "grad": "host"}, host_memory=PAGE_BYTES))
    free = {kind: tier for kind, tier in PLACEMENTS["nvme"].items() if kind != "grad"}
    with pytest.raises(CapacityError) as refused:
        plan(model, config(free, host_memory=PAGE_BYTES))
    assert refused.value.missing == min(either.value.missing, other.value.missing)


def test_gradients_go_to_nvme_only_when_the_host_is_too_small() -> None:
    document = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/nonexistent"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nonexistent"},
            "sub_group_size": 2048,
        },
    }
    model = decoder()
    ample = plan(model, Config.load(document))
    assert ample.placement[StateKind.GRAD] is Tier.HOST
    tight = plan(model, Config.load({**document, "infinity": {"host_memory": ample.total(Tier.HOST) - 1}}))
    assert tight.placement[StateKind.GRAD] is Tier.NVME
    assert tight.total(Tier.HOST) < ample.total(Tier.HOST)


def test_auto_fills_the_fastest_tier_first() -> None:
    free = {key: {"device": "auto", "nvme_path": "/nonexistent"} for key in ("offload_param", "offload_optimizer")}
    document: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    document |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "sub_group_size": 2048, **free}}
    model = decoder()

    def placed(**own: Any) -> Plan:
        return plan(model, Config.load({**document, "infinity": own}))

    everything = placed(device_memory="1GiB")
    assert {everything.placement[kind] for kind in everything.placement.tiers} == {Tier.DEVICE}
    fits = everything.total(Tier.DEVICE)
    previous = fits
    for budget in range(fits - 1, 0, -fits // 9):
        try:
            chosen = placed(device_memory=budget)
        except CapacityError as error:
            assert budget < smallest(str(error), Tier.DEVICE)
            continue
        assert chosen.total(Tier.DEVICE) <= budget
        previous = min(previous, chosen.total(Tier.DEVICE))
    assert previous < fits // 2


def test_a_matrix_is_not_cut_into_more_than_a_thousand_tiles() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16, bias=False))
    far = {"device": "nvme", "nvme_path": "swap"}
    config: dict[str, Any] = {"optimizer": {"type": "AdamW"}}
    config["zero_optimization"] = {"stage": 3, "offload_param": far, "offload_optimizer": far}
    with pytest.raises(CapacityError, match="device memory"):
        infinity.plan(model, config | {"infinity": {"device_memory": "1MiB"}})
    plan = infinity.plan(model, config | {"infinity": {"device_memory": "40MiB"}})
    assert max(plan.param_slabs) >= (4 << 32) // 1024
