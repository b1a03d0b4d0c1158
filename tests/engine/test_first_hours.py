"""What people try in their first hours gets a sentence they can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

ADAM: dict[str, Any] = {"optimizer": {"type": "AdamW"}}


def test_a_second_engine_on_the_same_model_is_refused() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = infinity.initialize(model, ADAM)
    with engine:
        with pytest.raises(infinity.ConfigError, match=r"weight belongs to an engine already.*restore_parameters"):
            infinity.initialize(model, ADAM)
        assert engine(torch.zeros(1, 4)).shape == (1, 4)


def test_activations_on_another_tier_can_be_asked_for_in_three_ways(tmp_path: Path) -> None:
    own = {"placement": {"activation": "nvme"}, "nvme_path": str(tmp_path)}
    for asked in (
        {"infinity": own},
        {"infinity": {"activations": "host"}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
    ):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        engine, *_ = infinity.initialize(model, {**ADAM, "zero_optimization": {"stage": 3}, **asked})
        with engine:
            engine.backward(engine(torch.ones(16, 64)).sum())
            assert any(line.purpose.startswith("unit inputs") for line in engine.plan.lines)


def test_train_batch_takes_what_it_needs_from_an_iterator() -> None:
    class Loss(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value).square().mean()

    engine, *_ = infinity.initialize(Loss(4, 4), {**ADAM, "gradient_accumulation_steps": 2})
    with engine:
        source = iter([torch.ones(1, 4) * number for number in range(5)])
        assert engine.train_batch(source).shape == (2,)
        assert next(source)[0, 0] == 2
        with pytest.raises(infinity.ScheduleError, match=r"a list of 2, one per gradient accumulation step"):
            engine.train_batch([torch.ones(1, 4)])


def test_a_swap_path_in_a_directory_that_takes_none_says_so() -> None:
    offload = {"device": "nvme", "nvme_path": "/proc/infinity-swap"}
    config = {**ADAM, "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload}}
    with pytest.raises(infinity.StorageError, match="cannot create /proc/infinity-swap"):
        infinity.initialize(nn.Linear(4, 4), config)


def _engine(**config: Any) -> Any:
    engine, *_ = infinity.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), {**ADAM, **config})
    return engine


def test_an_engine_says_what_it_is() -> None:
    with _engine() as engine:
        assert repr(engine).startswith("Engine(Sequential, 25 parameters, step 0, device ")
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert ", step 1, " in repr(engine)
    assert repr(engine).endswith(", destroyed)")


def test_what_an_engine_has_not_got_is_its_models() -> None:
    with _engine() as engine:
        assert list(engine.parameters()) == list(engine.module.parameters())
        assert torch.equal(engine.forward(torch.ones(1, 4)), engine(torch.ones(1, 4)))
        with pytest.raises(AttributeError, match="this engine, as well as its Sequential, has no attribute 'stepp'"):
            engine.stepp()


def test_a_state_dict_is_refused_once_for_all_parameters() -> None:
    with _engine() as engine:
        state = engine.state_dict()
        with pytest.raises(infinity.OffloadedError, match=r"put values into 0\.weight.*engine\.load_weights"):
            engine.module.load_state_dict(state)
        with pytest.raises(infinity.OffloadedError, match=r"put values into 1\.weight.*engine\.load_weights"):
            engine.module[1].load_state_dict({"weight": state["1.weight"]}, strict=False, assign=True)
        engine.module.load_state_dict({}, strict=False)
        with infinity.gathered(engine.module):
            engine.module.load_state_dict({name: torch.full_like(value, 2.0) for name, value in state.items()})
        assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in engine.state_dict().values())
        engine.destroy(restore_parameters=True)
        engine.module.load_state_dict(state)
        assert torch.equal(engine.module[0].weight, state["0.weight"])


@pytest.mark.parametrize("own_backward", [False, True])
def test_micro_batches_without_step_are_noticed(own_backward: bool, caplog: pytest.LogCaptureFixture) -> None:
    with _engine(gradient_accumulation_steps=2) as engine:
        for _ in range(2):
            loss = engine(torch.ones(1, 4)).sum()
            engine.backward(loss) if own_backward else loss.backward()
            engine.step()
        assert not caplog.messages
        for _ in range(3):
            loss = engine(torch.ones(1, 4)).sum()
            engine.backward(loss) if own_backward else loss.backward()
        assert len(caplog.messages) == 1
        assert "twice without step() in between, and gradient_accumulation_steps is 2" in caplog.text


def test_sums_over_several_backward_calls_are_nobodys_mistake(caplog: pytest.LogCaptureFixture) -> None:
    with _engine() as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    with _engine(gradient_accumulation_steps=3) as engine:
        engine.module.forward, plain = lambda value: plain(value).sum(), engine.module.forward
        engine.train_batch([torch.ones(1, 4)] * 3)
    assert not caplog.messages


def test_a_step_without_gradients_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with _engine() as engine:
        engine.step()
        engine.step()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step() found no gradient but zeros; was backward() called")


def test_backward_of_an_output_says_where_the_loss_is() -> None:
    class Output:
        loss = torch.ones(())

    with _engine() as engine, pytest.raises(TypeError, match=r"given a Output; its \.loss may be meant"):
        engine.backward(Output())


def test_backward_of_a_loss_that_trains_nothing_says_why() -> None:
    with (
        infinity.initialize(nn.Linear(4, 1), {})[0] as engine,
        pytest.raises(infinity.ScheduleError, match='the config has no "optimizer" block'),
    ):
        engine.backward(engine(torch.ones(2, 4)).mean())
    with _engine() as engine, pytest.raises(infinity.ScheduleError, match="under no_grad or detached"):
        engine.backward(engine(torch.ones(2, 4)).mean().detach())


@pytest.mark.parametrize(
    ("attempt", "advice"),
    [
        (lambda model: model.half(), r"Leave \.half\(\) out: bf16 and fp16 of the config"),
        (lambda model: model.to(torch.float64), r"Leave \.to\(\) out"),
        (lambda model: model(torch.ones(1, 4)).sum().backward(inputs=[model[0].weight]), "backward.*get_full_grad"),
        (lambda model: torch.autograd.grad(model(torch.ones(1, 4)).sum(), [model[0].weight]), "grad.*get_full_grad"),
        (lambda model: torch.save(model.state_dict(), "/dev/null"), r"engine\.save_checkpoint\(directory\) saves"),
    ],
)
def test_an_error_says_what_to_do_instead(attempt: Any, advice: str) -> None:
    with _engine() as engine, pytest.raises(infinity.OffloadedError, match=advice):
        attempt(engine.module)
