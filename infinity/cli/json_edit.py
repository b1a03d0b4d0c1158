"""Changes members of a JSON document, leaving every other character of it as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.decoder import JSONDecoder
from typing import Any

SPACE = " \t\n\r"


def put(text: str, path: Sequence[str], value: Any) -> str:
    """``text`` with the member at ``path`` set to ``value``; objects on the way to it are made where they lack."""
    return _put(text, _skip(text, 0), list(path), value, "  ")


def _put(text: str, start: int, path: list[str], value: Any, indent: str) -> str:
    """Edits the object that opens at ``start``, whose members are indented by ``indent``."""
    if text[start] != "{":
        raise ValueError(f"expected an object before {path[0]!r}")
    at, last_end = _skip(text, start + 1), None
    while text[at] != "}":
        key, at = JSONDecoder().raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # over the colon
        _, end = JSONDecoder().raw_decode(text, at)
        if key == path[0]:
            if len(path) > 1 and text[at] == "{":
                return _put(text, at, path[1:], value, indent + "  ")
            return text[:at] + _shown(path[1:], value, indent) + text[end:]
        last_end, at = end, _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    member = f"{json.dumps(path[0])}: {_shown(path[1:], value, indent)}"
    if last_end is None:
        return f"{text[: start + 1]}\n{indent}{member}\n{indent[2:]}{text[at:]}"
    separator = f",\n{indent}" if "\n" in text[start:last_end] else ", "
    return text[:last_end] + separator + member + text[last_end:]


def _shown(path: list[str], value: Any, indent: str) -> str:
    for key in reversed(path):
        value = {key: value}
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)}: {_shown([], v, indent)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at
