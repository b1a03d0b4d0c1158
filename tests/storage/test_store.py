"""State comes back as it was last written, in whatever order the disk works."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.obs.ledger import Ledger
from infinity.storage.io_engine import Faults, open_io_engine
from infinity.storage.store import Access, Extent, FileStore, MemoryStore
from infinity.storage.swap_file import SwapFile, open_file
from infinity.tier import PAGE_BYTES, Tier

PAGES = 6


@dataclass
class Opened:
    """A store of two units in one file, with what it is made of."""

    store: FileStore
    pool: SlabPool
    ledger: Ledger
    extents: dict[int, Extent]
    memory: HostMemory


@contextmanager
def opened(directory: Path, backend: str = "threads", faults: Faults | None = None, slabs: int = 3) -> Iterator[Opened]:
    engine = open_io_engine(backend, block_size=PAGE_BYTES, threads=4, faults=faults)
    file = open_file(str(directory / "x.swap"), create=True)
    os.truncate(file.path, 2 * PAGES * PAGE_BYTES)
    memory = HostMemory(slabs * PAGES * PAGE_BYTES)
    pool = SlabPool(Arena(Tier.HOST, memory.bytes), slabs, PAGES * PAGE_BYTES, "staging", poison=True)
    size = PAGES * PAGE_BYTES
    extents = {unit: Extent(file, unit * size, size) for unit in range(2)}
    ledger = Ledger()
    try:
        yield Opened(FileStore(engine, extents, ledger, pool), pool, ledger, extents, memory)
    finally:
        engine.close()
        file.close()


def aligned(pages: int) -> torch.Tensor:
    return HostMemory(pages * PAGE_BYTES).bytes


REQUESTS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 1),
        st.integers(0, PAGES - 1).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, PAGES))),
    ),
    min_size=4,
    max_size=24,
)


@pytest.mark.parametrize("backend", ["io_uring", "aio", "threads", "python"])
@settings(max_examples=12, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 1 << 16))
def test_reads_see_exactly_the_writes_before_them(
    backend: str, requests: list[tuple[bool, int, tuple[int, int]]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is waited for but what the store itself waits for; completions are late, out of order, in parts."""
    faults = Faults(seed=seed, short=0.3, delay_seconds=0.001, reorder=backend != "python")
    expected = torch.zeros(2, PAGES, dtype=torch.uint8)
    reads = []
    with opened(tmp_path_factory.mktemp("store"), backend, faults) as made:
        for number, (write, unit, (start, stop)) in enumerate(requests, start=1):
            window = aligned(stop - start)
            if write:
                window.fill_(number)
                made.store.write(unit, start * PAGE_BYTES, window)
                expected[unit, start:stop] = number
            else:
                window.fill_(255)
                ticket = made.store.read(unit, start * PAGE_BYTES, window)
                reads.append((ticket, window, expected[unit, start:stop].clone()))
        for ticket, window, values in reads:
            ticket.wait()
            assert torch.equal(window.view(-1, PAGE_BYTES), values[:, None].expand(-1, PAGE_BYTES))
        made.store.settle()
        assert made.store.is_settled(0)
        assert made.store.is_settled(1)
        whole = aligned(2 * PAGES)
        for unit in range(2):
            made.store.read(unit, 0, whole[unit * PAGES * PAGE_BYTES :][: PAGES * PAGE_BYTES]).wait()
        assert torch.equal(whole.view(2, PAGES, PAGE_BYTES)[:, :, 0], expected)


@dataclass
class Recorded:
    """An I/O ticket that is done when somebody waits for it, and tells."""

    name: str
    log: list[str]
    complete: bool = False

    def done(self) -> bool:
        return self.complete

    def wait(self) -> None:
        if not self.complete:
            self.log.append(f"wait {self.name}")
        self.complete = True

    def finished_at(self) -> float:
        return 0.0


@dataclass
class RecordingEngine:
    """Moves nothing; keeps the order in which it was asked and waited for."""

    log: list[str] = field(default_factory=list)
    backend: str = "recording"

    def read(self, file: SwapFile, offset: int, into: torch.Tensor) -> Recorded:
        return self._note(f"read {offset // PAGE_BYTES}+{into.numel() // PAGE_BYTES}")

    def write(self, file: SwapFile, offset: int, source: torch.Tensor) -> Recorded:
        return self._note(f"write {offset // PAGE_BYTES}+{source.numel() // PAGE_BYTES}")

    def close(self) -> None:
        pass

    def _note(self, name: str) -> Recorded:
        self.log.append(name)
        return Recorded(name, self.log)


def recorded(tmp_path: Path) -> tuple[FileStore, RecordingEngine]:
    file = open_file(str(tmp_path / "x"), create=True)
    engine = RecordingEngine()
    extents = {unit: Extent(file, unit * PAGES * PAGE_BYTES, PAGES * PAGE_BYTES) for unit in range(2)}
    return FileStore(engine, extents, Ledger(), None), engine


def test_what_waits_for_what(tmp_path: Path) -> None:
    store, engine = recorded(tmp_path)
    one, two = aligned(1), aligned(2)
    store.write(0, 0, two)
    store.write(0, 3 * PAGE_BYTES, one)
    store.read(1, 0, two)
    assert engine.log == ["write 0+2", "write 3+1", "read 6+2"], "apart: nothing waits"
    store.read(0, PAGE_BYTES, two)
    assert engine.log[3:] == ["wait write 0+2", "read 1+2"], "read after write, for the part that overlaps only"
    store.read(0, 2 * PAGE_BYTES, one)
    assert engine.log[5:] == ["read 2+1"], "reads pass reads"
    store.write(0, 2 * PAGE_BYTES, two)
    assert engine.log[6:] == ["wait write 3+1", "wait read 1+2", "wait read 2+1", "write 2+2"], "write after both"
    store.write(0, 2 * PAGE_BYTES, two)
    assert engine.log[10:] == ["wait write 2+2", "write 2+2"], "write after write"


def test_is_settled_only_without_writes_under_way(tmp_path: Path) -> None:
    store, engine = recorded(tmp_path)
    store.read(0, 0, aligned(1))
    assert store.is_settled(0)
    store.write(0, 0, aligned(1))
    assert not store.is_settled(0)
    assert store.is_settled(1)
    store.settle()
    assert store.is_settled(0)
    assert engine.log[-1] == "wait write 0+1"


def test_finished_transfers_are_forgotten(tmp_path: Path) -> None:
    store, _ = recorded(tmp_path)
    for _ in range(100):
        store.write(0, 0, aligned(1))
        store.read(0, 0, aligned(1)).wait()
    extent = store._extents[0]
    assert len(extent.reads) + len(extent.writes) <= 2


def test_what_each_kind_of_lease_moves(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        made.store.write(0, 0, aligned(PAGES).fill_(7)).wait()
        moved = dict(made.ledger.bytes)
        lease = made.store.lease(0, PAGE_BYTES, 3 * PAGE_BYTES, Access.READ)
        values = lease.wait()
        assert values.numel() == 2 * PAGE_BYTES
        assert bool((values == 7).all())
        values.fill_(9)
        lease.release()
        made.store.settle()
        assert made.ledger.bytes["nvme_read"] == 2 * PAGE_BYTES
        assert made.ledger.bytes["nvme_write"] == moved["nvme_write"], "read leases never write back"

        lease = made.store.lease(0, 0, PAGE_BYTES, Access.WRITE)
        lease.wait().fill_(8)
        lease.release()
        assert made.ledger.bytes["nvme_read"] == 2 * PAGE_BYTES, "write leases never read"
        assert made.ledger.bytes["nvme_write"] == moved["nvme_write"] + PAGE_BYTES

        lease = made.store.lease(0, 0, 2 * PAGE_BYTES, Access.UPDATE)
        lease.wait().add_(1)
        lease.release()
        into = aligned(PAGES)
        made.store.read(0, 0, into).wait()
        assert into.view(PAGES, PAGE_BYTES)[:, 0].tolist() == [9, 8, 7, 7, 7, 7]


def test_an_abandoned_lease_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, slabs=1) as made:
        for access in Access:
            lease = made.store.lease(0, 0, PAGE_BYTES, access)
            lease.wait().fill_(3)
            lease.abandon()
        into = aligned(1)
        made.store.read(0, 0, into).wait()
        assert not into.any()


def test_a_failed_write_is_raised_by_every_later_use_of_its_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, faults=Faults(fail_at=0, errno=28), slabs=1) as made:
        lease = made.store.lease(0, 0, PAGE_BYTES, Access.WRITE)
        lease.wait().fill_(3)
        lease.release()
        for _ in range(2):
            with pytest.raises(StorageError, match=r"x\.swap at byte 0, 4096 bytes: No space") as caught:
                made.store.read(0, 0, aligned(2))
            assert caught.value.errno == 28
        with pytest.raises(StorageError):
            made.store.settle()
        made.store.write(1, 0, aligned(1)).wait()


def test_a_failing_lease_gives_its_slab_back(tmp_path: Path) -> None:
    """The only slab: had it been lost, the next lease would wait for ever."""
    with opened(tmp_path, faults=Faults(fail_at=0), slabs=1) as made:
        made.store.write(0, 0, aligned(1))
        for access in (Access.READ, Access.UPDATE):
            with pytest.raises(StorageError):
                made.store.lease(0, 0, PAGE_BYTES, access)
        lease = made.store.lease(0, 0, PAGE_BYTES, Access.WRITE)
        with pytest.raises(StorageError):
            lease.release()
        lease = made.store.lease(1, 0, PAGE_BYTES, Access.UPDATE)
        lease.release()
        made.store.lease(1, 0, PAGE_BYTES, Access.READ).wait()


def test_a_slab_is_not_lent_again_while_its_write_is_under_way(tmp_path: Path) -> None:
    """One slab, many pages: each lease overwrites what the one before is still writing, unless the pool waits."""
    with opened(tmp_path, faults=Faults(seed=3, delay_seconds=0.003), slabs=1) as made:
        for page in range(PAGES):
            lease = made.store.lease(0, page * PAGE_BYTES, (page + 1) * PAGE_BYTES, Access.WRITE)
            lease.wait().fill_(page + 1)
            lease.release()
        into = aligned(PAGES)
        made.store.read(0, 0, into).wait()
        assert torch.equal(into.view(PAGES, PAGE_BYTES), torch.arange(1, PAGES + 1).view(-1, 1).expand(-1, PAGE_BYTES))


def test_memory_store_lends_views() -> None:
    region = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)
    store = MemoryStore(Tier.HOST, {5: region})
    lease = store.lease(5, PAGE_BYTES, 2 * PAGE_BYTES, Access.UPDATE)
    lease.wait().fill_(4)
    lease.release()
    assert region.view(2, PAGE_BYTES)[:, 0].tolist() == [0, 4]
    assert store.resident(5) is region
    into = torch.empty(10, dtype=torch.uint8)
    store.read(5, PAGE_BYTES - 5, into).wait()
    assert into.tolist() == [0] * 5 + [4] * 5
    store.write(5, 3, into).wait()
    assert region[:14].tolist() == [0] * 8 + [4] * 5 + [0]
    assert store.is_settled(5)
