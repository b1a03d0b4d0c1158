"""Lets the first Ctrl-C or SIGTERM end a run between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType


class StopRequest:
    """Remembers the first signal; a second one interrupts at once, unless the run is ending already."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal_number: int | None = None
        self._ending = False
        self._say = say
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def ending(self) -> None:
        """From here on signals only are remembered: files are being removed."""
        self._ending = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        again = self.signal_number is not None
        self.signal_number = self.signal_number or number
        if again and not self._ending:
            raise KeyboardInterrupt
        if not again and not self._ending:
            self._say(f"{signal.Signals(number).name}: stopping after this step; once more stops at once")

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
