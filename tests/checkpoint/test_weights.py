"""Weights go out as Hugging Face and torch read them, come in as they write them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import infinity
from tests.checkpoint.helpers import Model, configure, engine_of, everything, same, train

transformers = pytest.importorskip("transformers")


def values(seed: int = 5) -> dict[str, torch.Tensor]:
    """A state dict of ``Model`` with other values."""
    model = Model()
    random = torch.Generator().manual_seed(seed)
    state = {name: torch.rand(value.shape, generator=random) for name, value in model.state_dict().items()}
    state["head.weight"] = state["embedding.weight"]
    state["seen"] = torch.tensor(17)
    return state


def as_file(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file({name: value.clone() for name, value in state.items()}, path)
    return path


def as_shards(state: dict[str, torch.Tensor], path: Path) -> Path:
    path.mkdir()
    names = list(state)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in files.items():
        as_file({name: state[name] for name in members}, path / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def as_zero_to_fp32(state: dict[str, torch.Tensor], path: Path) -> Path:
    """What DeepSpeed's script writes: torch files with an index, tied weights under every name."""
    path.mkdir()
    names = list(state)
    weight_map = {}
    for number, members in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in members}, path / file)
        weight_map |= dict.fromkeys(members, file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def as_wrapped(state: dict[str, torch.Tensor], path: Path) -> Path:
    path = path.with_suffix(".pt")
    torch.save({"module": {f"module.{name}": value for name, value in state.items()}, "lr": 0.1}, path)
    return path


def as_old_format(state: dict[str, torch.Tensor], path: Path) -> Path:
    path = path.with_suffix(".bin")
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


FORMATS: dict[str, Callable[[dict[str, torch.Tensor], Path], Path]] = {
    "file": lambda state, path: as_file(state, path.with_suffix(".safetensors")),
    "shards": as_shards,
    "zero_to_fp32": as_zero_to_fp32,
    "wrapped": as_wrapped,
    "old format": as_old_format,
}


@pytest.mark.parametrize("form", FORMATS)
def test_from_files(tmp_path: Path, form: str) -> None:
    state = values()
    path = FORMATS[form](state, tmp_path / "given")
    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 1)
        engine.load_weights(path)
        assert engine.global_steps == 1
        found = everything(engine)
        for name, value in state.items():
            kept = value.bfloat16().float() if name.startswith("frozen") else value
            assert torch.equal(found[name], kept), name
            if f"{name}.param" in found:
                assert torch.equal(found[f"{name}.param"], value.bfloat16()), name
        train(engine, 1, 2)


def test_from_a_mapping_or_a_checkpoint(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        engine.load_weights(values())
        train(engine, 0, 1)
        path = engine.save_checkpoint(tmp_path / "ckpt")
        state = engine.state_dict()
    for source in (state, path, tmp_path / "ckpt"):
        with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
            engine.load_weights(source)
            assert same(state, engine.state_dict()) == []


def test_what_does_not_fit_is_named_and_nothing_changed(tmp_path: Path) -> None:
    state = values()
    del state["gain"], state["head.weight"]  # of which the second is tied, so not missing
    state |= {"blocks.0.up.weight": torch.zeros(3), "surplus": torch.zeros(1)}
    with engine_of(configure(tmp_path / "swap")) as engine:
        before = everything(engine)
        with pytest.raises(infinity.CheckpointError) as caught:
            engine.load_weights(state)
        assert "blocks.0.up.weight (saved [3], in the model [96, 48])" in str(caught.value)
        assert "1 are missing: gain" in str(caught.value)
        assert "1 are not in the model: surplus" in str(caught.value)
        assert same(before, everything(engine)) == []
        del state["blocks.0.up.weight"]
        assert engine.load_weights(state, strict=False) == (["gain", "blocks.0.up.weight"], ["surplus"])
        assert torch.equal(engine.state_dict()["embedding.weight"], state["embedding.weight"])


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    torch.save({"a": Exploit(tmp_path / "executed")}, tmp_path / "a.pt")
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Exploit(tmp_path / "executed")))
    (tmp_path / "c.bin").write_bytes(b"not a pickle")
    with engine_of(configure(tmp_path / "swap")) as engine:
        for name in ("a.pt", "b.bin", "c.bin"):
            with pytest.raises(infinity.CheckpointError, match="without running code"):
                engine.load_weights(tmp_path / name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    as_file(values(), tmp_path / "outside.safetensors")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gain": name}}))
    with engine_of(configure(tmp_path / "swap")) as engine, pytest.raises(infinity.CheckpointError, match="plain name"):
        engine.load_weights(tmp_path / "dir")


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("limit", [1 << 30, 20_000])
def test_written_weights_load_strictly(tmp_path: Path, dtype: str | None, limit: int) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 1)
        for _ in range(2):  # the second replaces the first
            paths = engine.save_pretrained(tmp_path / "out", max_shard_bytes=limit, dtype=dtype)
        state = everything(engine)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.path.basename(path) for path in paths)
    assert (len(paths) > 1) == (limit == 20_000)
    loaded = {name: v for path in paths if path.endswith("rs") for name, v in load_file(path).items()}
    assert "head.weight" not in loaded
    for name, value in loaded.items():
        kept = state[name] if dtype == "fp32" else state.get(f"{name}.param", state[name])
        wanted = {"fp32": torch.float32, "fp16": torch.float16}.get(str(dtype), torch.bfloat16)
        if dtype == "fp16":
            kept = state[name]
        assert torch.equal(value, kept.to(wanted) if value.is_floating_point() else kept), name
    if len(paths) == 1:
        load_model(Model(), paths[0], strict=True)
    with engine_of(configure(tmp_path / "swap")) as engine:
        engine.load_weights(tmp_path / "out")


def test_trained_weights_alone(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        (path,) = engine.save_pretrained(tmp_path / "out", trainable_only=True)
        names = load_file(path).keys()
        assert "frozen.weight" not in names
        assert "seen" not in names
        assert {name for name, p in engine.module.named_parameters() if p.requires_grad} == names


def llama(tied: bool) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=tied, pad_token_id=0,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


@pytest.mark.parametrize(
    "build", [lambda: llama(False), lambda: llama(True), gpt2, t5], ids=["llama", "tied", "gpt2", "t5"]
)
def test_hugging_face_reads_it_as_its_own(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    model = build()
    model.save_pretrained(tmp_path / "theirs")
    kind = type(model)
    config = configure(tmp_path / "swap", precision="fp32")
    with engine_of(config, model) as engine:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_pretrained(tmp_path / "ours", max_shard_bytes=30_000)
        state = engine.state_dict()
        engine.load_weights(tmp_path / "theirs")
        start = engine.state_dict()
    found, told = kind.from_pretrained(tmp_path / "ours", output_loading_info=True, torch_dtype=torch.float32)
    assert not any(told.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    theirs = found.state_dict()
    assert theirs.keys() == state.keys()
    assert [name for name, value in theirs.items() if not torch.equal(value, state[name])] == []
    again = kind.from_pretrained(tmp_path / "theirs").state_dict()
    assert [name for name, value in again.items() if not torch.equal(value, start[name])] == []
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    with (tmp_path / "theirs" / "model.safetensors").open("rb"):
        assert index["weight_map"].keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
