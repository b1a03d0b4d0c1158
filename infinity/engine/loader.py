"""Serves training data in batches, shared among the ranks, from the place where a checkpoint was saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infinity.comm import Group

log = logging.getLogger("infinity")


@dataclass
class Pass:
    """One pass over the data, in the order that ``seed`` gives; ``taken`` samples are behind all ranks together."""

    number: int
    seed: int
    taken: int
    order: list[int] = field(repr=False)


class SharedSamples(Sampler[int]):
    """Indices of this rank's samples: of the shuffled data rank r of N takes batches r, r + N, r + 2N, ...

    One rank that accumulates N times as often takes the same batches in the same order, as all ranks shuffle with the
    random numbers of rank 0. What is left after the last round of full batches is left out where it would not be
    enough for every rank.
    """

    def __init__(self, data: Sized, batch_size: int, group: Group) -> None:
        self._data, self._batch_size, self._group = data, batch_size, group
        self._now: Pass | None = None
        self._loaded: Pass | None = None

    def __len__(self) -> int:
        """Of a whole pass."""
        return self._count(len(self._data))

    def __iter__(self) -> Iterator[int]:
        now = self._begin()
        while True:
            if self._loaded is not None and now is self._now:  # a checkpoint was loaded inside the loop
                if not self.resumes:
                    return
                now = self._begin()
            rest, ranks = len(self._data) - now.taken, self._group.world_size
            size = min(self._batch_size, self._count(rest))
            if not size:
                return
            first = now.taken + self._group.rank * size
            now.taken += size * ranks
            yield from now.order[first : first + size]

    @property
    def resumes(self) -> bool:
        """Whether the next pass is the rest of one that a checkpoint was saved in."""
        return self._loaded is not None and self._count(len(self._data) - self._loaded.taken) > 0

    @property
    def passes(self) -> int:
        """How many passes are over."""
        last = self._loaded or self._now
        return 0 if last is None else last.number + (not self._count(len(self._data) - last.taken))

    def state_dict(self) -> dict[str, int]:
        """The place of the next sample; the same on every rank. Empty before the first pass."""
        last = self._loaded or self._now
        if last is None:
            return {}
        return {"pass": last.number, "seed": last.seed, "taken": last.taken, "samples": len(self._data)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass, also one that is under way, goes on from there, if the data are as many as they were."""
        self._loaded = None
        if not state:
            self._now = None
        elif state["samples"] != len(self._data):
            log.warning(
                "the checkpoint was saved on a pass over %d samples but training_data has %d: a new pass begins",
                state["samples"],
                len(self._data),
            )
        else:
            self._loaded = Pass(state["pass"], state["seed"], state["taken"], self._shuffled(state["seed"]))

    def _begin(self) -> Pass:
        if self.resumes:
            self._now = self._loaded
        else:
            drawn = int(torch.empty((), dtype=torch.int64).random_().item())
            words = self._group.talk("shuffling the data", drawn.to_bytes(8, "little", signed=True))
            seed = int.from_bytes(words[0], "little", signed=True)
            self._now = Pass(self.passes, seed, 0, self._shuffled(seed))
        self._loaded = None
        assert self._now is not None
        return self._now

    def _count(self, samples: int) -> int:
        """How many of so many samples this rank serves."""
        ranks = self._group.world_size
        return max(0, samples) if ranks == 1 else max(0, samples) // (self._batch_size * ranks) * self._batch_size

    def _shuffled(self, seed: int) -> list[int]:
        order: list[int] = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(seed)).tolist()
        return order


class TrainingLoader(DataLoader[Any]):
    """Batches of this rank, whose place in the data a checkpoint keeps; ``passes`` says how many passes are over.

    After ``engine.load_checkpoint`` the next loop over it serves what is left of the pass, beginning with the batch
    that would have come next.
    """

    def __init__(self, data: Any, batch_size: int, collate_fn: Callable[..., Any] | None, group: Group) -> None:
        self.samples = None if isinstance(data, IterableDataset) else SharedSamples(data, batch_size, group)
        super().__init__(data, batch_size=batch_size, sampler=self.samples, collate_fn=collate_fn)

    def __iter__(self) -> _BaseDataLoaderIter:
        if self.samples is None or not self.samples.resumes:
            return super().__iter__()
        # torch draws a number for workers at the beginning of a pass, which was drawn already when this one began
        before = torch.get_rng_state()
        try:
            return super().__iter__()
        finally:
            torch.set_rng_state(before)

    @property
    def passes(self) -> int:
        """How many passes are over: ``for _ in range(loader.passes, wanted): for batch in loader: ...``."""
        return 0 if self.samples is None else self.samples.passes

    def state_dict(self) -> dict[str, int]:
        """The place of the next batch; empty where there is none to be kept."""
        return {} if self.samples is None else self.samples.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from ``state``, an empty one being the very beginning; logged where that cannot be."""
        if self.samples is None:
            log.warning(
                "training_data is an IterableDataset, whose place a checkpoint cannot keep: it is iterated from its "
                "beginning; keep its own state in client_state"
            )
        else:
            self.samples.load_state_dict(state)
