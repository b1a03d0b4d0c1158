"""Every file in configs/ loads, describes a decoder, fits its own budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.cli.train import decoder_config
from infinity.config import Config
from infinity.nn.decoder import Decoder
from infinity.tier import StateKind, Tier

DIRECTORY = Path(__file__).resolve().parents[2] / "configs"
EVERY = sorted(DIRECTORY.glob("*.json"))


def test_there_are_configs() -> None:
    assert {path.stem for path in EVERY} >= {"demo", "tiny", "cpu-offload", "none", "fp16"}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_it_loads_and_its_plan_fits_its_budgets(path: Path) -> None:
    config = Config.load(path)
    assert config.ignored_keys == ()
    assert config.run.output_dir == f"runs/{path.stem}"
    with torch.device("meta"):
        model = Decoder(decoder_config(config))
    plan = infinity.plan(model, config)
    for tier in (Tier.DEVICE, Tier.HOST):
        budget = plan.budgets[tier]
        assert budget is None or plan.total(tier) <= budget
    if config.scheduler is not None:
        assert config.scheduler.params["total_num_steps"] == config.run.steps


def test_the_demo_is_as_large_and_as_confined_as_promised() -> None:
    config = Config.load(DIRECTORY / "demo.json")
    shape = decoder_config(config)
    assert shape.parameters >= 110_000_000
    assert shape.block_parameters * 2 <= 16_000_000
    assert config.infinity.device_memory == 96_000_000
    assert config.infinity.host_memory == 384_000_000
    for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        assert config.tier_of(kind) is Tier.NVME, kind


def test_the_large_one_is_larger_than_ram_and_smaller_than_six_gibibytes() -> None:
    config = Config.load(DIRECTORY / "large.json")
    with torch.device("meta"):
        plan = infinity.plan(Decoder(decoder_config(config)), config)
    assert plan.total(Tier.NVME) >= 36 << 30, "24 GiB and a half of it"
    assert plan.total(Tier.DEVICE) + plan.total(Tier.HOST) < 2 << 30
