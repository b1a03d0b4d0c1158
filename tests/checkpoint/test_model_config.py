"""An exported checkpoint of a Hugging Face model is a folder that from_pretrained loads with nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from infinity.checkpoint.model_config import config_files
from infinity.cli.main import app
from tests.checkpoint.helpers import configure, engine_of
from tests.checkpoint.test_weights import gpt2, llama, t5

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "build", [lambda: llama(False), lambda: llama(True), gpt2, t5], ids=["llama", "tied", "gpt2", "t5"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_export_needs_nothing_else(tmp_path: Path, build: Callable[[], nn.Module], precision: str) -> None:
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    model = build()
    with engine_of(configure(tmp_path / "swap", precision=precision), model) as engine:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "ckpt")
        engine.save_pretrained(tmp_path / "saved")
        state = engine.state_dict()
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(tmp_path / "ckpt"), str(out), "--json"])
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in out.iterdir())
    assert sorted(Path(path).name for path in json.loads(result.output)["files"]) == files
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    for name in files[:2]:
        assert (out / name).read_text() == (tmp_path / "saved" / name).read_text()
    auto = transformers.AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else transformers.AutoModelForCausalLM
    found, told = auto.from_pretrained(out, output_loading_info=True)
    assert not any(told.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert type(found) is type(model)
    assert found.config.architectures == [type(model).__name__]
    assert found.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    theirs = found.state_dict()
    assert theirs.keys() == state.keys()
    assert [name for name, value in theirs.items() if not torch.equal(value, state[name].to(value.dtype))] == []
    base = transformers.AutoModel.from_pretrained(out)
    assert all(parameter.dtype == found.dtype for parameter in base.parameters())


def test_the_dtype_that_was_asked_for_is_in_the_config(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap"), llama(False)) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    for _ in range(2):  # the second replaces the first
        result = CliRunner().invoke(
            app, ["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "fp16"], catch_exceptions=False
        )
    assert result.exit_code == 0
    assert "needs a config.json" not in result.output
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16


def test_a_config_that_is_no_text_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> str:
        raise TypeError("set is not JSON serializable")

    plain = nn.Linear(4, 4)
    assert config_files(plain) == {}
    plain.config = SimpleNamespace(width=4)
    assert config_files(plain) == {}
    plain.config = SimpleNamespace(to_json_string=refuse)
    with caplog.at_level(logging.WARNING, "infinity"):
        assert config_files(plain) == {}
    assert "config of the model cannot be kept" in caplog.text
