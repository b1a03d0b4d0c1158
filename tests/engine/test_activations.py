"""Unit inputs on host or NVMe: the same bits as on the device, less memory, a hard budget."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.build import Injected
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.storage.io_engine import Faults

LAYERS, WIDTH, LENGTH = 6, 64, 128
INPUT = 2 * LENGTH * WIDTH * 4
"""Bytes of one block's input in fp32."""


@contextmanager
def started(
    swap: Path, activations: str, model: nn.Module | None = None, gas: int = 1, faults: Faults | None = None, **own: Any
) -> Iterator[Engine]:
    torch.manual_seed(0)
    model = model or Decoder(DecoderConfig(d_model=WIDTH, n_layers=LAYERS, n_heads=4, d_ff=128))
    config = {
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "infinity": {"activations": activations, "nvme_path": str(swap), "adam_threads": 1, **own},
    }
    engine, *_ = initialize(model, config, injected=Injected(poison=True, faults=faults))
    with engine:
        yield engine


def tokens(step: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(step))


def trained(
    swap: Path, activations: str, *, layer_major: bool = False, gas: int = 1, lengths: tuple[int, ...] = (LENGTH,) * 3
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    losses = []
    with started(swap, activations, gas=gas) as engine:
        for step, length in enumerate(lengths):
            batches = [tokens(gas * step + micro, length) for micro in range(gas)]
            if layer_major:
                losses += engine.train_batch([(batch, batch) for batch in batches]).tolist()
                continue
            for batch in batches:
                engine.eval()
                with torch.no_grad():
                    engine(batch)
                engine.train()
                loss = engine(batch, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        engine.settle()
        return losses, engine.state_dict(), engine.report()


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize(("layer_major", "gas"), [(False, 1), (False, 2), (True, 3)])
def test_training_is_bitwise_that_of_the_device(tier: str, layer_major: bool, gas: int, tmp_path: Path) -> None:
    losses, weights, _ = trained(tmp_path, "device", layer_major=layer_major, gas=gas)
    moved, moved_weights, report = trained(tmp_path, tier, layer_major=layer_major, gas=gas)
    assert moved == losses
    assert all(torch.equal(weights[name], moved_weights[name]) for name in weights)
    planned = {name: use["planned_bytes"] for name, use in report["tiers"].items()}
    assert planned == {name: use["peak_bytes"] for name, use in report["tiers"].items()}
    written = report["links"]["nvme_write"]["bytes"]
    assert (written > 0) == (tier == "nvme")
    kept = LAYERS * INPUT * (gas if layer_major else 1)
    passes = 3 * (1 if layer_major else gas)
    assert written < passes * (kept - INPUT), "the inputs that backward needs first stay"
    assert report["links"]["nvme_read"]["bytes"] <= written
    assert report["steady_allocations"] == dict.fromkeys(("device", "host"), 0)


def test_inputs_are_checked_when_they_are_read_back(tmp_path: Path) -> None:
    losses, weights, _ = trained(tmp_path, "device")
    with started(tmp_path, "nvme", verify=True) as engine:
        for step, expected in enumerate(losses):
            loss = engine(tokens(step), tokens(step))
            assert loss.item() == expected
            engine.backward(loss)
            engine.step()
        state = engine.state_dict()
        assert all(torch.equal(weights[name], state[name]) for name in weights)
        loss = engine(tokens(9), tokens(9))
        (path,) = tmp_path.rglob("activation.swap")
        stream = engine._parts.activations
        written = [piece for piece in stream._kept.values() if piece.file is not None]
        for piece in written:
            piece.moving.wait()
            with open(path, "r+b") as file:
                (byte,) = os.pread(file.fileno(), 1, piece.file.start + 100)
                os.pwrite(file.fileno(), bytes([byte ^ 1]), piece.file.start + 100)
        with pytest.raises(infinity.StorageError, match=r"the input of a unit \(\d+ bytes\).*damaged: 1 of") as caught:
            engine.backward(loss)
        assert caught.value.path == str(path)


def test_batches_of_any_length_fit_in_any_order(tmp_path: Path) -> None:
    lengths = (32, 96, 40, 96, 33)
    losses, weights, _ = trained(tmp_path, "device", lengths=lengths)
    for tier in ("host", "nvme"):
        moved, moved_weights, report = trained(tmp_path, tier, lengths=lengths)
        assert moved == losses
        assert all(torch.equal(weights[name], moved_weights[name]) for name in weights)
        assert report["tiers"]["host"]["peak_bytes"] == report["tiers"]["host"]["planned_bytes"]


def test_the_plan_grows_by_the_inputs_and_no_more(tmp_path: Path) -> None:
    per_tier = {}
    for tier in ("device", "host", "nvme"):
        _, _, report = trained(tmp_path, tier)
        per_tier[tier] = {name: use["planned_bytes"] for name, use in report["tiers"].items()}
    angles = 2 * 4096  # cosine and sine are given to every block, copied once
    assert per_tier["host"]["host"] - per_tier["device"]["host"] == LAYERS * INPUT + angles
    window = 4 * (INPUT + angles)
    assert per_tier["nvme"]["host"] - per_tier["device"]["host"] == window
    assert 0 < per_tier["nvme"]["nvme"] <= (LAYERS - 1) * INPUT


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_device_memory_no_longer_holds_the_inputs(tier: str, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                alive.append(weakref.ref(x.untyped_storage()))  # type: ignore[arg-type]
            return super().forward(x).tanh()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Noted(64, 64) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    with started(tmp_path, tier, Stack()) as engine:
        loss = engine(torch.randn(32, 64))
        gc.collect()
        held = sum(ref() is not None for ref in alive)
        assert held == (5 if tier == "device" else 1), "the first one is the model's own input"
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_forward_without_backward_gives_its_room_back(tier: str, tmp_path: Path) -> None:
    with started(tmp_path, tier) as engine:
        batch = tokens(0)
        engine.backward(engine(batch, batch))
        planned = engine.plan
        for _ in range(3):
            loss = engine(batch, batch)
            del loss
            gc.collect()
        engine.backward(engine(batch, batch))
        assert engine.plan == planned


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_graph_that_is_retained_can_be_used_again(tier: str, tmp_path: Path) -> None:
    found = {}
    for where in ("device", tier):
        with started(tmp_path, where) as engine:
            batch = tokens(0)
            loss = engine(batch, batch)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                engine.backward(loss)
            found[where] = infinity.get_full_grad(engine.module.blocks[0].qkv.weight)  # type: ignore[union-attr,index]
    assert torch.equal(found["device"], found[tier])


def test_a_budget_too_small_is_refused_by_a_number_that_works(tmp_path: Path) -> None:
    with started(tmp_path, "host") as engine:
        batch = tokens(0)
        engine.backward(engine(batch, batch))
        needed = sum(line.total for line in engine.plan.lines if line.tier.value == "host")

    def attempt(host: int) -> None:
        with started(tmp_path, "host", host_memory=host) as engine:
            batch = tokens(0)
            engine.backward(engine(batch, batch))
            engine.step()
            assert engine.report()["tiers"]["host"]["peak_bytes"] == host

    attempt(needed)
    with pytest.raises(infinity.CapacityError, match="inputs of recomputed units") as refused:
        attempt(needed - 4096)
    more = re.search(r"Raise it by at least (\d+) bytes", str(refused.value))
    assert more is not None
    attempt(needed - 4096 + int(more[1]))
    with started(tmp_path, "nvme", host_memory=needed - LAYERS * INPUT // 2) as engine:
        engine.backward(engine(batch, batch))


def test_after_a_refusal_smaller_batches_still_train(tmp_path: Path) -> None:
    with started(tmp_path, "host") as engine:
        engine.backward(engine(tokens(0, 32), tokens(0, 32)))
        needed = sum(line.total for line in engine.plan.lines if line.tier.value == "host")
    with started(tmp_path, "host", host_memory=needed) as engine:
        for _ in range(2):
            with pytest.raises(infinity.CapacityError):
                engine(tokens(0), tokens(0))
            gc.collect()
            engine.backward(engine(tokens(0, 32), tokens(0, 32)))
            engine.step()
        assert engine.report()["tiers"]["host"]["peak_bytes"] <= needed


def test_swap_space_for_activations_is_a_budget_too(tmp_path: Path) -> None:
    with (
        started(tmp_path, "nvme", nvme_space=INPUT) as engine,
        pytest.raises(infinity.CapacityError, match=r"infinity\.nvme_space leaves"),
    ):
        engine.backward(engine(tokens(0), tokens(0)))


def test_a_disk_that_fails_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    faults = Faults(fail=1.0)
    with started(tmp_path, "nvme", faults=faults) as engine:

        def step() -> None:
            engine.backward(engine(tokens(0), tokens(0)))

        with pytest.raises(infinity.StorageError, match=r"activation"):
            step()


def test_inputs_keep_their_strides_and_small_or_odd_ones_stay(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
            seen.append((x.stride(), mask.stride(), mask.dtype, flag.item()))
            return super().forward(x) * mask + flag

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Turned(96, 96) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(1, 96, dtype=torch.bool).expand(96, 96)
            flag = torch.tensor(0.5)
            for layer in self.layers:
                x = layer(x, mask, flag).t()
            return x.sum()

    losses = []
    for tier in ("device", "host", "nvme"):
        torch.manual_seed(1)
        with started(tmp_path, tier, Stack()) as engine:
            loss = engine(torch.randn(96, 96))
            engine.backward(loss)
            assert seen[3:] == seen[2::-1], "backward sees what forward saw"
            seen.clear()
            losses.append(loss.item())
    assert losses[1:] == losses[:1] * 2
