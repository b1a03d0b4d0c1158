"""Matrices that are fetched tile by tile train as if they were whole; the user never sees a tile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.tier import Tier
from tests.engine.helpers import ADAM, PLACEMENTS, attached, check_model, configure, fresh, train_attached, train_plain

VOCABULARY = 96
TILE = 8192
"""Bytes of a tile: 32 rows of 64 in fp32."""


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(d_model=64, n_layers=2, n_heads=2, d_ff=64, vocabulary=VOCABULARY))


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, VOCABULARY, (2, 2, 16), generator=generator)) for _ in range(count)]  # type: ignore[misc]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


class FirstIsWide(nn.Module):
    """A tiled layer whose input needs no gradient: nothing in its training is a sum over tiles."""

    def __init__(self, kind: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.up = kind(64, 128)
        self.down = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def vectors(count: int = 4) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 6, 64, generator=generator),) for _ in range(count)]


def tiles_in(engine: infinity.Engine) -> dict[str, int]:
    return {matrix.name: len(matrix.pieces) for matrix in engine._parts.partition.tiled}


def test_training_of_tiles_is_the_training_of_the_whole(tmp_path: Path) -> None:
    check_model(decoder, batches(), loss_of, tmp_path, exact=False, tile_bytes=TILE)
    with attached(decoder(), configure(tmp_path, tile_bytes=TILE)) as engine:
        found = tiles_in(engine)
        slabs = engine.plan.param_slabs
    assert found["embedding.weight"] == found["head.weight"] == 3
    assert found["blocks.0.qkv.weight"] == 6
    assert found["blocks.0.down.weight"] == 2
    assert list(slabs) == [TILE], "norms take a page, which here is a tile"


def test_bit_for_bit_where_nothing_is_a_sum_over_tiles(tmp_path: Path) -> None:
    plain = train_plain(_built(FirstIsWide), vectors(), loss_of)
    whole = _trained(FirstIsWide, configure(tmp_path), vectors())
    for device in PLACEMENTS:
        tiled = _trained(FirstIsWide, configure(tmp_path, device, tile_bytes=TILE), vectors())
        assert torch.equal(tiled.losses[0], plain.losses[0])
        for name, value in plain.grads.items():
            assert torch.equal(tiled.grads[name], value), name
        for name, value in whole.weights.items():
            assert torch.equal(tiled.weights[name], value), f"{name} on {device}"


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
def test_an_engine_computes_the_bits_of_the_module(tmp_path: Path, grid: tuple[int, int], recompute: bool) -> None:
    def build() -> nn.Module:
        model = decoder()
        for block in model.blocks:
            block.down = infinity.TiledLinear(64, 64, False, *grid)
            block.qkv = infinity.TiledLinear(64, 192, False, *grid)
        return model

    check_model(build, batches(), loss_of, tmp_path, exact=True, devices=["nvme"], recompute=[recompute])


def test_sixteen_bit(tmp_path: Path) -> None:
    def config(device: str = "nvme", **block: Any) -> dict[str, Any]:
        return {**configure(tmp_path, device, **block), "bf16": {"enabled": True}}

    truth = _trained(decoder, configure(tmp_path), batches()).weights

    whole = _trained(decoder, config(), batches()).weights
    tiled = _trained(decoder, config(tile_bytes=TILE // 2), batches()).weights
    far = {name: ((tiled[name] - value).norm(), (whole[name] - value).norm()) for name, value in truth.items()}
    ratio = sum(a for a, _ in far.values()) / sum(b for _, b in far.values())
    assert 0.9 < ratio < 1.1, "tiles are as far from fp32 as the whole is"
    assert any(not torch.equal(tiled[name], value) for name, value in whole.items()), "something was cut"
    for device in PLACEMENTS:
        again = _trained(decoder, config(device, tile_bytes=TILE // 2, recompute=False), batches()).weights
        for name, value in tiled.items():
            assert torch.equal(again[name], value), f"{name} on {device}"


def test_names_groups_and_values_are_those_of_the_whole(tmp_path: Path) -> None:
    model, twin = _built(decoder), _built(decoder)
    original = model.head.weight

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        named = list(of.named_parameters())
        return [
            {"params": [p for n, p in named if n != "head.weight" and p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
            {"params": [of.head.weight], "lr": 3e-3, "weight_decay": 0.5},
        ]

    expected = train_plain(twin, batches(), loss_of, torch.optim.AdamW(groups(twin), **ADAM))
    config = configure(tmp_path, tile_bytes=TILE)
    with attached(model, config, model_parameters=groups(model)) as engine:
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
        assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
        assert engine.optimizer is not None
        assert engine.optimizer.param_groups[2]["params"][0] is model.head.weight is original
        train_attached(engine, batches(), loss_of)
        state = engine.state_dict()
        assert list(state) == list(twin.state_dict())
        for name, value in expected.weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        moment = infinity.get_full_optimizer_state(model.head.weight, "exp_avg")
        assert moment.shape == (VOCABULARY, 64)
        assert moment.abs().min(dim=1).values.min() > 0
        value = torch.arange(float(VOCABULARY * 64)).view(VOCABULARY, 64)
        infinity.set_full_param(model.head.weight, value)
        assert torch.equal(infinity.get_full_param(model.head.weight), value)
        with infinity.gathered(model.head):
            assert torch.equal(model.head.weight, value)
            model.head.weight.data[40] = -1.0
        assert (infinity.get_full_param(model.head.weight)[40] == -1.0).all()
        assert torch.equal(infinity.get_full_param(model.head.weight)[41], value[41])
        with pytest.raises(infinity.OffloadedError, match=r"head\.weight"):
            model.head.weight.sum()
        engine.destroy(restore_parameters=True)
    assert torch.equal(model.head.weight[41], value[41])
    assert isinstance(model.head.weight, nn.Parameter)
    model(*batches()[0]).backward()


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _trained(build: Callable[[], nn.Module], config: dict[str, Any], data: list[Any]) -> Any:
    with attached(_built(build), config) as engine:
        return train_attached(engine, fresh(data), loss_of)


def test_the_device_holds_one_tile(tmp_path: Path) -> None:
    """One slab of each size is all that is needed; a unit that overstayed would be told of by ``CapacityError``."""
    with attached(_built(FirstIsWide), configure(tmp_path, tile_bytes=TILE)) as engine:
        train_attached(engine, vectors(), loss_of)
        lines = [line for line in engine.plan.lines if line.tier is Tier.DEVICE]
        assert sum(line.total for line in lines) == engine.report()["tiers"]["device"]["peak_bytes"]
        assert engine.plan.param_slabs == {TILE: 2}, "the layer behind, the tile"


@pytest.mark.parametrize("recompute", [True, False])
def test_updates_in_backward_give_the_same_bits(tmp_path: Path, recompute: bool) -> None:
    def trained(**block: Any) -> dict[str, Tensor]:
        with attached(_built(decoder), configure(tmp_path, tile_bytes=TILE, recompute=recompute, **block)) as engine:
            for batch in batches():
                engine.backward(loss_of(engine.module, batch))
                engine.step()
            return engine.state_dict()

    expected = trained()
    for placement in ("auto", {"grad": "nvme"}):
        found = trained(update_in_backward=True, placement=placement)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("use_cache", [pytest.param(True, marks=pytest.mark.slow), False])
def test_models_of_transformers_are_cut_by_themselves(tmp_path: Path, name: str, use_cache: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":  # Conv1D, which has its weight the other way round; a tied head
        settings = transformers.GPT2Config(
            vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, resid_pdrop=0.1, use_cache=use_cache,
        )  # fmt: skip
        kind, cut = transformers.GPT2LMHeadModel, "transformer.h.1.mlp.c_fc.weight"
    else:  # no biases, a head of its own
        settings = transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, use_cache=use_cache,
        )  # fmt: skip
        kind, cut = transformers.LlamaForCausalLM, "model.layers.1.mlp.gate_proj.weight"
    generator = torch.Generator().manual_seed(1)
    data = []
    for _ in range(2):
        tokens = torch.randint(3, 512, (2, 12), generator=generator)
        data.append({"input_ids": tokens, "labels": tokens})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    block = {"device_memory": 250_000, "slabs": "auto"}
    with pytest.raises(infinity.CapacityError, match="device memory"):
        infinity.plan(kind(settings), configure(tmp_path, tile_bytes=1 << 30, **block))
    check_model(lambda: kind(settings).train(), data, loss, tmp_path, exact=False, devices=["nvme"], **block)
    torch.manual_seed(0)
    model = kind(settings).eval()
    prompt = {"input_ids": data[0]["input_ids"], "attention_mask": torch.ones_like(data[0]["input_ids"])}
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=5)
    with attached(model, configure(tmp_path, **block)) as engine:
        assert tiles_in(engine)[cut] > 1
        assert engine.report()["tiers"]["device"]["planned_bytes"] <= 250_000
        assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=5), tokens)


def test_accumulation_side_by_side_or_one_after_the_other(tmp_path: Path) -> None:
    config = configure(tmp_path, tile_bytes=TILE, gas=3)
    with attached(_built(decoder), config) as engine:
        for batch in batches(3):
            engine.backward(loss_of(engine.module, batch))
            engine.step()
        one_by_one = engine.state_dict()
    with attached(_built(decoder), config) as engine:
        engine.train_batch(batches(3))
        together = engine.state_dict()
    for name, value in one_by_one.items():
        torch.testing.assert_close(together[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_hook_sees_the_whole_gradient(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def halve(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient / gradient.norm()

    traces = []
    for attach in (False, True):
        model = _built(FirstIsWide)
        model.up.weight.register_hook(halve)
        if attach:
            with attached(model, configure(tmp_path, tile_bytes=TILE)) as engine:
                traces.append(train_attached(engine, vectors(2), loss_of))
        else:
            traces.append(train_plain(model, vectors(2), loss_of))
    assert [gradient.shape for gradient in seen] == [(128, 64)] * 4
    assert torch.equal(seen[0], seen[2])
    torch.testing.assert_close(traces[1].weights["up.weight"], traces[0].weights["up.weight"])


def test_other_operations_get_the_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Custom(FirstIsWide):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(x @ self.up.weight.t() + self.up.bias)).square().mean()

    check_model(Custom, vectors(), loss_of, tmp_path, exact=True, devices=["nvme"], tile_bytes=TILE)
    assert "up.weight is cut into tiles but t needs all of it at once" in caplog.text


def test_frozen_tiles_pass_the_gradient_on(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = decoder()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model

    check_model(build, batches(), loss_of, tmp_path, exact=False, devices=["nvme"], tile_bytes=TILE)


def test_gradients_asked_for_by_name_deposit_nothing(tmp_path: Path) -> None:
    with attached(_built(FirstIsWide), configure(tmp_path, tile_bytes=TILE)) as engine:
        x = vectors(1)[0][0].requires_grad_()
        (gradient,) = torch.autograd.grad(engine(x), [x])
        assert gradient.abs().sum() > 0
        assert infinity.get_full_grad(engine.module.up.weight) is None


def test_what_tiles_cannot_do_is_refused(tmp_path: Path) -> None:
    model = _built(FirstIsWide)
    with (
        pytest.raises(infinity.ConfigError, match=r"up\.weight is cut into tiles.*SGD|native Adam"),
        attached(
            model,
            {**configure(tmp_path, tile_bytes=TILE), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        ),
    ):
        pass
    with attached(model, configure(tmp_path, tile_bytes=TILE)) as engine:
        loss = engine(*vectors(1)[0])
        engine.backward(engine(*vectors(1)[0]))
        engine.step()
        with pytest.raises(infinity.ScheduleError, match="between a forward and its backward"):
            loss.backward()
        model.up.weight = nn.Parameter(torch.zeros(128, 64))
        with pytest.raises(infinity.OffloadedError, match=r"up\.weight was replaced"):
            engine(*vectors(1)[0])
