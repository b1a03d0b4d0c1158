"""Gradients are summed in fp32, wherever the sum is kept, in whatever order it comes and goes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._native.cpu_adam import open_kernels
from infinity.device.lane import LaneTicket, Ticket
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.obs.ledger import Ledger
from infinity.shard.layout import flat_layout
from infinity.shard.partition import Unit
from infinity.storage.store import MemoryStore
from infinity.stream.grads import GradStream
from infinity.tier import Tier

SHAPES = ((3, 5), (40,), (2, 2))


def unit(index: int, trainable: bool = True) -> Unit:
    names = [f"u{index}.{number}" for number in range(len(SHAPES))]
    layout = flat_layout(list(zip(names, SHAPES, strict=True)), torch.bfloat16)
    return Unit(index, f"u{index}", layout, trainable, tuple(((("", name),),) for name in names))


NBYTES = unit(0).layout.nbytes(torch.float32)


class Away(MemoryStore):
    """A store that must be copied from and to; its tickets complete when they are waited for, reads only then."""

    def __init__(self, units: int) -> None:
        super().__init__(Tier.NVME, {index: torch.zeros(NBYTES, dtype=torch.uint8) for index in range(units)})
        self.log: list[str] = []
        self.late: list[Late] = []

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        self.log.append(f"read {unit}")
        self.late.append(Late(lambda: MemoryStore.read(self, unit, start, into)))
        return self.late[-1]

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        self.log.append(f"write {unit}")
        return super().write(unit, start, source)


class Late(LaneTicket):
    """Does its work when it is waited for."""

    def __init__(self, work: object) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> None:
        if not self.done():
            self.resolve()
            self._work()  # type: ignore[operator]


def stream(units: int, slabs: int, frozen: tuple[int, ...] = ()) -> tuple[GradStream, Away | None]:
    members = [unit(index, index not in frozen) for index in range(units)]
    kernels = open_kernels(threads=1)
    if slabs == 0:
        regions = {index: HostMemory(NBYTES).bytes for index in range(units)}
        return GradStream(members, MemoryStore(Tier.HOST, regions), {}, {}, kernels, Ledger()), None
    store = Away(units)
    arena = Arena(Tier.HOST, HostMemory(slabs * NBYTES).bytes)
    pool = SlabPool(arena, slabs, NBYTES, "staging", poison=True)
    return GradStream(members, store, {NBYTES: pool}, dict.fromkeys(range(units), NBYTES), kernels, Ledger()), store


EVENTS = st.lists(
    st.tuples(st.sampled_from(["deposit"] * 6 + ["expect", "close", "discard"]), st.integers(0, 2), st.integers(0, 2)),
    max_size=30,
)


@pytest.mark.parametrize("slabs", [0, 1, 2, 3])
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(EVENTS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_sums_norms_and_absence(slabs: int, steps: list[list[tuple[str, int, int]]], seed: int) -> None:
    grads, _ = stream(3, slabs)
    generator = torch.Generator().manual_seed(seed)
    for events in steps:
        expected: dict[tuple[int, int], torch.Tensor] = {}
        for event, index, slot in events:
            if event == "deposit":
                value = torch.randn(SHAPES[slot], generator=generator)
                value = value.to((torch.float32, torch.bfloat16, torch.float16)[(index + slot) % 3])
                grads.deposit(index, slot, value)
                wide = value.float()
                expected[index, slot] = expected[index, slot] + wide if (index, slot) in expected else wide
            elif event == "discard":
                grads.discard(index, slot)
                expected.pop((index, slot), None)
            else:
                getattr(grads, event)(index)
        total = grads.total()
        squares = math.fsum(float(value) ** 2 for one in expected.values() for value in one.flatten())
        assert total.finite
        assert total.squared == pytest.approx(squares, rel=1e-13)
        for index in range(3):
            assert list(grads.deposited(index)) == [(index, slot) in expected for slot in range(3)]
            for slot in range(3):
                given_value = grads.read(index, slot)
                wanted = expected.get((index, slot))
                assert (given_value is None) == (wanted is None)
                assert wanted is None or torch.equal(given_value, wanted)
        grads.reset()
        assert grads.total().squared == 0.0


@pytest.mark.parametrize("slabs", [0, 1, 2])
def test_the_norm_has_the_same_bits_on_every_tier(slabs: int) -> None:
    def norm(slabs: int, order: list[int]) -> float:
        grads, _ = stream(3, slabs)
        for index in order:
            for slot, shape in enumerate(SHAPES):
                generator = torch.Generator().manual_seed(10 * index + slot)
                grads.deposit(index, slot, torch.randn(shape, generator=generator) * 10.0**index)
            grads.close(index)
        return grads.total().squared

    assert norm(slabs, [0, 1, 2]) == norm(slabs, [2, 0, 1]) == norm(0, [0, 1, 2])


def test_gradients_are_read_back_only_to_be_added_to() -> None:
    grads, store = stream(2, 1)
    assert store is not None
    for index in (1, 0):
        grads.expect(index)
        grads.deposit(index, 0, torch.ones(SHAPES[0]))
        grads.close(index)
    assert store.log == ["write 1", "write 0"]
    grads.expect(1)
    grads.deposit(1, 0, torch.ones(SHAPES[0]))
    grads.close(1)
    assert store.log[2:] == ["read 1", "write 1"]
    assert grads.total().squared == 4 * 15 + 15
    assert len(store.log) == 4, "norms were taken while the sums were in memory"


def test_a_slab_that_is_being_read_into_is_not_lent_again() -> None:
    """A reset while an accumulator is on its way back must wait for it before another unit uses the slab."""
    grads, store = stream(2, 1)
    assert store is not None
    grads.deposit(0, 0, torch.ones(SHAPES[0]))
    grads.close(0)
    grads.expect(0)
    grads.reset()
    grads.deposit(1, 0, torch.full(SHAPES[0], 5.0))
    for ticket in store.late:
        ticket.wait()
    assert torch.equal(grads.read(1, 0), torch.full(SHAPES[0], 5.0))  # type: ignore[arg-type]
    assert grads.total().squared == 25.0 * 15


def test_the_first_bad_parameter_is_named_whatever_comes_after() -> None:
    for slabs in (0, 1):
        grads, _ = stream(3, slabs)
        grads.deposit(2, 1, torch.full((40,), float("inf")))
        grads.deposit(1, 2, torch.full((2, 2), float("nan")))
        grads.deposit(1, 0, torch.ones(3, 5))
        total = grads.total()
        assert not total.finite
        assert total.culprit == "u1.2"
        assert math.isnan(total.squared)
        grads.reset()
        grads.deposit(1, 0, torch.ones(3, 5))
        assert grads.total().squared == 15.0


def test_values_that_overflow_when_squared_are_no_culprit() -> None:
    grads, _ = stream(1, 0)
    grads.deposit(0, 1, torch.full((40,), 3e38))
    assert grads.total().squared == pytest.approx(40 * 9e76)


def test_sparse_and_wide_gradients_are_taken() -> None:
    grads, _ = stream(1, 1)
    grads.deposit(0, 1, torch.ones(40, dtype=torch.float64))
    at = torch.tensor([[3, 7]])
    grads.deposit(0, 1, torch.sparse_coo_tensor(at, torch.tensor([2.0, 4.0]), (40,), check_invariants=True))
    value = grads.read(0, 1)
    assert value is not None
    assert value.tolist() == [3.0 if at == 3 else 5.0 if at == 7 else 1.0 for at in range(40)]
