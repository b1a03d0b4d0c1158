"""Python values as JSON with tensors beside it: what a checkpoint keeps of schedulers, generators, the user."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from infinity.errors import CheckpointError

MAX_DEPTH = 64

Put = Callable[[torch.Tensor], str]
Get = Callable[[str], torch.Tensor]


def encode(value: Any, where: str, put: Put, depth: int = 0) -> Any:
    """``value`` as JSON; ``put`` takes each tensor and gives the name under which it is kept.

    Known are None, bool, int, float, str, bytes, lists, tuples, sets, dicts, Counters, tensors, numpy arrays. Anything
    else would need code to be run on loading, so it is refused by its path ``where``.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where} is more than {MAX_DEPTH} levels deep or contains itself; save it flat")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where, put, depth)
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind in (list, tuple, set, frozenset):
        members = [encode(member, f"{where}[{place}]", put, depth + 1) for place, member in enumerate(value)]
        return members if kind is list else {_SEQUENCES[kind]: members}
    if kind in (dict, OrderedDict, Counter):
        if kind is not Counter and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(member, f"{where}.{key}", put, depth + 1) for key, member in value.items()}
        pairs = [
            [encode(key, f"{where} key", put, depth + 1), encode(member, f"{where}[{key!r:.40}]", put, depth + 1)]
            for key, member in value.items()
        ]
        return {"$counter" if kind is Counter else "$dict": pairs}
    if isinstance(value, torch.Tensor):
        return {"$tensor": put(value.detach().cpu())}
    if kind is np.ndarray and value.dtype.kind in "biuf":
        return {"$array": put(torch.from_numpy(np.ascontiguousarray(value)).view(value.shape))}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without running code on loading; "
        "save numbers, text, lists, dicts, tensors or arrays instead"
    )


def decode(value: Any, get: Get) -> Any:
    """The value that ``encode`` was given; CheckpointError if this is not what it made."""
    try:
        return _decode(value, get, 0)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a saved value is damaged: {error}") from None


def _decode(value: Any, get: Get, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:
        raise ValueError("it is too deep")
    if isinstance(value, list):
        return [_decode(member, get, depth + 1) for member in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag in _DECODERS:
            return _DECODERS[tag](content, get, depth + 1)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"{next(iter(value))!r:.40} is not known")
    return {key: _decode(member, get, depth + 1) for key, member in value.items()}


def _members(content: Any, get: Get, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a list was expected")
    return [_decode(member, get, depth) for member in content]


def _pairs(content: Any, get: Get, depth: int) -> dict[Any, Any]:
    return dict(_members(content, get, depth))


def _float(content: Any, get: Get, depth: int) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(f"{content!r:.40} is no float")
    return float(content)


def _tensor(content: Any, get: Get, depth: int) -> torch.Tensor:
    if not isinstance(content, str):
        raise ValueError("a tensor's name was expected")
    return get(content)


_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_DECODERS: dict[str, Callable[[Any, Get, int], Any]] = {
    "$float": _float,
    "$bytes": lambda content, get, depth: bytes.fromhex(content),
    "$tuple": lambda content, get, depth: tuple(_members(content, get, depth)),
    "$set": lambda content, get, depth: set(_members(content, get, depth)),
    "$frozenset": lambda content, get, depth: frozenset(_members(content, get, depth)),
    "$dict": _pairs,
    "$counter": lambda content, get, depth: Counter(_pairs(content, get, depth)),
    "$tensor": _tensor,
    "$array": lambda content, get, depth: _tensor(content, get, depth).numpy(),
}
