"""Reads a config file into plain JSON values, keys that are given twice included."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from infinity.errors import ConfigError

MAX_DEPTH = 32
MAX_VALUES = 100_000
YAML_SUFFIXES = (".yaml", ".yml")


class Refused:
    """Stands where a value was that has no place in a config."""


class Pairs(list[tuple[Any, Any]]):
    """An object as it stands in the file, so that a key given twice is not lost."""


class _YamlLoader(yaml.SafeLoader):
    """YAML whose objects are pairs, in which 1e9 is a number (YAML 1.1 would call it text)."""


def _yaml_object(loader: _YamlLoader, node: yaml.MappingNode) -> Pairs:
    return Pairs((loader.construct_object(key), loader.construct_object(value, deep=True)) for key, value in node.value)


_YamlLoader.add_constructor("tag:yaml.org,2002:map", _yaml_object)
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_file(path: Path) -> Any:
    """The document in ``path``, YAML if its suffix says so, otherwise JSON. Objects come as ``Pairs``."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{shown_path(path)} cannot be read: {reason}.") from None
    try:
        if path.suffix.lower() in YAML_SUFFIXES:
            return yaml.load(content, _YamlLoader)
        return parse_json(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{shown_path(path)}, line {error.lineno}, column {error.colno}: this is not JSON: {error.msg}."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{shown_path(path)}{where}: this is not YAML: {why}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be used: {error}.") from None


def parse_json(content: str) -> Any:
    """JSON as the standard has it: NaN, Infinity are refused with ValueError."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a JSON value")

    return json.loads(content, object_pairs_hook=Pairs, parse_constant=refuse)


def shown_path(path: object) -> str:
    return str(path).encode("utf-8", "replace").decode()


def plain(value: object) -> tuple[Any, list[str]]:
    """``value`` in dicts, lists, text, numbers, booleans, None only, then what had to be left out, a sentence each."""
    walk = _Plain()
    return walk.convert(value, ""), walk.problems


class _Plain:
    """One pass over a document."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.values = 0

    def convert(self, value: object, key: str, depth: int = 0) -> Any:
        self.values += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"`{key[:200]}` is more than {MAX_DEPTH} levels deep; a config is not that deep.")
        if self.values > MAX_VALUES:
            raise ConfigError(f"The config holds more than {MAX_VALUES} values; a config is not that long.")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                return self.refuse(f"`{key}` is {value}, but it must be a finite number.")
            return float(value)
        if isinstance(value, str | os.PathLike):
            return self.text(value, key)
        if isinstance(value, Pairs):
            return self.object(value, key, depth)
        if isinstance(value, Mapping):
            return self.object(value.items(), key, depth)
        if isinstance(value, list | tuple):
            items = (self.convert(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value))
            return [item for item in items if not isinstance(item, Refused)]
        return self.refuse(
            f"`{key}` is a Python {type(value).__name__}, but it must be a JSON value: text, a number, true, false, "
            "null, a list or an object."
        )

    def object(self, pairs: Iterable[tuple[object, object]], key: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if not isinstance(name, str):
                self.refuse(f"A key in `{key or 'the config'}` is {name!r:.80}, but keys must be text.")
                continue
            clean = self.text(name, f"{key}.{name!a}")
            if isinstance(clean, Refused):
                continue
            dotted = f"{key}.{clean}" if key else clean
            if clean in found:
                self.refuse(f"`{dotted}` is given twice; keep one of the two.")
                continue
            item = self.convert(value, dotted, depth + 1)
            if not isinstance(item, Refused):
                found[clean] = item
        return found

    def text(self, value: str | os.PathLike[Any], key: str) -> str | Refused:
        raw = os.fspath(value)
        if isinstance(raw, str):
            clean = str.__str__(raw)  # the value of an enum that is also text
            if clean.isascii() or _is_unicode(clean):
                return clean
        return self.refuse(f"`{key}` holds bytes that are not Unicode text.")

    def refuse(self, problem: str) -> Refused:
        self.problems.append(shown_path(problem))
        return Refused()


def _is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
