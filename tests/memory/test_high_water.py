"""What is planned is what is used: arenas, files, the process as the kernel sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.tier import Tier

MEBIBYTE = 1 << 20
OFFLOADS = {"device": "none", "host": "cpu", "nvme": "nvme"}


def start(swap: Path, param: str, optimizer: str, grad: str, dtype: str, **own: Any) -> Engine:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=64, n_layers=4, n_heads=2, d_ff=192))
    tiers = {"param": param, "grad": grad, **dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), optimizer)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "sub_group_size": 8192},
        "infinity": {"placement": tiers, "nvme_path": str(swap), **own},
        dtype: {"enabled": True},
    }
    if dtype == "fp32":
        del config[dtype]
    return initialize(model, config)[0]


def train(engine: Engine, steps: int) -> None:
    for step in range(steps):
        for micro in range(2):
            tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2 * step + micro))
            engine.backward(engine(tokens, tokens))
            engine.step()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("param", "optimizer", "grad"),
    [
        ("device", "device", "device"),
        ("host", "host", "host"),
        ("nvme", "nvme", "host"),
        ("nvme", "nvme", "nvme"),
        ("nvme", "host", "nvme"),
        ("host", "nvme", "nvme"),
        ("host", "nvme", "host"),
    ],
)
def test_the_peak_of_every_tier_is_the_plan(param: str, optimizer: str, grad: str, dtype: str, tmp_path: Path) -> None:
    with start(tmp_path, param, optimizer, grad, dtype) as engine:
        train(engine, 2)
        settled = {tier: engine._parts.arenas[tier].allocations for tier in (Tier.DEVICE, Tier.HOST)}
        train(engine, 3)
        engine.settle()
        report = engine.report()
        assert report["steps"] == 5
        assert report["steady_allocations"] == {"device": 0, "host": 0}
        assert {tier: arena.allocations for tier, arena in engine._parts.arenas.items()} == settled
        for tier in Tier:
            bytes_of = report["tiers"][tier.value]
            assert bytes_of["peak_bytes"] == bytes_of["planned_bytes"], tier
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
        assert sum(path.stat().st_size for path in files) == report["tiers"]["nvme"]["planned_bytes"]
        assert sum(path.stat().st_blocks for path in files) * 512 == report["tiers"]["nvme"]["planned_bytes"]
        assert (report["tiers"]["nvme"]["planned_bytes"] > 0) == ("nvme" in (param, optimizer, grad))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", [{"slabs": 1}, {"slabs": 2}, {"prefetch_units": 0}, {"recompute": False}])
def test_no_choice_needs_more_than_the_plan(own: Any, tmp_path: Path) -> None:
    with start(tmp_path, "nvme", "nvme", "nvme", "bf16", **own) as engine:
        train(engine, 3)
        engine.settle()
        for tier, bytes_of in engine.report()["tiers"].items():
            assert bytes_of["peak_bytes"] == bytes_of["planned_bytes"], tier


PROCESS = """
import gc, json, sys
import torch
torch.set_num_threads(1)
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.obs.process_memory import AnonymousPeak, status_bytes

placement, swap = sys.argv[1:]
kinds = dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), placement)
model = Decoder(DecoderConfig(d_model=256, n_layers=10, n_heads=2, d_ff=512))
tokens = torch.arange(32).view(1, 32)
model(tokens, tokens).backward()
model.zero_grad(set_to_none=True)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process imports a compiler
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "sub_group_size": 65536},
    "infinity": {"placement": kinds, "nvme_path": swap},
}
values = sum(p.nbytes for p in model.parameters())
before = status_bytes("RssAnon") - values
engine, optimizer, _, _ = initialize(model, config)


def train(steps):
    for _ in range(steps):
        engine.backward(engine(tokens, tokens))
        engine.step()
    engine.settle()


with AnonymousPeak(0.001) as peak:
    train(3)
    gc.collect()
    warm = status_bytes("RssAnon")
    train(12)
    gc.collect()
    grown = status_bytes("RssAnon") - warm
planned = sum(tier["planned_bytes"] for name, tier in engine.report()["tiers"].items() if name != "nvme")
print(json.dumps({"values": values, "planned": planned, "grown": grown, "above": peak.peak_bytes - before}))
engine.destroy()
"""


@pytest.mark.parametrize("placement", ["nvme", pytest.param("host", marks=pytest.mark.slow)])
def test_the_process_stays_within_its_plan(placement: str, tmp_path: Path) -> None:
    """Anonymous memory, as the kernel counts it, without what the model's values took before they were moved."""
    command = [sys.executable, "-c", PROCESS, placement, str(tmp_path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    states = 4 * seen["values"]
    assert (seen["planned"] >= states) == (placement == "host")
    assert seen["grown"] < 2 * MEBIBYTE
    assert seen["above"] < seen["planned"] + 12 * MEBIBYTE
    if placement == "nvme":
        assert seen["above"] < states / 2, "or the bound above would say nothing"
