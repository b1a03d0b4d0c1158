"""The ``activation_checkpointing`` block, as DeepSpeed has it."""

from __future__ import annotations

from typing import Annotated

from infinity.config.values import Block, Count, NoEffect


class ActivationCheckpointingConfig(Block):
    """Whether unit inputs leave the device. Which units recompute is ``infinity.recompute``."""

    cpu_checkpointing: bool = False
    """Keeps the inputs of recomputed units in host memory, as ``infinity.activations`` "host" does."""
    partition_activations: Annotated[bool, NoEffect] = False
    contiguous_memory_optimization: Annotated[bool, NoEffect] = False
    number_checkpoints: Annotated[Count | None, NoEffect] = None
    synchronize_checkpoint_boundary: Annotated[bool, NoEffect] = False
    profile: Annotated[bool, NoEffect] = False
