"""Plans the training of a model by a config, of which a micro-batch may be known."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.plan import Plan
from infinity.plan.memory import READ_AHEAD
from infinity.plan.micro_batch import MicroBatch
from infinity.plan.recompute import check_patterns, is_free, recomputes
from infinity.plan.tiling import plan_units
from infinity.plan.waiting import Waits
from infinity.shard.partition import Partition, partition
from infinity.tier import StateKind

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan_for(
    model: nn.Module,
    config: Config,
    *,
    world_size: int = 1,
    read_ahead: int | None = None,
    moments: bool | None = None,
    local_ranks: int = 1,
    micro_batch: Any = None,
    layer_major: bool = False,
) -> tuple[Partition, Plan]:
    """The units of a model, which may be on the meta device, with the plan for them."""
    if moments is None:
        moments = config.optimizer is None or config.optimizer.adam is not None
    _check_supported(config)
    ahead = READ_AHEAD if read_ahead is None else read_ahead
    together = config.resolve_batch(world_size).accumulation_steps if layer_major else 1
    if micro_batch is None and config.tier_of(StateKind.ACTIVATION) is None:
        raise ConfigError(
            '`infinity.activations` is "auto", but how large activations are is not known; give a micro-batch '
            "(micro_batch=(x, y) of infinity.initialize or infinity.plan), or set it to device, host or nvme"
        )
    found, plan = plan_units(
        model,
        config,
        COMPUTE_DTYPES[config.param_dtype],
        world_size=world_size,
        read_ahead=ahead,
        moments=moments,
        local_ranks=local_ranks,
        waits=None if micro_batch is None else _waits(model, config, micro_batch, together),
    )
    check_patterns(config, {entry.path: model.get_submodule(entry.path) for entry in found.entries})
    return found, plan


def _check_supported(config: Config) -> None:
    """Refuses what the config may say but this version cannot do; nothing is ignored in silence."""
    own = config.infinity
    unsupported = {
        'infinity.device: "cuda"': own.device == "cuda",
        f'infinity.grad_dtype: "{own.grad_dtype}"': own.grad_dtype != "fp32",
        "fp16.auto_cast": config.fp16.auto_cast,
    }
    problems = [
        f"{what} is not available in this version; leave it out" for what, asked in unsupported.items() if asked
    ]
    if problems:
        raise ConfigError(problems)


def _waits(model: nn.Module, config: Config, micro_batch: Any, together: int) -> Waits:
    from infinity.plan.activations import predict  # brings torch's symbolic machinery with it, which only this needs

    units = config.infinity.units
    found = partition(model, units if isinstance(units, str) else list(units))
    modules = dict(model.named_modules())
    again = {e.path for e in found.entries if recomputes(config, e.path, modules[e.path], is_block=e.is_block)}
    blocks = {entry.path for entry in found.entries if entry.is_block}
    dtype = COMPUTE_DTYPES[config.param_dtype]

    def rehearse(recomputed: frozenset[str], moved: frozenset[str]) -> MicroBatch:
        try:
            with _in_silence("torch._subclasses.fake_tensor"):  # a traceback before the error that tells the same
                return predict(model, micro_batch, recomputed=recomputed, moved=moved, blocks=blocks, dtype=dtype)
        except MemoryError:
            raise  # which tells of this process, not of the model
        except Exception as error:  # whatever the model raises
            told = str(error).splitlines()[:1]
            raise ConfigError(
                f"micro_batch: the model could not be run with it on tensors without data "
                f"({type(error).__name__}: {''.join(told)}). Give what the model is called with; if it looks at values "
                "inside forward, leave micro_batch out, so that the first step learns what it would have told"
            ) from error

    return Waits(
        rehearse,
        again,
        {e.path for e in found.entries if is_free(config, e.path, modules[e.path], is_block=e.is_block)},
        config.tier_of(StateKind.ACTIVATION),
        swap=bool(config.swap_directories(StateKind.ACTIVATION)),
        together=together,
    )


@contextmanager
def _in_silence(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def plan_model(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    world_size: int = 1,
    *,
    micro_batch: Any = None,
    layer_major: bool = False,
) -> Plan:
    """What training ``model`` (it may be on the meta device) would allocate; allocates nothing itself.

    With a ``micro_batch`` (a tuple of arguments, a dict of keyword arguments, or one argument; tensors on the meta
    device will do) it also says what activations take: the model is run on tensors without data. ``layer_major``
    plans for ``train_batch``, which has all micro-batches of a step in flight at once. Raises ``CapacityError`` with
    what would fit.
    """
    return plan_for(
        model, Config.load(config), world_size=world_size, micro_batch=micro_batch, layer_major=layer_major
    )[1]
