"""What waits for backward is chosen from the budgets, known before anything is allocated."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.engine.initialize import initialize
from infinity.errors import ConfigError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan import Plan
from infinity.plan.micro_batch import MicroBatch, UnitInput
from infinity.plan.waiting import Waits
from infinity.tier import PAGE_BYTES, Tier, round_up

LAYERS = 6
SHAPE = DecoderConfig(d_model=128, n_layers=LAYERS, n_heads=4, d_ff=256)
TOKENS = 2, 64
BLOCKS = [f"blocks.{number}" for number in range(LAYERS)]
BLOCKS_ONLY = {"blocks.*": True}


def config(swap: object, gas: int = 1, **own: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(swap)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 4096, "offload_param": offload, "offload_optimizer": offload
        },
        "infinity": {"placement": {"grad": "nvme"}, "adam_threads": 1, "tile_bytes": "1TiB", **own},
    }  # fmt: skip


def plan(swap: object, **own: Any) -> Plan:
    with torch.device("meta"):
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        return infinity.plan(Decoder(SHAPE), config(swap, **own), micro_batch=(tokens, tokens))


def train(given: dict[str, Any], *, known: bool = True) -> tuple[list[float], dict[str, torch.Tensor], Plan]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, TOKENS)
    engine, *_ = initialize(Decoder(SHAPE), given, micro_batch=(tokens, tokens) if known else None)
    losses = []
    with engine:
        before = engine.plan
        for _ in range(2):
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.settle()
        if known:
            assert sorted(map(str, engine.plan.lines)) == sorted(map(str, before.lines))
        for tier, use in engine.report()["tiers"].items():
            assert use["peak_bytes"] == engine.plan.total(Tier(tier)), tier
            assert use["budget_bytes"] is None or use["peak_bytes"] <= use["budget_bytes"]
        return losses, engine.state_dict(), engine.plan


def chosen(found: Plan) -> tuple[int, int, int]:
    """Blocks that keep activations, blocks whose inputs stay, blocks whose inputs leave."""
    assert found.waiting is not None
    kept, staying = found.waiting.kept, found.waiting.staying
    return len(kept), len(staying), len({one.unit for one in found.waiting.micro_batch.inputs if one.moves})


def test_blocks_keep_their_activations_as_far_as_the_device_has_room(tmp_path: Path) -> None:
    none = plan(tmp_path)
    assert chosen(none) == (0, 0, 0), "without a budget there is nothing to fill"
    slabs, floor = none.total(Tier.DEVICE), none.waiting
    assert floor is not None
    everything = plan(tmp_path, device_memory="1GiB")
    assert chosen(everything)[0] == LAYERS
    assert everything.waiting is not None
    whole = everything.waiting.device
    keep = plan(tmp_path, recompute=False).waiting
    assert keep is not None
    assert whole + floor.outside == keep.micro_batch.outside == keep.outside
    before = -1
    for share in (0, 5, 10):
        budget = slabs + round_up(whole, PAGE_BYTES) * share // 10
        found = plan(tmp_path, device_memory=budget)
        assert found.waiting is not None
        assert found.total(Tier.DEVICE) <= budget
        assert found.waiting.outside == floor.outside
        assert found.waiting.kept == frozenset(BLOCKS[LAYERS - len(found.waiting.kept) :]), "the last ones"
        assert len(found.waiting.kept) >= before
        before = len(found.waiting.kept)
        assert f"kept instead of recomputed: {before} of {LAYERS}" in found.render() or not before
    assert before == LAYERS


def test_what_the_config_names_is_not_chosen(tmp_path: Path) -> None:
    assert chosen(plan(tmp_path, device_memory="1GiB", recompute=True))[0] == 0
    named = plan(tmp_path, device_memory="1GiB", recompute={"blocks.[0-3]": True, "blocks.4": False})
    assert named.waiting is not None
    assert named.waiting.kept == {"blocks.5"}


def test_a_pattern_that_names_no_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, recompute={"layers.*": True, "Block": False, "blocs.1": True})
    assert len(refused.value.problems) == 2
    assert refused.value.problems[0] == (
        'infinity.recompute: "layers.*" matches no unit; expected a class name (Block, Embedding, Linear), or a '
        "pattern for names of units, which are embedding, blocks.0, blocks.1, blocks.2, blocks.3, blocks.4, ..."
    )


def test_one_block_is_no_span(tmp_path: Path) -> None:
    found = [plan(tmp_path, device_memory=size << 10).render() for size in range(1600, 3200, 200)]
    assert any("kept instead of recomputed: 1 of 6 blocks, blocks.5\n" in text for text in found)
    assert any("kept instead of recomputed: 2 of 6 blocks, blocks.4 to blocks.5\n" in text for text in found)


def test_inputs_fill_device_then_host_then_nvme(tmp_path: Path) -> None:
    slabs = plan(tmp_path).total(Tier.DEVICE)
    moved = plan(tmp_path, device_memory=slabs, activations="host", recompute=BLOCKS_ONLY)
    host = moved.total(Tier.HOST)
    inputs = sum(line.total for line in moved.lines if line.purpose == "unit inputs")
    own = {"activations": "auto", "recompute": BLOCKS_ONLY}
    near = plan(tmp_path, device_memory=slabs + inputs, host_memory=2 * host, **own)
    assert chosen(near) == (0, LAYERS, 0)
    half = plan(tmp_path, device_memory=slabs + inputs // 2, host_memory=2 * host, **own)
    assert half.waiting is not None
    assert half.waiting.staying == set(BLOCKS[4:]), "what backward needs first stays, what all are given with it"
    assert chosen(half) == (0, 2, 4)
    assert half.waiting.tier is Tier.HOST
    far = plan(tmp_path, device_memory=slabs, host_memory=host - PAGE_BYTES, **own)
    assert far.waiting is not None
    assert far.waiting.tier is Tier.NVME
    assert chosen(far) == (0, 0, LAYERS)
    assert sum(line.total for line in far.lines if line.purpose == "unit inputs, swap") < inputs
    assert far.total(Tier.HOST) <= host - PAGE_BYTES


def test_every_choice_gives_the_same_bits(tmp_path: Path) -> None:
    slabs, host = plan(tmp_path).total(Tier.DEVICE), plan(tmp_path, activations="host").total(Tier.HOST)
    whole = plan(tmp_path, device_memory="1GiB").waiting
    assert whole is not None
    losses, weights, _ = train(config(tmp_path), known=False)
    seen = set()
    for device, memory, activations in (
        (slabs + whole.device // 2, "1GiB", "device"),
        (slabs + whole.device // 2, "1GiB", "host"),
        (slabs + whole.device // 3, "1GiB", "auto"),
        (slabs + 20 * PAGE_BYTES, "1GiB", "auto"),
        (slabs, host - PAGE_BYTES, "auto"),
    ):
        own = {"device_memory": device, "host_memory": memory, "activations": activations}
        found, same, used = train(config(tmp_path, **own))
        assert found == losses
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert used.waiting is not None
        seen.add((*(count > 0 for count in chosen(used)), used.waiting.tier))
    assert {kind[:3] for kind in seen} >= {(True, False, True), (True, True, False), (False, True, True)}
    assert (False, False, True, Tier.NVME) in seen


def test_a_layer_major_step_has_all_micro_batches_in_flight(tmp_path: Path) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.long)
    budget = plan(tmp_path, device_memory="1GiB").total(Tier.DEVICE)
    given = config(tmp_path, gas=2, device_memory=budget)
    engine, *_ = initialize(Decoder(SHAPE), given, micro_batch=(tokens, tokens))
    with engine, pytest.raises(infinity.ScheduleError, match="layer_major=True"):
        engine.train_batch([(tokens, tokens)] * 2)
    engine, *_ = initialize(Decoder(SHAPE), given, micro_batch=(tokens, tokens), layer_major=True)
    with engine:
        assert 0 < chosen(engine.plan)[0] < LAYERS
        engine.train_batch([(tokens, tokens)] * 2)


@pytest.mark.parametrize("activations", ["host", "nvme", "auto"])
def test_a_refusal_comes_before_anything_and_names_what_works(activations: str, tmp_path: Path) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.long)
    own: dict[str, Any] = {"recompute": True, "activations": activations}
    if activations == "auto":
        own |= {"device_memory": plan(tmp_path).total(Tier.DEVICE)}

    def attempt(host: int) -> None:
        engine, *_ = initialize(Decoder(SHAPE), config(tmp_path, host_memory=host, **own), micro_batch=(tokens, tokens))
        with engine:
            engine.backward(engine(tokens, tokens))
            engine.step()
            assert engine.report()["tiers"]["host"]["peak_bytes"] <= host

    without = plan(tmp_path).total(Tier.HOST)
    with pytest.raises(infinity.CapacityError, match="host memory: the plan needs") as refused:
        attempt(without)
    assert list(tmp_path.iterdir()) == []
    number = re.search(r"Raise it to at least (\d+) bytes", str(refused.value))
    assert number is not None
    attempt(int(number[1]))
    with pytest.raises(infinity.CapacityError):
        attempt(int(number[1]) - 1)


def test_auto_needs_to_know_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match=r"micro_batch=\(x, y\)"):
        initialize(Decoder(SHAPE), config(tmp_path, activations="auto"))

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() * (2.0 if x.sum() > 0 else 1.0)

    with pytest.raises(infinity.ConfigError, match="looks at values"):
        initialize(Looks(), config(tmp_path, activations="auto"), micro_batch=torch.zeros(2, 8))


def test_a_micro_batch_that_does_not_fit_the_model_is_one_error_without_tracebacks(tmp_path: Path) -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match=r"micro_batch: .*\[2, 31\] X \[32, 8\]"):
            infinity.plan(nn.Linear(32, 8), config(tmp_path) | {"bf16": {}}, micro_batch=torch.ones(2, 31))
    finally:
        log.removeHandler(handler)
    assert not heard
    assert not log.disabled


def test_a_rehearsal_leaves_nothing_behind(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.norm = nn.BatchNorm1d(64)
            self.calls, self.last = 0, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x
            for layer in self.layers:
                x = F.dropout(layer(x), 0.5)
            return self.norm(x).square().mean()

    found = []
    for batch in (None, torch.zeros(64, 64, dtype=torch.bfloat16)):
        torch.manual_seed(0)
        model = Counts()
        with initialize(model, config(tmp_path, device_memory="1GiB"), micro_batch=batch)[0] as engine:
            assert (model.calls, model.last) == (0, None)
            assert model.norm.num_batches_tracked.item() == 0
            loss = engine(torch.randn(64, 64).bfloat16())
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), engine.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_few_rehearsals_find_the_choice() -> None:
    paths = [f"b.{number:03}" for number in range(200)]
    ran = []

    def rehearse(again: frozenset[str], moved: frozenset[str]) -> MicroBatch:
        ran.append(again)
        kept = 200 - len(again)
        inputs = tuple(UnitInput(path, PAGE_BYTES, path, path in moved) for path in paths if path in again)
        outside = 10_000_000 + kept * 100_000 + (len(again) - len(moved)) * PAGE_BYTES
        return MicroBatch(inputs, PAGE_BYTES, outside, 0, 1, tuple(paths))

    waits = Waits(rehearse, paths, paths, None, swap=False, together=1)
    found = waits.within(7_654_321, 1 << 30)
    assert len(found.kept) == 76
    assert len(found.staying) == (7_654_321 // PAGE_BYTES * PAGE_BYTES - 7_600_000) // PAGE_BYTES
    assert len(ran) < 12
    tight = waits.within(7_654_321, 10 * PAGE_BYTES)
    assert tight.host <= 10 * PAGE_BYTES
    assert tight.device <= 7_654_321
    assert len(tight.kept) == max(
        kept for kept in range(77)
        if 200 - kept - (7_654_321 // PAGE_BYTES * PAGE_BYTES - kept * 100_000) // PAGE_BYTES <= 10
    )  # fmt: skip
    assert len(ran) < 60
