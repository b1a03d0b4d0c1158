"""Checks what a bench is asked for before it measures, lets SIGTERM clean up behind it."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Collection
from typing import TypeVar

from infinity.errors import InfinityError

T = TypeVar("T")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """One of ``names``."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def several(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Items with commas between them."""

    def parse(text: str) -> list[T]:
        try:
            return [item(part) for part in text.split(",")]
        except (ValueError, InfinityError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def end_on_sigterm() -> None:
    """Has SIGTERM end the process as an exit does, by way of every ``with`` and ``finally``."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
