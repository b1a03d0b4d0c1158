"""The ranks that train one model together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from infinity.comm.lane import CommLane
from infinity.comm.transport import Transport, launched, ranks_expected
from infinity.device.lane import DONE, Ticket
from infinity.obs.ledger import Ledger


class Group:
    """This process among its peers. Alone every exchange is the identity, and nothing is ever sent.

    All ranks call the same methods with the same ``name`` in the same order; a rank that does not ends the others with
    an error that tells the names. What is called here waits until it is done.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.local_rank = 0
        self.local_world_size = 1

    def talk(self, name: str, words: bytes = b"") -> list[bytes]:
        """Gives every rank the words of all, in the order of the ranks; any length, also different ones."""
        return [words]

    def barrier(self, name: str) -> None:
        """Returns when every rank has come here."""

    def broadcast(self, name: str, tensor: torch.Tensor, source: int) -> None:
        """Overwrites ``tensor`` (contiguous, same shape and dtype on all ranks) with that of ``source``."""

    def pieces(self, name: str, pieces: Sequence[torch.Tensor]) -> None:
        """Fills in every piece but this rank's own, ``pieces[rank]``, from the rank that has it; sizes may differ."""

    def gather(self, unit: int, unit_name: str, flat: torch.Tensor, after: Ticket, *, backward: bool = False) -> Ticket:
        """Fills ``flat`` (uint8, ``world_size`` equal slices), of which slice ``rank`` is there after ``after``."""
        return after

    def reduce(self, unit: int, unit_name: str, flags: Sequence[bytes], flats: Sequence[torch.Tensor]) -> Ticket:
        """Takes slice k of each of ``flats`` (uint8, ``world_size`` equal slices) to the sink of rank k.

        There they come in the order of the ranks, those of one rank in the order given, each with its ``flags``.
        """
        return DONE

    def serve(
        self,
        shard: Callable[[int], torch.Tensor] | None,
        sink: Callable[[int, int, bytes, torch.Tensor], None],
        staging: torch.Tensor,
    ) -> None:
        """What the lane works with: ``sink`` takes (unit, rank, flags, values) of one rank's gradients of this rank's
        slice, of which ``staging`` holds those of all other ranks of any unit; ``shard`` reads a unit's own slice,
        where units are gathered so late that a rank may have to help out others."""

    def trace(self) -> bytes:
        """Says in which order this rank asked for units since the last call; ranks that did the same say the same."""
        return b""

    def begin_step(self, step: int) -> None:
        """Names the step in messages from now on."""

    def close(self) -> None:
        """Takes leave of the others."""


class RankLabel(logging.Filter):
    """Puts the rank in front of every message of this package's logger."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"[rank {self._rank}] {record.msg}"
        return True


class Ranks(Group):
    """Several processes, whose exchanges one lane issues in the order of the program."""

    def __init__(self, timeout_seconds: float, ledger: Ledger, delay: Callable[[], None] | None) -> None:
        transport = Transport(timeout_seconds)
        self.rank, self.world_size = transport.rank, transport.world_size
        ranks = self.local_world_size = launched("LOCAL_WORLD_SIZE", self.world_size, 1, self.world_size)
        self.local_rank = launched("LOCAL_RANK", self.rank % ranks, 0, ranks - 1)
        self.lane = CommLane(transport, timeout_seconds, ledger, delay)
        self.talk = self.lane.talk  # type: ignore[method-assign]
        self.broadcast = self.lane.broadcast  # type: ignore[method-assign]
        self.pieces = self.lane.pieces  # type: ignore[method-assign]
        self.gather = self.lane.gather  # type: ignore[method-assign]
        self.reduce = self.lane.reduce  # type: ignore[method-assign]
        self.serve = self.lane.serve  # type: ignore[method-assign]
        self.trace = self.lane.trace  # type: ignore[method-assign]
        self._label = RankLabel(self.rank)
        logging.getLogger("infinity").addFilter(self._label)

    def barrier(self, name: str) -> None:
        self.talk(name)

    def close(self) -> None:
        logging.getLogger("infinity").removeFilter(self._label)
        self.lane.close()

    def begin_step(self, step: int) -> None:
        self.lane.step = step


def open_group(
    timeout_seconds: float = 600.0, ledger: Ledger | None = None, delay: Callable[[], None] | None = None
) -> Group:
    """The group of torch.distributed if there is one, else the one that the launcher's environment describes."""
    return Group() if ranks_expected() == 1 else Ranks(timeout_seconds, ledger or Ledger(), delay)
