"""Drives an I/O engine as training does, with the clock running."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import torch

from infinity.memory.host import HostMemory
from infinity.storage.io_engine import IoEngine, IoTicket, open_io_engine
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.swap_file import SwapFile
from infinity.tier import HUGE_PAGE_BYTES, PAGE_BYTES, round_up

PATTERN_BYTES = 4 << 20
FILL_BYTES = 64 << 20
REQUEST_BYTES = 32 << 20
"""A unit's shard or an optimizer sub-group; far smaller requests would measure the interpreter."""

REQUESTS = 4
"""In flight for one file, as an updater has that reads ahead: a caller that is woken late must not idle the disk."""


class Pattern(Enum):
    """What is moved: one whole file per directory one way, or one file each way at once, as an optimizer step does."""

    READ = "read"
    WRITE = "write"
    MIX = "mix"


@dataclass(frozen=True)
class Setting:
    """How an engine is opened."""

    engine: str = "auto"
    block_size: int = 1 << 20
    queue_depth: int = 32
    threads: int = 4

    def open(self, memory: Sequence[torch.Tensor] = ()) -> IoEngine:
        """An engine whose requests will use ``memory``."""
        engine = open_io_engine(
            self.engine, queue_depth=self.queue_depth, block_size=self.block_size, threads=self.threads
        )
        engine.register(memory)
        return engine

    @property
    def window_bytes(self) -> int:
        """Memory for requests that fill the queue twice, none smaller than those that training makes."""
        return max(2 * self.queue_depth * self.block_size, REQUESTS * REQUEST_BYTES)


@dataclass(frozen=True)
class Sample:
    """One timed run; ``cpu_seconds`` are those of the whole process, kernel included."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """GB/s (10^9 bytes), both ways added up."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        """Seconds of CPU time for 10^9 bytes."""
        return self.cpu_seconds / self.nbytes * 1e9


class Window:
    """Memory on huge pages that blocks travel through. It holds random bytes, which no disk can compress."""

    def __init__(self, nbytes: int) -> None:
        self._memory = HostMemory(nbytes)
        self.huge_pages = self._memory.huge_pages
        self.bytes = fill(self._memory.bytes)

    def free(self) -> None:
        """Gives the memory back."""
        self.bytes = self.bytes[:0]
        self._memory.free()


def fill(memory: torch.Tensor) -> torch.Tensor:
    """Fills ``memory`` (uint8) with a repeated piece of random bytes."""
    pattern = torch.randint(256, (PATTERN_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for start in range(0, memory.numel(), PATTERN_BYTES):
        piece = memory[start : start + PATTERN_BYTES]
        piece.copy_(pattern[: piece.numel()])
    return memory


class TrialFiles(AbstractContextManager["TrialFiles"]):
    """Two files of ``nbytes`` in each directory, one to be read, one to be written, removed at the end.

    Both are written once here: the first write to a block that was only reserved is slower than all later ones.
    """

    def __init__(self, directories: Sequence[str], nbytes: int) -> None:
        self.nbytes = nbytes
        self.sources: list[SwapFile] = []
        self.targets: list[SwapFile] = []
        self._directories: list[SwapDirectory] = []
        try:
            for directory in directories:
                owned = SwapDirectory(directory, rank=0, nbytes=2 * nbytes)
                self._directories.append(owned)
                self.sources.append(owned.create("source", nbytes))
                self.targets.append(owned.create("target", nbytes))
            start = time.perf_counter()
            self._fill()
            self.fill_rate = 2 * nbytes * len(directories) / (time.perf_counter() - start)
            """Bytes per second of the first write, which also had to turn reserved blocks into written ones."""
        except BaseException:
            self._remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def direct(self) -> bool:
        """Whether every file bypasses the page cache."""
        return all(file.direct for file in (*self.sources, *self.targets))

    def chosen(self, pattern: Pattern) -> list[tuple[SwapFile, bool]]:
        """The files that ``pattern`` touches, each with whether it is written."""
        read = [] if pattern is Pattern.WRITE else [(file, False) for file in self.sources]
        written = [] if pattern is Pattern.READ else [(file, True) for file in self.targets]
        return read + written

    def _fill(self) -> None:
        window = Window(min(FILL_BYTES, round_up(self.nbytes, HUGE_PAGE_BYTES)))
        engine = Setting(queue_depth=8).open()
        try:
            for file in (*self.sources, *self.targets):
                stream(engine, file, write=True, nbytes=self.nbytes, window=window.bytes)
        finally:
            engine.close()
            window.free()

    def _remove(self) -> None:
        for directory in self._directories:
            directory.remove()


def measure(
    engine: IoEngine, files: TrialFiles, pattern: Pattern, window: torch.Tensor, *, nbytes: int | None = None
) -> Sample:
    """Moves each file that ``pattern`` names once, or its first ``nbytes``, through equal parts of ``window``.

    All files at the same time.
    """
    moved = files.nbytes if nbytes is None else nbytes
    chosen = files.chosen(pattern)
    share = round_down(window.numel() // len(chosen))
    parts = [window[turn * share : (turn + 1) * share] for turn in range(len(chosen))]

    def one(turn: int) -> None:
        file, write = chosen[turn]
        stream(engine, file, write=write, nbytes=moved, window=parts[turn])

    with ThreadPoolExecutor(len(chosen), "traffic") as pool:
        cpu, start = cpu_seconds(), time.perf_counter()
        if len(chosen) == 1:
            one(0)
        else:
            list(pool.map(one, range(len(chosen))))
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return Sample(len(chosen) * moved, seconds, cpu)


def stream(engine: IoEngine, file: SwapFile, *, write: bool, nbytes: int, window: torch.Tensor) -> None:
    """Moves the first ``nbytes`` of ``file`` in requests of equal parts of ``window``, REQUESTS of them in flight."""
    piece = round_down(window.numel() // REQUESTS)
    move = engine.write if write else engine.read
    pending: deque[IoTicket] = deque()
    for turn, offset in enumerate(range(0, nbytes, piece)):
        if len(pending) == REQUESTS:
            pending.popleft().wait()
        part = window[turn % REQUESTS * piece :][:piece]
        pending.append(move(file, offset, part[: nbytes - offset]))
    while pending:
        pending.popleft().wait()


def round_down(nbytes: int) -> int:
    """Whole huge pages, or whole pages where it is too little for one."""
    unit = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    return nbytes // unit * unit


def cpu_seconds() -> float:
    """User time plus system time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
