"""The 16-bit formats that parameters train in."""

from __future__ import annotations

from typing import Annotated

from infinity.config.values import Block, Count, Natural, NoEffect, NotNegative, Positive


class Fp16Config(Block):
    """IEEE half precision, with the loss scaled so that small gradients survive."""

    enabled: bool = False
    auto_cast: bool = False
    """Casts floating-point inputs of the model to fp16."""
    loss_scale: NotNegative = 0.0
    """A fixed scale; 0 means that it adapts to what overflows."""
    initial_scale_power: Natural = 16
    """The adaptive scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps without an overflow before the scale doubles."""
    hysteresis: Count = 2
    """Overflows to bear before the scale halves."""
    consecutive_hysteresis: bool = False
    """A step without an overflow restores the hysteresis."""
    min_loss_scale: Positive = 1.0
    fp16_master_weights_and_grads: Annotated[bool, NoEffect] = False

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self.loss_scale == 0.0


class Bf16Config(Block):
    """bfloat16: the range of fp32, so the loss is not scaled."""

    enabled: bool = False
    immediate_grad_update: Annotated[bool, NoEffect] = True
    check_grad_overflow: Annotated[bool, NoEffect] = False
    bf16_master_weights_and_grads: Annotated[bool, NoEffect] = False
    bf16_optimizer_states: Annotated[bool, NoEffect] = False
