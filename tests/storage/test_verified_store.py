"""With ``infinity.verify`` no byte that a disk lost, mixed up or changed is computed with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity
from infinity.obs.ledger import Ledger
from infinity.storage.io_engine import IoEngine, open_io_engine
from infinity.storage.store import Extent
from infinity.storage.swap_file import open_file
from infinity.storage.verified_store import VerifiedFileStore
from infinity.tier import PAGE_BYTES
from tests.checkpoint.helpers import configure, engine_of, everything, same, train

PAGES = 8


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    engine = open_io_engine("threads", queue_depth=4, block_size=1 << 20, threads=1)
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path: Path, engine: IoEngine) -> VerifiedFileStore:
    file = open_file(str(tmp_path / "x.swap"), create=True)
    os.posix_fallocate(file.fileno(), 0, PAGES * PAGE_BYTES)
    extent = Extent(file, 0, PAGES * PAGE_BYTES)
    return VerifiedFileStore(engine, {0: extent}, Ledger(), None, {0: 'exp_avg of unit "a" (float32)'})


def pages(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).repeat_interleave(PAGE_BYTES)


def read(store: VerifiedFileStore, start: int = 0, count: int = PAGES) -> torch.Tensor:
    into = torch.empty(count * PAGE_BYTES, dtype=torch.uint8)
    ticket = store.read(0, start * PAGE_BYTES, into)
    ticket.wait()
    ticket.wait()
    return into


def plant(tmp_path: Path, page: int, data: torch.Tensor) -> None:
    with open(tmp_path / "x.swap", "r+b") as file:
        os.pwrite(file.fileno(), data.numpy().tobytes(), page * PAGE_BYTES)


def test_what_was_written_is_read(store: VerifiedFileStore) -> None:
    assert not read(store).any()  # reserved space is zeros
    store.write(0, 0, pages(1, 2, 3, 4, 5, 6, 7, 8)).wait()
    store.write(0, 2 * PAGE_BYTES, pages(9, 9)).wait()
    assert read(store).view(PAGES, -1)[:, 0].tolist() == [1, 2, 9, 9, 5, 6, 7, 8]
    assert read(store, 3, 2).view(2, -1)[:, 0].tolist() == [9, 5]


@pytest.mark.parametrize(
    ("page", "planted", "expected"),
    [
        (0, pages(*range(11, 19)), r"stale: it holds generation 1, the last write of it was lost"),
        (3, pages(14), r"torn: 1 of 8 pages are of the generation before"),
        (5, pages(77), r"damaged: 1 of 8 pages hold bytes that were never written there"),
    ],
    ids=["stale", "torn", "damaged"],
)
def test_what_is_wrong_is_told_apart(
    tmp_path: Path, store: VerifiedFileStore, page: int, planted: torch.Tensor, expected: str
) -> None:
    store.write(0, 0, pages(*range(11, 19))).wait()
    store.write(0, 0, pages(*range(1, 9))).wait()
    plant(tmp_path, page, planted)
    with pytest.raises(infinity.StorageError) as caught:
        read(store)
    assert caught.match(r'exp_avg of unit "a" \(float32\), generation 2, is ' + expected)
    assert caught.value.offset == page * PAGE_BYTES
    assert caught.value.path == str(tmp_path / "x.swap")
    store.write(0, 0, pages(*range(1, 9))).wait()
    assert read(store)[0] == 1


def test_training_is_the_same(tmp_path: Path) -> None:
    found = []
    for verify in (False, True):
        config = configure(tmp_path / "swap")
        config["infinity"] |= {"verify": verify, "slabs": 1}
        with engine_of(config) as engine:
            found.append((train(engine, 0, 4), everything(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1]) == []


@pytest.mark.parametrize("kind", ["param", "master", "exp_avg", "exp_avg_sq"])
def test_one_wrong_bit_ends_training_by_name(tmp_path: Path, kind: str) -> None:
    config = configure(tmp_path / "swap")
    config["infinity"] |= {"verify": True, "slabs": 1, "prefetch_units": 0}
    with engine_of(config) as engine:
        train(engine, 0, 2)
        engine.settle()
        (path,) = (tmp_path / "swap").rglob(f"{kind}.swap")
        with open(path, "r+b") as file:
            middle = os.fstat(file.fileno()).st_size // 2
            (byte,) = os.pread(file.fileno(), 1, middle)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), middle)
        with pytest.raises(infinity.StorageError, match=f'{kind} of unit "blocks.*damaged: 1 of') as caught:
            train(engine, 2, 4)
        assert caught.value.path == str(path)
        with pytest.raises(infinity.StorageError, match="damaged"):  # nothing is computed any more
            train(engine, 4, 5)
