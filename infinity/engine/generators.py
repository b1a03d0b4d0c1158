"""Random number generators of a rank: what a checkpoint keeps of them, how another number of ranks goes on."""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

from infinity.checkpoint.read import Checkpoint
from infinity.comm import Group
from infinity.device.cpu import CpuDevice

log = logging.getLogger("infinity")


def generators(device: CpuDevice) -> dict[str, Any]:
    """The states of every generator that a model may draw from on this rank."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "device": device.rng_state()}


def saved_generators(checkpoint: Checkpoint, group: Group) -> dict[str, Any] | int:
    """The states that this rank had; for a rank that the checkpoint does not know a seed that follows from it.

    So a resume by another number of ranks draws the same numbers every time, though not those that the run would have
    drawn without it: the same micro-batch may be computed by another rank.
    """
    saved: dict[str, Any] | None = checkpoint.rank_state(group.rank)
    if saved is not None:
        return saved
    first = checkpoint.rank_state(0)["device"].numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(first + f"rank {group.rank}".encode(), digest_size=7).digest(), "little")


def restore_generators(device: CpuDevice, saved: dict[str, Any] | int) -> None:
    """Puts back what ``saved_generators`` found."""
    if isinstance(saved, int):
        random.seed(saved)
        np.random.seed(saved % 2**32)
        torch.manual_seed(saved)
        return
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    device.set_rng_state(saved["device"])


def tell_of_other_ranks(checkpoint: Checkpoint, group: Group) -> None:
    """Says once what another number of ranks changes."""
    before = checkpoint.manifest.world_size
    if group.world_size != before and not group.rank:
        log.warning(
            "%s was saved by %d %s, this run has %d: what is drawn at random (dropout) is the same in each such "
            "resume, though not what the run would have drawn without it",
            checkpoint.path,
            before,
            "rank" if before == 1 else "ranks",
            group.world_size,
        )
