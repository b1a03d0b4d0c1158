"""The types of single config values, each refusing a wrong value in one phrase."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from infinity.config.size import EXPECTED as A_SIZE
from infinity.config.size import parse_bytes
from infinity.errors import ConfigError
from infinity.tier import PAGE_BYTES

Auto = Literal["auto"]


class Block(BaseModel):
    """One JSON object of the config: unknown keys refused, values read as they are, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class NoEffect:
    """Marks a key that DeepSpeed has, which changes nothing here: accepted, then listed once."""


def no_effect(block: type[BaseModel]) -> set[str]:
    """The keys of a block that change nothing here."""
    return {name for name, field in block.model_fields.items() if NoEffect in field.metadata}


def expected(phrase: str) -> PydanticCustomError:
    """The refusal of a value; ``phrase`` ends the sentence "... must be"."""
    return PydanticCustomError("expected", "{phrase}", {"phrase": phrase})


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: object) -> int | None:
    """The value as an int. JSON files write 500000000 as 5e8, so a float without a fraction is whole."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def counted(least: int, most: int | None = None) -> PlainValidator:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def check(value: object) -> int:
        number = whole(value)
        if number is None or number < least or (most is not None and number > most):
            raise expected(f"a whole number {bounds}")
        return number

    return PlainValidator(check, json_schema_input_type=int)


def real(least: float, most: float = math.inf, *, above: bool = False) -> PlainValidator:
    """A finite number from ``least`` (or above it) up to ``most``."""
    bounds = f"above {least:g}" if above else f"of at least {least:g}"
    if most < math.inf:
        bounds += f", at most {most:g}"

    def check(value: object) -> float:
        if is_number(value):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and (number > least if above else number >= least) and number <= most:
                return number
        raise expected(f"a number {bounds}")

    return PlainValidator(check, json_schema_input_type=float)


def sized(least: int = 0, why: str = "") -> PlainValidator:
    def check(value: object) -> int:
        try:
            size = parse_bytes(value)
        except ConfigError:
            raise expected(A_SIZE) from None
        if size < least:
            raise expected(f"{A_SIZE}, of at least {least}{why}")
        return size

    return PlainValidator(check, json_schema_input_type=int)


def or_auto(validator: PlainValidator) -> PlainValidator:
    """The same values, or the word that leaves the choice to the plan."""
    check: Callable[[object], Any] = validator.func  # type: ignore[assignment]

    def check_or_auto(value: object) -> Any:
        if value == "auto":
            return value
        try:
            return check(value)
        except PydanticCustomError as error:
            raise expected(f'{error.message()}, or "auto"') from None

    return PlainValidator(check_or_auto, json_schema_input_type=Any)


def text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise expected("text that is not empty")


def directories(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list | tuple) and given and all(isinstance(path, str) and path.strip() for path in given):
        if len(set(given)) < len(given):
            raise expected("a list of directories that are all different")
        return tuple(given)
    raise expected("one directory, or a list of directories, one per disk")


def object_of_anything(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise expected("an object")


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_json(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value.value if isinstance(value, Enum) else value


AS_JSON = PlainSerializer(_as_json)
"""Writes a value as it stands in a file; without it pydantic warns about the shapes that a validator made itself."""

Count = Annotated[int, counted(1)]
Natural = Annotated[int, counted(0)]
AutoCount = Annotated[int | Auto, or_auto(counted(1))]
AutoNatural = Annotated[int | Auto, or_auto(counted(0))]
Positive = Annotated[float, real(0.0, above=True)]
NotNegative = Annotated[float, real(0.0)]
Fraction01 = Annotated[float, real(0.0, 1.0)]
Bytes = Annotated[int, sized()]
AutoBytes = Annotated[int | Auto, or_auto(sized())]
AutoSomeBytes = Annotated[int | Auto, or_auto(sized(1))]
AutoPages = Annotated[int | Auto, or_auto(sized(PAGE_BYTES, " (a page, which is what less would take as well)"))]
Text = Annotated[str, PlainValidator(text, json_schema_input_type=str)]
Directories = Annotated[
    tuple[str, ...],
    PlainValidator(directories, json_schema_input_type=Any),
    AS_JSON,
]
Object = Annotated[dict[str, Any], PlainValidator(object_of_anything, json_schema_input_type=dict)]
