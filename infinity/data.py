"""Text files as byte tokens, served in a seeded order that a resumed run continues.

A corpus is a list of files, read where they lie, a window at a time: nothing is copied, cached or held in memory.
Whole files are held back for evaluation, chosen by a hash of their bytes, so that a copy of one is held back too.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinity.errors import ConfigError

HELD_BACK = 0.05
"""Share of the files (or of the bytes of a single file) that is never trained on."""

_CHUNK_BYTES = 1 << 20
_EXPECTED = "give a text file, a directory of them or 'stdlib'"


@dataclass(frozen=True)
class Span:
    """A range of bytes of one file."""

    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class Text:
    """Spans laid end to end and addressed as one sequence of bytes."""

    spans: tuple[Span, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(span.length for span in self.spans))

    def __len__(self) -> int:
        return self._ends[-1] if self.spans else 0

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; an error if a file has shrunk or gone since it was listed."""
        pieces = []
        index = bisect_right(self._ends, start)
        while length > 0:
            span = self.spans[index]
            skip = start - (self._ends[index] - span.length)
            take = min(length, span.length - skip)
            try:
                with open(span.path, "rb", buffering=0) as file:
                    piece = os.pread(file.fileno(), take, span.start + skip)
            except OSError as error:
                raise ConfigError(f"run.data: {span.path} cannot be read any more: {error.strerror}") from error
            if len(piece) != take:
                raise ConfigError(f"run.data: {span.path} is shorter than when it was listed; start the run again")
            pieces.append(piece)
            start, length, index = start + take, length - take, index + 1
        return b"".join(pieces)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text to train on, text held back, how often each byte occurs in both.

    ``fingerprint`` names exactly these bytes in this order.
    """

    source: str
    train: Text
    held_back: Text
    byte_counts: npt.NDArray[np.int64]
    fingerprint: str

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Corpus:
        """``"stdlib"`` for the sources of Python's standard library, else a text file or a directory of them."""
        files = _list_stdlib() if source == "stdlib" else _list_text(Path(source))
        counts = np.zeros(256, dtype=np.int64)
        listed = []
        for path in files:
            digest, size, own_counts = _scan(path)
            if size and not own_counts[0]:  # a NUL byte: not text
                listed.append((digest, Span(path, 0, size)))
                counts += own_counts
        if not listed:
            raise ConfigError(f"run.data: no text file in {str(source)!r}; {_EXPECTED}")
        if len(listed) == 1:
            path, size = listed[0][1].path, listed[0][1].length
            kept = size - int(size * HELD_BACK)
            train, held_back = [Span(path, 0, kept)], [Span(path, kept, size - kept)]
        else:
            first = min(digest for digest, _ in listed)  # so that a few files have a held-back one among them
            limit = max(first, int(HELD_BACK * 2**64).to_bytes(8, "big"))
            train = [span for digest, span in listed if digest > limit]
            held_back = [span for digest, span in listed if digest <= limit]
        whole = hashlib.blake2b(b"".join(digest for digest, _ in listed), digest_size=8).hexdigest()
        return cls(str(source), Text(tuple(train)), Text(tuple(held_back)), counts, whole)

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the best guess that ignores what came before: what a model has learnt is below it."""
        share = self.byte_counts[self.byte_counts > 0] / self.byte_counts.sum()
        return float(-(share * np.log(share)).sum())


def _list_stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts))


def _list_text(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"run.data: {str(source)!r} does not exist; {_EXPECTED}")

    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(source).parts)

    return sorted(path for path in source.rglob("*") if path.is_file() and not hidden(path))


def _scan(path: Path) -> tuple[bytes, int, npt.NDArray[np.int64]]:
    """Hash, size and byte counts of one file."""
    digest, size, counts = hashlib.blake2b(digest_size=8), 0, np.zeros(256, dtype=np.int64)
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                counts += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
    except OSError as error:
        raise ConfigError(f"run.data: {path} cannot be read: {error.strerror}") from error
    return digest.digest(), size, counts


class Shuffle:
    """A seeded bijection of ``0 .. size - 1``, computed per index: no shuffled list is held, whatever the size.

    A four-round Feistel network permutes the smallest power of four that holds ``size``; an image outside ``size`` is
    mapped again until it is inside, which takes fewer than four turns on average.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=32).digest()
        self._keys = [int.from_bytes(key[i : i + 8], "big") for i in range(0, 32, 8)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for key in self._keys:
                mixed = (right + 1) * 0x9E3779B97F4A7C15 ^ key
                mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ (mixed >> 32 & mask)
            index = left << self._half | right
            if index < self.size:
                return index


class LoaderState(TypedDict):
    """Where a loader is; ``position`` counts windows of this epoch over all ranks."""

    seed: int
    epoch: int
    position: int
    fingerprint: str
    sequence_length: int


class ByteLoader:
    """Endless batches ``(tokens, targets)``, each int64 ``(batch_size, sequence_length)``; every epoch in a new order.

    The state counts windows over all ranks, so it may be taken up by another number of ranks.
    """

    def __init__(
        self, corpus: Corpus, *, batch_size: int, sequence_length: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.corpus, self.batch_size, self.sequence_length = corpus, batch_size, sequence_length
        self._windows = (len(corpus.train) - 1) // sequence_length
        if self._windows < 1:
            raise ConfigError(
                f"run.data: {len(corpus.train)} bytes of text to train on are fewer than one window of "
                f"run.sequence_length {sequence_length} + 1; give more text or a smaller run.sequence_length"
            )
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._served = 0
        self._order = Shuffle(self._windows, seed, 0)
        self._epoch = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch of this rank."""
        first = self._served + self._rank * self.batch_size
        starts = [self._window(sample) * self.sequence_length for sample in range(first, first + self.batch_size)]
        self._served += self.batch_size * self._world_size
        return _batch(self.corpus.train, starts, self.sequence_length)

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self._windows)
        if epoch != self._epoch:
            self._order, self._epoch = Shuffle(self._windows, self._seed, epoch), epoch
        return self._order[position]

    def state_dict(self) -> LoaderState:
        """What ``load_state_dict`` needs to go on with the very next batch."""
        epoch, position = divmod(self._served, self._windows)
        return LoaderState(
            seed=self._seed,
            epoch=epoch,
            position=position,
            fingerprint=self.corpus.fingerprint,
            sequence_length=self.sequence_length,
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on from ``state``; an error if the text or the window is not the one it was taken with."""
        own = self.state_dict()
        if state["fingerprint"] != own["fingerprint"] or state["sequence_length"] != own["sequence_length"]:
            raise ConfigError(
                f"run.data: the saved order is of text {state['fingerprint']} in windows of {state['sequence_length']} "
                f"bytes, this run has {own['fingerprint']} in {own['sequence_length']}; resume with the same run.data "
                "and run.sequence_length"
            )
        self._seed = state["seed"]
        self._served = state["epoch"] * self._windows + state["position"]
        self._order, self._epoch = Shuffle(self._windows, self._seed, state["epoch"]), state["epoch"]


def evaluation_batches(
    corpus: Corpus, *, batches: int, batch_size: int, sequence_length: int
) -> list[tuple[Tensor, Tensor]]:
    """The same windows of held-back text every time, spread evenly over it."""
    room = len(corpus.held_back) - (sequence_length + 1)
    if room < 0:
        raise ConfigError(
            f"run.data: {len(corpus.held_back)} bytes of held-back text are fewer than one window of "
            f"run.sequence_length {sequence_length} + 1; give more text or a smaller run.sequence_length"
        )
    count = batches * batch_size
    starts = [room * index // max(1, count - 1) for index in range(count)]
    rows = (starts[index : index + batch_size] for index in range(0, count, batch_size))
    return [_batch(corpus.held_back, row, sequence_length) for row in rows]


def _batch(text: Text, starts: list[int], sequence_length: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([np.frombuffer(text.read(start, sequence_length + 1), dtype=np.uint8) for start in starts])
    tokens = torch.from_numpy(rows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
