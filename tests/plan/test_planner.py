"""The plan of a model without data: stages, activations, traffic, time, wear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from infinity.engine.planning import plan_for
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan.links import Machine, forecast
from infinity.plan.micro_batch import swapped
from infinity.plan.traffic import StepTraffic, step_traffic
from infinity.plan.wear import Wear
from infinity.plan.zero import stage_bytes
from infinity.tier import Tier

SHAPE = DecoderConfig(d_model=64, n_layers=6, n_heads=4, d_ff=128)


def test_the_stage_table_is_that_of_the_zero_paper() -> None:
    assert stage_bytes(7_000_000_000, 1) == dict.fromkeys(range(4), 112_000_000_000)
    seventy = stage_bytes(70_000_000_000, 64)
    assert seventy[0] == 1_120_000_000_000
    assert seventy[1] == 4 * 70_000_000_000 + 12 * 70_000_000_000 // 64
    assert seventy[2] == 2 * 70_000_000_000 + 14 * 70_000_000_000 // 64
    assert seventy[3] == 17_500_000_000


def config(swap: Path, gas: int = 1, **own: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(swap)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"prefetch_units": 0, "slabs": 2, **own},
    }


@pytest.mark.parametrize("activations", ["device", "host", "nvme"])
@pytest.mark.parametrize("layer_major", [False, True])
@pytest.mark.parametrize("length", [128, 512])
def test_two_steps_learn_what_the_plan_predicted(
    activations: str, layer_major: bool, length: int, tmp_path: Path
) -> None:
    given = config(tmp_path, gas=3 if layer_major else 1, activations=activations, recompute=True)
    tokens = torch.zeros(2, length, dtype=torch.long)
    with torch.device("meta"):
        meta = Decoder(SHAPE)
    predicted = infinity.plan(meta, given, micro_batch=(tokens, tokens), layer_major=layer_major)
    engine, *_ = infinity.initialize(Decoder(SHAPE), given)
    with engine:
        for _ in range(2):
            if layer_major:
                engine.train_batch([(tokens, tokens)] * 3)
            else:
                engine.backward(engine(tokens, tokens))
                engine.step()
        assert sorted(map(str, engine.plan.lines)) == sorted(map(str, predicted.lines))
        engine.settle()
        for tier, use in engine.report()["tiers"].items():
            assert use["peak_bytes"] == predicted.total(Tier(tier)), tier


@pytest.mark.parametrize(("gas", "layer_major"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("grad", ["host", "nvme"])
@pytest.mark.parametrize("activations", ["device", "nvme"])
def test_a_steady_step_moves_what_was_predicted(
    gas: int, layer_major: bool, grad: str, activations: str, tmp_path: Path
) -> None:
    given = config(tmp_path, gas, activations=activations, placement={"grad": grad})
    tokens = torch.zeros(2, 64, dtype=torch.long)  # rotary angles stay below a page, so that blocks share nothing
    model = Decoder(SHAPE)
    found, plan = plan_for(model, infinity.Config.load(given), micro_batch=(tokens, tokens), layer_major=layer_major)
    engine, *_ = infinity.initialize(model, given)
    with engine:
        for _ in range(3):
            engine.settle()
            before = engine.report()["links"]
            if layer_major:
                engine.train_batch([(tokens, tokens)] * gas)
            else:
                for _ in range(gas):
                    engine.backward(engine(tokens, tokens))
                    engine.step()
            engine.settle()
            after = engine.report()["links"]
    swap = sum(line.total for line in plan.lines if line.purpose == "unit inputs, swap")
    times = 1 if layer_major else gas
    traffic = step_traffic(plan, found, gas, layer_major=layer_major, inputs_swapped=times * swap)
    moved = {link: after[link]["bytes"] - before[link]["bytes"] for link in ("nvme_read", "nvme_write")}
    assert moved["nvme_write"] == traffic.written
    # The order of a step is not quite there and back: small units are used once more, out of turn.
    assert moved["nvme_read"] == pytest.approx(traffic.read, rel=0.1)


def test_the_inputs_needed_first_stay() -> None:
    backwards = {number: -number for number in range(6)}
    assert swapped([10] * 6, backwards, 40) == 40
    assert swapped([10] * 2, backwards, 40) == 0
    assert swapped([10, 4, 10, 10], {0: 3, 1: 0, 2: 2, 3: 1}, 40) == 20, "a small one that is needed at once stays"


def test_recompute_and_moving_inputs_lower_what_torch_takes(tmp_path: Path) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.long)
    with torch.device("meta"):
        model = Decoder(SHAPE)
        wide = Decoder(DecoderConfig(d_model=64, n_layers=1, n_heads=4, d_ff=128, vocabulary=4096))

    def outside(**own: Any) -> Any:
        waiting = infinity.plan(model, config(tmp_path, **own), micro_batch=(tokens, tokens)).waiting
        assert waiting is not None
        return waiting.micro_batch

    kept, again, moved = outside(recompute=False), outside(), outside(activations="host")
    assert kept.outside > 3 * again.outside
    assert again.outside - moved.outside == sum(one.nbytes for one in again.inputs)
    assert sum(one.nbytes for one in again.inputs) == 6 * 2 * 128 * 64 * 2 + 2 * 4096
    head = infinity.plan(wide, config(tmp_path), micro_batch=(tokens, tokens)).waiting
    assert head is not None
    assert head.micro_batch.logits == 2 * 128 * 4096 * 2


def test_time_tokens_bottleneck_follow_from_bandwidths() -> None:
    machine = Machine(nvme_read=2e9, nvme_write=1e9, flops=1e12, adam=1e9)
    traffic = StepTraffic(pass_read=4_000_000_000, pass_written=0, update_read=0, update_written=1_000_000_000)
    found = forecast(machine, traffic, tokens=1000, parameters=1_000_000_000, trained=1_000_000_000, recompute=True)
    compute, disk = found.pass_links
    assert compute.seconds == 8.0
    assert disk.seconds == 2.0
    # T = peak / 8 * bytes / bandwidth, with 4 bytes per parameter.
    assert disk.tokens == pytest.approx(1e12 / 8 * 4 / 2e9)
    assert found.seconds == 8.0 + 1.0
    assert found.bottleneck.name == "compute"
    few = forecast(machine, traffic, tokens=100, parameters=1_000_000_000, trained=1_000_000_000, recompute=True)
    assert few.bottleneck.name == "NVMe"
    assert "the bottleneck is NVMe" in few.render()


def test_wear_counts_whole_steps() -> None:
    assert Wear(written=3, endurance=10).steps == 3
    assert Wear(written=0, endurance=10).steps is None


def plan_command(path: Path, document: dict[str, Any], *arguments: str) -> Any:
    path.write_text(json.dumps(document))
    return CliRunner().invoke(app, ["plan", str(path), *arguments])


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    document = config(tmp_path, device_memory="8MB", host_memory="32MiB")
    document["run"] = {"model": {"d_model": 64, "n_layers": 6, "n_heads": 4, "d_ff": 128}, "sequence_length": 128}
    result = plan_command(tmp_path / "a.json", document, "--json", "--ranks", "4", "--ranks-per-host", "2")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["zero_stage_bytes"]["3"] * 4 == found["zero_stage_bytes"]["0"] == 16 * found["parameters"]
    for tier, nbytes in found["per_host_bytes"].items():
        lines = found["tiers"][tier]["lines"]
        assert nbytes == 2 * found["tiers"][tier]["planned_bytes"] == 2 * sum(line["total_bytes"] for line in lines)
    assert found["micro_batch"]["tokens"] == 256
    assert found["wear"]["steps"] == 600_000_000_000_000 // (2 * sum(found["step_bytes"][k] for k in WRITTEN))
    table = plan_command(tmp_path / "a.json", document).stdout
    assert "of 8.00 MB" in table
    assert "of 33.55 MB" in table, "one table has one kind of unit"


WRITTEN = ("pass_written", "update_written")


def test_the_command_plans_a_hugging_face_directory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    result = plan_command(tmp_path / "a.json", config(tmp_path), "--json", "--model", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["parameters"] == 2 * 1000 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert found["micro_batch"]["logits_bytes"] == 2 * 256 * 1000 * 2
    missing = plan_command(tmp_path / "a.json", config(tmp_path), "--model", str(tmp_path / "nowhere"))
    assert missing.exit_code == 1
    assert "has no config.json" in missing.output


def test_the_command_refuses_what_training_would(tmp_path: Path) -> None:
    path, document = tmp_path / "config.json", config(tmp_path)
    assert "give --model DIR" in plan_command(path, document).output
    model = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 176}
    document |= {"run": {"model": model}, "infinity": {"grad_dtype": "bf16"}}
    result = plan_command(path, document)
    assert result.exit_code == 1
    assert 'infinity.grad_dtype: "bf16" is not available in this version' in result.output


def test_where_nothing_is_staged_no_sub_group_is_told(tmp_path: Path) -> None:
    document = config(tmp_path, device_memory="64MiB") | {"zero_optimization": {"stage": 3}}
    document["run"] = {"model": {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 176}}
    assert "sub-group" not in plan_command(tmp_path / "a.json", document).output
    document["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert "optimizer sub-group: " in plan_command(tmp_path / "a.json", document).output
