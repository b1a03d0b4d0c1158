"""What outlives an engine: its checkpoints, its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.checkpoint.export import MAX_SHARD_BYTES
from infinity.checkpoint.save import Progress
from infinity.engine import persistence, weights
from infinity.engine.access import full_state
from infinity.engine.build import Parts
from infinity.engine.loader import TrainingLoader
from infinity.engine.runtime import Runtime
from infinity.engine.saving import Saving
from infinity.optim.facade import StreamedOptimizer
from infinity.optim.loss_scaler import LossScaler, NonFiniteGuard
from infinity.optim.steps import Steps

COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "_norm")


class Keeping:
    """The part of an engine that saves it, restores it, shows its state."""

    module: nn.Module
    optimizer: StreamedOptimizer | None
    lr_scheduler: LRScheduler | None
    training_dataloader: TrainingLoader | None
    micro_steps: int
    _parts: Parts
    _runtime: Runtime
    _scaler: LossScaler
    _guard: NonFiniteGuard
    _saving: Saving
    steps: Steps
    _applied: bool

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a step."""
        raise NotImplementedError

    def _synchronise_scale(self) -> None:
        raise NotImplementedError

    def iter_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in fp32 and every persistent buffer, one at a time, tied names included."""
        return full_state(self.module, self._runtime)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole fp32 state on the CPU, outside the budgets; ``iter_state`` needs one tensor's memory only."""
        return dict(self.iter_state())

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> str:
        """Writes everything that training goes on from to ``directory/tag``, returned when it is durable.

        ``tag`` is ``global_step<n>`` by default. ``client_state`` may hold numbers, text, lists, tensors, arrays.
        ``keep_last`` removes all but so many of the newest afterwards. Until the new one is complete the former stays
        ``latest``, whatever happens. Raises ``StorageError`` for a disk that fails or is full: training may go on.

        With ``wait=False`` it returns when updates under way are over, while another thread writes the values of this
        moment; the update of a unit waits until that one is written. It is durable after ``settle()`` or ``destroy()``.
        Should it fail, the next ``step()``, ``settle()``, ``save_checkpoint()`` or ``destroy()`` raises
        ``CheckpointError``, once, before it does anything else. Several ranks always wait. ``progress(done, total)`` is
        called with bytes as they are written, on the thread that writes.
        """
        self._runtime.check()
        persistence.check_boundary(self.micro_steps, self.gradient_accumulation_steps)
        self._parts.grads.check_whole("save_checkpoint")
        return persistence.save_checkpoint(
            self._training(), self._saving, directory, tag, client_state, keep_last, progress, wait=wait
        )

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        load_rng_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Goes on from ``directory/tag`` (the latest by default); returns its path, the client state.

        The checkpoint may have been saved with other units, placements, precision, number of ranks. Raises
        ``CheckpointError``, naming every parameter that does not fit, before anything is changed. Not strict loads
        what there is. ``load_module_only`` takes the weights and leaves counters, optimizer, scheduler, generators.
        """
        training = self._training()
        result = persistence.load_checkpoint(
            training,
            directory,
            tag,
            strict=load_module_strict,
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            rng_states=load_rng_states,
        )
        self.__dict__.update(training.counters)
        self.micro_steps = self.__dict__["global_steps"] * self.gradient_accumulation_steps  # which may be others now
        self._applied = False
        self._synchronise_scale()
        return result

    def load_weights(
        self, source: str | os.PathLike[str] | Mapping[str, torch.Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Streams weights onto their tiers, fp32 masters included; returns the names missing, the names not used.

        ``source``: a safetensors file, a directory of them with its index, a torch state dict (``.bin``, ``.pt``),
        DeepSpeed's ``zero_to_fp32`` output, a checkpoint, or a mapping. Raises ``CheckpointError`` with every name that
        does not fit before anything is changed; not strict, for wrong shapes alone.
        """
        self._parts.grads.check_whole("load_weights")
        difference = weights.load_weights(self._training(), source, strict=strict)
        return difference.missing, difference.unexpected

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: str | None = None,
        trainable_only: bool = False,
    ) -> list[str]:
        """Writes safetensors files as Hugging Face does, streamed; returns their paths.

        ``dtype``: "fp32", "bf16" or "fp16", by default what the model computes in. ``trainable_only`` leaves frozen
        weights out, as for adapters. A model of transformers gets its config written too.
        """
        self._runtime.check()
        self._parts.grads.check_whole("save_pretrained")
        return weights.save_pretrained(
            self._training(), directory, max_shard_bytes, dtype, trainable_only=trainable_only
        )

    def _training(self) -> persistence.Training:
        counters = {name: self.__dict__[name] for name in COUNTERS}
        return persistence.Training(
            self.module, self._parts, self._runtime, self.optimizer, self.lr_scheduler, self._scaler, self._guard,
            self.steps.taken, counters, self.training_dataloader,
        )  # fmt: skip
