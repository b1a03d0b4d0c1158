"""What is kept of a running engine in a checkpoint, how it comes back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.checkpoint.folder import Folder
from infinity.checkpoint.load import (
    Reader,
    StateWriter,
    compare,
    zeros,
)
from infinity.checkpoint.manifest import SavedParameter
from infinity.checkpoint.model_config import config_files
from infinity.checkpoint.pieces import piece_reader
from infinity.checkpoint.read import Checkpoint
from infinity.checkpoint.save import Contents, Progress, save, together
from infinity.checkpoint.values import encode
from infinity.comm import Group
from infinity.engine.build import Parts
from infinity.engine.generators import generators, restore_generators, saved_generators, tell_of_other_ranks
from infinity.engine.loader import TrainingLoader
from infinity.engine.runtime import Runtime
from infinity.engine.saving import Saving
from infinity.errors import CheckpointError, ScheduleError, StorageError
from infinity.optim.facade import StreamedOptimizer
from infinity.optim.loss_scaler import LossScaler, NonFiniteGuard
from infinity.optim.rules import TorchRule
from infinity.shard.partition import Unit
from infinity.shard.tiles import Piece
from infinity.tier import StateKind

log = logging.getLogger("infinity")

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass
class Training:
    """What an engine has beside its parts; ``counters`` and ``steps_of`` are the engine's own, changed in place."""

    module: nn.Module
    parts: Parts
    runtime: Runtime
    optimizer: StreamedOptimizer | None
    lr_scheduler: LRScheduler | None
    scaler: LossScaler
    guard: NonFiniteGuard
    steps_of: dict[tuple[int, int], int]
    counters: dict[str, Any]
    loader: TrainingLoader | None = None
    changed: bool = False

    @property
    def rule(self) -> TorchRule | None:
        """The torch optimizer behind the updater, None for the native Adam."""
        rule = self.parts.updater.rule
        return rule if isinstance(rule, TorchRule) else None


def save_checkpoint(
    training: Training,
    saving: Saving,
    directory: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    keep_last: int | None,
    progress: Progress | None,
    *,
    wait: bool,
) -> str:
    """Waits for updates under way, then writes everything that training goes on from, or has it written."""
    folder = Folder(directory)
    wait = wait or training.parts.group.world_size > 1
    with training.runtime.alone():
        training.runtime.settle()
        saving.check()
        collect = partial(_contents, training, client_state, copied=not wait)
        contents = together(training.parts.group, "what a checkpoint keeps", collect)
        tag = tag or f"global_step{contents.step}"
        write = partial(save, folder, tag, contents, keep_last)
        if wait:
            return write(progress)
        saving.begin(folder.of(tag), [unit.index for unit in contents.units], progress, write)
        return folder.of(tag)


def _contents(training: Training, client_state: Mapping[str, Any] | None, *, copied: bool) -> Contents:
    """What there is at this moment; ``copied`` where forward and backward may change what is not a unit's."""
    tensors: list[tuple[str, torch.Tensor]] = []

    def put(prefix: str, tensor: torch.Tensor, copied: bool = copied) -> str:
        tensors.append((f"{prefix}.{len(tensors)}", tensor.clone() if copied else tensor))
        return tensors[-1][0]

    state: dict[str, Any] = {}
    if training.parts.group.rank == 0:
        state = encode(_state(training, client_state), "state", partial(put, "state"))
        of_units = partial(put, "state", copied=False)  # what a torch optimizer remembers may be all that fits
        state["torch_optimizer"] = encode(_torch_states(training), "state.torch_optimizer", of_units)
    buffers = {name: buffer.detach() for name, buffer in persistent_buffers(training.module).items()}
    return Contents(
        partition=training.parts.partition,
        placement=training.parts.plan.placement,
        stores=training.parts.homes.slice_stores,
        group=training.parts.group,
        steps=dict(training.steps_of),
        buffers={name: value.clone() for name, value in buffers.items()} if copied else buffers,
        state=state,
        rank_state=encode(generators(training.parts.device), "state", partial(put, "rank")),
        tensors=tensors,
        config=json.loads(training.parts.config.to_json()),
        plan=training.parts.plan.render(),
        step=int(training.counters["global_steps"]),
    )


def load_checkpoint(
    training: Training,
    directory: str | os.PathLike[str],
    tag: str | None,
    *,
    strict: bool,
    module_only: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    rng_states: bool,
) -> tuple[str, dict[str, Any]]:
    """Puts a checkpoint onto the tiers; returns its directory with the client state."""

    def load() -> tuple[str, dict[str, Any]]:
        with ExitStack() as stack:
            checkpoint = _found(training.parts.group, directory, tag, stack)
            state = checkpoint.state()
            own = saved_generators(checkpoint, training.parts.group)
            matched = _match(training, checkpoint, strict=strict)
            with_optimizer = optimizer_states and not module_only and training.optimizer is not None
            if with_optimizer:
                _check_optimizer(training, checkpoint, state, matched, strict=strict)
            else:
                training.parts.grads.check_whole("load_checkpoint without optimizer states")
            with changing(training):
                _load_parameters(training, checkpoint, matched)
                if with_optimizer:
                    _load_moments(training, checkpoint, matched)
                for name, buffer in persistent_buffers(training.module).items():
                    if name in checkpoint.manifest.buffers:
                        with torch.no_grad():
                            buffer.copy_(checkpoint.buffer(name))
        if not module_only:
            _restore(training, state, with_optimizer=with_optimizer, with_scheduler=scheduler_states)
            if rng_states:
                tell_of_other_ranks(checkpoint, training.parts.group)
                restore_generators(training.parts.device, own)
        log.info("loaded %s, step %d", checkpoint.path, checkpoint.manifest.step)
        client: dict[str, Any] = state["client_state"]
        return checkpoint.path, client

    with loading(training, strict=strict):
        return together(training.parts.group, "the loading of a checkpoint", load)


def _found(group: Group, directory: str | os.PathLike[str], tag: str | None, stack: ExitStack) -> Checkpoint:
    """The checkpoint, opened until ``stack`` ends; it must be one for all ranks."""
    name = "the finding of a checkpoint"
    checkpoint = together(group, name, lambda: stack.enter_context(Checkpoint(Folder(directory).find(tag))))
    told = f"{checkpoint.checksum:08x} {checkpoint.path} (step {checkpoint.manifest.step})"
    words = [
        word.decode(errors="replace").split(" ", 1) for word in group.talk("which checkpoint it is", told.encode())
    ]
    for rank, (checksum, what) in enumerate(words):
        if checksum != words[0][0]:
            raise CheckpointError(
                f"rank {rank} would load {what}, but rank 0 {words[0][1]}, which is another one. Give all ranks one "
                "directory that all see, one tag"
            )
    return checkpoint


def value_kinds(training: Training, unit: Unit) -> list[StateKind]:
    """The kinds that hold a unit's values, the most precise one first."""
    return [kind for kind in (StateKind.MASTER, StateKind.PARAM) if training.parts.plan.placement.has(kind, unit)]


@contextmanager
def loading(training: Training, *, strict: bool) -> Iterator[None]:
    """Settles, keeps others away; an error after values were changed leaves an engine that only says so."""
    runtime, before = training.runtime, training.runtime.failure
    with runtime.alone():
        try:
            if strict and isinstance(before, HalfLoaded):
                runtime.failure = None  # a whole load mends it
            runtime.settle()
            yield
        except BaseException as error:
            if training.changed:
                runtime.failure = HalfLoaded(
                    f"a load ended when a part of the values had been changed, so they are mixed: {error}. Load a "
                    "complete checkpoint"
                )
            else:
                runtime.failure = runtime.failure or before
            raise


@contextmanager
def changing(training: Training) -> Iterator[None]:
    """Inside, values on the tiers change, so copies elsewhere are dropped at the end."""
    training.changed = True
    try:
        yield
    finally:
        for bound in training.runtime.units:
            bound.changed()
        training.parts.params.drop_all()
        training.parts.grads.forget()


class HalfLoaded(StorageError):
    """A load that failed after it had changed values; only a whole load makes the engine usable again."""


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer that belongs to the model's state, once, under its first name."""
    found, seen = {}, set()
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{path}.{name}" if path else name] = buffer
    return found


# What is kept ---------------------------------------------------------------------------------------------------


def _state(training: Training, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    optimizer, scheduler = training.optimizer, training.lr_scheduler
    return {
        "counters": training.counters,
        "loss_scaler": training.scaler.state_dict(),
        "non_finite_in_a_row": training.guard.in_a_row,
        "optimizer": None if optimizer is None else _optimizer_name(training),
        "groups": [] if optimizer is None else [_numbers(group) for group in optimizer.param_groups],
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loader": None if training.loader is None else training.loader.state_dict(),
        "model_config": config_files(training.module),
        "client_state": dict(client_state or {}),
    }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _optimizer_name(training: Training) -> str:
    return "Adam" if training.rule is None else training.rule.name


def _torch_states(training: Training) -> dict[str, Any]:
    if training.rule is None:
        return {}
    return {
        slot.name: state
        for unit in training.parts.partition.units
        for number, slot in enumerate(unit.layout.slots)
        if (state := training.rule.state_of(unit.index, number))
    }


# How it comes back ----------------------------------------------------------------------------------------------

Matched = dict[tuple[int, int], tuple[Piece, SavedParameter]]
"""Of which parameter each slot is a piece, with what was saved of it, by unit index with slot number."""


def _match(training: Training, checkpoint: Checkpoint, *, strict: bool) -> Matched:
    names, shapes = training.parts.partition.names, shapes_of(training)
    saved, owner = {}, {}
    for name, parameter in checkpoint.manifest.parameters.items():
        for alias in (name, *parameter.also):
            saved[alias], owner[alias] = parameter.shape, name
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(training.module).items()}
    found, difference = compare(
        {**shapes, **buffers},
        {**names, **{name: [name] for name in buffers}},
        {**saved, **checkpoint.manifest.buffers},
        owner,
    )
    difference.check(checkpoint.path, strict=strict)
    return {
        (piece.unit, piece.slot): (piece, checkpoint.manifest.parameters[owner[found[name]]])
        for name, pieces in training.parts.partition.pieces.items()
        if name in found
        for piece in pieces
    }


def shapes_of(training: Training) -> dict[str, tuple[int, ...]]:
    """Each parameter's shape, by its first name."""
    return {name: pieces[0].shape for name, pieces in training.parts.partition.pieces.items()}


def _check_optimizer(training: Training, checkpoint: Checkpoint, state: Any, matched: Matched, *, strict: bool) -> None:
    """Raises, before anything is changed, if the saved optimizer states cannot serve this optimizer."""
    if state["optimizer"] != _optimizer_name(training):
        raise CheckpointError(
            f"{checkpoint.path} has the states of {state['optimizer'] or 'no optimizer'}, this engine trains with "
            f"{_optimizer_name(training)}; load the weights alone with load_optimizer_states=False"
        )
    assert training.optimizer is not None
    if len(state["groups"]) != len(training.optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint.path} has {len(state['groups'])} parameter groups, this optimizer has "
            f"{len(training.optimizer.param_groups)}; give infinity.initialize the same groups, or load with "
            "load_optimizer_states=False"
        )
    if not strict or training.rule is not None:
        return
    units = training.parts.partition.units
    frozen = {
        piece.name: None
        for piece, parameter in matched.values()
        if units[piece.unit].trainable and StateKind.EXP_AVG not in checkpoint.kinds(parameter)
    }
    if frozen:
        raise CheckpointError(
            f"{checkpoint.path} has no optimizer states of {len(frozen)} parameters that were not trained when it was "
            f"saved: {', '.join(frozen)}; load with strict=False to start theirs from zero"
        )


def _load_parameters(training: Training, checkpoint: Checkpoint, matched: Matched) -> None:
    with state_writer(training) as writer:
        for unit in training.parts.partition.units:
            readers = {
                number: piece_reader(piece, checkpoint.sources(parameter, checkpoint.value_kind(parameter)))
                for number, (piece, parameter) in _of_unit(unit, matched)
            }
            fill(training, writer, unit, value_kinds(training, unit), readers)


@contextmanager
def state_writer(training: Training) -> Iterator[StateWriter]:
    """What fills this rank's states; its memory is given back at the end."""
    writer = StateWriter(training.parts.plan.placement, training.parts.homes.stores)
    try:
        yield writer
        with training.runtime.watched():
            writer.finish()
    finally:
        writer.free()


def fill(
    training: Training, writer: StateWriter, unit: Unit, kinds: Sequence[StateKind], readers: Mapping[int, Reader]
) -> None:
    """Gives every kind that this rank keeps of ``unit``, whole or a slice, the same values."""
    with training.runtime.watched():
        kept = [training.parts.homes.unit(kind, unit.index) for kind in kinds]
        if all(own is kept[0] for own in kept):
            writer.fill(kept[0], kinds, readers)
            return
        for kind, own in zip(kinds, kept, strict=True):
            writer.fill(own, [kind], readers)


def _load_moments(training: Training, checkpoint: Checkpoint, matched: Matched) -> None:
    placement = training.parts.plan.placement
    with state_writer(training) as writer:
        for unit in training.parts.partition.units:
            for number, (_, parameter) in _of_unit(unit, matched):
                training.steps_of[unit.index, number] = parameter.steps
            for kind in MOMENTS:
                if placement.has(kind, unit):
                    readers = {
                        number: piece_reader(piece, checkpoint.sources(parameter, kind))
                        if kind in checkpoint.kinds(parameter)
                        else zeros
                        for number, (piece, parameter) in _of_unit(unit, matched)
                    }
                    fill(training, writer, unit, [kind], readers)


def _of_unit(unit: Unit, matched: Matched) -> list[tuple[int, tuple[Piece, SavedParameter]]]:
    slots = range(len(unit.layout.slots))
    return [(number, matched[unit.index, number]) for number in slots if (unit.index, number) in matched]


def _restore(training: Training, state: Any, *, with_optimizer: bool, with_scheduler: bool) -> None:
    training.counters.update(state["counters"])
    training.scaler.load_state_dict(state["loss_scaler"])
    training.guard.in_a_row = int(state["non_finite_in_a_row"])
    if training.loader is not None:
        training.loader.load_state_dict(state.get("loader") or {})
    if with_optimizer:
        assert training.optimizer is not None
        for group, numbers in zip(training.optimizer.param_groups, state["groups"], strict=True):
            group.update(numbers)
        if training.rule is not None:
            partition, states = training.parts.partition, state["torch_optimizer"]
            names = partition.names
            for name, (piece, *_) in partition.pieces.items():  # torch's optimizers update whole parameters alone
                saved: dict[str, Any] = next((states[alias] for alias in names[name] if alias in states), {})
                training.rule.set_state(piece.unit, piece.slot, saved)
    if with_scheduler and training.lr_scheduler is not None and state["lr_scheduler"] is not None:
        training.lr_scheduler.load_state_dict(state["lr_scheduler"])


def check_boundary(micro_steps: int, accumulation_steps: int) -> None:
    """Raises between the micro-steps of one accumulation, whose gradients a checkpoint does not keep."""
    if micro_steps % accumulation_steps:
        raise ScheduleError(
            f"save_checkpoint was called after {micro_steps % accumulation_steps} of {accumulation_steps} micro-steps "
            "of an accumulation; call it after the step() that ends one"
        )
