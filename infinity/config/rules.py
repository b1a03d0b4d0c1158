"""Combinations of keys that cannot be honoured, each in itself a fair value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.config.schema import Schema
from infinity.config.zero import OffloadConfig
from infinity.tier import PAGE_BYTES, StateKind, Tier

OPTIMIZER_KINDS = (StateKind.GRAD, StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Clash:
    """Keys that do not go together. It is not reported where one of the keys is at fault already."""

    keys: tuple[str, ...]
    problem: str


def clashes(config: Schema) -> Iterator[Clash]:
    """Every clash, in the order of the config."""
    yield from _batch(config)
    yield from _precision(config)
    yield from _stage(config)
    yield from _ratio(config)
    yield from _swap_directories(config)
    yield from _placement(config)
    yield from _update_in_backward(config)
    yield from _wear(config)
    yield from _aio(config)
    yield from _warmup(config)


def placed(config: Schema) -> dict[StateKind, Tier]:
    """The kinds that ``infinity.placement`` names."""
    return {} if config.infinity.placement == "auto" else config.infinity.placement


def offload_of(config: Schema, kind: StateKind) -> tuple[str, OffloadConfig | None]:
    """The offload block that speaks for a kind, after its dotted key."""
    zero = config.zero_optimization
    if kind is StateKind.PARAM:
        return "zero_optimization.offload_param", zero.offload_param
    if kind in OPTIMIZER_KINDS:
        return "zero_optimization.offload_optimizer", zero.offload_optimizer
    return "", None


def _batch(config: Schema) -> Iterator[Clash]:
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    parts = (micro or 1) * (accumulation or 1)
    if train is not None and train % parts:
        keys = tuple(
            name
            for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            if getattr(config, name) is not None
        )
        product = " x ".join(f"`{name}` {getattr(config, name)}" for name in keys)
        yield Clash(
            ("train_batch_size", *keys),
            f"`train_batch_size` is {train}, but it must be a multiple of {parts} ({product}), whatever the number of "
            "ranks; change one of them, or drop one to have it derived.",
        )


def _precision(config: Schema) -> Iterator[Clash]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Clash(
            ("fp16.enabled", "bf16.enabled"),
            "`fp16.enabled` and `bf16.enabled` are both true, but parameters have one format; set one to false.",
        )


def _stage(config: Schema) -> Iterator[Clash]:
    stage = config.zero_optimization.stage
    for kind in StateKind:
        least = 3 if kind is StateKind.PARAM else 1 if kind in OPTIMIZER_KINDS else 0
        if stage >= least:
            continue
        tier = placed(config).get(kind)
        if tier in (Tier.HOST, Tier.NVME):
            key = f"infinity.placement.{kind.value}"
            yield Clash(
                ("zero_optimization.stage", "infinity.placement"),
                f'`{key}` is "{tier.value}", but `zero_optimization.stage` is {stage}; set the stage to '
                f'{_from(least)}, or `{key}` to "device".',
            )
    for name, least in (("offload_param", 3), ("offload_optimizer", 1)):
        offload = getattr(config.zero_optimization, name)
        if offload and offload.device in ("cpu", "nvme") and stage < least:
            key = f"zero_optimization.{name}.device"
            yield Clash(
                ("zero_optimization.stage", key),
                f'`{key}` is "{offload.device}", but `zero_optimization.stage` is {stage}; set the stage to '
                f'{_from(least)}, or `{key}` to "none".',
            )


def _from(least: int) -> str:
    return "3" if least == 3 else f"{least}, 2 or 3" if least == 1 else f"{least} or more"


def _ratio(config: Schema) -> Iterator[Clash]:
    for name in ("offload_param", "offload_optimizer"):
        offload = getattr(config.zero_optimization, name)
        if offload and offload.ratio != 1.0 and offload.device in ("none", "auto"):
            key = f"zero_optimization.{name}"
            yield Clash(
                (f"{key}.ratio", f"{key}.device"),
                f'`{key}.ratio` is {offload.ratio:g}, but `{key}.device` is "{offload.device}"; drop the ratio, or set '
                'the device to "cpu" or "nvme", to which so much is offloaded.',
            )


def _swap_directories(config: Schema) -> Iterator[Clash]:
    common = config.infinity.nvme_path
    for name in ("offload_param", "offload_optimizer"):
        offload = getattr(config.zero_optimization, name)
        if offload and offload.device == "nvme" and not (offload.nvme_path or common):
            key = f"zero_optimization.{name}"
            yield Clash(
                (f"{key}.device", f"{key}.nvme_path", "infinity.nvme_path"),
                f'`{key}.device` is "nvme", but there is no directory for it; set `{key}.nvme_path` (or '
                "`infinity.nvme_path`, for all states) to a directory on a local NVMe disk.",
            )
    users = [f"infinity.placement.{kind.value}" for kind, tier in placed(config).items() if tier is Tier.NVME]
    users += ["infinity.activations"] if config.infinity.activations == "nvme" else []
    zero = config.zero_optimization
    anywhere = common or any(block and block.nvme_path for block in (zero.offload_param, zero.offload_optimizer))
    if users and not anywhere:
        yield Clash(
            ("infinity.placement", "infinity.activations", "infinity.nvme_path"),
            f'{" and ".join(f"`{user}`" for user in users)} {"is" if len(users) == 1 else "are"} "nvme", but there is '
            "no directory for it; set `infinity.nvme_path` to a directory on a local NVMe disk.",
        )


def _placement(config: Schema) -> Iterator[Clash]:
    for kind, tier in placed(config).items():
        key, offload = offload_of(config, kind)
        # Gradients merely follow the optimizer where nobody says otherwise.
        if offload and offload.tier not in (None, tier) and kind is not StateKind.GRAD:
            yield Clash(
                ("infinity.placement", f"{key}.device"),
                f'`infinity.placement.{kind.value}` is "{tier.value}", but `{key}.device` is "{offload.device}"; '
                "drop one of the two.",
            )
    activation = placed(config).get(StateKind.ACTIVATION)
    if activation and config.infinity.activations not in ("device", activation.value):
        yield Clash(
            ("infinity.placement", "infinity.activations"),
            f'`infinity.placement.activation` is "{activation.value}", but `infinity.activations` is '
            f'"{config.infinity.activations}"; drop one of the two.',
        )


def _wear(config: Schema) -> Iterator[Clash]:
    if config.infinity.nvme_writes_stop and config.infinity.nvme_writes_per_day == "auto":
        yield Clash(
            ("infinity.nvme_writes_stop", "infinity.nvme_writes_per_day"),
            "`infinity.nvme_writes_stop` is true, but `infinity.nvme_writes_per_day` says no number of bytes to stop "
            'at; set it, such as "2TB", or `infinity.nvme_writes_stop` to false.',
        )


def _update_in_backward(config: Schema) -> Iterator[Clash]:
    if not config.infinity.update_in_backward:
        return
    needs = (
        ("gradient_clipping", config.gradient_clipping != 0.0, f"{config.gradient_clipping:g}", "0.0"),
        ("gradient_accumulation_steps", (config.gradient_accumulation_steps or 1) > 1,
         f"{config.gradient_accumulation_steps}", "1"),
        ("fp16.enabled", config.fp16.enabled, "true", "false"),
    )  # fmt: skip
    for key, clashes_with_it, given, expected in needs:
        if clashes_with_it:
            yield Clash(
                ("infinity.update_in_backward", key),
                f"`infinity.update_in_backward` is true, which changes weights before later gradients are known, but "
                f"`{key}` is {given}; set it to {expected}, or `infinity.update_in_backward` to false.",
            )
    adam = config.optimizer is None or config.optimizer.adam is not None
    if not adam:
        yield Clash(
            ("infinity.update_in_backward", "optimizer.type"),
            "`infinity.update_in_backward` is true, which the native Adam alone can do; take Adam or AdamW, or set "
            "`infinity.update_in_backward` to false.",
        )


def _aio(config: Schema) -> Iterator[Clash]:
    aio = config.aio
    if aio.block_size != "auto" and aio.block_size % PAGE_BYTES:
        yield Clash(
            ("aio.block_size",),
            f"`aio.block_size` is {aio.block_size}, but it must be a multiple of {PAGE_BYTES} bytes, such as 1048576.",
        )
    counts = (aio.thread_count, aio.intra_op_parallelism)
    if "auto" not in counts and counts[0] != counts[1]:
        yield Clash(
            ("aio.thread_count", "aio.intra_op_parallelism"),
            f"`aio.thread_count` is {counts[0]}, but `aio.intra_op_parallelism` is {counts[1]}; they are two names of "
            "one number, so drop one.",
        )


def _warmup(config: Schema) -> Iterator[Clash]:
    warmup = config.scheduler.warmup if config.scheduler else None
    total = getattr(warmup, "total_num_steps", None)
    if warmup and total is not None and warmup.warmup_num_steps > total:
        yield Clash(
            ("scheduler.params",),
            f"`scheduler.params.warmup_num_steps` is {warmup.warmup_num_steps}, but `scheduler.params.total_num_steps` "
            f"is {total}; the warm-up must end before the schedule does.",
        )
