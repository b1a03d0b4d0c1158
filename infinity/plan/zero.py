"""What mixed-precision Adam keeps per rank at each ZeRO stage."""

from __future__ import annotations

PARAM_BYTES = 2
GRAD_BYTES = 2
OPTIMIZER_BYTES = 12
"""fp32 master, exp_avg, exp_avg_sq."""


def stage_bytes(parameters: int, ranks: int) -> dict[int, int]:
    """Bytes per rank by stage: 16 Ψ, 4 Ψ + 12 Ψ/N, 2 Ψ + 14 Ψ/N, 16 Ψ/N, with 16-bit gradients as the ZeRO paper."""
    sharded = {0: 0, 1: OPTIMIZER_BYTES, 2: OPTIMIZER_BYTES + GRAD_BYTES, 3: OPTIMIZER_BYTES + GRAD_BYTES + PARAM_BYTES}
    everything = PARAM_BYTES + GRAD_BYTES + OPTIMIZER_BYTES
    return {
        stage: (everything - split) * parameters + -(-split * parameters // ranks) for stage, split in sharded.items()
    }
