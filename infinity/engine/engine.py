"""The engine that users hold: call it, backward, step."""

from __future__ import annotations

import logging
import math
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from infinity.config.size import format_bytes
from infinity.engine import layer_major
from infinity.engine.attach import restore_values
from infinity.engine.build import Parts
from infinity.engine.entry import EntryModule
from infinity.engine.keeping import Keeping
from infinity.engine.loader import TrainingLoader
from infinity.engine.ranks import numbers_of_step
from infinity.engine.runtime import Runtime
from infinity.engine.saving import Saving
from infinity.engine.sharing import padded
from infinity.engine.updates import Updates
from infinity.engine.wear import WearGuard
from infinity.engine.zero_grad import ZeroGrad
from infinity.errors import ScheduleError
from infinity.optim.facade import StreamedOptimizer
from infinity.optim.loss_scaler import LossScaler, NonFiniteGuard
from infinity.optim.steps import Steps
from infinity.plan import Plan
from infinity.tier import Tier

log = logging.getLogger("infinity")

RANK_LINKS = ("gather_sent", "gather_received", "reduce_sent", "reduce_received")
"""Links between ranks; a link's time is told where it begins."""


class Engine(Keeping):
    """A model in training whose states stream between tiers.

    ``engine(x)`` is ``model(x)``; ``engine.backward(loss)`` deposits gradients; ``engine.step()`` acts at every
    ``gradient_accumulation_steps``-th call, returning while updates are still in flight: whoever needs an updated
    value next waits for exactly that value.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Parts,
        runtime: Runtime,
        saving: Saving,
        entries: list[EntryModule],
        scaler: LossScaler,
        group_of: dict[tuple[int, int], int],
    ) -> None:
        self.module = module
        self.config = parts.config
        self.optimizer: StreamedOptimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.training_dataloader: TrainingLoader | None = None
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._parts = parts
        self._runtime = runtime
        self._saving = saving
        self._replaced: list[EntryModule | ZeroGrad] = [*entries, ZeroGrad(self)]
        self._scaler = scaler
        self._guard = NonFiniteGuard(parts.config.infinity.non_finite_limit)
        self._batch = parts.config.resolve_batch(parts.group.world_size)
        self.steps = Steps(group_of)
        self._members = zlib.crc32(repr(sorted(group_of.items())).encode())
        self.updates: Updates
        self._norm: float | None = None
        self._applied = False
        self._wear = WearGuard(parts.config.infinity, parts.group)
        self._traffic_mark = (0, 0)
        self._last_traffic = (0, 0)
        self._carved = {tier: arena.allocations for tier, arena in parts.arenas.items()}
        self._synchronise_scale()
        self._finalizer = weakref.finalize(self, _collected, parts, runtime, self._replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __repr__(self) -> str:
        plan, model = self._parts.plan, type(self.module).__name__
        tiers = ", ".join(f"{tier.value} {format_bytes(plan.total(tier))}" for tier in Tier)
        ended = ", destroyed" if self._runtime.closed else ""
        return f"Engine({model}, {plan.parameters:,} parameters, step {self.global_steps}, {tiers}{ended})"

    if not TYPE_CHECKING:  # which is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """What an engine has not got is the model's: ``engine.parameters()``, ``engine.generate(...)``."""
            module = self.__dict__.get("module")
            if module is not None and not name.startswith("_") and hasattr(module, name):
                return getattr(module, name)
            owner = "engine" if module is None else f"engine, as well as its {type(module).__name__},"
            raise AttributeError(f"this {owner} has no attribute {name!r}", name=name, obj=self)

    # Training ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of ``loss`` times the loss scale, divided by the accumulation steps and by the number of ranks.

        Gradients, which are summed over both, are deposited.
        """
        self._runtime.check()
        if not isinstance(loss, torch.Tensor):
            hint = "; its .loss may be meant" if hasattr(loss, "loss") else ""  # type: ignore[unreachable]
            raise TypeError(f"backward takes the loss, a tensor; given a {type(loss).__name__}{hint}")
        if not loss.requires_grad:
            why = "it was computed under no_grad or detached, or every parameter is frozen"
            if self.optimizer is None:
                why = 'nothing is trained, as the config has no "optimizer" block and none was passed to initialize'
            raise ScheduleError(f"backward was given a loss that needs no gradient: {why}")
        shares = self._runtime.shares if scale_wrt_gas else self._parts.group.world_size
        factor = self._scaler.scale / shares
        self._runtime.loss_is_scaled = True
        try:
            scaled = loss if factor == 1.0 else loss.float() * factor
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._runtime.loss_is_scaled = False
        return loss

    def train_batch(self, micro_batches: Sequence[Any] | Iterator[Any]) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step, then the step; returns their losses, 1-D.

        Every micro-batch goes through unit k before any goes on to unit k+1, forward as well as backward, so each
        unit's parameters cross the slow link once per pass for the whole step. The model must return its loss. A
        micro-batch is a tuple of arguments, a dict of keyword arguments, or one argument; of a list there must be
        ``gradient_accumulation_steps``, of an iterator so many are taken.
        """
        steps = self.gradient_accumulation_steps
        micro_batches = list(islice(micro_batches, steps)) if isinstance(micro_batches, Iterator) else micro_batches
        if len(micro_batches) != steps:
            raise ScheduleError(
                f"train_batch was given {len(micro_batches)} micro-batches; expected a list of {steps}, one per "
                "gradient accumulation step, such as [(x, y), ...]"
            )
        if self.micro_steps % steps:
            raise ScheduleError(
                f"train_batch was called after {self.micro_steps % steps} of {steps} micro-steps of an accumulation; "
                "finish it with forward, backward and step() first"
            )
        self._runtime.check()
        self._saving.check()
        waiting = self._parts.plan.waiting
        if waiting is not None and waiting.device and waiting.together < steps:
            raise ScheduleError(
                f"train_batch has {steps} micro-batches in flight at once, but activations were planned for "
                f"{waiting.together}; give infinity.initialize layer_major=True"
            )
        with self._runtime.alone():
            losses = layer_major.run(
                self._runtime, self.module, micro_batches, self._scaler.scale / self._runtime.shares
            )
        self.micro_steps += steps - 1
        self._micro_step()
        return losses

    def step(self) -> None:
        """One micro-step; at the accumulation boundary the optimizer step, unless a gradient is not finite."""
        self._runtime.check()
        self._saving.check()
        self._micro_step()

    def _micro_step(self) -> None:
        runtime = self._runtime
        if runtime.frames:
            raise ScheduleError("step() was called inside the model's forward or backward")
        if self.optimizer is None:
            raise ScheduleError(
                'step() needs an optimizer: this engine was made for inference. Give the config an "optimizer" block '
                "or pass one to infinity.initialize(optimizer=...)"
            )
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        runtime.micro_steps.step()
        self._applied = False
        if not boundary:
            return
        with runtime.alone(), self._parts.ledger.phase("step"), runtime.watched():
            self._step()
        self._parts.group.begin_step(self.global_steps)
        if self.lr_scheduler is not None and self._applied and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            log.info("%s", self._progress())
        self._wear.check()

    def _progress(self) -> str:
        """One line: steps, skipped ones, learning rates, norm, with the time split if the config wants it."""
        rates = ", ".join(f"{rate:.3g}" for rate in self.get_lr())
        line = f"step {self.global_steps}, skipped {self.skipped_steps}, lr {rates}, gradient norm {self._norm:.4g}"
        if self.config.wall_clock_breakdown:
            times = self._parts.ledger.seconds
            line += "".join(f", {name} {seconds:.3f} s" for name, seconds in times.items())
        return line

    def _step(self) -> None:
        assert self.optimizer is not None
        grads, scale = self._parts.grads, self._scaler.scale
        total = grads.total(self._numbers())
        self._note_traffic()
        self._norm = math.sqrt(total.squared) / scale if total.finite else math.inf
        self.global_steps += 1
        self._scaler.update(overflow=not total.finite)
        if not total.finite:
            self.skipped_steps += 1
            grads.reset()
            self._parts.params.invalidate({})
            excused = self._scaler.dynamic and not self._scaler.exhausted
            self._runtime.say_once(
                f"step {self.global_steps} was skipped: the gradient of {total.culprit} is not finite"
                + (f"; the loss scale is now {self._scaler.scale:g}" if self._scaler.dynamic else "")
            )
            self._synchronise_scale()
            self._guard.update(total.culprit, excused=excused)
            return
        self._guard.update(None, excused=False)
        if not total.squared:
            self._runtime.say_once(
                "step() found no gradient but zeros; was backward() called, on a loss of this model, since the step "
                "before? Momentum and weight decay change the weights nevertheless"
            )
        clip = self.config.gradient_clipping
        coefficient = min(1.0, clip / (self._norm + 1e-6)) if clip else 1.0
        tickets = self.updates.begin(coefficient / scale)
        grads.reset()
        self._parts.params.invalidate(tickets)
        self._applied = True
        self.optimizer.__dict__["_opt_called"] = True  # torch's schedulers warn if they step before the optimizer
        self._synchronise_scale()

    def _numbers(self) -> bytes:
        """What all ranks must step with; nothing where there is but one."""
        if self._parts.group.world_size == 1:
            return b""
        assert self.optimizer is not None
        facts = {
            "members of parameter groups": self._members,
            "gradient_clipping": self.config.gradient_clipping,
            "the loss scale": self._scaler.scale,
            "engine.global_steps": self.global_steps,
        }
        return numbers_of_step(self.optimizer, facts)

    def settle(self) -> None:
        """Waits until every update has been made and every write has reached its tier, a save has been completed."""
        self._runtime.settle()
        self._saving.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients gathered so far; between micro-steps of one accumulation it does nothing."""
        if self.micro_steps % self.gradient_accumulation_steps == 0:
            with self._runtime.alone():
                self._parts.grads.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, each rank sums gradients by itself; they are exchanged with those of the next backward outside.

        Saves traffic at stages 0 and 1. From stage 2 on no rank has room for sums that belong to others, so gradients
        are exchanged as ever. Sums in another order may round otherwise.
        """
        with self._parts.grads.unsynced():
            yield

    def padded(self, batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """For ranks with different numbers of batches: ``(batch, weight)`` until no rank has another one.

        The weight is 1.0, or 0.0 for a batch that is only repeated so that this rank takes part: multiply the loss by
        it. Every rank iterates over its own.
        """
        return padded(self._parts.group, batches)

    def averaged(self, value: float) -> float:
        """The mean of every rank's ``value``, such as a loss to print, in fp64; every rank calls this."""
        words = self._parts.group.talk("averaging a number", struct.pack("<d", value))
        return math.fsum(struct.unpack("<d", word)[0] for word in words) / len(words)

    def train(self, mode: bool = True) -> Engine:
        """As ``module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As ``module.eval``."""
        return self.train(False)

    # Facts ------------------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation_steps

    @property
    def train_batch_size(self) -> int:
        return self._batch.train_batch_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch_size

    @property
    def device(self) -> torch.device:
        return self._parts.device.torch_device

    @property
    def plan(self) -> Plan:
        """What was allocated; unit inputs away from the device as the first step has shown them, or as predicted."""
        plan, usage = self._parts.plan, self._parts.activations.usage()
        return plan.with_unit_inputs(usage["host"], usage["nvme"])

    @property
    def loss_scale(self) -> float:
        return self._scaler.scale

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates the weights."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps == 0

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the weights."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the averaged, unscaled gradient before clipping; None before the first step, inf if not finite."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def report(self) -> dict[str, Any]:
        """Bytes per tier against budget and plan, bytes and seconds per link, waits by cause, all since the start."""
        parts, plan = self._parts, self.plan
        ledger = parts.ledger
        tiers = {}
        for tier in Tier:
            peak = parts.arenas[tier].peak if tier in parts.arenas else plan.total(tier)
            tiers[tier.value] = {
                "budget_bytes": plan.budgets[tier],
                "planned_bytes": plan.total(tier),
                "peak_bytes": peak,
            }
        links = ("nvme_read", "nvme_write", "host_to_device", "device_to_host", *RANK_LINKS)
        read, written = self._last_traffic
        return {
            "steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "parameters": parts.partition.parameters,
            "trained_parameters": parts.partition.trained_parameters,
            "tiers": tiers,
            "links": {link: {"bytes": ledger.bytes[link], "seconds": ledger.busy[link]} for link in links},
            "stalls": dict(ledger.stalls),
            "time": {name: ledger.seconds[name] for name in ("forward", "backward", "step", "update")},
            "nvme_last_step": {"read": read, "written": written},
            "steady_allocations": {
                tier.value: arena.allocations - self._carved[tier] for tier, arena in parts.arenas.items()
            },
            "swap_directories": [directory.path for directory in parts.swap],
            "io_engine": parts.io.backend if parts.io is not None else "none",
            "isa": parts.kernels.isa,
        }

    # End --------------------------------------------------------------------------------------------------------

    def destroy(self, restore_parameters: bool = False) -> None:
        """Returns memory, threads, descriptors and swap files. With ``restore_parameters`` the modules get real
        parameters back (in RAM, compute dtype); else they keep placeholders that can no longer be used."""
        if self._runtime.closed:
            return
        with self._runtime.alone():
            try:
                if restore_parameters:
                    self._runtime.settle()
                    restore_values(self._runtime.units, self._parts.homes)
            finally:
                self._finalizer.detach()
                try:
                    self._saving.end()
                finally:
                    _take_down(self._parts, self._runtime, self._replaced)
        if sys.exc_info()[1] is None:
            self._saving.check()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    def _synchronise_scale(self) -> None:
        self._runtime.scale = self._scaler.scale
        self._runtime.micro_steps.per_step = self.gradient_accumulation_steps
        self._runtime.shares = self.gradient_accumulation_steps * self._parts.group.world_size

    def _note_traffic(self) -> None:
        """Called once a step, when the last update is over and this one's has not begun."""
        now = self._parts.ledger.bytes["nvme_read"], self._parts.ledger.bytes["nvme_write"]
        self._wear.note(now[1])
        self._last_traffic = now[0] - self._traffic_mark[0], now[1] - self._traffic_mark[1]
        self._traffic_mark = now


def _take_down(parts: Parts, runtime: Runtime, replaced: Sequence[EntryModule | ZeroGrad]) -> None:
    """Ends the model's use of the engine, then the engine."""
    runtime.close()
    for method in replaced:
        method.remove()
    parts.close()


def _collected(parts: Parts, runtime: Runtime, replaced: Sequence[EntryModule | ZeroGrad]) -> None:
    """The end of an engine that nobody destroyed.

    The collector comes in any thread at any instruction, even inside a lane or under a lock of an I/O engine, so it
    must not wait here for either: another thread does. At the end of the program, when the main thread has ended and
    nobody would wait for another one, there is nothing to be inside of.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=_take_down, args=(parts, runtime, replaced), name="infinity-end").start()
    else:
        _take_down(parts, runtime, replaced)
