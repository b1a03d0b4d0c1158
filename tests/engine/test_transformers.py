"""Models of transformers, built from a config, train and generate unmodified."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.engine.helpers import PLACEMENTS, attached, check_model, configure, fresh, train_attached

transformers = pytest.importorskip("transformers")

VOCABULARY = 64


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **options,
        )
    )  # fmt: skip


def gpt2(**options: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, **options,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, output_router_logits=True,
        )
    )  # fmt: skip


MODELS = {"llama": llama, "gpt2": gpt2}


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    return found


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return model(**batch, **options).loss


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_training(tmp_path: Path, name: str, use_cache: bool) -> None:
    def build() -> nn.Module:
        return MODELS[name](use_cache=use_cache).train()

    check_model(build, batches(), loss_of, tmp_path, exact=False, devices=["cpu", "nvme"])


def test_training_of_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    check_model(lambda: t5().train(), batches(), loss_of, tmp_path, exact=False, devices=["nvme"])


def test_training_of_experts_with_a_loss_on_their_router(tmp_path: Path) -> None:
    check_model(
        lambda: mixtral().train(), batches(), loss_of, tmp_path, exact=False, devices=["nvme"], recompute=[False]
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_training_with_their_own_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    def build() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model.train()

    check_model(build, batches(), loss_of, tmp_path, exact=False, devices=["nvme"], recompute=[False])


def test_training_with_everything_returned(tmp_path: Path) -> None:
    def more(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result = model(**batch, output_hidden_states=True, output_attentions=True)
        assert len(result.hidden_states) == 4
        return result.loss + result.hidden_states[1].pow(2).mean() + result.attentions[2].pow(2).mean()

    def build(use_cache: bool) -> nn.Module:
        return llama(attn_implementation="eager", use_cache=use_cache).train()

    check_model(lambda: build(False), batches(), more, tmp_path, exact=False, devices=["nvme"], recompute=[False])
    with (
        attached(build(False), configure(tmp_path, recompute=True)) as engine,
        pytest.raises(infinity.ScheduleError, match=r'"model\.layers\.2" lets a tensor out.*recompute'),
    ):
        train_attached(engine, batches(), more)


def test_a_cache_that_was_left_on_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "infinity"),
        attached(llama(use_cache=True), configure(tmp_path, recompute=True)) as engine,
    ):
        train_attached(engine, batches(1), loss_of)
    assert "use_cache = False" in caplog.text


@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("build", [llama, gpt2, t5])
def test_generation_gives_the_same_tokens(tmp_path: Path, device: str, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    prompt = {key: batches(1)[0][key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "num_beams": 1}
    greedy = model.generate(**prompt, do_sample=False, **options)
    torch.manual_seed(3)
    sampled = model.generate(**prompt, do_sample=True, **options)
    beams = model.generate(**prompt, do_sample=False, max_new_tokens=6, num_beams=3)
    with attached(model, configure(tmp_path, device)) as engine:
        assert torch.equal(model.generate(**prompt, do_sample=False, **options), greedy)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**prompt, do_sample=True, **options), sampled)
        assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=6, num_beams=3), beams)
        train_attached(engine, fresh(batches(1)), loss_of)
        model.eval()
        model.generate(**prompt, do_sample=False, **options)
