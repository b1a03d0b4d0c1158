"""The ``infinity`` block: budgets, placement, everything that DeepSpeed has no name for."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from infinity.config.values import (
    AS_JSON,
    Auto,
    AutoBytes,
    AutoCount,
    AutoNatural,
    AutoPages,
    AutoSomeBytes,
    Block,
    Count,
    Directories,
    Positive,
    expected,
)
from infinity.tier import StateKind, Tier

KINDS = [kind.value for kind in StateKind]
TIERS = [tier.value for tier in Tier]


def _placement(value: object) -> dict[StateKind, Tier] | Auto:
    if value == "auto":
        return "auto"
    shape = f'"auto", or an object from kinds ({", ".join(KINDS)}) to tiers ({", ".join(TIERS)})'
    if not isinstance(value, dict) or not value:
        raise expected(shape)
    wrong = [f"{name!r} is not a kind{_near(name, KINDS)}" for name in value if name not in KINDS]
    wrong += [f"{tier!r} is not a tier{_near(tier, TIERS)}" for tier in value.values() if tier not in TIERS]
    if wrong:
        raise expected(f"{shape}; {', '.join(wrong)}")
    return {StateKind(name): Tier(tier) for name, tier in value.items()}


def _near(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _recompute(value: object) -> dict[str, bool] | bool | Auto:
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    if isinstance(value, dict) and value and all(isinstance(choice, bool) for choice in value.values()):
        return value
    raise expected('"auto", true, false, or an object from unit patterns to true or false')


def _units(value: object) -> tuple[str, ...] | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name.strip() for name in value):
        return tuple(value)
    raise expected('"auto", or a list of class names or module name patterns')


Placement = Annotated[dict[StateKind, Tier] | Auto, PlainValidator(_placement, json_schema_input_type=Any), AS_JSON]
Recompute = Annotated[dict[str, bool] | bool | Auto, PlainValidator(_recompute, json_schema_input_type=Any), AS_JSON]
Units = Annotated[tuple[str, ...] | Auto, PlainValidator(_units, json_schema_input_type=Any), AS_JSON]


class InfinityConfig(Block):
    """Per rank, as every budget here. ``"auto"`` leaves a value to the plan."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    device_memory: AutoSomeBytes = "auto"
    """Bytes of accelerator memory; on a CPU, bytes of RAM that play its part."""
    host_memory: AutoBytes = "auto"
    nvme_space: AutoBytes = "auto"
    nvme_writes_per_day: AutoSomeBytes = "auto"
    """Bytes that a rank writes to NVMe in 24 hours above which it warns; "auto" never does."""
    nvme_writes_stop: bool = False
    """Ends the run there instead, after a step."""
    nvme_path: Directories | None = None
    """Swap directories, one per disk, for states whose offload block names none."""
    placement: Annotated[
        dict[StateKind, Tier] | Auto, PlainValidator(_placement, json_schema_input_type=Any), AS_JSON
    ] = "auto"
    """The tier of each state kind; a kind that is left out is placed by the plan."""
    recompute: Annotated[
        dict[str, bool] | bool | Auto, PlainValidator(_recompute, json_schema_input_type=Any), AS_JSON
    ] = "auto"
    """Which units run again in backward instead of keeping their activations."""
    activations: Literal["auto", "device", "host", "nvme"] = "device"
    """The tier that keeps the inputs of recomputed units; "auto" fills one after the other, given a micro-batch."""
    units: Units = "auto"
    """Class names or module name patterns whose parameters move together."""
    tile_bytes: AutoPages = "auto"
    """Linears and embeddings above this become tiles; auto cuts where ``device_memory`` would not hold the plan."""
    update_in_backward: bool = False
    """Updates each unit as soon as backward has its gradient: needs no clipping, no accumulation, no fp16."""
    grad_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Format of stored gradients."""
    state_dtype: Literal["fp32"] = "fp32"
    """Format of masters, exp_avg, exp_avg_sq."""
    io_engine: Literal["auto", "io_uring", "aio", "libaio", "threads", "python"] = "auto"
    verify: bool = False
    """Checks a checksum of every extent that is read back."""
    timeout_seconds: Positive = 600.0
    """A peer that is silent for this long ends the run."""
    prefetch_units: AutoNatural = "auto"
    """Units read ahead of use."""
    slabs: AutoCount = "auto"
    """Slabs of device memory that units take turns in."""
    non_finite_limit: Count = 5
    """Steps in a row with non-finite gradients (in fp16: at the minimum loss scale) that end the run."""
    isa: Literal["auto", "scalar", "avx2", "avx512", "neon", "torch"] = "auto"
    """Instruction set of the Adam kernel."""
    adam_threads: AutoCount = "auto"
