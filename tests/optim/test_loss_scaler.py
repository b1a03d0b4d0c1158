"""The loss scale moves as DeepSpeed's does; non-finite steps are counted, then end the run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import NonFiniteError
from infinity.optim.loss_scaler import LossScaler, NonFiniteGuard


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow."""
    seen = []
    for step in overflows:
        scaler.update(overflow=step == "x")
        seen.append(scaler.scale)
    return seen


def test_it_halves_on_overflow_and_doubles_after_a_window() -> None:
    scaler = LossScaler(1024, dynamic=True, window=3, hysteresis=1)
    assert scales(scaler, "x..." + ".x...") == [512, 512, 512, 1024, 1024, 512, 512, 512, 1024]


def test_hysteresis_tolerates_that_many_overflows_less_one() -> None:
    assert scales(LossScaler(16, dynamic=True, window=100, hysteresis=3), "x.x.x.x") == [16, 16, 16, 16, 8, 8, 4]
    consecutive = LossScaler(16, dynamic=True, window=100, hysteresis=2, consecutive=True)
    assert scales(consecutive, "x.x.xx.") == [16, 16, 16, 16, 16, 8, 8], "a good step restores the tolerance"


def test_the_window_restores_the_tolerance() -> None:
    assert scales(LossScaler(16, dynamic=True, window=2, hysteresis=2), "x..x") == [16, 16, 32, 32]


def test_the_minimum_holds() -> None:
    scaler = LossScaler(8, dynamic=True, hysteresis=1, minimum=2.0)
    assert not scaler.exhausted
    assert scales(scaler, "xxx") == [4, 2, 2]
    assert scaler.exhausted


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(128, dynamic=False)
    assert scales(scaler, "x.x.xxxx") == [128] * 8
    assert scaler.exhausted


@given(overflows=st.text(".x", max_size=60), window=st.integers(1, 5), hysteresis=st.integers(1, 3))
def test_powers_of_two_above_the_minimum_and_resumable(overflows: str, window: int, hysteresis: int) -> None:
    def make() -> LossScaler:
        return LossScaler(2.0**16, dynamic=True, window=window, hysteresis=hysteresis, minimum=0.25)

    whole = make()
    expected = scales(whole, overflows)
    assert all(math.log2(scale).is_integer() and scale >= 0.25 for scale in expected)
    half = len(overflows) // 2
    first, second = make(), make()
    seen = scales(first, overflows[:half])
    second.load_state_dict(first.state_dict())
    assert seen + scales(second, overflows[half:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_a_run_of_bad_steps_ends_it_by_name() -> None:
    guard = NonFiniteGuard(3)
    for culprit in ("a.weight", "b.weight", None, "c.weight", "c.weight"):
        guard.update(culprit, excused=False)
    assert guard.in_a_row == 2
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* first seen in d\.weight.*non_finite_limit"):
        guard.update("d.weight", excused=False)


def test_a_scale_on_its_way_down_is_excused() -> None:
    guard = NonFiniteGuard(1)
    for _ in range(20):
        guard.update("a", excused=True)
    with pytest.raises(NonFiniteError):
        guard.update("a", excused=False)
