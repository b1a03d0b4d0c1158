"""The batch triple: every way to give one, two or three of its sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import BatchSizes, Config
from infinity.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 4, (4, 1, 1)),
        ({TRAIN: 32}, 4, (32, 8, 1)),
        ({MICRO: 2}, 4, (8, 2, 1)),
        ({STEPS: 3}, 4, (12, 1, 3)),
        ({TRAIN: 32, MICRO: 2}, 4, (32, 2, 4)),
        ({TRAIN: 32, STEPS: 4}, 2, (32, 4, 4)),
        ({MICRO: 2, STEPS: 4}, 2, (16, 2, 4)),
        ({TRAIN: 16, MICRO: 2, STEPS: 4}, 2, (16, 2, 4)),
        ({TRAIN: "auto", MICRO: 2.0, STEPS: "auto"}, 1, (2, 2, 1)),
        ({TRAIN: None, MICRO: 2}, 1, (2, 2, 1)),
    ],
)
def test_the_rest_is_derived(given: dict[str, object], world_size: int, sizes: tuple[int, int, int]) -> None:
    assert Config.load(given).resolve_batch(world_size) == BatchSizes(*sizes)


@pytest.mark.parametrize(
    ("given", "world_size", "message"),
    [
        ({TRAIN: 10}, 4, "train_batch_size is 10, but it must be a multiple of 4 .*such as 8 or 12"),
        ({TRAIN: 2}, 4, "such as 4"),
        ({TRAIN: 8, MICRO: 4}, 4, "must be a multiple of 16 .train_micro_batch_size_per_gpu 4 x 4 ranks."),
        ({TRAIN: 8, STEPS: 4}, 4, "must be a multiple of 16 .gradient_accumulation_steps 4 x 4 ranks."),
        ({TRAIN: 16, MICRO: 2, STEPS: 4}, 4, "train_batch_size is 16, but .* x 4 ranks is 32; drop one"),
        ({}, 0, "number of ranks is 0"),
    ],
)
def test_what_does_not_divide_is_refused(given: dict[str, object], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(given).resolve_batch(world_size)


sizes = st.none() | st.integers(1, 64)


@given(sizes, sizes, sizes, st.integers(1, 8))
def test_whatever_is_resolved_is_consistent(
    train: int | None, micro: int | None, steps: int | None, world_size: int
) -> None:
    try:
        batch = Config.load({TRAIN: train, MICRO: micro, STEPS: steps}).resolve_batch(world_size)
    except ConfigError:
        assert train is not None
        assert train % ((micro or 1) * (steps or 1) * world_size) or train != (micro or 1) * (steps or 1) * world_size
        return
    assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation_steps * world_size
    assert train in (None, batch.train_batch_size)
    assert micro in (None, batch.micro_batch_size)
    assert steps in (None, batch.accumulation_steps)
