"""What a rank asks all ranks to do next, as a few bytes that go ahead of the data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("<BiBqI64s")
NAME_BYTES = 64


class Kind(IntEnum):
    """Training traffic is served in whatever order it is asked for; a talk needs every rank at once."""

    REDUCE = 1
    GATHER = 2
    TALK = 3


@dataclass(frozen=True)
class Request:
    """``name`` says what a talk is about, of traffic which unit; ``payload`` are flags or the first words of a talk."""

    kind: Kind
    unit: int
    backward: bool
    step: int
    name: str
    payload: bytes = b""

    @property
    def key(self) -> tuple[int, int, str]:
        """Equal for ranks that ask for the same."""
        return self.kind, self.unit, self.name

    def pack(self, capacity: int) -> bytes:
        """Exactly ``_HEAD.size + capacity`` bytes; a payload beyond ``capacity`` is cut, its length is not."""
        head = _HEAD.pack(
            self.kind, self.unit, self.backward, self.step, len(self.payload), self.name.encode()[:NAME_BYTES]
        )
        return head + self.payload[:capacity].ljust(capacity, b"\0")

    def __str__(self) -> str:
        where = f", step {self.step}"
        if self.kind is Kind.TALK:
            return f"{self.name}{where}"
        what = "reducing the gradients" if self.kind is Kind.REDUCE else "gathering the parameters"
        return f'{what} of unit "{self.name}"{where}'


def short(name: str) -> str:
    """What of a name fits into a request: its end, where names of units differ."""
    return name.encode()[-NAME_BYTES:].decode(errors="ignore")


def packed_bytes(capacity: int) -> int:
    """The length of a packed request."""
    return _HEAD.size + capacity


def unpack(packed: bytes) -> tuple[Request, int]:
    """A request whose payload is cut to what came along, with the payload's full length."""
    kind, unit, backward, step, length, name = _HEAD.unpack_from(packed)
    payload = packed[_HEAD.size : _HEAD.size + length]
    return Request(Kind(kind), unit, bool(backward), step, name.rstrip(b"\0").decode(errors="ignore"), payload), length


def chosen(requests: Sequence[Request]) -> Request | None:
    """What to do first when ranks ask for different things, the same on every rank; None if only talks are left.

    Gradients before parameters, units in the order in which a pass in that direction comes to them.
    """
    traffic = [request for request in requests if request.kind is not Kind.TALK]
    order = {True: -1, False: 1}
    return min(traffic, key=lambda request: (request.kind, order[request.backward] * request.unit), default=None)
