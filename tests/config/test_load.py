"""Reading configs from files and dicts, writing them back."""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.tier import StateKind, Tier

FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_max_lr": [1e-3, 2e-3]}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e8,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme0", "ratio": 0.5},
        "offload_optimizer": {"device": "nvme", "nvme_path": ["/nvme0", "/nvme1"], "ratio": 0.25},
    },
    "aio": {"block_size": "2MiB", "queue_depth": "auto", "intra_op_parallelism": 4},
    "infinity": {
        "device_memory": "8GiB",
        "placement": {"param": "nvme", "master": "nvme"},
        "recompute": {"blocks.*": True},
        "units": ["Block"],
    },
    "run": {"model": {"layers": 4}, "steps": 10},
}


def write(directory: Path, name: str, content: str) -> Path:
    path = directory / name
    path.write_text(content, encoding="utf-8")
    return path


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def test_attributes_are_named_as_the_keys(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path, "ds.json", json.dumps(FULL)))
    assert config.train_batch_size == 64
    assert config.zero_optimization.sub_group_size == 100_000_000
    assert config.zero_optimization.offload_param is not None
    assert config.zero_optimization.offload_param.nvme_path == ("/nvme0",)
    assert config.zero_optimization.offload_param.ratio == 0.5
    assert config.aio.block_size == 2 << 20
    assert config.aio.threads == 4
    assert config.infinity.device_memory == 8 << 30
    assert config.infinity.host_memory == "auto"
    assert config.infinity.units == ("Block",)
    assert config.run.model == {"layers": 4}
    assert Config.load(str(tmp_path / "ds.json")) == config == Config.load(FULL)
    assert Config.load(config) is config


def test_the_defaults() -> None:
    config = Config.load({})
    assert config.gradient_clipping == 1.0
    assert config.optimizer is None
    assert config.zero_optimization.stage == 0
    assert (config.fp16.enabled, config.fp16.dynamic, config.fp16.initial_scale_power) == (False, True, 16)
    assert (config.fp16.loss_scale_window, config.fp16.hysteresis, config.fp16.min_loss_scale) == (1000, 2, 1.0)
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.threads) == (1 << 20, 32, "auto")
    assert (config.infinity.placement, config.infinity.activations) == ("auto", "device")
    assert config.infinity.non_finite_limit == 5
    assert config.param_dtype == "fp32"
    assert config.ignored_keys == ()


def test_it_cannot_be_changed() -> None:
    config = Config.load(FULL)
    with pytest.raises(ValidationError, match="frozen"):
        config.train_batch_size = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.infinity.device_memory = 1  # type: ignore[misc]


def test_what_was_given_is_left_alone() -> None:
    before = json.dumps(FULL)
    Config.load(FULL)
    assert json.dumps(FULL) == before


def test_written_json_reads_back_as_the_same_config() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config.load(FULL)
        again = Config.load(json.loads(config.to_json()))
    assert again.to_json() == config.to_json()
    assert again.zero_optimization == config.zero_optimization
    assert again.infinity == config.infinity
    assert all(again.tier_of(kind) == config.tier_of(kind) for kind in StateKind)
    resolved = json.loads(config.to_json())
    assert resolved["optimizer"]["params"]["eps"] == 1e-8
    assert resolved["scheduler"]["params"]["warmup_num_steps"] == 1000
    assert "stage3_max_reuse_distance" not in resolved["zero_optimization"]


def test_it_survives_a_pickle_for_a_spawned_rank() -> None:
    config = Config.load(FULL)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.given() == config.given()


def test_enums_and_paths_are_fine_in_a_dict(tmp_path: Path) -> None:
    config = Config.load(
        {
            "zero_optimization": {"stage": 3},
            "infinity": {"placement": {StateKind.PARAM: Tier.NVME}, "nvme_path": [tmp_path]},
        }
    )
    assert config.tier_of(StateKind.PARAM) is Tier.NVME
    assert config.swap_directories(StateKind.PARAM) == (str(tmp_path),)


def test_yaml_by_its_suffix(tmp_path: Path) -> None:
    content = "train_batch_size: 8\nzero_optimization: {stage: 3, sub_group_size: 1e8}\noptimizer:\n  type: AdamW\n"
    config = Config.load(write(tmp_path, "ds.yaml", content))
    assert config == Config.load(
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 3, "sub_group_size": 10**8},
            "optimizer": {"type": "AdamW"},
        }
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"bf16": {}, "bf16": {}}', "a.json: `bf16` is given twice; keep one of the two."),
        (
            "a.json",
            '{"fp16": {"enabled": true, "enabled": false}}',
            "a.json: `fp16.enabled` is given twice; keep one of the two.",
        ),
        ("a.yml", "run: {steps: 1}\nrun: {steps: 2}", "a.yml: `run` is given twice; keep one of the two."),
        ("a.yml", "run:\n  steps: 1\n  steps: 2", "a.yml: `run.steps` is given twice; keep one of the two."),
        ("a.json", '{"bf16": \n }', "a.json, line 2, column 2: this is not JSON: Expecting value."),
        ("a.json", "", "a.json, line 1, column 1: this is not JSON: Expecting value."),
        ("a.json", '{"gradient_clipping": NaN}', "a.json cannot be used: NaN is not a JSON value."),
        ("a.json", "[1]", 'a.json: A config must be an object, such as {"train_batch_size": 8}.'),
        ("a.json", '{"bf61": {}}', "a.json: `bf61` is not a known key; did you mean `bf16`?"),
        ("a.yaml", "a: [", "a.yaml, line 1, column 5: this is not YAML: expected the node content, but found"),
        ("a.yaml", "1: 2", "a.yaml: A key in `the config` is 1, but keys must be text."),
        ("a.yaml", "run: &a [*a]", "a.yaml, line 1, column 6: this is not YAML: found unconstructable recursive node."),
        ("a.yaml", "run: !!python/name:os.system x", "this is not YAML: could not determine a constructor"),
        ("a.json", "[" * 10**5, "a.json cannot be used: "),
    ],
)
def test_a_faulty_file_is_named_with_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    assert message in refusal(write(tmp_path, name, content))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.json") == f"{tmp_path}/no.json cannot be read: No such file or directory."
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory."
    (tmp_path / "latin.json").write_bytes(b"\xff")
    assert "latin.json cannot be read: 'utf-8' codec" in refusal(tmp_path / "latin.json")
    assert "cannot be read" in refusal("a\0b.json")


def test_keys_without_meaning_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "zero_allow_untested_optimizer": True,
        "wandb": {"enabled": True},
        "fp16": {"enabled": False},
        "aio": {"single_submit": True},
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 1e9, "reduce_scatter": True},
    }
    with caplog.at_level(logging.INFO, logger="infinity"):
        config = Config.load(given)
        Config.load(config).with_overrides(["run.steps=3"])
    assert config.ignored_keys == (
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.reduce_scatter",
        "aio.single_submit",
        "zero_allow_untested_optimizer",
        "wandb",
    )
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"These keys have no effect here: {', '.join(config.ignored_keys)}"


def test_a_switched_off_feature_is_accepted() -> None:
    config = Config.load({"amp": {"enabled": False, "opt_level": "O1"}, "data_efficiency": {"enabled": False}})
    assert config.ignored_keys == ("amp", "data_efficiency")


ON_DEVICE, OPEN = Tier.DEVICE, None


@pytest.mark.parametrize(
    ("given", "param", "grad", "master", "activation"),
    [
        ({}, ON_DEVICE, ON_DEVICE, ON_DEVICE, ON_DEVICE),
        ({"zero_optimization": {"stage": 2}}, ON_DEVICE, OPEN, OPEN, ON_DEVICE),
        ({"zero_optimization": {"stage": 3}}, OPEN, OPEN, OPEN, ON_DEVICE),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {}, "offload_optimizer": {"device": "cpu"}}},
            ON_DEVICE,
            Tier.HOST,
            Tier.HOST,
            ON_DEVICE,
        ),
        (
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "auto", "nvme_path": "/n"}},
                "infinity": {"placement": {"grad": "host", "activation": "nvme"}},
            },
            OPEN,
            Tier.HOST,
            OPEN,
            Tier.NVME,
        ),
        (
            {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": True}},
            OPEN,
            OPEN,
            OPEN,
            Tier.HOST,
        ),
    ],
)
def test_the_tier_that_was_asked_for(
    given: dict[str, Any], param: Tier | None, grad: Tier | None, master: Tier | None, activation: Tier | None
) -> None:
    config = Config.load(given)
    kinds = (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER, StateKind.ACTIVATION)
    assert tuple(config.tier_of(kind) for kind in kinds) == (param, grad, master, activation)


def test_swap_directories_come_from_the_nearest_key() -> None:
    config = Config.load(FULL)
    assert config.swap_directories(StateKind.PARAM) == ("/nvme0",)
    assert config.swap_directories(StateKind.EXP_AVG) == ("/nvme0", "/nvme1")
    assert config.swap_directories(StateKind.ACTIVATION) == ("/nvme0",)
    assert Config.load({}).swap_directories(StateKind.PARAM) == ()
    common = Config.load({**FULL, "infinity": {"nvme_path": "/all"}})
    assert common.swap_directories(StateKind.PARAM) == ("/nvme0",)
    assert common.swap_directories(StateKind.ACTIVATION) == ("/all",)
