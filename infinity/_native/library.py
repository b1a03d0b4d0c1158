"""Loads the shared libraries that setup.py built beside this file."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch  # noqa: F401  loads torch's OpenMP run-time first, so that the process has one pool of threads

LibraryName = Literal["aio", "cpu_adam"]

NEWEST: dict[LibraryName, str] = {"aio": "infinity_aio_finished", "cpu_adam": "infinity_cpu_adam_supports"}
"""The function that came last: a library without it was built from older sources."""


def load(name: LibraryName) -> ctypes.CDLL | None:
    """The library, or None where it was not built or this machine cannot load it."""
    found = _open(name)
    return None if isinstance(found, str) else found


def why_missing(name: LibraryName) -> str | None:
    """Why ``load`` gives None, as the end of a sentence, or None when it does not."""
    found = _open(name)
    return found if isinstance(found, str) else None


def _open(name: LibraryName) -> ctypes.CDLL | str:
    library = Path(__file__).with_name(f"libinfinity_{name}.so")
    if library.exists():
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            return f"{library} could not be loaded: {error}"
        if hasattr(loaded, NEWEST[name]):
            return loaded
        return f"{library} was built from older sources; run `make build`, or install the package again"
    try:
        reason = library.with_name(f"libinfinity_{name}.missing.txt").read_text(encoding="utf-8").strip()
    except OSError:
        reason = "it was never built; run `make build`, or install the package again"
    return f"{library} does not exist: {reason}"
