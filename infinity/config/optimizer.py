"""The ``optimizer`` block."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from infinity.config.values import AS_JSON, Block, NoEffect, NotNegative, Object, expected, is_number, no_effect, text

TORCH_OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip
NOT_FROM_A_CONFIG = {
    "LBFGS": "calls the model several times in one step, which offloading cannot serve",
    "SparseAdam": "needs sparse gradients, which are not made here",
    "OneBitAdam": "is DeepSpeed's own; Adam gives the uncompressed result",
    "ZeroOneAdam": "is DeepSpeed's own; Adam gives the uncompressed result",
    "OneBitLamb": "is DeepSpeed's own; pass such an optimizer to infinity.initialize(optimizer=...)",
    "Lamb": "is DeepSpeed's own; pass such an optimizer to infinity.initialize(optimizer=...)",
    "Lion": "is not in torch.optim; pass such an optimizer to infinity.initialize(optimizer=...)",
}


def by_name(names: tuple[str, ...], other: dict[str, str], what: str) -> PlainValidator:
    """A class name out of ``names``, capitals ignored; ``other`` says why a known name cannot serve."""
    known = {name.lower(): name for name in names}
    refused = {name.lower(): reason for name, reason in other.items()}

    def check(value: object) -> str:
        name = text(value)
        if name.lower() in refused:
            raise expected(f"{what} that a config can describe: {name} {refused[name.lower()]}")
        if name.lower() not in known:
            close = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f'; did you mean "{known[close[0]]}"?' if close else ""
            raise expected(f"one of {', '.join(names)}{hint}")
        return known[name.lower()]

    return PlainValidator(check, json_schema_input_type=str)


def _betas(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value):
        return float(value[0]), float(value[1])
    raise expected("a list of two numbers, each of at least 0, below 1")


BlockType = type[Block]


class AdamParams(Block):
    """``optimizer.params`` for Adam, AdamW, with DeepSpeed's defaults."""

    lr: NotNegative = 1e-3
    betas: Annotated[tuple[float, float], PlainValidator(_betas, json_schema_input_type=list), AS_JSON] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    bias_correction: bool = True
    adam_w_mode: bool = True
    """Decay apart from the gradient. "Adam" means that too unless this is false, as in DeepSpeed; "AdamW" always."""
    amsgrad: Literal[False] = False
    maximize: Literal[False] = False
    torch_adam: Annotated[bool, NoEffect] = False
    fp32_optimizer_states: Annotated[bool, NoEffect] = True
    set_grad_none: Annotated[bool, NoEffect] = True
    foreach: Annotated[bool | None, NoEffect] = None
    fused: Annotated[bool | None, NoEffect] = None
    capturable: Annotated[bool, NoEffect] = False
    differentiable: Annotated[Literal[False], NoEffect] = False


class OptimizerConfig(Block):
    """An optimizer by name. ``adam`` is set for the two that run in the native kernel."""

    type: Annotated[str, by_name(TORCH_OPTIMIZERS, NOT_FROM_A_CONFIG, "an optimizer")]
    params: Object = Field(default_factory=dict)
    """Arguments of the class, as given."""
    legacy_fusion: Annotated[bool, NoEffect] = False

    @property
    def params_schema(self) -> BlockType | None:
        return AdamParams if self.type in ("Adam", "AdamW") else None

    @property
    def adam(self) -> AdamParams | None:
        """The arguments with defaults filled in; None for an optimizer that torch runs."""
        return AdamParams.model_validate(self.params) if self.params_schema else None

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is applied to the weight (AdamW) and not added to the gradient."""
        return self.type == "AdamW" or (self.adam is not None and self.adam.adam_w_mode)

    @property
    def resolved_params(self) -> dict[str, Any]:
        """The arguments with every default that is known here."""
        return self.params if self.adam is None else self.adam.model_dump(mode="json", exclude=no_effect(AdamParams))
