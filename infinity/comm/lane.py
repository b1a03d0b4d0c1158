"""Issues this rank's collectives one at a time, in the order of the program.

Each begins with a few bytes in which every rank says what it is about to do. If all agree, as they do when all ran the
same branches, the data follow. If not, one of the requests is served first, the same on every rank: those who asked for
something else help with it (their slice of the parameters; no gradient) and ask again. So a rank that has left out a
unit holds nobody up, and ranks that cannot come together find out before any data are mixed up.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from infinity.comm.board import GRACE_SECONDS, TICK_SECONDS, Board, Position, Watchdog, told
from infinity.comm.request import Kind, Request, chosen, packed_bytes, short, unpack
from infinity.comm.transport import PeerLost, Transport
from infinity.device.lane import Lane, LaneTicket, Ticket
from infinity.errors import RankError, ScheduleError
from infinity.obs.ledger import Ledger

log = logging.getLogger("infinity")

_LAYERS = struct.Struct("<BQ")
"""What goes before the flags of gradients: how many layers there are, the bytes of a slice."""

CAPACITY = 256
"""Bytes of words or flags that travel with a request; what is longer takes an exchange of its own."""


class CommLane:
    """Owner of one fact: which collective is next."""

    def __init__(
        self, transport: Transport, timeout_seconds: float, ledger: Ledger, delay: Callable[[], None] | None
    ) -> None:
        self.step = 0
        self.joined = 0
        self._transport = transport
        self._rank, self._peers = transport.rank, [p for p in range(transport.world_size) if p != transport.rank]
        self._ledger = ledger
        self._failure: RankError | None = None
        self._open: set[LaneTicket] = set()
        self._lock = threading.Lock()
        self._position = Position()
        self._shard: Callable[[int], torch.Tensor] | None = None
        self._sink: Callable[[int, int, bytes, torch.Tensor], None]
        self._staging: torch.Tensor
        self._lane = Lane("comm", delay)
        self._board = Board(transport.store, transport.rank, transport.world_size, timeout_seconds)
        self._watchdog = Watchdog(self._board, self._rank, timeout_seconds, lambda: self._position, self._end)
        self._closed = False
        self._trace = hashlib.blake2b(digest_size=8)
        atexit.register(self.close)  # before the process group ends: others may still need what is under way

    def serve(
        self,
        shard: Callable[[int], torch.Tensor] | None,
        sink: Callable[[int, int, bytes, torch.Tensor], None],
        staging: torch.Tensor,
    ) -> None:
        """See ``Group.serve``."""
        self._shard, self._sink, self._staging = shard, sink, staging

    # What is asked for ------------------------------------------------------------------------------------------

    def gather(self, unit: int, unit_name: str, flat: torch.Tensor, after: Ticket, *, backward: bool = False) -> Ticket:
        """See ``Group.gather``."""
        self._trace.update(f"+{unit}".encode())
        request = Request(Kind.GATHER, unit, backward, self.step, short(unit_name))

        def work() -> None:
            after.wait()
            self._exchange_shards(unit, self._agree(request), request.key, flat)

        return self._submit(work)

    def reduce(self, unit: int, unit_name: str, flags: Sequence[bytes], flats: Sequence[torch.Tensor]) -> Ticket:
        """See ``Group.reduce``."""
        self._trace.update(f"-{unit}".encode())
        size = flats[0].numel() // (len(self._peers) + 1)
        payload = _LAYERS.pack(len(flags), size) + b"".join(flags)
        request = Request(Kind.REDUCE, unit, True, self.step, short(unit_name), payload)
        return self._submit(lambda: self._exchange_slices(unit, self._agree(request), request.key, flats))

    def talk(self, name: str, words: bytes = b"") -> list[bytes]:
        """See ``Group.talk``."""
        request = Request(Kind.TALK, -1, False, self.step, short(name), words)

        def work() -> list[bytes]:
            return self._full_words(request, self._agree(request))

        return self._submit(work).wait()  # type: ignore[no-any-return]

    def broadcast(self, name: str, tensor: torch.Tensor, source: int) -> None:
        """See ``Group.broadcast``."""
        contiguous = tensor.detach().contiguous()
        flat = contiguous.view(-1).view(torch.uint8)
        self.pieces(name, [flat if rank == source else flat[:0] for rank in range(len(self._peers) + 1)])
        if not tensor.is_contiguous() and not torch.equal(tensor, contiguous):  # an expanded one cannot be written to
            tensor.detach().copy_(contiguous)

    def pieces(self, name: str, pieces: Sequence[torch.Tensor]) -> None:
        """See ``Group.pieces``."""
        request = Request(Kind.TALK, -1, False, self.step, short(name))
        flats = [piece.detach().view(-1).view(torch.uint8) for piece in pieces]

        def work() -> None:
            self._agree(request)
            mine = flats[self._rank]
            self._swap(
                "control",
                dict.fromkeys(self._peers, mine) if mine.numel() else {},
                {peer: flats[peer] for peer in self._peers if flats[peer].numel()},
            )

        self._submit(work).wait()

    def trace(self) -> bytes:
        """Eight bytes that say in which order units were gathered or reduced since this was last asked."""
        digest, self._trace = self._trace.digest(), hashlib.blake2b(digest_size=8)
        return digest

    def close(self) -> None:
        """Takes leave. A lane whose collective cannot end any more is left behind: it dies with the process."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        reason = sys.exc_info()[1]
        if reason is not None and not isinstance(reason, RankError) and self._failure is None:
            self._end(self._board.fail(self._rank, told(self._rank, self._position, reason)))
        for ticket in tuple(self._open):
            with suppress(Exception):
                ticket.wait()
        self._watchdog.stop()
        if self._failure is None:
            with suppress(Exception):  # a store that is gone has no reader either
                self._board.leave(self._position)
            self._lane.close()
            self._transport.close()
        else:
            with suppress(Exception):
                self._board.linger(self._failure.rank)
        self._board.close()

    # How it is done, on the lane's thread -----------------------------------------------------------------------

    def _submit(self, work: Callable[[], Any]) -> LaneTicket:
        def guarded() -> Any:
            if self._failure is not None:
                raise self._failure
            try:
                return work()
            except PeerLost as lost:
                error = self._lost(lost)
                self._end(error)
                raise error from None
            except BaseException as error:
                self._end(self._board.fail(self._rank, told(self._rank, self._position, error)))
                raise
            finally:
                self._position = Position(self._position.count, self._position.doing)
                with self._lock:
                    self._open.discard(ticket)

        if self._closed:
            raise ScheduleError("this engine was destroyed; nothing can be exchanged with the other ranks any more")
        with self._lock:
            ticket = self._lane.submit(guarded)
            self._open.add(ticket)
        if self._failure is not None:
            self._end(self._failure)
        return ticket

    def _end(self, error: RankError) -> None:
        """Fails whatever waits now or will."""
        is_first = self._failure is None
        self._failure = self._failure or error
        self._watchdog.rest()
        with self._lock:
            waiting, self._open = self._open, set()
        for ticket in waiting:
            if not ticket.done():
                ticket.fail(self._failure)
        if is_first:
            with suppress(Exception):  # a store that is gone has nobody else to tell
                self._board.acknowledge()

    def _lost(self, lost: PeerLost) -> RankError:
        """What became of a peer: its own words, or another's who knows more, or that there are none."""
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            try:
                failure = self._failure or self._board.failure()
                left = self._board.left()
            except Exception:
                break
            if failure is not None:
                return failure
            if lost.rank in left:
                return self._board.fail(
                    lost.rank,
                    f"rank {lost.rank} ended its engine, or its program, after {left[lost.rank]}, while rank "
                    f"{self._rank} is in {self._position.doing}. Give every rank the same number of batches, or pad "
                    "the shorter ones (engine.padded(loader))",
                )
            threading.Event().wait(TICK_SECONDS)
        return self._board.fail(
            lost.rank,
            f"rank {lost.rank} died without a word while rank {self._rank} was in {self._position.doing} ({lost}); "
            "look at its own output and at the kernel's log (it may have been killed for memory)",
        )

    def _agree(self, mine: Request) -> list[Request]:
        """The requests of all ranks, once this rank's own is served; helps with others' until then."""
        while True:
            requests = self._ask(mine)
            if len({request.key for request in requests}) == 1:
                return requests
            first = chosen(requests)
            if first is None:
                raise self._diverged(requests)
            if not self.joined:
                log.info("ranks went different ways, so they help each other out: %s", _listed(requests))
            self.joined += 1
            if first.key == mine.key:
                return requests
            if first.kind is Kind.GATHER:
                self._exchange_shards(first.unit, requests, first.key, None)
            else:
                self._exchange_slices(first.unit, requests, first.key, ())

    def _ask(self, mine: Request) -> list[Request]:
        self._position = Position(self._position.count + 1, str(mine), time.monotonic())
        size = packed_bytes(CAPACITY)
        packed = torch.frombuffer(bytearray(mine.pack(CAPACITY)), dtype=torch.uint8)
        received = {peer: torch.empty(size, dtype=torch.uint8) for peer in self._peers}
        self._swap("control", dict.fromkeys(self._peers, packed), received)
        heads = {self._rank: (mine, len(mine.payload))}
        for peer, head in received.items():
            heads[peer] = unpack(head.numpy().tobytes())
        return self._with_payloads(mine, heads)

    def _with_payloads(self, mine: Request, heads: dict[int, tuple[Request, int]]) -> list[Request]:
        """Fetches what did not fit into the heads."""
        long = {rank: length for rank, (_, length) in heads.items() if length > CAPACITY}
        sends, receives = {}, {}
        if self._rank in long:
            sends = dict.fromkeys(self._peers, torch.frombuffer(bytearray(mine.payload), dtype=torch.uint8))
        receives = {peer: torch.empty(long[peer], dtype=torch.uint8) for peer in self._peers if peer in long}
        if sends or receives:
            self._swap("control", sends, receives)
        found = []
        for rank in range(len(self._peers) + 1):
            request = heads[rank][0]
            if rank in receives:
                words = receives[rank].numpy().tobytes()
                request = Request(request.kind, request.unit, request.backward, request.step, request.name, words)
            found.append(request)
        return found

    def _full_words(self, mine: Request, requests: list[Request]) -> list[bytes]:
        return [mine.payload if rank == self._rank else request.payload for rank, request in enumerate(requests)]

    def _diverged(self, requests: list[Request]) -> RankError:
        keys = [request.key for request in requests]
        odd = min(range(len(keys)), key=lambda rank: (keys.count(keys[rank]), -rank))
        return self._board.fail(odd, f"ranks went different ways for good: {_listed(requests)}")

    def _exchange_shards(
        self, unit: int, requests: list[Request], key: tuple[int, int, str], flat: torch.Tensor | None
    ) -> None:
        """Every rank sends its slice of a unit to those who asked for it, straight into place."""
        wanting = [rank for rank, request in enumerate(requests) if request.key == key]
        if flat is None:
            if self._shard is None:
                raise self._diverged(requests)
            own, receives = self._shard(unit), {}
        else:
            slices = flat.chunk(len(requests))
            own = slices[self._rank]
            receives = {peer: slices[peer] for peer in self._peers}
        self._swap("gather", {rank: own for rank in wanting if rank != self._rank}, receives)

    def _exchange_slices(
        self, unit: int, requests: list[Request], key: tuple[int, int, str], flats: Sequence[torch.Tensor]
    ) -> None:
        """Those who have gradients of a unit send each rank its slice, which adds them up in the order of the ranks."""
        giving = {rank: _layers(request.payload) for rank, request in enumerate(requests) if request.key == key}
        size = next(_LAYERS.unpack_from(requests[rank].payload)[1] for rank in giving)
        slices = [flat.chunk(len(requests)) for flat in flats]
        rounds = [giving]
        if any(len(layers) > 1 for layers in giving.values()):  # there is room for one layer of each rank
            rounds = [{rank: [flags]} for rank, layers in giving.items() for flags in layers]
        sent = 0
        for each in rounds:
            others = [rank for rank in each if rank != self._rank]
            staged = {peer: self._staging[place * size : (place + 1) * size] for place, peer in enumerate(others)}
            mine = slices[sent] if self._rank in each else ()
            self._swap("reduce", {peer: mine[peer] for peer in self._peers} if mine else {}, staged)
            for rank, layers in each.items():
                self._sink(unit, rank, layers[0], mine[rank] if rank == self._rank else staged[rank])
            sent += bool(mine)

    def _swap(self, link: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        start = time.perf_counter()
        self._ledger.begin(f"{link}_sent", sum(tensor.nbytes for tensor in sends.values()))
        self._ledger.begin(f"{link}_received", sum(tensor.nbytes for tensor in receives.values()))
        self._transport.swap(sends, receives)
        self._ledger.end(f"{link}_sent", start, time.perf_counter())


def _layers(payload: bytes) -> list[bytes]:
    """The flags of each layer of gradients that a rank gives."""
    count, flags = _LAYERS.unpack_from(payload)[0], payload[_LAYERS.size :]
    each = len(flags) // count
    return [flags[place * each : (place + 1) * each] for place in range(count)]


def _listed(requests: Sequence[Request]) -> str:
    return "; ".join(f"rank {rank} is at {request}" for rank, request in enumerate(requests))
