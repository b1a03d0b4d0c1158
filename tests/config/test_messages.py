"""What a person reads when a config is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.config import Config
from infinity.errors import ConfigError


def problems_of(given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load(given)
    return list(caught.value.problems)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def ours(**keys: Any) -> dict[str, Any]:
    return {"infinity": keys}


ONE_FAULT: list[tuple[dict[Any, Any], str]] = [
    # what Hugging Face's Trainer would have filled in
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        '`optimizer.params.lr` is "auto", which Hugging Face\'s Trainer replaces by its `learning_rate` (5e-5 by '
        "default); nothing replaces it here, so write the value, or leave the key out for the default here.",
    ),
    (
        {"bf16": {"enabled": "auto"}},
        '`bf16.enabled` is "auto", which Hugging Face\'s Trainer replaces by its `bf16` (false by default); nothing '
        "replaces it here, so write the value, or leave the key out for the default here.",
    ),
    (
        ours(tile_bytes=10),
        '`infinity.tile_bytes` is 10, but it must be a number of bytes, or text such as "8GiB" (2^30) or "8GB" (10^9), '
        'of at least 4096 (a page, which is what less would take as well), or "auto".',
    ),
    # unknown keys
    ({"zero_optimzation": {}}, "`zero_optimzation` is not a known key; did you mean `zero_optimization`?"),
    ({"FP16": {}}, "`FP16` is not a known key; did you mean `fp16`?"),
    (ours(device_memroy=1), "`infinity.device_memroy` is not a known key; did you mean `infinity.device_memory`?"),
    (
        zero(stage=3, offload_param={"devise": "cpu"}),
        "`zero_optimization.offload_param.devise` is not a known key; did you mean "
        "`zero_optimization.offload_param.device`?",
    ),
    ({"stage": 3}, "`stage` is not a known key; it belongs at `zero_optimization.stage`."),
    ({"run": {"device_memory": 1}}, "`run.device_memory` is not a known key; it belongs at `infinity.device_memory`."),
    (
        {"bf16": {"qqqqq": 1}},
        "`bf16.qqqqq` is not a known key; `bf16` knows enabled, immediate_grad_update, check_grad_overflow, "
        "bf16_master_weights_and_grads, bf16_optimizer_states.",
    ),
    ({"bfloat16": {}}, '`bfloat16` is not a key here; write `bf16`, as in "bf16": {"enabled": true}.'),
    (
        zero(cpu_offload=True),
        '`zero_optimization.cpu_offload` is not a key here; write "offload_optimizer": {"device": "cpu"}.',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3, "lr": 1e-3}}},
        "`optimizer.params.learning_rate` is not a known key; `optimizer.params` knows lr, betas, eps, weight_decay, "
        "bias_correction, adam_w_mode, amsgrad, maximize, torch_adam, fp32_optimizer_states, set_grad_none, foreach "
        "... (15 keys).",
    ),
    # values
    ({"train_batch_size": -8}, '`train_batch_size` is -8, but it must be a whole number of at least 1, or "auto".'),
    ({"train_batch_size": 2.5}, '`train_batch_size` is 2.5, but it must be a whole number of at least 1, or "auto".'),
    ({"train_batch_size": True}, '`train_batch_size` is true, but it must be a whole number of at least 1, or "auto".'),
    ({"gradient_clipping": -1}, "`gradient_clipping` is -1, but it must be a number of at least 0."),
    ({"fp16": {"enabled": "yes"}}, '`fp16.enabled` is "yes", but it must be true or false.'),
    ({"fp16": {"min_loss_scale": 0}}, "`fp16.min_loss_scale` is 0, but it must be a number above 0."),
    ({"fp16": True}, "`fp16` is true, but it must be an object with keys such as enabled, auto_cast, loss_scale, "
     "initial_scale_power."),
    (zero(stage=4), "`zero_optimization.stage` is 4, but it must be a whole number from 0 to 3."),
    (
        zero(stage=3, offload_param={"device": "disk"}),
        '`zero_optimization.offload_param.device` is "disk", but it must be "none", "cpu", "nvme" or "auto".',
    ),
    (
        zero(stage=3, offload_param={"ratio": 1.5}),
        "`zero_optimization.offload_param.ratio` is 1.5, but it must be a number of at least 0, at most 1.",
    ),
    (
        zero(stage=3, offload_param={"device": "nvme", "nvme_path": []}),
        "`zero_optimization.offload_param.nvme_path` is [], but it must be one directory, or a list of directories, "
        "one per disk.",
    ),
    (
        ours(nvme_path=["/a", "/a"]),
        '`infinity.nvme_path` is ["/a", "/a"], but it must be a list of directories that are all different.',
    ),
    (
        ours(device_memory="8G"),
        '`infinity.device_memory` is "8G", but it must be a number of bytes, or text such as "8GiB" (2^30) or "8GB" '
        '(10^9), or "auto".',
    ),
    (
        ours(io_engine="iouring"),
        '`infinity.io_engine` is "iouring", but it must be "auto", "io_uring", "aio", "libaio", "threads" or "python"; '
        'did you mean "io_uring"?',
    ),
    (
        ours(placement={"parm": "nvme", "grad": "hots"}),
        '`infinity.placement` is {"parm": "nvme", "grad": "hots"}, but it must be "auto", or an object from kinds '
        "(param, grad, master, exp_avg, exp_avg_sq, activation) to tiers (device, host, nvme); 'parm' is not a kind "
        "(did you mean 'param'?), 'hots' is not a tier (did you mean 'host'?).",
    ),
    (ours(state_dtype="bf16"), '`infinity.state_dtype` is "bf16", but it must be "fp32".'),
    (
        ours(recompute={"blocks.*": "yes"}),
        '`infinity.recompute` is {"blocks.*": "yes"}, but it must be "auto", true, false, or an object from unit '
        "patterns to true or false.",
    ),
    (ours(units="Block"), '`infinity.units` is "Block", but it must be "auto", or a list of class names or module name '
     "patterns."),
    ({"run": {"steps": 0}}, "`run.steps` is 0, but it must be a whole number of at least 1."),
    ({"run": {"data": "  "}}, '`run.data` is "  ", but it must be text that is not empty.'),
    ({"aio": {"block_size": 5000}}, "`aio.block_size` is 5000, but it must be a multiple of 4096 bytes, such as "
     "1048576."),
    # optimizers, schedulers
    (
        {"optimizer": {"type": "AdamX"}},
        '`optimizer.type` is "AdamX", but it must be one of Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, ASGD, '
        'Muon, NAdam, RAdam, RMSprop, Rprop, SGD; did you mean "Adamax"?',
    ),
    (
        {"optimizer": {"type": "OneBitAdam"}},
        '`optimizer.type` is "OneBitAdam", but it must be an optimizer that a config can describe: OneBitAdam is '
        "DeepSpeed's own; Adam gives the uncompressed result.",
    ),
    ({"optimizer": {}}, "`optimizer.type` is missing; add it to `optimizer`, since nothing can be assumed for it."),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}},
        "`optimizer.params.betas` is [0.9, 1.0], but it must be a list of two numbers, each of at least 0, below 1.",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
        "`optimizer.params.amsgrad` is true, but it must be false (or left out).",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR"}},
        "`scheduler.params.total_num_steps` is missing; add it to `scheduler.params`, since nothing can be assumed "
        "for it.",
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}},
        "`scheduler.params.warmup_num_steps` is 20, but `scheduler.params.total_num_steps` is 10; the warm-up must end "
        "before the schedule does.",
    ),
    # combinations
    (
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
        "`train_batch_size` is 10, but it must be a multiple of 4 (`train_micro_batch_size_per_gpu` 4), whatever the "
        "number of ranks; change one of them, or drop one to have it derived.",
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "`fp16.enabled` and `bf16.enabled` are both true, but parameters have one format; set one to false.",
    ),
    (
        zero(stage=2, offload_param={"device": "cpu"}),
        '`zero_optimization.offload_param.device` is "cpu", but `zero_optimization.stage` is 2; set the stage to 3, or '
        '`zero_optimization.offload_param.device` to "none".',
    ),
    (
        zero(offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        '`zero_optimization.offload_optimizer.device` is "nvme", but `zero_optimization.stage` is 0; set the stage to '
        '1, 2 or 3, or `zero_optimization.offload_optimizer.device` to "none".',
    ),
    (
        {**zero(stage=1), **ours(placement={"param": "host"})},
        '`infinity.placement.param` is "host", but `zero_optimization.stage` is 1; set the stage to 3, or '
        '`infinity.placement.param` to "device".',
    ),
    (
        zero(stage=3, offload_optimizer={"device": "nvme"}),
        '`zero_optimization.offload_optimizer.device` is "nvme", but there is no directory for it; set '
        "`zero_optimization.offload_optimizer.nvme_path` (or `infinity.nvme_path`, for all states) to a directory on a "
        "local NVMe disk.",
    ),
    (
        ours(activations="nvme"),
        '`infinity.activations` is "nvme", but there is no directory for it; set `infinity.nvme_path` to a directory '
        "on a local NVMe disk.",
    ),
    (
        {**zero(stage=3, offload_param={"device": "cpu"}), **ours(placement={"param": "device"})},
        '`infinity.placement.param` is "device", but `zero_optimization.offload_param.device` is "cpu"; drop one of '
        "the two.",
    ),
    (
        ours(placement={"activation": "device"}, activations="host"),
        '`infinity.placement.activation` is "device", but `infinity.activations` is "host"; drop one of the two.',
    ),
    (
        {"aio": {"thread_count": 2, "intra_op_parallelism": 4}},
        "`aio.thread_count` is 2, but `aio.intra_op_parallelism` is 4; they are two names of one number, so drop one.",
    ),
    (
        {"amp": {"enabled": True}},
        '`amp` is {"enabled": true}, but it must be left out, or hold "enabled": false, because it changes what is '
        "trained in a way not offered here.",
    ),
    # values that JSON does not have
    ({"run": {"seed": {1, 2}}}, "`run.seed` is a Python set, but it must be a JSON value: text, a number, true, false, "
     "null, a list or an object."),
    ({"run": {"model": {"dropout": float("nan")}}}, "`run.model.dropout` is nan, but it must be a finite number."),
    ({1: 2}, "A key in `the config` is 1, but keys must be text."),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), ONE_FAULT, ids=[message[:60] for _, message in ONE_FAULT])
def test_one_fault_is_told_once(given: dict[Any, Any], message: str) -> None:
    assert problems_of(given) == [message]


def test_every_problem_comes_at_once() -> None:
    found = problems_of(
        {
            "train_batch_size": 10,
            "gradient_accumulation_steps": 3,
            "stage": 3,
            "optimizer": {"type": "Adam", "params": {"lr": "fast"}},
            "fp16": {"enabled": True, "loss_scale": -1},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}, "sub_group_size": "big"},
            "infinity": {"device": "gpu", "units": 3},
            "run": 7,
        }
    )
    keys = sorted(problem.split("`")[1] for problem in found)
    assert keys == [
        "fp16.enabled",
        "fp16.loss_scale",
        "infinity.device",
        "infinity.units",
        "optimizer.params.lr",
        "run",
        "stage",
        "train_batch_size",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.device",
        "zero_optimization.sub_group_size",
    ]


def test_a_faulty_key_is_not_blamed_again_for_a_combination() -> None:
    found = problems_of(zero(stage="three", offload_param={"device": "cpu"}))
    assert found == ['`zero_optimization.stage` is "three", but it must be a whole number from 0 to 3.']


def test_a_long_value_is_cut() -> None:
    (problem,) = problems_of({"run": {"seed": "x" * 5000}})
    assert len(problem) < 200
    (problem,) = problems_of({"run": {"seed": -(10**5000)}})
    assert problem == "`run.seed` is a number too long to show, but it must be a whole number of at least 0."


@pytest.mark.parametrize("given", [[], None, 3, [1, 2]])
def test_a_config_is_an_object(given: Any) -> None:
    assert problems_of(given) == ['A config must be an object, such as {"train_batch_size": 8}.']


def test_the_constructor_refuses_as_load_does() -> None:
    with pytest.raises(ConfigError, match="did you mean `train_batch_size`"):
        Config(train_batch_siz=8)
