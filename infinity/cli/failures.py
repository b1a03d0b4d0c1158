"""Turns errors into one paragraph on standard error, then an exit code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console

from infinity.errors import ConfigError, InfinityError


class Stopped(Exception):
    """The run was asked to stop by a signal; ``told`` says in one sentence what is left of it."""

    def __init__(self, signal_number: int, told: str) -> None:
        self.signal_number = signal_number
        super().__init__(told)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds what is open, as Ctrl-C does; a run has its own way (``StopRequest``)."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped(number, "ended by SIGTERM; no swap or trial files are left.")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Exit 1 on an error, 128 + the signal's number when stopped; ``debug`` lets the traceback through."""
    errors = Console(stderr=True, highlight=False, emoji=False)
    errors.soft_wrap = not errors.is_terminal  # a reader of a file wants whole lines
    try:
        with _ending_on_sigterm():
            yield
    except Stopped as stopped:
        errors.print(f"stopped: {stopped}", markup=False)
        raise typer.Exit(128 + stopped.signal_number) from None
    except KeyboardInterrupt:
        errors.print("stopped: interrupted; no swap or trial files are left.", markup=False)
        raise typer.Exit(130) from None
    except Exception as error:
        if debug or isinstance(error, typer.Exit):
            raise
        errors.print(f"error: {_speaker()}{_paragraph(error)}", markup=False)
        raise typer.Exit(1) from None


def _speaker() -> str:
    """Who of several ranks is talking."""
    return f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _paragraph(error: Exception) -> str:
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return "\n  - ".join([f"{len(error.problems)} problems:", *error.problems])
    if isinstance(error, InfinityError):
        return str(error).replace("\n", "; ")
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (
            f"this machine or its limits (ulimit -v, cgroup) leave too little RAM: {error}. Lower "
            "train_micro_batch_size_per_gpu or run.sequence_length, the budgets of infinity, or the size of the model"
        )
    told = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"{told} (--debug shows where)"
