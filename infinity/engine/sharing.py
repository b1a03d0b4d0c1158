"""Evens out ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from infinity.comm import Group
from infinity.errors import ScheduleError


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
