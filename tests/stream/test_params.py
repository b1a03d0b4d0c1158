"""Units are on the device when they are used: whatever is lent cannot move, whatever is not may be read ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.device.lane import DONE, Lane, LaneTicket, Ticket
from infinity.errors import CapacityError, ScheduleError, StorageError
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.obs.ledger import Ledger
from infinity.shard.layout import flat_layout
from infinity.shard.partition import Unit
from infinity.storage.store import MemoryStore
from infinity.stream.params import ParamStream, Phase
from infinity.tier import PAGE_BYTES, Tier


class Source(MemoryStore):
    """A store that must be copied from, as if it could not be addressed; notes every read."""

    def __init__(self, units: int) -> None:
        regions = {index: torch.full((PAGE_BYTES,), index + 1, dtype=torch.uint8) for index in range(units)}
        super().__init__(Tier.NVME, regions)
        self.reads: list[int] = []
        self.fail: set[int] = set()
        self.settled = True

    def is_settled(self, unit: int) -> bool:
        return self.settled

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        self.reads.append(unit)
        if unit in self.fail:
            ticket = LaneTicket()
            ticket.fail(StorageError("cannot read", path="x.swap"))
            return ticket
        return super().read(unit, start, into)


def unit(index: int) -> Unit:
    return Unit(index, f"u{index}", flat_layout([(f"u{index}.w", (8,))], torch.uint8), True, ((("", "w"),),))


def stream(units: int, slabs: int, prefetch: int | None = 0) -> tuple[ParamStream, Source, Lane]:
    source, lane = Source(units), Lane("fetch")
    arena = Arena(Tier.DEVICE, HostMemory(slabs * PAGE_BYTES).bytes)
    pool = SlabPool(arena, slabs, PAGE_BYTES, "slabs", poison=True)
    made = ParamStream(
        [unit(index) for index in range(units)], source, {PAGE_BYTES: pool}, dict.fromkeys(range(units), PAGE_BYTES),
        lane, Ledger(), prefetch,
    )  # fmt: skip
    return made, source, lane


def use(made: ParamStream, index: int, phase: Phase = Phase.FORWARD) -> None:
    made.lend([index], phase)
    assert bool((made.flat(index) == index + 1).all())
    made.release([index])


def step(made: ParamStream, order: list[int]) -> None:
    for index in order:
        use(made, index)
    for index in reversed(order):
        use(made, index, Phase.BACKWARD)
    made.invalidate(dict.fromkeys(order, DONE))


@pytest.mark.parametrize("slabs", [1, 2, 3, 5])
def test_a_known_order_reads_the_least_possible(slabs: int) -> None:
    """Backward finds the last units of forward in their slabs; the unit that is needed last is evicted first."""
    made, source, lane = stream(5, slabs)
    order = [0, 1, 2, 3, 4]
    step(made, order)
    for _ in range(2):
        source.reads.clear()
        step(made, order)
        assert len(source.reads) == 5 + (5 - slabs)
    lane.close()


def test_units_are_read_ahead_in_the_order_of_the_last_step() -> None:
    made, source, lane = stream(5, 2, prefetch=None)
    order = [3, 0, 4, 1, 2]
    step(made, order)
    source.reads.clear()
    made.lend([3], Phase.FORWARD)
    made.release([3])
    assert source.reads == [], "both units that come first were read when the step ended"
    made.lend([0], Phase.FORWARD)
    assert source.reads == [4], "the slab of 3 goes to what comes next"
    made.release([0])
    lane.close()


def test_what_is_lent_is_never_evicted() -> None:
    made, _, lane = stream(3, 2)
    made.lend([0], Phase.FORWARD)
    for index in (1, 2, 1):
        use(made, index)
        assert bool((made.flat(0) == 1).all())
    made.lend([1], Phase.FORWARD)
    with pytest.raises(CapacityError, match=r'unit "u2" is needed while "u0", "u1" are in use .* by 4096 bytes'):
        made.lend([2], Phase.FORWARD)
    made.release([0])
    use(made, 2)
    made.release([1])
    lane.close()


def test_lending_is_all_or_nothing() -> None:
    made, source, lane = stream(4, 2)
    with pytest.raises(CapacityError):
        made.lend([0, 1, 2], Phase.FORWARD)
    source.fail = {3}
    with pytest.raises(StorageError, match=r"x\.swap"):
        made.lend([0, 3], Phase.FORWARD)
    source.fail = set()
    made.lend([1, 2], Phase.FORWARD)
    made.release([1, 2])
    lane.close()


def test_a_unit_is_not_read_before_its_update() -> None:
    made, source, lane = stream(2, 2, prefetch=None)
    step(made, [0, 1])
    use(made, 0)
    use(made, 1)
    update = LaneTicket()
    source.reads.clear()
    made.invalidate({0: update, 1: DONE})
    use(made, 1)
    assert source.reads == [1]
    source._regions[0].fill_(77)
    update.resolve()
    made.lend([0], Phase.FORWARD)
    assert bool((made.flat(0) == 77).all())
    made.release([0])
    lane.close()


def test_a_failed_update_is_raised_by_every_use_of_its_unit() -> None:
    made, _, lane = stream(2, 2, prefetch=None)
    step(made, [0, 1])
    update = LaneTicket()
    made.invalidate({0: update})
    update.fail(StorageError("cannot write", path="y.swap"))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"y\.swap"):
            made.lend([0], Phase.FORWARD)
    use(made, 1)
    lane.close()


def test_a_step_during_a_use_is_refused() -> None:
    made, _, lane = stream(1, 1)
    made.lend([0], Phase.FORWARD)
    with pytest.raises(ScheduleError, match=r'while unit "u0" was still computing'):
        made.invalidate({0: DONE})
    lane.close()


def test_inference_has_an_order_of_its_own() -> None:
    made, source, lane = stream(4, 2)
    step(made, [0, 1, 2, 3])
    for _ in range(2):
        made.begin_inference()
        for index in (3, 1):
            use(made, index, Phase.INFERENCE)
    assert made.forward_order() == [0, 1, 2, 3]
    assert list(made._inference.upcoming()) == []
    source.reads.clear()
    step(made, [0, 1, 2, 3])
    assert sorted(set(source.reads)) == [0, 1, 2, 3]
    lane.close()


def test_dropping_forgets_only_what_is_not_lent() -> None:
    made, source, lane = stream(2, 2)
    made.lend([0], Phase.FORWARD)
    use(made, 1)
    source.reads.clear()
    made.drop_all()
    use(made, 0)
    use(made, 1)
    assert source.reads == [1]
    made.release([0])
    lane.close()


def test_where_the_home_is_addressable_nothing_is_copied() -> None:
    source, lane = Source(2), Lane("fetch")
    made = ParamStream([unit(0), unit(1)], source, {}, {}, lane, Ledger())
    update = LaneTicket()
    made.invalidate({0: update})
    use(made, 1)
    update.resolve()
    use(made, 0)
    assert source.reads == []
    assert made.flat(0).data_ptr() == source._regions[0].data_ptr()
    lane.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), slabs=st.integers(1, 4), prefetch=st.sampled_from([None, 0, 1, 9]))
def test_any_order_gives_the_right_bytes(data: st.DataObject, slabs: int, prefetch: int | None) -> None:
    """Random uses, phases, steps, drops; values at home change with every step, and are never seen stale."""
    made, source, lane = stream(5, slabs, prefetch)
    source.settled = data.draw(st.booleans())
    version = dict.fromkeys(range(5), 0)
    actions: dict[str, Callable[[], None]] = {}

    def lend() -> None:
        indices = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=slabs, unique=True))
        made.lend(indices, data.draw(st.sampled_from(list(Phase))))
        for index in indices:
            assert bool((made.flat(index) == index + 1 + 10 * version[index]).all())
        made.release(indices)

    def update() -> None:
        changed = data.draw(st.lists(st.integers(0, 4), unique=True))
        tickets: dict[int, Ticket] = {}
        for index in changed:
            version[index] = (version[index] + 1) % 20
        waiting = {index: LaneTicket() for index in changed}
        tickets.update(waiting)
        made.invalidate(tickets)
        for index, ticket in waiting.items():
            source._regions[index].fill_(index + 1 + 10 * version[index])
            ticket.resolve()

    actions = {"lend": lend, "update": update, "drop": made.drop_all, "inference": made.begin_inference}
    for name in data.draw(st.lists(st.sampled_from([*["lend"] * 4, *actions]), max_size=25)):
        actions[name]()
    made.settle()
    lane.close()
