"""The ``zero_optimization`` block: what is partitioned, what is offloaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from infinity.config.values import (
    AutoCount,
    AutoNatural,
    Block,
    Count,
    Directories,
    Fraction01,
    NoEffect,
    counted,
)
from infinity.tier import Tier


class OffloadConfig(Block):
    """Where one half of the model states lives. Counts of elements and buffers may be ``"auto"``."""

    device: Literal["none", "cpu", "nvme", "auto"] = "none"
    nvme_path: Directories | None = None
    """Swap directories, one per disk; without it those of ``infinity.nvme_path`` serve."""
    pin_memory: Annotated[bool, NoEffect] = False
    """Host memory is pinned where there is an accelerator to copy to."""
    ratio: Fraction01 = 1.0
    """Share of the bytes that is offloaded, unit by unit; the first units stay on the device."""

    buffer_count: AutoCount = "auto"
    """On NVMe: device slabs per unit size (parameters), buffers for one state of one sub-group each (optimizer)."""
    buffer_size: AutoCount = "auto"
    """On NVMe, elements: at least the largest unit's (parameters), at most so many per sub-group (optimizer)."""

    # Reads and writes always overlap with compute.
    max_in_cpu: Annotated[AutoNatural, NoEffect] = "auto"
    pipeline_read: Annotated[bool, NoEffect] = True
    pipeline_write: Annotated[bool, NoEffect] = True
    fast_init: Annotated[bool, NoEffect] = False
    super_offload: Annotated[bool, NoEffect] = False
    cpuadam_cores_perc: Annotated[float, NoEffect] = 0.8

    @property
    def tier(self) -> Tier | None:
        """The tier that ``device`` names; None leaves it to the plan."""
        return {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}.get(self.device)


class ZeroConfig(Block):
    """Partitioning over ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    stage: Annotated[int, counted(0, 3)] = 0
    offload_param: OffloadConfig | None = None
    offload_optimizer: OffloadConfig | None = None
    sub_group_size: AutoCount = "auto"
    """Elements of a shard that the optimizer reads, updates and writes at a time."""

    # What follows tunes machinery that does not exist here: a unit is what moves, at once and in place.
    reduce_bucket_size: Annotated[AutoCount, NoEffect] = "auto"
    allgather_bucket_size: Annotated[AutoCount, NoEffect] = "auto"
    stage3_prefetch_bucket_size: Annotated[AutoNatural, NoEffect] = "auto"
    overlap_comm: Annotated[bool, NoEffect] = True
    contiguous_gradients: Annotated[bool, NoEffect] = True
    stage3_max_live_parameters: Annotated[AutoNatural, NoEffect] = "auto"
    stage3_max_reuse_distance: Annotated[AutoNatural, NoEffect] = "auto"
    stage3_param_persistence_threshold: Annotated[AutoNatural, NoEffect] = "auto"
    stage3_model_persistence_threshold: Annotated[AutoNatural, NoEffect] = "auto"
    stage3_module_granularity_threshold: Annotated[AutoNatural, NoEffect] = "auto"
    stage3_gather_16bit_weights_on_model_save: Annotated[bool, NoEffect] = False
    stage3_gather_fp16_weights_on_model_save: Annotated[bool, NoEffect] = False
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, NoEffect] = False
    stage3_allgather_sequential: Annotated[bool, NoEffect] = False
    reduce_scatter: Annotated[bool, NoEffect] = True
    allgather_partitions: Annotated[bool, NoEffect] = True
    use_multi_rank_bucket_allreduce: Annotated[bool, NoEffect] = True
    load_from_fp32_weights: Annotated[bool, NoEffect] = True
    elastic_checkpoint: Annotated[bool, NoEffect] = False
    ignore_unused_parameters: Annotated[bool, NoEffect] = True
    legacy_stage1: Annotated[bool, NoEffect] = False
    round_robin_gradients: Annotated[bool, NoEffect] = False
    zero_hpz_partition_size: Annotated[Count, NoEffect] = 1
    zero_quantized_weights: Annotated[bool, NoEffect] = False
    zero_quantized_nontrainable_weights: Annotated[bool, NoEffect] = False
    zero_quantized_gradients: Annotated[bool, NoEffect] = False
    zeropp_loco_param: Annotated[dict[str, Any] | None, NoEffect] = None
    zenflow: Annotated[dict[str, Any] | None, NoEffect] = None
    mics_shard_size: Annotated[int, NoEffect] = -1
    mics_hierarchical_params_gather: Annotated[bool, NoEffect] = False
    memory_efficient_linear: Annotated[bool, NoEffect] = True
    pipeline_loading_checkpoint: Annotated[bool, NoEffect] = False
    override_module_apply: Annotated[bool, NoEffect] = True
    log_trace_cache_warnings: Annotated[bool, NoEffect] = False
    enable_sanity_checks: Annotated[bool, NoEffect] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, NoEffect] = False
