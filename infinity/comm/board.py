"""A board beside the collectives on which a rank writes what ended it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infinity.device.lane import Lane
from infinity.errors import InfinityError, RankError

TICK_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""How long to wait for the word of a rank whose connection broke: its message is worth more than the broken pipe's."""


@dataclass(frozen=True)
class Position:
    """How many collectives a rank has begun, what the last one is, since when it waits (None: it does not)."""

    count: int = 0
    doing: str = "start"
    since: float | None = None


class StoreSilentError(Exception):
    """The rendezvous store has not answered."""


class Board:
    """Words of all ranks in the rendezvous store; the first failure written is the one that everybody reports.

    The store has no deadline of its own: if its process hangs, or its machine cannot be reached, so does whoever asks.
    So a thread asks, which is left behind when it has not answered for ``timeout_seconds``.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout_seconds
        self._lane = Lane("board")
        self._silent = False

    def fail(self, rank: int, message: str) -> RankError:
        """Writes that ``rank`` is to blame; returns the error to raise, which is the first one written."""
        try:
            word = self._ask(lambda: self._store.compare_set("failed", "", f"{rank}|{message}").decode())
        except Exception:  # the store's own process is gone: nobody else will read it either
            return RankError(message, rank)
        return _error(word)

    def failure(self) -> RankError | None:
        """The first failure, if there is one."""
        word = self._ask(lambda: self._store.get("failed").decode() if self._store.check(["failed"]) else "")
        return _error(word) if word else None

    def leave(self, position: Position) -> None:
        """Writes that this rank takes no part any more, on purpose."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", position.doing))

    def left(self) -> dict[int, str]:
        """Ranks that took their leave, with the last thing they did."""
        return self._read("left")

    def say(self, position: Position) -> None:
        """Writes where this rank is."""
        self._ask(lambda: self._store.set(f"at/{self._rank}", f"{position.count}|{position.doing}"))

    def positions(self) -> dict[int, tuple[int, str]]:
        """Where every rank is that has said so."""
        found = {}
        for rank, word in self._read("at").items():
            count, _, doing = word.partition("|")
            found[rank] = int(count), doing
        return found

    def _read(self, what: str) -> dict[int, str]:
        keys = {rank: f"{what}/{rank}" for rank in range(self._world_size)}
        return self._ask(  # type: ignore[no-any-return]
            lambda: {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        )

    def acknowledge(self) -> None:
        """Writes that this rank has read the failure."""
        self._ask(lambda: self._store.set(f"knows/{self._rank}", "."))

    def linger(self, failed: int | None) -> None:
        """Gives the others a while to read the failure: rank 0 is the one that the store may end with."""
        others = set(range(1, self._world_size)) - {failed}
        until = time.monotonic() + GRACE_SECONDS
        while self._rank == 0 and time.monotonic() < until and others - {*self._read("knows"), *self.left()}:
            threading.Event().wait(TICK_SECONDS / 4)

    def close(self) -> None:
        """Ends the thread, if it can be ended."""
        if not self._silent:
            self._lane.close()

    def _ask(self, work: Callable[[], Any]) -> Any:
        ticket = None if self._silent else self._lane.submit(work)
        if ticket is None or not ticket.comes_within(self._timeout):
            self._silent = True
            raise StoreSilentError(f"it has not answered for {self._timeout:g} s (infinity.timeout_seconds)")
        return ticket.wait()


class Watchdog:
    """A thread that ends a wait which cannot succeed: somebody failed, left, or has been silent for too long.

    ``position`` says what this rank waits for; ``end`` is called once with the error.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        timeout_seconds: float,
        position: Callable[[], Position],
        end: Callable[[RankError], None],
    ) -> None:
        self._board = board
        self._rank = rank
        self._timeout = timeout_seconds
        self._position = position
        self._end = end
        self._stopped = threading.Event()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught
        self._thread = threading.Thread(target=self._run, name="infinity-watchdog", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """Ends the watch, not yet the thread: there is nothing left to wait for."""
        self._stopped.set()

    def stop(self) -> None:
        """Ends the thread; a rank that is not failing leaves word that it went on purpose."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """What ends the program of this rank ends those of the others, with the same words."""
        if not isinstance(error, RankError):
            self._end(self._board.fail(self._rank, told(self._rank, self._position(), error)))
        self._previous_hook(kind, error, traceback)

    def _run(self) -> None:
        said = -1
        while not self._stopped.wait(TICK_SECONDS):
            try:
                failure = self._board.failure()
                now = self._position()
                if failure is None and now.count != said:
                    self._board.say(now)
                    said = now.count
                if failure is None and now.since is not None:
                    failure = self._overdue(now, time.monotonic() - now.since)
            except Exception as error:
                if self._stopped.is_set():
                    return
                failure = RankError(
                    f"the rendezvous store, which rank 0 or its launcher keeps, cannot be asked: {error}. Its process "
                    "hangs or has ended, or the network to its machine is down",
                    0,
                )
            if failure is not None:
                self._end(failure)
                return

    def _overdue(self, now: Position, waited: float) -> RankError | None:
        if waited < 4 * TICK_SECONDS:
            return None
        for rank, last in self._board.left().items():
            return self._board.fail(
                rank,
                f"rank {rank} ended its engine, or its program, after {last}, while rank {self._rank} waits for it in "
                f"{now.doing}. Give every rank the same number of batches, or pad the shorter ones "
                "(engine.padded(loader))",
            )
        if waited < self._timeout:
            return None
        others = {rank: at for rank, at in self._board.positions().items() if rank != self._rank}
        behind = min(others, key=lambda rank: others[rank][0], default=0)
        count, doing = others.get(behind, (0, "nothing"))
        where = f"its last collective was {doing}" if count < now.count else f"it waits in {doing}"
        return self._board.fail(
            behind,
            f"rank {behind} has not come to {now.doing} within infinity.timeout_seconds ({self._timeout:g} s), where "
            f"rank {self._rank} waits for it; {where}. It hangs, computes for longer than that, or took another branch",
        )


def told(rank: int, position: Position, error: BaseException) -> str:
    """One paragraph on what ended a rank, for the others."""
    reason = str(error) if isinstance(error, InfinityError) else f"{type(error).__name__}: {error}"
    return f"rank {rank} failed (its last collective was {position.doing}): {reason}"


def _error(word: str) -> RankError:
    rank, _, message = word.partition("|")
    return RankError(message, int(rank))
