"""Which completions a test wants spoiled."""

from __future__ import annotations

import errno as errors
from dataclasses import dataclass
from enum import IntEnum


class Draw(IntEnum):
    """What a number is drawn for; the values are those of native/aio, so that every backend draws alike."""

    SHORT = 1
    CUT = 2
    FAIL = 3
    DELAY = 4


@dataclass(frozen=True)
class Faults:
    """Faults to inject where blocks complete. Each draw depends only on ``seed``, the block's index, its attempt."""

    seed: int = 0
    short: float = 0.0
    """Probability that a transfer moves only some whole pages, so that it must be continued."""
    fail: float = 0.0
    """Probability that a transfer fails with ``errno``."""
    errno: int = errors.EIO
    delay_seconds: float = 0.0
    """Each completion comes up to this much later."""
    reorder: bool = False
    """Completions are held back, then come in another order."""
    fail_at: int | None = None
    """Index, in order of submission, of the one block that fails."""

    def draw(self, index: int, attempt: int, kind: Draw) -> int:
        """64 random bits."""
        return _mix(self.seed ^ _mix(index ^ _mix(attempt ^ _mix(kind))))

    def chance(self, index: int, attempt: int, kind: Draw) -> float:
        """A number in [0, 1)."""
        return (self.draw(index, attempt, kind) >> 11) * 2.0**-53

    def fails(self, index: int, attempt: int) -> bool:
        return index == self.fail_at or self.chance(index, attempt, Draw.FAIL) < self.fail


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
