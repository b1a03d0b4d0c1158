"""Engines survive, or report, whatever goes wrong with single blocks."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.errors import StorageError
from infinity.memory.host import HostMemory
from infinity.storage.io_engine import BACKENDS, Faults, open_io_engine, probe
from infinity.storage.swap_file import SwapFile, open_file
from infinity.tier import PAGE_BYTES

WORKING = [name for name in BACKENDS if probe(name) is None]
REORDERING = [name for name in WORKING if name in ("io_uring", "aio", "threads")]

BLOCK = 8 * PAGE_BYTES

every_backend = pytest.mark.parametrize("backend", WORKING)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    opened = open_file(str(tmp_path / "a.swap"), create=True)
    yield opened
    opened.close()


def random_bytes(count: int) -> torch.Tensor:
    memory = HostMemory(count).bytes
    memory.copy_(torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)))
    return memory


def round_trip(backend: str, file: SwapFile, faults: Faults, length: int, offset: int = PAGE_BYTES) -> None:
    source, into = random_bytes(length), HostMemory(length).bytes
    engine = open_io_engine(backend, queue_depth=6, block_size=BLOCK, threads=3, faults=faults)
    engine.write(file, offset, source).wait()
    engine.read(file, offset, into).wait()
    engine.close()
    assert torch.equal(source, into)
    assert Path(file.path).read_bytes()[offset : offset + length] == bytes(source.numpy())


@every_backend
@pytest.mark.parametrize("short", [0.4, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_short_transfers_are_continued(backend: str, file: SwapFile, short: float, seed: int) -> None:
    round_trip(backend, file, Faults(seed=seed, short=short), 9 * BLOCK + 3 * PAGE_BYTES + 17)
    round_trip(backend, file, Faults(seed=seed, short=short), 3 * BLOCK, offset=100)


@every_backend
def test_a_transfer_that_says_again_is_tried_again(backend: str, file: SwapFile) -> None:
    round_trip(backend, file, Faults(seed=3, fail=0.5, errno=errno.EAGAIN), 12 * BLOCK)
    with pytest.raises(StorageError) as caught:  # but not for ever
        round_trip(backend, file, Faults(fail=1.0, errno=errno.EAGAIN), BLOCK)
    assert caught.value.errno == errno.EAGAIN


@every_backend
def test_delays_change_nothing(backend: str, file: SwapFile) -> None:
    round_trip(backend, file, Faults(seed=1, short=0.3, delay_seconds=0.003), 12 * BLOCK + 5)


@pytest.mark.parametrize("backend", REORDERING)
@pytest.mark.parametrize("seed", range(4))
def test_reordered_completions_change_nothing(backend: str, file: SwapFile, seed: int) -> None:
    round_trip(backend, file, Faults(seed=seed, reorder=True), 20 * BLOCK + 5)
    round_trip(backend, file, Faults(seed=seed, reorder=True, short=0.5, delay_seconds=0.002), 20 * BLOCK + 5)


@pytest.mark.parametrize("backend", [name for name in WORKING if name not in REORDERING])
def test_an_engine_that_cannot_reorder_says_so(backend: str) -> None:
    with pytest.raises(StorageError, match="reorder"):
        open_io_engine(backend, faults=Faults(reorder=True))


@every_backend
@pytest.mark.parametrize("block", [0, 3, 7])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_block_is_reported_with_its_place(backend: str, file: SwapFile, block: int, number: int) -> None:
    source, into = random_bytes(8 * BLOCK), HostMemory(8 * BLOCK).bytes
    faults = Faults(fail_at=8 + block, errno=number)  # of the second request
    engine = open_io_engine(backend, queue_depth=4, block_size=BLOCK, threads=3, faults=faults)
    engine.write(file, PAGE_BYTES, source).wait()
    ticket = engine.read(file, PAGE_BYTES, into)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        error = caught.value
        assert (error.path, error.errno) == (file.path, number)
        assert (error.offset, error.length) == (PAGE_BYTES + block * BLOCK, BLOCK)
    assert ticket.done()
    engine.read(file, PAGE_BYTES, into).wait()  # the engine goes on
    assert torch.equal(source, into)
    engine.close()


@every_backend
def test_nothing_is_written_into_a_buffer_after_its_wait_raised(backend: str, file: SwapFile) -> None:
    engine = open_io_engine(backend, block_size=BLOCK)
    engine.write(file, 0, random_bytes(32 * BLOCK)).wait()
    engine.close()
    faults = Faults(fail=0.3, delay_seconds=0.001)
    engine = open_io_engine(backend, queue_depth=8, block_size=BLOCK, threads=4, faults=faults)
    buffers = []
    for _ in range(8):
        into = HostMemory(32 * BLOCK).bytes
        with pytest.raises(StorageError):
            engine.read(file, 0, into).wait()
        buffers.append(into.fill_(90))
    engine.close()
    assert all((buffer == 90).all() for buffer in buffers)


def failures(backend: str, file: SwapFile, faults: Faults) -> list[int | None]:
    source = random_bytes(32 * BLOCK)
    engine = open_io_engine(backend, queue_depth=5, block_size=BLOCK, threads=3, faults=faults)
    found: list[int | None] = []
    for ticket in [engine.write(file, at * BLOCK, source[at * BLOCK :][: 2 * BLOCK]) for at in range(0, 32, 2)]:
        try:
            ticket.wait()
            found.append(None)
        except StorageError as error:
            found.append(error.offset)
    engine.close()
    return found


def test_faults_depend_on_the_seed_only(file: SwapFile) -> None:
    expected = failures("python", file, Faults(seed=5, fail=0.2))
    assert 0 < sum(at is None for at in expected) < len(expected)
    assert failures("python", file, Faults(seed=6, fail=0.2)) != expected
    for backend in WORKING:
        assert failures(backend, file, Faults(seed=5, fail=0.2)) == expected
        assert failures(backend, file, Faults(seed=5, fail=0.2, delay_seconds=0.002)) == expected
