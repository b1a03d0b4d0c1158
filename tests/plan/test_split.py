"""A kind of state can be on several tiers, unit by unit, without changing a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import Config
from infinity.engine.initialize import initialize
from infinity.engine.planning import plan_for
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan.placement import OPTIMIZER_KINDS, STREAMED_KINDS
from infinity.plan.traffic import step_traffic
from infinity.tier import StateKind, Tier

SHAPE = DecoderConfig(d_model=64, n_layers=6, n_heads=4, d_ff=128)
KIB = 1024


def config(swap: object, param: Any, optimizer: Any, **own: Any) -> dict[str, Any]:
    def block(given: Any) -> dict[str, Any]:
        device, ratio = given if isinstance(given, tuple) else (given, 1.0)
        return {"device": device, "nvme_path": str(swap), "ratio": ratio}

    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 2048, "offload_param": block(param), "offload_optimizer": block(optimizer)
        },
        "infinity": {"adam_threads": 1, "tile_bytes": "1TiB", **own},
    }  # fmt: skip


def shares(given: dict[str, Any]) -> dict[StateKind, list[int]]:
    """Bytes of each kind on each tier."""
    with torch.device("meta"):
        found, plan = plan_for(Decoder(SHAPE), Config.load(given))
    return {kind: [plan.placement.total(kind, found, tier) for tier in Tier] for kind in STREAMED_KINDS}


def train(given: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    engine, *_ = initialize(model, given)
    losses = []
    with engine:
        for step in range(3):
            if step == 2:
                engine.settle()
                before = engine.report()["links"]
            for _ in range(2):
                tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
                loss = engine(tokens, tokens)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        engine.settle()
        after = engine.report()["links"]
        for tier, use in engine.report()["tiers"].items():
            assert use["peak_bytes"] == use["planned_bytes"], tier
            assert use["budget_bytes"] is None or use["peak_bytes"] <= use["budget_bytes"]
        state = engine.state_dict()
        for name, parameter in model.named_parameters():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"{kind} of {name}"] = infinity.get_full_optimizer_state(parameter, kind)
        return losses, state, after["nvme_write"]["bytes"] - before["nvme_write"]["bytes"]


SPLITS: list[tuple[str, str, dict[str, Any]]] = [
    ("auto", "auto", {"device_memory": 260 * KIB, "host_memory": 1500 * KIB}),
    ("auto", "auto", {"device_memory": 450 * KIB, "host_memory": 2000 * KIB}),
    ("auto", "auto", {"device_memory": 900 * KIB, "host_memory": 2600 * KIB}),
    ("nvme", "nvme", {"host_memory": 1250 * KIB}),
    ("nvme", "auto", {"host_memory": 1250 * KIB, "placement": {"master": "nvme"}}),
    ("auto", "nvme", {"device_memory": 300 * KIB, "host_memory": 1500 * KIB, "update_in_backward": False}),
]


def test_any_split_gives_the_same_bits(tmp_path: Path) -> None:
    losses, state, _ = train(config(tmp_path, "none", "none"))
    ratios = [
        (("nvme", 0.5), ("nvme", 0.7)), (("cpu", 0.3), ("nvme", 0.5)), (("nvme", 0.4), ("cpu", 0.6))
    ]  # fmt: skip
    splits: set[tuple[StateKind, tuple[bool, ...]]] = set()
    for param, optimizer, own in [*SPLITS, *((*pair, {}) for pair in ratios)]:
        given = config(tmp_path, param, optimizer, **own)
        splits |= {(kind, tuple(nbytes > 0 for nbytes in on)) for kind, on in shares(given).items()}
        found, same, written = train(given)
        assert found == losses, given
        assert all(torch.equal(state[name], same[name]) for name in state), given
        with torch.device("meta"):
            units, plan = plan_for(Decoder(SHAPE), Config.load(given))
        traffic = step_traffic(plan, units, 2)
        assert written == traffic.written, given
    for kind in (StateKind.PARAM, StateKind.GRAD, *OPTIMIZER_KINDS):
        assert (kind, (True, True, False)) in splits, kind
    assert {(StateKind.PARAM, (True, False, True)), (StateKind.GRAD, (False, True, True))} <= splits
    assert (StateKind.EXP_AVG, (True, False, True)) in splits


def test_faster_tiers_are_filled_in_the_order_of_worth(tmp_path: Path) -> None:
    everything = shares(config(tmp_path, "none", "none"))
    for device in range(300, 2400, 300):
        own = {"device_memory": device * KIB, "host_memory": "64MiB"}
        found = shares(config(tmp_path, "auto", "auto", **own))
        assert {kind: sum(on) for kind, on in found.items()} == {kind: sum(on) for kind, on in everything.items()}
        on_device = [found[kind][0] for kind in STREAMED_KINDS]
        assert sum(on_device) <= device * KIB
        if found[StateKind.PARAM][1]:
            assert not any(on_device[2:]) or on_device[0], "parameters first"
        assert not any(on[2] for on in found.values()), "the host has room for the rest"
        assert sum(on_device) > (device - 260) * KIB, "no more than the slabs of one size is left"


def test_a_ratio_is_a_share_of_bytes(tmp_path: Path) -> None:
    for ratio in (0.0, 0.25, 0.5, 0.9):
        found = shares(config(tmp_path, ("nvme", ratio), ("cpu", ratio)))
        for kind in STREAMED_KINDS:
            offloaded = 1 - found[kind][0] / sum(found[kind])
            assert ratio <= offloaded < ratio + 0.17, (kind, "to the next unit")
    for device in ("none", "auto"):
        with pytest.raises(infinity.ConfigError, match=rf'ratio` is 0.5, but `.*device` is "{device}"'):
            Config.load(config(tmp_path, (device, 0.5), "cpu"))
