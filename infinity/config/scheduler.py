"""The ``scheduler`` block."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from infinity.config.optimizer import by_name
from infinity.config.values import AS_JSON, Block, Count, Natural, NotNegative, Object, counted, expected, is_number

WARMUP_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
TORCH_SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
NOT_FROM_A_CONFIG = {
    "LambdaLR": "needs a function; pass it to infinity.initialize(lr_scheduler=...)",
    "MultiplicativeLR": "needs a function; pass it to infinity.initialize(lr_scheduler=...)",
    "SequentialLR": "is made of other schedulers; pass it to infinity.initialize(lr_scheduler=...)",
    "ChainedScheduler": "is made of other schedulers; pass it to infinity.initialize(lr_scheduler=...)",
    "ReduceLROnPlateau": "needs a metric at every step; step it yourself",
    "LRRangeTest": "is DeepSpeed's own and is not offered here",
    "OneCycle": "is DeepSpeed's own; torch's OneCycleLR is close to it",
}


def _rates(value: object) -> float | tuple[float, ...]:
    if is_number(value) and 0 <= value < 1e300:
        return float(value)
    if isinstance(value, list | tuple) and value and all(is_number(rate) and 0 <= rate < 1e300 for rate in value):
        return tuple(float(rate) for rate in value)
    raise expected("a learning rate of at least 0, or a list of them, one per parameter group")


Rates = Annotated[float | tuple[float, ...], PlainValidator(_rates, json_schema_input_type=Any), AS_JSON]


class _Warmup(Block):
    """What the three warm-ups share."""

    warmup_num_steps: Natural = 1000
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Annotated[int, counted(-1)] = -1


class WarmupParams(_Warmup):
    """WarmupLR: rises from the minimum to the maximum, then stays."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR: rises, then falls in a line to zero at the last step."""

    total_num_steps: Count


class WarmupCosineParams(_Warmup):
    """WarmupCosineLR: rises, then falls along a cosine. Ratios are of the optimizer's own learning rate."""

    total_num_steps: Count
    warmup_min_ratio: NotNegative = 0.0
    cos_min_ratio: NotNegative = 0.0001


WarmupType = type[WarmupParams] | type[WarmupCosineParams]


class SchedulerConfig(Block):
    """A learning-rate schedule by name. ``warmup`` is set for DeepSpeed's three; torch's take ``params`` as given."""

    type: Annotated[str, by_name((*WARMUP_SCHEDULERS, *TORCH_SCHEDULERS), NOT_FROM_A_CONFIG, "a scheduler")]
    params: Object = Field(default_factory=dict)
    """Arguments of the class, as given."""

    @property
    def params_schema(self) -> WarmupType | None:
        if self.type == "WarmupLR":
            return WarmupParams
        if self.type == "WarmupDecayLR":
            return WarmupDecayParams
        return WarmupCosineParams if self.type == "WarmupCosineLR" else None

    @property
    def warmup(self) -> WarmupParams | WarmupCosineParams | None:
        """The arguments with defaults filled in; None for a scheduler of torch."""
        return self.params_schema.model_validate(self.params) if self.params_schema else None

    @property
    def resolved_params(self) -> dict[str, Any]:
        """The arguments with every default that is known here."""
        return self.params if self.warmup is None else self.warmup.model_dump(mode="json")
