"""train_batch gives the bits of the ordinary order while parameters cross the slow link once per pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.build import Injected
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig

STEPS = 3


def train(
    directory: Path, *, layer_major: bool, micro_batches: int, param: str, bf16: bool, own: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Losses, weights, NVMe bytes of a tiny decoder with one slab per unit size."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=64, n_layers=4, n_heads=4, d_ff=128))
    directory.mkdir(exist_ok=True)
    offload = {"device": param, "nvme_path": str(directory)}
    config = {
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"slabs": 1, "prefetch_units": 0, **own},
    }
    engine, *_ = initialize(model, config, injected=Injected(poison=True))
    random = torch.Generator().manual_seed(1)
    losses: list[float] = []
    with engine:
        for _ in range(STEPS):
            batches = [torch.randint(0, 256, (2, 16), generator=random) for _ in range(micro_batches)]
            if layer_major:
                losses += engine.train_batch([(batch, batch) for batch in batches]).tolist()
            else:
                for batch in batches:
                    loss = engine(batch, batch)
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
            engine.settle()
        assert engine.global_steps == STEPS
        links = engine.report()["links"]
        return (
            losses,
            engine.state_dict(),
            {"read": links["nvme_read"]["bytes"], "written": links["nvme_write"]["bytes"]},
        )


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("none", {}),
        ("none", {"recompute": False}),
        ("nvme", {}),
        ("nvme", {"recompute": False}),
        ("nvme", {"placement": {"grad": "nvme"}}),
    ],
)
def test_same_bits_as_the_ordinary_order(tmp_path: Path, param: str, own: dict[str, Any], bf16: bool) -> None:
    ordinary = train(tmp_path / "a", layer_major=False, micro_batches=4, param=param, bf16=bf16, own=own)
    layered = train(tmp_path / "b", layer_major=True, micro_batches=4, param=param, bf16=bf16, own=own)
    assert layered[0] == ordinary[0]
    for name, value in ordinary[1].items():
        assert torch.equal(layered[1][name], value), name


def test_parameters_cross_the_link_as_often_for_eight_micro_batches_as_for_one(tmp_path: Path) -> None:
    own = {"placement": {"grad": "host"}}
    one = train(tmp_path / "a", layer_major=True, micro_batches=1, param="nvme", bf16=True, own=own)[2]
    eight = train(tmp_path / "b", layer_major=True, micro_batches=8, param="nvme", bf16=True, own=own)[2]
    ordinary = train(tmp_path / "c", layer_major=False, micro_batches=8, param="nvme", bf16=True, own=own)[2]
    assert eight == one
    assert ordinary["read"] > 1.5 * eight["read"]


def test_an_error_in_one_micro_batch_reaches_the_caller(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=64, n_layers=2, n_heads=4, d_ff=64))
    config = {"gradient_accumulation_steps": 3, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = infinity.initialize(model, config)
    good = torch.zeros(1, 8, dtype=torch.long)
    with engine:
        with pytest.raises(IndexError):
            engine.train_batch([(good, good), (good + 999, good), (good, good)])
        losses = engine.train_batch([(good, good)] * 3)
        assert losses.shape == (3,)
        assert engine.was_step_applied()


def test_the_number_of_micro_batches_is_checked() -> None:
    model = Decoder(DecoderConfig(d_model=64, n_layers=2, n_heads=4, d_ff=64))
    engine, *_ = infinity.initialize(model, {"gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}})
    with engine, pytest.raises(infinity.ScheduleError, match="given 1 micro-batches; expected a list of 2"):
        engine.train_batch([(torch.zeros(1, 8, dtype=torch.long),) * 2])
