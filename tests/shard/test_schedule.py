"""The order of units is recorded, predicted, found again after a change."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from infinity.shard.schedule import Schedule

FORWARD = [0, 1, 2, 3]
BACKWARD = [3, 2, 1, 0]


def play(schedule: Schedule, forward: list[int], backward: list[int]) -> int:
    """Uses units; returns how often the next one was what was predicted."""
    hits = 0
    for uses, phase in ((forward, False), (backward, True)):
        for unit in uses:
            hits += next(schedule.upcoming(), None) == unit
            schedule.use(unit, backward=phase)
    return hits


def test_before_the_first_step_memory_order_forward_and_its_reverse_backward() -> None:
    schedule = Schedule(FORWARD)
    assert list(schedule.upcoming()) == FORWARD
    assert not schedule.known
    hits = play(schedule, FORWARD, BACKWARD)
    assert hits == 7, "all but the first of backward, which is not known to have begun"


def test_a_repeated_step_is_predicted_wholly() -> None:
    schedule = Schedule([9, 8, 7])
    for _ in range(2):
        play(schedule, [2, 0, 2, 1], [1, 2, 0])
        schedule.end_step()
    assert schedule.known
    assert list(schedule.upcoming()) == [2, 0, 2, 1, 1, 2, 0]
    assert play(schedule, [2, 0, 2, 1], [1, 2, 0]) == 7
    assert list(schedule.upcoming()) == []
    assert schedule.next_use(0) == math.inf


def test_next_use_counts_from_the_cursor() -> None:
    schedule = Schedule(FORWARD)
    play(schedule, FORWARD, BACKWARD)
    schedule.end_step()
    assert [schedule.next_use(unit) for unit in FORWARD] == [0, 1, 2, 3]
    schedule.use(0, backward=False)
    assert [schedule.next_use(unit) for unit in FORWARD] == [6, 0, 1, 2]
    assert schedule.next_use(77) == math.inf


def test_a_skipped_unit_moves_the_cursor_on() -> None:
    schedule = Schedule(FORWARD)
    play(schedule, FORWARD, BACKWARD)
    schedule.end_step()
    schedule.use(0, backward=False)
    schedule.use(2, backward=False)
    assert list(schedule.upcoming()) == [3, 3, 2, 1, 0]


def test_an_unknown_unit_leaves_the_prediction_alone() -> None:
    schedule = Schedule(FORWARD)
    play(schedule, FORWARD, BACKWARD)
    schedule.end_step()
    schedule.use(0, backward=False)
    schedule.use(42, backward=False)
    assert list(schedule.upcoming()) == [1, 2, 3, 3, 2, 1, 0]
    schedule.end_step()
    assert list(schedule.upcoming()) == [0, 42]


def test_a_new_order_is_known_after_one_step() -> None:
    schedule = Schedule(FORWARD)
    play(schedule, FORWARD, BACKWARD)
    schedule.end_step()
    play(schedule, BACKWARD, FORWARD)
    schedule.end_step()
    assert play(schedule, BACKWARD, FORWARD) == 8


def test_order_is_this_step_or_the_last() -> None:
    schedule = Schedule(FORWARD)
    assert schedule.order() == FORWARD
    play(schedule, [2, 1, 2], [2, 1])
    assert schedule.order() == [2, 1]
    schedule.end_step()
    assert schedule.order() == [2, 1]
    schedule.end_step()
    assert schedule.order() == [2, 1], "a step without uses changes nothing"


def test_several_micro_steps_are_one_order() -> None:
    schedule = Schedule(FORWARD)
    for _ in range(3):
        play(schedule, FORWARD, BACKWARD)
    schedule.end_step()
    assert list(schedule.upcoming()) == (FORWARD + BACKWARD) * 3


UNITS = st.lists(st.integers(0, 5), max_size=20)


@given(steps=st.lists(st.tuples(UNITS, UNITS), max_size=5))
def test_whatever_happens_hints_stay_consistent(steps: list[tuple[list[int], list[int]]]) -> None:
    schedule = Schedule(range(6))
    for forward, backward in steps:
        for uses, phase in ((forward, False), (backward, True)):
            for unit in uses:
                schedule.use(unit, backward=phase)
                upcoming = list(schedule.upcoming())
                for other in range(6):
                    expected = upcoming.index(other) if other in upcoming else math.inf
                    assert schedule.next_use(other) == expected
        schedule.end_step()
        if forward + backward:
            assert list(schedule.upcoming()) == forward + backward
