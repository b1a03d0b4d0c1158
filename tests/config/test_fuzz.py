"""Whatever is loaded gives a config or a ConfigError, never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import Config
from infinity.config.problems import dotted, every_key
from infinity.config.schema import Schema
from infinity.errors import ConfigError
from infinity.tier import StateKind

KEYS = [*every_key(Schema)]
WORDS = sorted({str(part) for key in KEYS for part in key})
CHOICES = ["auto", "cpu", "nvme", "none", "device", "host", "AdamW", "WarmupLR", "WarmupDecayLR", "SGD", "8GiB", "log"]

text = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(WORDS + CHOICES)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text | st.just(10**400) | st.sampled_from([0, 1, 2])
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.integers(), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def near_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Values of every sort at keys that exist."""
    config: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=8)):
        here = config
        for part in key[:-1]:
            if not isinstance(here.get(str(part)), dict):
                here[str(part)] = {}
            here = here[str(part)]
        here[str(key[-1])] = draw(values)
    return config


def load(source: Any) -> None:
    try:
        config = Config.load(source)
    except ConfigError as error:
        assert error.problems
        assert all(problem.rstrip()[-1] in ".?" for problem in error.problems)
        assert len(set(error.problems)) == len(error.problems)
        str(error).encode()
        return
    assert Config.load(config.given()) == config
    again = Config.load(json.loads(config.to_json()))
    assert again.to_json() == config.to_json()
    for kind in StateKind:
        assert again.tier_of(kind) == config.tier_of(kind)
        assert again.swap_directories(kind) == config.swap_directories(kind)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(text | st.integers() | st.none(), values, max_size=4))
def test_any_dict(source: dict[Any, Any]) -> None:
    load(source)


@settings(max_examples=400, deadline=None)
@given(near_configs())
def test_any_value_at_a_known_key(source: dict[str, Any]) -> None:
    load(source)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KEYS), values)
def test_any_override(key: tuple[str | int, ...], value: Any) -> None:
    try:
        Config.load({}).with_overrides([f"{dotted(key)}={value}"])
    except ConfigError as error:
        assert error.problems


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.text("{}[]:,\"'&*a1-!|>\n #", max_size=40).map(str.encode), st.booleans())
def test_any_file(tmp_path_factory: Any, content: bytes, as_yaml: bool) -> None:
    path: Path = tmp_path_factory.getbasetemp() / f"fuzz.{'yaml' if as_yaml else 'json'}"
    path.write_bytes(content)
    load(path)


def test_a_dict_that_holds_itself() -> None:
    source: dict[str, Any] = {}
    source["run"] = source
    load(source)
