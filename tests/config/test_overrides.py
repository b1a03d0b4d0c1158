"""``--set key=value`` on top of a config."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.config import Config
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=5", {"run": {"steps": 5}}),
        ("run.data=corpus", {"run": {"data": "corpus"}}),
        ("run.data=a=b", {"run": {"data": "a=b"}}),
        ('run.data="5"', {"run": {"data": "5"}}),
        ("infinity.device_memory=8GiB", {"infinity": {"device_memory": 8 << 30}}),
        ("infinity.recompute.blocks.*=true", {"infinity": {"recompute": {"blocks.*": True}}}),
        ("run.model.layers=3", {"run": {"model": {"layers": 3}}}),
        ("bf16.enabled=true", {"bf16": {"enabled": True}}),
        (" gradient_clipping =0", {"gradient_clipping": 0}),
        ('infinity={"slabs": 2}', {"infinity": {"slabs": 2}}),
    ],
)
def test_a_value_is_json_or_else_text(override: str, expected: dict[str, Any]) -> None:
    assert Config.load({}).with_overrides([override]).given() == expected


def test_the_rest_stays_as_it_was_given() -> None:
    given = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "infinity": {"placement": {"master": "host"}},
        "zero_optimization": {"stage": 1},
    }
    before = Config.load(given)
    after = before.with_overrides(["optimizer.params.eps=1e-6", "infinity.placement.grad=device", "run.steps=2"])
    assert after.given() == {
        **given,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-6}},
        "infinity": {"placement": {"master": "host", "grad": "device"}},
        "run": {"steps": 2},
    }
    assert before == Config.load(given)
    assert after.with_overrides(["optimizer.type=SGD", 'optimizer.params={"momentum": 0.9}']).optimizer is not None


def test_the_last_one_wins() -> None:
    assert Config.load({}).with_overrides(["run.steps=2", "run.steps=3"]).run.steps == 3


def test_a_free_word_gives_way_to_an_object() -> None:
    config = Config.load({"zero_optimization": {"stage": 1}, "infinity": {"placement": "auto"}})
    assert config.with_overrides(["infinity.placement.grad=host"]).infinity.placement == {"grad": "host"}


def test_every_problem_comes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({}).with_overrides(["run.stpes=5", "steps", "bf16.enabled=maybe", "=3", "run.steps.x=1", "slabs=2"])
    assert caught.value.problems == (
        "`run.stpes` is not a known key; did you mean `run.steps`?",
        "`steps` is not an override; write it as key=value, such as run.steps=10.",
        "`=3` is not an override; write it as key=value, such as run.steps=10.",
        "`slabs` is not a known key; it belongs at `infinity.slabs`.",
        '`bf16.enabled` is "maybe", but it must be true or false.',
        '`run.steps` is {"x": 1}, but it must be a whole number of at least 1.',
    )
