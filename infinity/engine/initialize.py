"""Turns a model with a config into an engine, an optimizer, a loader, a scheduler."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from infinity.config import Config
from infinity.engine.attach import bind_units, check_parameters, store_values, tiled_parameters
from infinity.engine.build import Injected, Parts, build_parts
from infinity.engine.engine import Engine
from infinity.engine.entry import EntryModule
from infinity.engine.loader import TrainingLoader
from infinity.engine.placeholder import OffloadedParameter
from infinity.engine.planning import COMPUTE_DTYPES
from infinity.engine.runtime import Runtime
from infinity.engine.saving import Saving
from infinity.engine.tiled_parameter import TiledParameter
from infinity.engine.updates import updates_of
from infinity.errors import ConfigError
from infinity.optim.facade import DEFAULTS, StreamedAdam, StreamedOptimizer, group_problems
from infinity.optim.loss_scaler import LossScaler
from infinity.optim.rules import TorchRule, torch_optimizer
from infinity.optim.schedulers import build_scheduler
from infinity.plan.recompute import recomputes
from infinity.tier import StateKind

log = logging.getLogger("infinity")

Groups = list[dict[str, Any]]


def initialize(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    model_parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    *,
    micro_batch: Any = None,
    layer_major: bool = False,
    injected: Injected | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, TrainingLoader | None, LRScheduler | None]:
    """Moves ``model`` onto its tiers; returns ``(engine, optimizer, loader, scheduler)``.

    ``model_parameters``: parameters or groups with their own ``lr``, ``weight_decay``, ``betas``, ``eps``; parameters
    in no group are not trained. ``optimizer``: one of torch's, whose groups are taken over; Adam and AdamW run in
    the native kernels. ``lr_scheduler``: a
    torch scheduler, or a function from optimizer to scheduler, stepped by ``engine.step()`` unless it needs a metric.
    ``training_data``: a dataset that the loader shuffles, shares among ranks, goes on with after a resume.
    ``micro_batch``: one as ``train_batch`` takes it, on any device; with it the plan is made for what waits for its
    backward too (``infinity.recompute`` and ``infinity.activations`` "auto", refusals). ``layer_major`` says that
    ``train_batch`` will be used, which has all micro-batches of a step in flight at once.
    Raises ``ConfigError``, ``CapacityError`` or ``StorageError`` before the model is touched, unless it is a disk that
    fails while parameters are being moved to it: then the model has to be built again. An error that a scheduler or
    loader raises finds the model with parameters in RAM again.
    """
    settings = Config.load(config)
    check_parameters(model)
    groups, defaults = _parameter_groups(model, settings, model_parameters, optimizer)
    shadow = _shadow(settings, optimizer, groups)
    _freeze_others(model, groups)
    batch = {"micro_batch": micro_batch, "layer_major": layer_major}
    parts = build_parts(model, settings, injected or Injected(), moments=shadow is None, **batch)
    try:
        if shadow is not None and parts.partition.tiled:
            raise ConfigError(
                f"{parts.partition.tiled[0].name} is cut into tiles, which only the native Adam and AdamW update. "
                "Use one of those, or leave infinity.tile_bytes out and make it an nn.Linear if it is a TiledLinear"
            )
        engine = _attach(model, parts, groups)
    except BaseException:
        parts.close()
        raise
    try:
        if groups is not None:
            if shadow is None:
                engine.optimizer = StreamedAdam(groups, {**DEFAULTS, **defaults}, engine.step, engine.zero_grad)
            else:
                numbers = [
                    {**ours, "params": own["params"]} for ours, own in zip(shadow.param_groups, groups, strict=True)
                ]
                engine.optimizer = StreamedOptimizer(numbers, shadow.defaults, engine.step, engine.zero_grad)
                parts.updater.rule = TorchRule(shadow, _stand_ins(shadow, groups))
            engine.updates = updates_of(parts, engine._runtime.units, engine.steps, engine.optimizer)
            engine.lr_scheduler = _scheduler(settings, engine.optimizer, lr_scheduler)
        loader = engine.training_dataloader = _loader(training_data, collate_fn, settings, parts)
    except BaseException:
        engine.destroy(restore_parameters=True)
        raise
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _attach(model: nn.Module, parts: Parts, groups: Groups | None) -> Engine:
    bound = bind_units(model, parts.partition, parts.device.torch_device)
    places: dict[int, tuple[tuple[int, int], ...]] = {}
    for unit in bound:
        for homes, placeholder in zip(unit.homes, unit.placeholders, strict=True):
            own = placeholder._homes if isinstance(placeholder, TiledParameter) else homes
            parameters, name = own[0]
            places[id(parameters[name])] = placeholder.places
    group_of = {
        place: number for number, group in enumerate(groups or []) for p in group["params"] for place in places[id(p)]
    }
    runtime = Runtime(bound, parts.params, parts.grads, parts.device, parts.ledger)
    placement = parts.plan.placement
    runtime.param_tiers = [placement.tier(StateKind.PARAM, unit).value for unit in parts.partition.units]
    saving = Saving(parts)
    parts.updater.held = saving.held
    runtime.settle_parts = saving.settle
    runtime.timeout_seconds = parts.config.infinity.timeout_seconds
    runtime.homes = parts.homes
    store_values(bound, parts.homes)
    for unit in bound:
        for placeholder in unit.placeholders:
            placeholder._owner = runtime
    runtime.tiled = tiled_parameters(bound)
    for group in groups or []:
        group["params"] = [
            bound[places[id(p)][0][0]].placeholders[places[id(p)][0][1]] if id(p) in places else p
            for p in group["params"]
        ]
    _cast_buffers(model, COMPUTE_DTYPES[parts.config.param_dtype])
    for name, buffer in model.named_buffers():
        parts.group.broadcast(f"the buffer {name}", buffer, 0)
    modules = dict(model.named_modules())
    entries = _called_entries(parts, runtime, modules)
    called = {entry.path for entry in parts.partition.entries}
    for path, module in modules.items():
        offloaded = [p for p in module._parameters.values() if isinstance(p, OffloadedParameter)]
        if offloaded and path not in called:
            own_units = tuple(sorted({p._place[0] for p in offloaded if not isinstance(p, TiledParameter)}))
            entries.append(EntryModule(runtime, path, module, own_units, recompute=False, guest=True))
    for wrapped in entries:
        wrapped.install()
    return Engine(model, parts, runtime, saving, entries, _scaler(parts.config), group_of)


def _called_entries(parts: Parts, runtime: Runtime, modules: Mapping[str, nn.Module]) -> list[EntryModule]:
    """The entries of the partition; where nothing ever moves, those that keep activations join one around them."""
    waiting = parts.plan.waiting
    kept, staying = (waiting.kept, waiting.staying) if waiting is not None else (frozenset(), frozenset())
    entries, resident = [], parts.is_resident
    for entry in parts.partition.entries:
        path, module = entry.path, modules[entry.path]
        again = recomputes(parts.config, path, module, is_block=entry.is_block) and path not in kept
        moves = None if path in staying else parts.activations
        joins = resident and not again
        entries.append(EntryModule(runtime, path, module, entry.units, recompute=again, activations=moves, joins=joins))
    if resident:
        for bound in runtime.units:
            bound.home = parts.params.flat(bound.unit.index)
    return entries


def _parameter_groups(
    model: nn.Module,
    config: Config,
    model_parameters: Iterable[Any] | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[Groups | None, dict[str, Any]]:
    """Groups of real parameters with their own numbers, with the numbers for the rest; None without an optimizer."""
    defaults: dict[str, Any] = {}
    adam = None if config.optimizer is None else config.optimizer.adam
    if optimizer is not None:
        decoupled = {"decoupled": isinstance(optimizer, torch.optim.AdamW)} if _is_adam(optimizer) else {}
        groups = [{**decoupled, **group} for group in optimizer.param_groups]
        if optimizer.state and not isinstance(optimizer, torch.optim.Adagrad):  # which has state before its first step
            raise ConfigError("optimizer: it has taken steps already; pass one that has no state yet")
    elif config.optimizer is None:
        if model_parameters is not None:
            raise ConfigError('model_parameters were given but the config has no "optimizer" block and none was passed')
        return None, defaults
    else:
        if adam is not None:
            defaults = {
                "lr": adam.lr, "betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay,
                "decoupled": config.optimizer.decoupled, "bias_correction": adam.bias_correction,
            }  # fmt: skip
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        grouped = bool(given) and isinstance(given[0], dict)
        groups = [dict(group) for group in given] if grouped else [{"params": given}]
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: dict[int, int] = {}
    problems = []
    for number, group in enumerate(groups):
        streamed = adam is not None if optimizer is None else _is_adam(optimizer)
        problems += group_problems(number, group, defaults) if streamed else []
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        for parameter in group["params"]:
            if id(parameter) not in known:
                problems.append(
                    f"parameter group {number} holds a tensor of shape {tuple(parameter.shape)} that is no parameter "
                    "of the model"
                )
            elif id(parameter) in seen:
                problems.append(
                    f"{known[id(parameter)]} is in parameter group {seen[id(parameter)]} as well as {number}; it can "
                    "be in one"
                )
            seen[id(parameter)] = number
    if problems:
        raise ConfigError(problems)
    return groups, defaults


def _is_adam(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the native kernels do what this optimizer does."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def _shadow(
    config: Config, optimizer: torch.optim.Optimizer | None, groups: Groups | None
) -> torch.optim.Optimizer | None:
    """The torch optimizer that will run over stand-ins, for one the native kernels do not know; None for Adam."""
    if groups is None or _is_adam(optimizer) or (optimizer is None and config.optimizer and config.optimizer.adam):
        return None
    if optimizer is not None:
        kind, known = type(optimizer), inspect.signature(type(optimizer)).parameters
        arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
    else:
        assert config.optimizer is not None
        kind, arguments = getattr(torch.optim, config.optimizer.type), config.optimizer.params
    name = kind.__name__
    if kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise ConfigError(f"optimizer: {name} cannot run on offloaded parameters; use Adam, AdamW or a first-order one")
    try:
        shadow = torch_optimizer(kind, arguments, groups)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: torch's {name} refused these parameters: {error}") from None
    log.warning(
        "%s runs in PyTorch, on one unit at a time, slower than the native Adam; what it remembers stays in RAM, "
        "outside of the budgets",
        name,
    )
    return shadow


def _stand_ins(shadow: torch.optim.Optimizer, groups: Groups) -> dict[tuple[int, int], nn.Parameter]:
    return {
        own._place: stand_in
        for ours, theirs in zip(shadow.param_groups, groups, strict=True)
        for stand_in, own in zip(ours["params"], theirs["params"], strict=True)
    }


def _freeze_others(model: nn.Module, groups: Groups | None) -> None:
    trained = {id(parameter) for group in groups or [] for parameter in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if others:
        log.info("%d parameters are in no parameter group, so they are frozen: %s ...", len(others), others[0])
        for name, parameter in model.named_parameters():
            if name in set(others):
                parameter.requires_grad_(False)


def _scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler(1.0, dynamic=False)
    scale = 2.0**fp16.initial_scale_power if fp16.dynamic else fp16.loss_scale
    return LossScaler(
        scale, dynamic=fp16.dynamic, window=fp16.loss_scale_window, hysteresis=fp16.hysteresis,
        minimum=fp16.min_loss_scale, consecutive=fp16.consecutive_hysteresis,
    )  # fmt: skip


def _scheduler(
    config: Config,
    optimizer: torch.optim.Optimizer,
    given: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None,
) -> LRScheduler | None:
    if isinstance(given, LRScheduler):
        _retarget(given, optimizer)
        return given
    if given is not None:
        return given(optimizer)
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.resolved_params, optimizer)


def _retarget(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """Makes a scheduler that was built for another optimizer, with those inside it, act on ``optimizer``."""
    scheduler.optimizer = optimizer
    # At 1 torch warns about an optimizer that was not there when the scheduler was built.
    scheduler.__dict__["_step_count"] = scheduler.__dict__.get("_step_count", 1) + 1
    for inner in getattr(scheduler, "_schedulers", ()):
        _retarget(inner, optimizer)


def _cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Persistent floating buffers follow the parameters; computed ones (rotary frequencies) keep their precision."""
    if dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)


def _loader(data: Any, collate_fn: Callable[..., Any] | None, config: Config, parts: Parts) -> TrainingLoader | None:
    if data is None:
        return None
    size = config.resolve_batch(parts.group.world_size).micro_batch_size
    ranks = parts.group.world_size
    if ranks > 1 and isinstance(data, IterableDataset):
        log.warning(
            "training_data is an IterableDataset: each of %d ranks iterates over all of it, so let it give each rank "
            "samples of its own",
            ranks,
        )
    elif ranks > 1 and len(data) < size * ranks:
        raise ConfigError(
            f"training_data has {len(data)} samples, too few for one batch of {size} on each of {ranks} ranks; "
            "give more, or lower train_micro_batch_size_per_gpu"
        )
    return TrainingLoader(data, size, collate_fn, parts.group)
