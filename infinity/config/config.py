"""The config as a whole: read, checked, changed, written."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from infinity.config import batch
from infinity.config.document import parse_json, plain, read_file, shown_path
from infinity.config.problems import Key, block_at, dotted, sentence, unknown_key
from infinity.config.rules import clashes, offload_of, placed
from infinity.config.schema import Schema
from infinity.config.values import Block, no_effect
from infinity.errors import ConfigError
from infinity.tier import StateKind, Tier

log = logging.getLogger(__name__)


class Config(Schema):
    """Every knob once, in DeepSpeed's layout. Attributes are named as the JSON keys, all the way down."""

    def __init__(self, /, **given: Any) -> None:
        document, problems = plain(given)
        problems += faults(document)
        if problems:
            raise ConfigError(problems)
        super().__init__(**document)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
        """Reads a JSON or YAML file, or a dict; raises ConfigError with every problem at once."""
        if isinstance(source, Config):
            return source
        origin = ""
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            origin = f"{shown_path(path)}: "
            given = read_file(path)
        else:
            given = source
        document, problems = plain(given)
        if not isinstance(document, dict):
            raise ConfigError(f'{origin}A config must be an object, such as {{"train_batch_size": 8}}.')
        problems += faults(document)
        if problems:
            raise ConfigError([origin + problem for problem in problems])
        config = cls(**document)
        if config.ignored_keys:
            log.info("These keys have no effect here: %s", ", ".join(config.ignored_keys))
        return config

    def with_overrides(self, overrides: Iterable[str]) -> Config:
        """A config with ``a.b.c=value`` applied to what was given. A value is JSON, or else text."""
        document, problems = self.given(), []
        for override in overrides:
            name, separator, value = override.partition("=")
            if not separator or not name.strip():
                problems.append(f"`{override}` is not an override; write it as key=value, such as run.steps=10.")
                continue
            problem = _put(document, name.strip(), _read(value))
            problems += [problem] if problem else []
        document, found = plain(document)
        problems += found + faults(document)
        if problems:
            raise ConfigError(problems)
        return Config(**document)

    def given(self) -> dict[str, Any]:
        """Only the keys that were given, as JSON values."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_json(self) -> str:
        """Every key that has an effect with its value, defaults included, as a file that ``load`` reads."""
        document = _effective(self)
        for name, block in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if block:
                document[name]["params"] = block.resolved_params
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """The dotted keys that were given but change nothing here."""
        return tuple(_ignored(self))

    def resolve_batch(self, world_size: int) -> batch.BatchSizes:
        """The three batch sizes for this many ranks."""
        return batch.resolve_batch(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, world_size
        )

    @property
    def param_dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """The format of parameters during forward, backward."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def tier_of(self, kind: StateKind) -> Tier | None:
        """The tier that was asked for, whichever key says so; None leaves it to the plan."""
        if kind in placed(self):
            return placed(self)[kind]
        if kind is StateKind.ACTIVATION:
            if self.infinity.activations == "device" and self.activation_checkpointing.cpu_checkpointing:
                return Tier.HOST
            return None if self.infinity.activations == "auto" else Tier(self.infinity.activations)
        stage = self.zero_optimization.stage
        if stage == 0 or (stage < 3 and kind is StateKind.PARAM):
            return Tier.DEVICE
        offload = offload_of(self, kind)[1]
        return offload.tier if offload else None

    def swap_directories(self, kind: StateKind) -> tuple[str, ...]:
        """Where a kind goes on NVMe, one directory per disk; empty where none was given."""
        zero, offload = self.zero_optimization, offload_of(self, kind)[1]
        others = (block.nvme_path for block in (zero.offload_param, zero.offload_optimizer) if block)
        choices = (offload.nvme_path if offload else None, self.infinity.nvme_path, *others)
        return next((paths for paths in choices if paths), ())


def faults(document: dict[str, Any]) -> list[str]:
    """Every problem of a document of plain values, a sentence each.

    A faulty value is taken out before the rest is looked at again, so that one mistake hides no other.
    """
    problems: list[str] = []
    wrong: list[Key] = []
    rest = copy.deepcopy(document)
    config = None
    while config is None:
        try:
            config = Schema.model_validate(rest)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                if fault["loc"] not in wrong:  # else its value was wrong, so it was taken out
                    problems.append(sentence(fault, Schema))
                wrong.append(fault["loc"])
                _take_out(rest, fault["loc"][:-1] if fault["type"] == "missing" else fault["loc"])
    for name in ("optimizer", "scheduler"):
        block = getattr(config, name)
        if block and block.params_schema:
            found = list(_params_faults(block.params, block.params_schema, (name, "params")))
            problems += found
            if found:
                wrong.append((name,))
                config = config.model_copy(update={name: None})
    known_wrong = [dotted(key) for key in wrong]
    for clash in clashes(config):
        if not any(_touches(key, bad) for key in clash.keys for bad in known_wrong):
            problems.append(clash.problem)
    return problems


def _params_faults(params: dict[str, Any], schema: type[Block], at: Key) -> Iterable[str]:
    try:
        schema.model_validate(params)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            yield sentence(fault, schema, at)


def _touches(key: str, bad: str) -> bool:
    return f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.")


def _take_out(document: dict[str, Any], key: Key) -> None:
    """Removes the deepest object entry that the key leads to, if an earlier fault has not removed it."""
    owner, name = document, key[0]
    value: Any = document
    for part in key:
        if not isinstance(value, dict) or part not in value:
            break
        owner, name, value = value, part, value[part]
    owner.pop(str(name), None)


def _ignored(block: BaseModel, at: Key = ()) -> Iterable[str]:
    silent = no_effect(type(block))
    for name in type(block).model_fields:
        if name in block.model_fields_set:
            value = getattr(block, name)
            if name in silent:
                yield dotted((*at, name))
            elif isinstance(value, BaseModel):
                yield from _ignored(value, (*at, name))


def _effective(block: BaseModel) -> dict[str, Any]:
    document = block.model_dump(mode="json", exclude=no_effect(type(block)))
    for name in type(block).model_fields:
        value = getattr(block, name)
        if name in document and isinstance(value, BaseModel):
            document[name] = _effective(value)
    return document


def _read(value: str) -> Any:
    try:
        return parse_json(value)
    except (ValueError, RecursionError):
        return value


def _put(document: dict[str, Any], name: str, value: Any) -> str | None:
    """Sets one dotted key, making the blocks on the way; what is wrong with the key, if anything."""
    parts = name.split(".")
    here = document
    for depth, part in enumerate(parts):
        block = block_at(Schema, tuple(parts[:depth]))
        if block is None:  # inside a free object, whose own keys may hold dots
            here[".".join(parts[depth:])] = value
            return None
        if part not in block.model_fields:
            return unknown_key(tuple(parts[: depth + 1]), Schema)
        if depth + 1 == len(parts):
            here[part] = value
            return None
        if not isinstance(here.get(part), dict):
            here[part] = {}
        here = here[part]
    return None
