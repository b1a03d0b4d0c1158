"""The errors a user can meet, each saying what, where, what was given, what was expected, what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence


class InfinityError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(InfinityError):
    """A config that cannot be honoured; ``problems`` holds one line per fault, all of them at once."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class CapacityError(InfinityError):
    """A plan that does not fit a tier's budget or the machine, found before anything was allocated.

    ``missing`` is how many bytes it is too large, over all tiers.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        self.missing = missing
        super().__init__(message)


class StorageError(InfinityError):
    """An I/O request or a swap directory that failed; carries path, offset, length and errno where known."""

    def __init__(
        self,
        what: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        errno: int | None = None,
        action: str | None = None,
    ) -> None:
        self.path, self.offset, self.length, self.errno = path, offset, length, errno
        where = "" if path is None else f" {path}"
        if offset is not None:
            where += f" at byte {offset}"
        if length is not None:
            where += f", {length} bytes"
        why = "" if errno is None else f": {os.strerror(errno)} (errno {errno})"
        then = "" if action is None else f". {action}"
        super().__init__(f"{what}{where}{why}{then}")


class WearError(StorageError):
    """More was written to NVMe in a day than the config allows; the step that found out was made."""


class CheckpointError(InfinityError):
    """A checkpoint that is missing, incomplete, damaged or does not match the model."""


class OffloadedError(InfinityError, RuntimeError):
    """Arithmetic on a parameter whose values are on another tier at this moment."""


class NonFiniteError(InfinityError, ArithmeticError):
    """Too many steps in a row had a non-finite gradient; names the first parameter seen."""


class ScheduleError(InfinityError, RuntimeError):
    """Forward, backward and step were called in an order that cannot give a right result."""


class RankError(InfinityError, RuntimeError):
    """A rank that died, raised, left or went another way than the rest; ``rank`` is the one to look at."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)
