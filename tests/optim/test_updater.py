"""The update of a step: exact, in pieces, overlapped; what fails in it reaches whoever waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._native.cpu_adam import AdamStep, TorchKernels, open_kernels
from infinity.device.lane import Lane
from infinity.errors import StorageError
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.obs.ledger import Ledger
from infinity.optim.rules import AdamRule
from infinity.optim.updater import Piece, UnitUpdate, Updater, pieces_of
from infinity.plan.placement import STREAMED_KINDS, Placement
from infinity.shard.layout import flat_layout
from infinity.shard.partition import Unit
from infinity.storage.io_engine import Faults, open_io_engine
from infinity.storage.store import Extent, FileStore, Store
from infinity.storage.swap_file import open_file
from infinity.tier import StateKind, Tier

GROUP = 2048
MOVING = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


def unit(index: int, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Unit:
    names = [f"u{index}.{number}" for number in range(len(sizes))]
    layout = flat_layout([(name, (size,)) for name, size in zip(names, sizes, strict=True)], dtype)
    return Unit(index, f"u{index}", layout, True, tuple(((("", name),),) for name in names))


def step(lr: float = 1e-2, number: int = 1) -> AdamStep:
    return AdamStep(lr, 0.9, 0.999, 1e-3, 0.1, number, True)


class Bench:
    """An updater over stores on disk, with the values they started from."""

    def __init__(self, units: list[Unit], stores: dict[StateKind, FileStore], updater: Updater, lane: Lane) -> None:
        self.units, self.stores, self.updater, self.lane = units, stores, updater, lane
        self.placement = Placement(dict.fromkeys(STREAMED_KINDS, Tier.NVME), True)
        self.before = {}
        generator = torch.Generator().manual_seed(5)
        for kind in stores:
            for one in units:
                if self.placement.has(kind, one):
                    values = torch.rand(one.layout.numel, generator=generator).to(self.placement.dtype(kind, one))
                    self.before[kind, one.index] = values
                    stores[kind].write(one.index, 0, aligned(values)).wait()

    def read(self, kind: StateKind, index: int) -> torch.Tensor:
        values = torch.empty_like(self.before[kind, index])
        window = HostMemory(values.nbytes).bytes
        self.stores[kind].read(index, 0, window).wait()
        return window.view(values.dtype)

    def expected(self, updates: list[UnitUpdate]) -> dict[tuple[StateKind, int], torch.Tensor]:
        after = {place: values.clone() for place, values in self.before.items()}
        for update in updates:
            index = update.unit.index
            has_master = (StateKind.MASTER, index) in after
            master = after[StateKind.MASTER if has_master else StateKind.PARAM, index]
            for piece in update.pieces:
                part = slice(piece.start, piece.stop)
                out = after[StateKind.PARAM, index][part] if has_master else None
                moments = [after[kind, index][part] for kind in MOVING[1:]]
                TorchKernels().adam(master[part], *moments, after[StateKind.GRAD, index][part], out, piece.step)
        return after


def aligned(values: torch.Tensor) -> torch.Tensor:
    memory = HostMemory(values.nbytes).bytes
    memory.copy_(values.view(torch.uint8))
    return memory


@contextmanager
def bench(directory: Path, units: list[Unit], read_ahead: int = 2, faults: Faults | None = None) -> Iterator[Bench]:
    engine = open_io_engine("threads", block_size=4096, faults=faults)
    lane = Lane("update")
    ledger = Ledger()
    stores: dict[StateKind, FileStore] = {}
    for kind in STREAMED_KINDS:
        slabs = read_ahead + (1 if kind is StateKind.GRAD else 3)
        pool = SlabPool(Arena(Tier.HOST, HostMemory(slabs * 4 * GROUP).bytes), slabs, 4 * GROUP, "ring", poison=True)
        file = open_file(str(directory / f"{kind.value}.swap"), create=True)
        extents, offset = {}, 0
        for one in units:
            extents[one.index] = Extent(file, offset, one.layout.nbytes(torch.float32))
            offset += one.layout.nbytes(torch.float32)
        os.truncate(file.path, offset)
        stores[kind] = FileStore(engine, extents, ledger, pool)
    placement = Placement(dict.fromkeys(STREAMED_KINDS, Tier.NVME), True)
    kinds: dict[StateKind, Store] = dict(stores)
    updater = Updater(placement, kinds, AdamRule(open_kernels(threads=1)), GROUP, read_ahead, lane, ledger)
    try:
        yield Bench(units, stores, updater, lane)
    finally:
        lane.close()
        engine.close()


@pytest.mark.parametrize("read_ahead", [0, 1, 2, 5])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_pieces_of_any_units(
    read_ahead: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=4)
    dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
    units = [unit(index, *data.draw(sizes), dtype=data.draw(dtypes)) for index in range(data.draw(st.integers(1, 3)))]
    updates = []
    for one in data.draw(st.permutations(units)):
        deposited = [data.draw(st.booleans()) for _ in one.layout.slots]
        numbers = [data.draw(st.integers(1, 2)) for _ in one.layout.slots]
        pieces = pieces_of(one, deposited, lambda slot, numbers=numbers: step(number=numbers[slot]))
        if pieces:
            updates.append(UnitUpdate(one, pieces))
    faults = Faults(seed=data.draw(st.integers(0, 99)), short=0.2, delay_seconds=0.0005, reorder=True)
    with bench(tmp_path_factory.mktemp("updater"), units, read_ahead, faults) as made:
        tickets = made.updater.start(updates)
        assert tickets.keys() == {update.unit.index for update in updates}
        for update in updates:
            tickets[update.unit.index].wait()
        for (kind, index), values in made.expected(updates).items():
            assert torch.equal(made.read(kind, index), values), (kind, index)


def test_a_unit_can_be_read_as_soon_as_its_own_ticket_is_done(tmp_path: Path) -> None:
    units = [unit(0, 3 * GROUP), unit(1, 3 * GROUP)]
    updates = [UnitUpdate(one, pieces_of(one, [1], lambda slot: step())) for one in units]
    with bench(tmp_path, units, read_ahead=0) as made:
        tickets = made.updater.start(updates)
        expected = made.expected(updates)
        tickets[0].wait()
        assert torch.equal(made.read(StateKind.PARAM, 0), expected[StateKind.PARAM, 0])
        tickets[1].wait()
        assert torch.equal(made.read(StateKind.PARAM, 1), expected[StateKind.PARAM, 1])


@pytest.mark.parametrize("fail_at", range(0, 40, 3))
def test_what_fails_reaches_whoever_waits_and_nothing_hangs(fail_at: int, tmp_path: Path) -> None:
    """The first blocks lay down the state of two units; the one that fails belongs to one of two updates."""
    units = [unit(0, 2 * GROUP), unit(1, GROUP)]
    updates = [UnitUpdate(one, pieces_of(one, [1], lambda slot: step())) for one in units]
    raised: list[StorageError] = []
    with bench(tmp_path, units) as probe:
        blocks = sum(values.nbytes for values in probe.before.values()) // 4096
    faults = Faults(fail_at=blocks + fail_at, errno=5)
    with bench(tmp_path, units, faults=faults) as made:
        for _ in range(2):
            for ticket in made.updater.start(updates).values():
                try:
                    ticket.wait()
                except StorageError as error:
                    raised.append(error)
        for store in made.stores.values():
            try:
                store.settle()
            except StorageError as error:
                raised.append(error)
    assert raised
    assert {error.errno for error in raised} == {5}
    assert all(error.path is not None and error.path.endswith(".swap") and error.offset is not None for error in raised)


def test_pieces_join_equal_neighbours_over_their_gaps() -> None:
    one = unit(0, 10, 40, 5, 7)
    numbers = {0: step(), 1: step(), 2: step(lr=0.5), 3: step()}

    def pieces(*deposited: int) -> list[tuple[int, int]]:
        return [(piece.start, piece.stop) for piece in pieces_of(one, deposited, numbers.__getitem__)]

    assert pieces(1, 1, 1, 1) == [(0, 96), (96, 128), (128, 2048)]
    assert pieces(1, 0, 1, 1) == [(0, 32), (96, 128), (128, 2048)]
    assert pieces(0, 1, 0, 0) == [(32, 96)]
    assert pieces(0, 0, 0, 0) == []
    assert pieces_of(one, (1, 1, 0, 0), numbers.__getitem__) == (Piece(0, 96, step()),)


def test_a_parameter_without_elements_is_left_out() -> None:
    assert pieces_of(unit(0, 4, 0), (0, 1), lambda slot: step()) == ()
