"""A run that was saved and taken up again goes on as if it had not been interrupted, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import infinity
from infinity.checkpoint.manifest import Manifest, parse
from tests.checkpoint.helpers import PRECISIONS, Model, configure, engine_of, everything, same, train

DEVICES = ("none", "cpu", "nvme", "mixed")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_goes_on_to_the_bit(tmp_path: Path, device: str, precision: str) -> None:
    config = configure(tmp_path / "swap", device, precision)
    with engine_of(config) as engine:
        train(engine, 0, 3)
        path = engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 1, "seen": torch.arange(3)})
        assert path == str(tmp_path / "ckpt" / "global_step3")
        saved = everything(engine)
        losses = train(engine, 3, 6)
        norm, scale, rates = engine.get_global_grad_norm(), engine.loss_scale, engine.get_lr()
        final = everything(engine)
    torch.manual_seed(123)
    with engine_of(config) as engine:
        train(engine, 50, 52)  # whatever the new engine did before must not matter
        path, client = engine.load_checkpoint(tmp_path / "ckpt")
        assert client["epoch"] == 1
        assert torch.equal(client["seen"], torch.arange(3))
        assert engine.global_steps == engine.micro_steps == 3
        assert same(saved, everything(engine)) == []
        assert train(engine, 3, 6) == losses
        assert (engine.get_global_grad_norm(), engine.loss_scale, engine.get_lr()) == (norm, scale, rates)
        assert same(final, everything(engine)) == []


@pytest.mark.parametrize(("source", "target"), [("nvme", "none"), ("none", "nvme"), ("cpu", "mixed")])
@pytest.mark.parametrize("units", [["Model"], ["Block", "Embedding"], ["Linear", "LayerNorm", "Embedding"]])
def test_any_units_and_placement(tmp_path: Path, source: str, target: str, units: list[str]) -> None:
    # Without clipping: the norm's sum is rounded unit by unit.
    with engine_of(configure(tmp_path / "swap", source, gradient_clipping=0.0)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt", "a")
        saved = everything(engine)
        losses = train(engine, 2, 4)
        final = everything(engine)
    with engine_of(configure(tmp_path / "other", target, units=units, gradient_clipping=0.0)) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert same(saved, everything(engine)) == []
        if units != ["Model"]:  # which sums the two gradients of the tied weight in 16 bit
            assert train(engine, 2, 4) == losses
            assert same(final, everything(engine)) == []


def test_load_save_load_is_the_identity(tmp_path: Path) -> None:
    config = configure(tmp_path / "swap")
    config["infinity"] |= {"host_memory": "64MB"}  # else the plan, which is saved, depends on what is free
    with engine_of(config) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "first")
    with engine_of(config) as engine:
        engine.load_checkpoint(tmp_path / "first")
        engine.load_checkpoint(tmp_path / "first")
        engine.save_checkpoint(tmp_path / "second")
    for path in sorted((tmp_path / "first" / "global_step2").iterdir()):
        assert path.read_bytes() == (tmp_path / "second" / "global_step2" / path.name).read_bytes(), path.name


def test_taken_back_in_a_running_engine(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        losses = train(engine, 2, 4)
        engine.backward(engine(torch.zeros(1, 4, dtype=torch.int64)))  # a gradient that must be forgotten
        engine.load_checkpoint(tmp_path / "ckpt")
        assert train(engine, 2, 4) == losses


@pytest.mark.parametrize("before", PRECISIONS)
@pytest.mark.parametrize("after", PRECISIONS)
def test_another_precision(tmp_path: Path, before: str, after: str) -> None:
    with engine_of(configure(tmp_path / "swap", "cpu", before)) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "ckpt")
        saved = engine.state_dict()
    with engine_of(configure(tmp_path / "swap", "nvme", after)) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        state = engine.state_dict()
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[after]
        for name, value in saved.items():
            kept = value.to(dtype).to(value.dtype) if name.startswith("frozen") else value
            assert torch.equal(state[name], kept), name
        train(engine, 1, 2)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("SGD", {"lr": 0.01, "momentum": 0.9}),
        ("Adagrad", {"lr": 0.05}),
        ("RMSprop", {"lr": 0.01, "centered": True}),
        ("NAdam", {"lr": 0.01}),
    ],
)
def test_a_torch_optimizer(tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    others = {
        "optimizer": {"type": kind, "params": arguments},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2}},
    }
    config = configure(tmp_path / "swap", "nvme", **others)
    with engine_of(config) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "ckpt")
        losses = train(engine, 3, 6)
        final = everything(engine)
    with engine_of(config) as engine:
        train(engine, 9, 10)
        engine.load_checkpoint(tmp_path / "ckpt")
        assert train(engine, 3, 6) == losses
        assert same(final, everything(engine)) == []
    with (
        engine_of(configure(tmp_path / "swap")) as engine,
        pytest.raises(infinity.CheckpointError, match=f"has the states of {kind}, this engine trains with Adam"),
    ):
        engine.load_checkpoint(tmp_path / "ckpt")


def test_schedulers_with_states_of_their_own(tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("MultiStepLR", {"milestones": [2, 4]}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 20}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ]
    for kind, params in kinds:
        config = configure(tmp_path / "swap", "none", scheduler={"type": kind, "params": params})
        with engine_of(config) as engine:
            train(engine, 0, 3)
            engine.save_checkpoint(tmp_path / kind)
            losses, rates = train(engine, 3, 6), engine.get_lr()
        with engine_of(config) as engine:
            engine.load_checkpoint(tmp_path / kind)
            assert train(engine, 3, 6) == losses, kind
            assert engine.get_lr() == rates, kind


def test_a_loss_scale_that_has_moved_goes_on(tmp_path: Path) -> None:
    config = configure(tmp_path / "swap", "cpu", "fp16")
    config["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    with engine_of(config) as engine:
        train(engine, 0, 8)
        skipped = engine.skipped_steps
        assert skipped
        engine.save_checkpoint(tmp_path / "ckpt")
        losses, scale = train(engine, 8, 14), engine.loss_scale
    with engine_of(config) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert engine.skipped_steps == skipped
        assert train(engine, 8, 14) == losses
        assert engine.loss_scale == scale


def test_weights_alone(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        weights = engine.state_dict()
    with engine_of(configure(tmp_path / "swap", "cpu")) as engine:
        engine.load_checkpoint(tmp_path / "ckpt", load_module_only=True)
        assert engine.global_steps == 0
        assert same(weights, engine.state_dict()) == []
        moments = [value for name, value in everything(engine).items() if "exp_avg" in name]
        assert moments
        assert not any(value.any() for value in moments)


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(48, 47)
        self.gain = nn.Parameter(torch.ones(2))
        self.bonus = nn.Parameter(torch.ones(3))
        self.blocks[0].up = nn.Linear(48, 96, bias=False)
        self.register_buffer("extra", torch.zeros(2))


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    with engine_of(configure(tmp_path / "swap"), Wider()) as engine:
        before = everything(engine)
        with pytest.raises(infinity.CheckpointError) as caught:
            engine.load_checkpoint(tmp_path / "ckpt")
        text = str(caught.value)
        for part in (
            "3 have another shape: ", "frozen.weight (saved [48, 48], in the model [47, 48])", "gain (saved []",
            "2 are missing: bonus, extra", "1 are not in the model: blocks.0.up.bias",
        ):  # fmt: skip
            assert part in text, text
        assert same(before, everything(engine)) == []  # nothing was touched


def test_what_there_is_can_be_loaded(tmp_path: Path) -> None:
    class Longer(Model):
        def __init__(self) -> None:
            super().__init__(layers=4)
            self.bonus = nn.Parameter(torch.full((3,), 7.0))

    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        saved = engine.state_dict()
    for device in DEVICES:
        with engine_of(configure(tmp_path / "swap", device, units=["Longer"]), Longer()) as engine:
            before = engine.state_dict()
            engine.load_checkpoint(tmp_path / "ckpt", load_module_strict=False)
            state = engine.state_dict()
            assert same(saved, {name: state[name] for name in saved}) == []
            others = state.keys() - saved.keys()
            assert "bonus" in others
            assert all(torch.equal(state[name], before[name]) for name in others)


def test_tied_weights_by_any_of_their_names(tmp_path: Path) -> None:
    class Untied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.zeros(96, 48))

    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "ckpt")
        saved = engine.state_dict()
    with engine_of(configure(tmp_path / "swap"), Untied()) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert same(saved, engine.state_dict()) == []


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    """As the README describes them: no code of this package is needed to read a parameter."""
    with engine_of(configure(tmp_path / "swap")) as engine:
        train(engine, 0, 1)
        folder = Path(engine.save_checkpoint(tmp_path / "ckpt"))
        state = everything(engine)
    manifest = parse(Manifest, (folder / "manifest.json").read_bytes(), "")
    assert manifest.parameters["embedding.weight"].also == ["head.weight"]
    for name, parameter in manifest.parameters.items():
        unit = manifest.units[parameter.unit]
        with safe_open(str(folder / f"{unit.file}.rank-0.safetensors"), "pt") as file:
            for kind in unit.kinds:
                flat = file.get_tensor(f"{parameter.unit}.{kind.value}")
                value = flat[parameter.start : parameter.start + parameter.numel].view(parameter.shape)
                full = {"master": name, "param": f"{name}.param"}.get(kind.value, f"{name}.{kind.value}")
                assert torch.equal(value, state[full].to(value.dtype)), full
    with safe_open(str(folder / "buffers.safetensors"), "pt") as file:
        assert file.get_tensor("seen") == 24
    assert (folder / "manifest.json").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_between_two_micro_steps_nothing_is_saved(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap", gradient_accumulation_steps=2)) as engine:
        train(engine, 0, 1)
        with pytest.raises(infinity.ScheduleError, match="after 1 of 2 micro-steps"):
            engine.save_checkpoint(tmp_path / "ckpt")
        train(engine, 1, 2)
        engine.save_checkpoint(tmp_path / "ckpt")


def test_client_state_that_would_need_code_is_refused(tmp_path: Path) -> None:
    with engine_of(configure(tmp_path / "swap")) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"state\.client_state\.model is a .*Linear"):
            engine.save_checkpoint(tmp_path / "ckpt", client_state={"model": nn.Linear(1, 1)})
        assert not (tmp_path / "ckpt").exists()
