"""The three batch sizes that determine each other."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """In samples; ``train_batch_size`` = micro batch x accumulation x ranks."""

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def resolve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Derives what is None. A train batch alone is not accumulated; a missing micro batch is otherwise 1."""
    if world_size < 1:
        raise ConfigError(f"The number of ranks is {world_size}, but it must be at least 1.")
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _share(train, accumulation * world_size, f"gradient_accumulation_steps {accumulation}", world_size)
    elif accumulation is None:
        accumulation = _share(train, micro * world_size, f"train_micro_batch_size_per_gpu {micro}", world_size)
    elif train != micro * accumulation * world_size:
        raise ConfigError(
            f"train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{accumulation} x {world_size} ranks is {micro * accumulation * world_size}; drop one of the three keys "
            "to have it derived."
        )
    return BatchSizes(train, micro, accumulation)


def _share(train: int, parts: int, given: str, world_size: int) -> int:
    if train % parts:
        below, above = train // parts * parts, (train // parts + 1) * parts
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"train_batch_size is {train}, but it must be a multiple of {parts} ({given} x {world_size} ranks), "
            f"such as {nearest}."
        )
    return train // parts
