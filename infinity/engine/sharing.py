"""Shares the batches of training data among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from infinity.comm import Group
from infinity.errors import ScheduleError


class SharedBatches(Sampler[list[int]]):
    """Indices of this rank's batches: of the shuffled data rank r of N takes batches r, r + N, r + 2N, ...

    One rank that accumulates N times as often takes the same batches in the same order, as all ranks shuffle with the
    random numbers of rank 0. What is left after the last round of full batches is left out, as it would not be enough
    for every rank.
    """

    def __init__(self, data: Sized, batch_size: int, group: Group) -> None:
        self._data = data
        self._batch_size = batch_size
        self._group = group

    def __len__(self) -> int:
        return len(self._data) // (self._batch_size * self._group.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())
        seed = int.from_bytes(
            self._group.talk("shuffling the data", drawn.to_bytes(8, "little", signed=True))[0], "little", signed=True
        )
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(seed)).tolist()
        for turn in range(len(self)):
            start = (turn * self._group.world_size + self._group.rank) * self._batch_size
            yield order[start : start + self._batch_size]


def padded(group: Group, batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Every batch with the weight 1.0; then, while other ranks still have some, the last one again with 0.0.

    All ranks iterate together. A loss times its weight has the gradient it should have.
    """
    own = iter(batches)
    last: Any = None
    seen = False
    while True:
        batch = next(own, _END)
        if not any(map(any, group.talk("who has another batch", bytes([batch is not _END])))):
            return
        if batch is not _END:
            last, seen = batch, True
            yield batch, 1.0
        elif seen:
            yield last, 0.0
        else:
            raise ScheduleError(
                f"rank {group.rank} has no batch at all, so there is nothing to pad with while others train; give "
                "every rank at least one"
            )


_END = object()
