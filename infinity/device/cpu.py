"""The CPU as the device that computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from infinity.memory.host import HostMemory


class CpuDevice:
    """A device whose memory is a budget of RAM, so host memory is addressable by it."""

    is_host = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def allocate(self, nbytes: int) -> HostMemory:
        """Device memory of exactly ``nbytes``, zero."""
        return HostMemory(nbytes)

    def rng_state(self) -> Any:
        """The state of every random number generator a forward may draw from."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """Puts the generators back to ``state``."""
        torch.set_rng_state(state)

    def same_rng_state(self, state: Any) -> bool:
        """Whether nothing was drawn since ``state``."""
        return torch.equal(torch.get_rng_state(), state)

    def fingerprint(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """A number for each tensor that any other values would change: the sum of its bits as integers."""
        return [_sum_of_bits(tensor) for tensor in tensors]

    def autocast_state(self) -> torch.dtype | None:
        """The dtype autocast is active with, None if it is off."""
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def autocast(self, state: torch.dtype | None) -> AbstractContextManager[Any]:
        """Computes under the autocast that ``autocast_state`` saw."""
        if state is None:
            return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
        return torch.autocast("cpu", dtype=state, cache_enabled=False)

    @contextmanager
    def uncached_autocast(self) -> Iterator[None]:
        """Keeps autocast from holding on to casts of weights that are only lent."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    return int(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())
