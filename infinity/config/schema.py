"""Every key of the config, in DeepSpeed's layout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from infinity.config.activation import ActivationCheckpointingConfig
from infinity.config.aio import AioConfig
from infinity.config.optimizer import OptimizerConfig
from infinity.config.precision import Bf16Config, Fp16Config
from infinity.config.run import RunConfig
from infinity.config.runtime import InfinityConfig
from infinity.config.scheduler import SchedulerConfig
from infinity.config.values import (
    Block,
    Count,
    Natural,
    NoEffect,
    NotNegative,
    Object,
    Text,
    counted,
    expected,
    or_auto,
)
from infinity.config.zero import ZeroConfig


def _absent_when_auto(value: object) -> int | None:
    size: int | str = or_auto(counted(1)).func(value)  # type: ignore[call-arg]
    return None if isinstance(size, str) else size


BatchSize = Annotated[int, PlainValidator(_absent_when_auto, json_schema_input_type=Any)] | None


def _is_on(block: object) -> bool:
    """Whether the block, or a part of it that is not itself switched off, is enabled."""
    if not isinstance(block, dict) or block.get("enabled") is False:
        return False
    return block.get("enabled", False) is not False or any(_is_on(part) for part in block.values())


def _off(value: object) -> dict[str, Any]:
    if isinstance(value, dict) and not _is_on(value):
        return value
    raise expected('left out, or hold "enabled": false, because it changes what is trained in a way not offered here')


SwitchedOff = Annotated[dict[str, Any] | None, PlainValidator(_off, json_schema_input_type=dict), NoEffect]
Ignored = Annotated[Object | None, NoEffect]


class Schema(Block):
    """The whole config."""

    train_batch_size: BatchSize = None
    train_micro_batch_size_per_gpu: BatchSize = None
    gradient_accumulation_steps: BatchSize = None
    gradient_clipping: NotNegative = 1.0
    """Largest global norm of the gradient; 0 does not clip."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    bf16: Bf16Config = Field(default_factory=Bf16Config)
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    aio: AioConfig = Field(default_factory=AioConfig)
    steps_per_print: Natural | None = 10
    """Steps between log lines; 0 or null logs none."""
    wall_clock_breakdown: bool = False
    dataloader_drop_last: bool = False
    infinity: InfinityConfig = Field(default_factory=InfinityConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    # Real DeepSpeed keys that change nothing here.
    zero_allow_untested_optimizer: Annotated[bool, NoEffect] = True
    zero_force_ds_cpu_optimizer: Annotated[bool, NoEffect] = False
    communication_data_type: Annotated[Text | None, NoEffect] = None
    seq_parallel_communication_data_type: Annotated[Text | None, NoEffect] = None
    prescale_gradients: Annotated[bool, NoEffect] = False
    gradient_predivide_factor: Annotated[NotNegative, NoEffect] = 1.0
    sparse_gradients: Annotated[bool, NoEffect] = False
    disable_allgather: Annotated[bool, NoEffect] = False
    allgather_size: Annotated[Count, NoEffect] = 500_000_000
    dump_state: Annotated[bool, NoEffect] = False
    memory_breakdown: Annotated[bool, NoEffect] = False
    graph_harvesting: Annotated[bool, NoEffect] = False
    use_data_before_expert_parallelism: Annotated[bool, NoEffect] = False
    sequence_parallel_size: Annotated[Literal[1], NoEffect] = 1
    autotuning: Ignored = None
    checkpoint: Ignored = None
    comet: Ignored = None
    comms_logger: Ignored = None
    compile: Ignored = None
    csv_monitor: Ignored = None
    data_types: Ignored = None
    eigenvalue: Ignored = None
    flops_profiler: Ignored = None
    hybrid_engine: Ignored = None
    monitor_config: Ignored = None
    nebula: Ignored = None
    pipeline: Ignored = None
    tensorboard: Ignored = None
    timers: Ignored = None
    wandb: Ignored = None
    # The same, but switched on they would change the result, so a run that went on without them would mislead.
    amp: SwitchedOff = None
    compression_training: SwitchedOff = None
    curriculum_learning: SwitchedOff = None
    data_efficiency: SwitchedOff = None
    elasticity: SwitchedOff = None
    progressive_layer_drop: SwitchedOff = None
    quantize_training: SwitchedOff = None
    torch_autocast: SwitchedOff = None
