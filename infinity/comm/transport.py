"""Moves tensors between ranks by torch.distributed."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.errors import ConfigError, RankError, ScheduleError


class PeerLost(Exception):
    """The connection to ``rank`` broke, or it did not answer."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        super().__init__(reason)


class Transport:
    """Point-to-point exchanges in a process group of our own, so that no collective of the user's gets between.

    Sending straight out of a buffer, receiving straight into one: no copy is made on either side.
    """

    def __init__(self, timeout_seconds: float) -> None:
        # Longer than the watchdog's, which has more to say.
        limit = timedelta(seconds=1.5 * timeout_seconds + 10)
        _join_process_group(limit)
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=limit)
        store = dist.distributed_c10d._get_default_store()
        self.store: Any = dist.PrefixStore(  # type: ignore[attr-defined]
            f"infinity/{self._group.group_name}", store
        )

    def swap(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Sends and receives at once, one tensor per peer; blocks until all of it is done."""
        works = []
        try:
            for peer in sorted(sends.keys() | receives.keys()):
                if peer in receives:
                    works.append((peer, dist.irecv(receives[peer], peer, group=self._group)))
                if peer in sends:
                    works.append((peer, dist.isend(sends[peer], peer, group=self._group)))
        except ValueError:
            raise ScheduleError(
                "torch.distributed's process group was destroyed while this engine exchanges with other ranks; call "
                "engine.destroy() before torch.distributed.destroy_process_group()"
            ) from None
        except RuntimeError as error:
            raise PeerLost(peer, _reason(error)) from None
        for peer, work in works:
            assert work is not None
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(peer, _reason(error)) from None

    def close(self) -> None:
        """Gives the connections back."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def _reason(error: RuntimeError) -> str:
    """What gloo says of a broken connection, without its advice."""
    return str(error).partition(". This is typically")[0]


def ranks_expected() -> int:
    """How many ranks the process group, or else the launcher's environment, speaks of."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return launched("WORLD_SIZE", 1, 1, None)


def rank_expected() -> int:
    """This process's rank, as far as it is known before ranks have met."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    ranks = ranks_expected()
    return launched("RANK", 0, 0, ranks - 1) if ranks > 1 else 0


def launched(name: str, default: int, low: int, high: int | None) -> int:
    """A number from ``low`` to ``high`` that a launcher has put into the environment; what is empty is not there."""
    word = os.environ.get(name) or str(default)
    if word.strip().isdecimal() and low <= int(word) and (high is None or int(word) <= high):
        return int(word)
    expected = f"a whole number from {low} on" if high is None else f"a whole number from {low} to {high}"
    raise ConfigError(
        f"the environment variable {name} is {word!r}; expected {expected}. Start the program with torchrun "
        "--nproc_per_node N, or unset what another launcher has left (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)"
    )


def _join_process_group(limit: timedelta) -> None:
    if dist.is_initialized():
        return
    rank_expected()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start the program with "
            "torchrun --nproc_per_node N, or call torch.distributed.init_process_group first"
        )
    rank, where = rank_expected(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank:
        await_store(rank, where, limit)
    try:
        dist.init_process_group("gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        others = ", ".join(f"rank {other}" for other in range(ranks_expected()) if other != rank)
        raise RankError(
            f"rank {rank} did not find all the others ({others}) at {where}: {str(error).splitlines()[0]}. One of "
            "them was not started, has ended, or cannot reach this address"
        ) from None
    atexit.register(_leave_process_group)


def await_store(rank: int, where: str, limit: timedelta) -> None:
    """Returns when somebody listens there; torch by itself tries up to three times as long, with pages of log."""
    host, port = where.rsplit(":", 1)
    until = time.monotonic() + limit.total_seconds()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except ValueError:
            raise ConfigError(f"the environment variable MASTER_PORT is {port!r}; expected a number") from None
        except OSError as error:
            if time.monotonic() > until:
                raise RankError(
                    f"rank {rank} did not reach the rendezvous store, which rank 0 or its launcher keeps, at {where} "
                    f"within {limit.total_seconds():g} s: {error}. Rank 0 was not started, has ended, or its machine "
                    "cannot be reached from here",
                    0,
                ) from None
            threading.Event().wait(0.05)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
