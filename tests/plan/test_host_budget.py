"""Host memory is a budget: split kinds, buffers as asked for, cgroups, bytes per parameter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import Config
from infinity.engine.initialize import initialize
from infinity.engine.planning import plan_for
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan import Plan
from infinity.plan.ram import available_host_memory, cgroup_limits, installed_host_memory
from infinity.tier import StateKind, Tier

SHAPE = DecoderConfig(d_model=64, n_layers=6, n_heads=4, d_ff=128)
MOMENTS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


def config(swap: object, optimizer: str = "nvme", param: str = "nvme", **blocks: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": blocks.pop("sub_group_size", 4096),
            "offload_param": {"device": param, "nvme_path": str(swap), **blocks.pop("of_param", {})},
            "offload_optimizer": {"device": optimizer, "nvme_path": str(swap), **blocks.pop("of_optimizer", {})},
        },
        "infinity": {"placement": {"grad": "nvme"}, "adam_threads": 1, **blocks},
    }


def meta(shape: DecoderConfig = SHAPE) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape)


def plan(given: dict[str, Any], shape: DecoderConfig = SHAPE) -> Plan:
    return infinity.plan(meta(shape), given)


def train(given: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any], Plan]:
    torch.manual_seed(0)
    engine, *_ = initialize(Decoder(SHAPE), given)
    losses = []
    with engine:
        for step in range(3):
            tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.settle()
        return losses, engine.state_dict(), engine.report(), engine.plan


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_auto_splits_the_optimizer_over_host_and_nvme(share: float, tmp_path: Path) -> None:
    far = plan(config(tmp_path))
    states = sum(
        line.total for line in far.lines if line.purpose.startswith(("fp32", "exp")) and "swap" in line.purpose
    )
    budget = far.total(Tier.HOST) + int(share * states)
    given = config(tmp_path, optimizer="auto", host_memory=budget, device_memory=far.total(Tier.DEVICE))
    found, split = plan_for(meta(), Config.load(given))
    on_host = sum(split.placement.total(kind, found, Tier.HOST) for kind in MOMENTS)
    assert share * states - 3 * max(split.placement.nbytes(StateKind.MASTER, u) for u in found.units) < on_host
    assert split.total(Tier.HOST) <= budget
    assert split.total(Tier.NVME) == far.total(Tier.NVME) - on_host
    assert split.update_read == far.update_read - on_host
    losses, weights, _, _ = train(config(tmp_path))
    mixed, mixed_weights, report, allocated = train(given)
    assert allocated == split
    assert mixed == losses
    assert all(torch.equal(weights[name], mixed_weights[name]) for name in weights)
    for tier, use in report["tiers"].items():
        assert use["peak_bytes"] == split.total(Tier(tier)), tier
    assert report["nvme_last_step"]["written"] < far.update_written * 1.5


@pytest.mark.parametrize(
    ("where", "own", "works"),
    [
        ("of_param", {"buffer_size": 1000}, {"buffer_size": 43008}),
        ("of_optimizer", {"buffer_count": 3}, {"buffer_count": 4}),
        ("of_optimizer", {"buffer_size": 2047}, {"buffer_size": 4096}),
        ("of_optimizer", {"buffer_size": 4095}, {"buffer_size": 4096}),
    ],
)
def test_buffers_are_refused_with_the_number_that_works(
    where: str, own: dict[str, int], works: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(infinity.ConfigError) as refused:
        plan(config(tmp_path, **{where: own}))
    number = next(iter(works.values()))
    if own != {"buffer_size": 2047}:
        assert f"at least {number}" in str(refused.value)
    plan(config(tmp_path, **{where: works}))


def test_buffers_are_honoured(tmp_path: Path) -> None:
    ring = {count: plan(config(tmp_path, of_optimizer={"buffer_count": count})).ring for count in (4, 8, 12, 40)}
    assert ring == {4: 1, 8: 2, 12: 3, 40: 5}
    sized = plan(config(tmp_path, sub_group_size="auto", of_optimizer={"buffer_size": 5000}))
    assert sized.subgroup_numel == 4096
    slabs = plan(config(tmp_path, of_param={"buffer_count": 3})).param_slabs
    assert max(slabs.values()) == 3
    losses, weights, _, _ = train(config(tmp_path))
    few, few_weights, report, _ = train(config(tmp_path, of_optimizer={"buffer_count": 4}))
    assert few == losses
    assert all(torch.equal(weights[name], few_weights[name]) for name in weights)
    assert report["tiers"]["host"]["peak_bytes"] == report["tiers"]["host"]["planned_bytes"]
    with pytest.raises(infinity.ConfigError, match="two names of one number"):
        plan(config(tmp_path, of_param={"buffer_count": 3}, slabs=4))


def test_host_memory_per_parameter_and_none_on_nvme() -> None:
    """Optimizer on the host: 16 bytes per parameter (12 of states, 4 of gradients), 12 where gradients are consumed."""
    sizes = (DecoderConfig(d_model=256, n_layers=4, n_heads=4, d_ff=512), DecoderConfig(256, 12, 4, 512))
    placement = {"grad": "host"}

    def slope(**given: Any) -> float:
        small, large = (plan(config("/nonexistent", **given), shape) for shape in sizes)
        return (large.total(Tier.HOST) - small.total(Tier.HOST)) / (large.parameters - small.parameters)

    assert slope(optimizer="cpu", param="none", placement=placement) == pytest.approx(16, rel=0.01)
    consumed = {"update_in_backward": True, "placement": "auto"}
    assert slope(optimizer="cpu", param="none", **consumed) == pytest.approx(12, rel=0.01)
    assert slope() == 0.0, "with everything on NVMe the model's size does not show"


def fake_system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_cgroup_counts_wherever_it_is(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "5\n",
            "sys/fs/cgroup/jobs/memory.max": "3000000\n",
            "sys/fs/cgroup/jobs/memory.current": "1000000\n",
            "sys/fs/cgroup/jobs/one/memory.max": "4000000\n",
            "sys/fs/cgroup/jobs/one/memory.current": "900000\n",
        },
    )
    assert list(cgroup_limits(root)) == [(4_000_000, 900_000), (3_000_000, 1_000_000)]
    assert available_host_memory(root) == 2_000_000
    assert installed_host_memory(root) == 3_000_000
    old = fake_system(
        tmp_path / "old",
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/jobs\n",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "7000000",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "6000000",
        },
    )
    assert available_host_memory(old) == 1_000_000
    assert list(cgroup_limits(tmp_path / "none")) == []


def test_a_budget_above_the_cgroup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its dotted name, on whose way infinity.plan is a function.
    monkeypatch.setattr(sys.modules["infinity.plan.memory"], "installed_host_memory", lambda: 1 << 20)
    with pytest.raises(infinity.CapacityError, match="cgroup of this process, has 1048576"):
        plan(config("/nonexistent", host_memory="2MiB"))
