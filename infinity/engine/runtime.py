"""What the entries of one model share: its units, the frames that are open, how lent memory is referred to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.device.cpu import CpuDevice
from infinity.engine.bound_unit import BoundUnit
from infinity.engine.frame import Frame
from infinity.engine.homes import Homes
from infinity.engine.micro_steps import MicroSteps
from infinity.engine.placeholder import OffloadedParameter, away
from infinity.engine.tiled_parameter import TiledParameter, TiledParameters
from infinity.engine.tree import Tree, tensors_in
from infinity.engine.turn import Turn
from infinity.errors import OffloadedError, ScheduleError, StorageError
from infinity.obs.ledger import Ledger
from infinity.stream.exchange import GradExchange
from infinity.stream.grads import GradStream
from infinity.stream.params import ParamStream, Phase

log = logging.getLogger("infinity")


@dataclass(frozen=True)
class LentMemory:
    """A saved tensor that was a view of a lent unit: where to find it again."""

    unit: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Runtime:
    """Shared by all entries of one engine; ``frames`` is the stack of calls in progress."""

    def __init__(
        self,
        units: Sequence[BoundUnit],
        params: ParamStream,
        grads: GradStream | GradExchange,
        device: CpuDevice,
        ledger: Ledger,
    ) -> None:
        self.units = units
        self.params = params
        self.grads = grads
        self.device = device
        self.ledger = ledger
        self._local = threading.local()
        self._alone = threading.RLock()
        self._process = os.getpid()
        self.timeout_seconds = 600.0
        self.failure: StorageError | None = None
        self.closed = False
        self.trains = any(bound.unit.trainable for bound in units)
        self.anchor = torch.zeros((), device=device.torch_device, requires_grad=True)
        self.scale = 1.0
        self.shares = 1
        """Losses that one step's gradient is the mean of: micro-batches of an accumulation, on all ranks."""
        self.micro_steps = MicroSteps(self.say_once)
        self.loss_is_scaled = False
        self.param_tiers: list[str] = []
        self.settle_parts: Callable[[], None]
        self.homes: Homes
        self.tiled = TiledParameters()
        self._said: set[str] = set()
        self._leaves: dict[tuple[int, int, bool, str], tuple[list[bool], list[nn.Parameter]]] = {}

    @property
    def frames(self) -> list[Frame]:
        """The calls in progress on this thread, innermost last."""
        frames = getattr(self._local, "frames", None)
        if frames is None:
            frames = self._local.frames = []
        return frames

    @property
    def turn(self) -> Turn | None:
        """This thread's part in a layer-major batch."""
        return getattr(self._local, "turn", None)

    @turn.setter
    def turn(self, turn: Turn | None) -> None:
        self._local.turn = turn

    @property
    def phase(self) -> Phase | None:
        """What the running frames are for; None outside of any."""
        return self.frames[-1].phase if self.frames else None

    @contextmanager
    def frame(
        self,
        name: str,
        indices: Iterable[int],
        phase: Phase,
        *,
        differentiable: bool,
        packs: bool = False,
        shares: bool = True,
    ) -> Iterator[Frame]:
        """A call in progress, with ``indices`` lent for its duration."""
        frame = Frame(self, name, phase, differentiable=differentiable, packs=packs, shares=shares)
        with self.alone(), self._frame(frame, indices):
            yield frame

    @contextmanager
    def _frame(self, frame: Frame, indices: Iterable[int]) -> Iterator[None]:
        phase, outermost = frame.phase, not self.frames
        if outermost and phase is Phase.INFERENCE:
            self.params.begin_inference()
        self.frames.append(frame)
        try:
            if outermost:
                self.tiled.hide_gathered()
            with (
                self.watched(),
                self.device.uncached_autocast(),
                self.ledger.phase(phase.value) if outermost and self.turn is None else _NOTHING,
                self.ledger.span(frame.name),
            ):
                frame.lend(indices)
                yield
                frame.check_unwritten()
            if not outermost:
                self.frames[-2].used |= frame.used
        finally:
            frame.close()
            self.frames.remove(frame)
            if outermost:
                self.tiled.show_gathered()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other threads away from the module tree, the units, the stores: they wait until this one is done.

        The threads of a layer-major batch take turns by themselves, under the lock of the thread that started them.
        """
        if self.turn is not None:
            yield
            return
        if not self._alone.acquire(timeout=self.timeout_seconds):
            raise ScheduleError(
                f"another thread has been using this model for infinity.timeout_seconds ({self.timeout_seconds:g} s). "
                "If the model's forward waits for threads that call parts of it, let it call them itself"
            )
        try:
            yield
        finally:
            self._alone.release()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remembers failed storage: no value of this engine can be trusted any more, so every later use raises it."""
        try:
            yield
        except StorageError as error:
            self.failure = self.failure or error
            raise

    def leaves(
        self, bound: BoundUnit, flat: torch.Tensor, *, differentiable: bool, shares: bool, joined: str = ""
    ) -> list[nn.Parameter]:
        """Leaf parameters over a lent unit's memory; gradients that reach them are deposited at once.

        They are made once per unit, place in memory and ``joined`` entry: that costs more than a small unit's lend.
        Those of a call that ``shares`` not are made for it, as are those of micro-batches side by side: one graph
        must not add up what several calls have for one leaf before it is deposited.
        """
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [placeholder.requires_grad for placeholder in bound.placeholders]
        key = bound.unit.index, flat.data_ptr(), differentiable, joined
        shares = shares and self.turn is None
        known, leaves = self._leaves.get(key, ([], [])) if shares else ([], [])
        if known != wanted:
            leaves = [
                nn.Parameter(view, requires)
                for view, requires in zip(bound.unit.layout.views(flat), wanted, strict=True)
            ]
            for slot, leaf in enumerate(leaves):
                if differentiable and bound.unit.trainable and leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(self._depositor(bound.unit.index, slot))  # type: ignore[no-untyped-call]
            if shares:
                self._leaves[key] = wanted, leaves
        return list(leaves)

    def _depositor(self, index: int, slot: int) -> Any:
        def deposit(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            for hook in self.units[index].placeholders[slot]._hooks.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            self.grads.deposit(index, slot, gradient)

        return deposit

    def pack(self, tensor: torch.Tensor) -> Any:
        """Replaces a view of lent memory by a handle; anything else is kept, with its version."""
        tensor = tensor.resolve_conj().resolve_neg()  # copies, if there is such a bit: a handle would lose it
        index = self.lent(tensor)
        if index is None:
            return tensor.detach(), tensor._version  # detached, because a node that kept its own output would never die
        flat = self.params.flat(index)
        offset = (tensor.data_ptr() - flat.data_ptr()) // tensor.element_size()
        return LentMemory(index, offset, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def lent(self, tensor: torch.Tensor) -> int | None:
        """The lent unit of whose memory ``tensor`` is a view."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for frame in reversed(self.frames):
            for index, (start, stop) in frame.ranges.items():
                if start <= address < stop:
                    return index
        return None

    def unpack(self, packed: Any) -> torch.Tensor:
        """What ``pack`` was given, from wherever the unit is now."""
        if not isinstance(packed, LentMemory):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tuple(tensor.shape)} tensor that a unit's backward needs is at version {tensor._version}, "
                    f"expected {version}"
                )
            return tensor  # type: ignore[no-any-return]
        if not self.frames:
            raise ScheduleError(
                f'backward reached the inside of unit "{self.units[packed.unit].unit.name}", but not by its output: a '
                "tensor computed in it left it in an object that is no tuple, list, dict or dataclass. Return it in one"
            )
        if any(packed.unit in frame.leaves for frame in self.frames):
            return self._found(packed)
        with self.frame("backward", [packed.unit], Phase.BACKWARD, differentiable=False):
            return self._found(packed).clone()

    def _found(self, packed: LentMemory) -> torch.Tensor:
        flat = self.params.flat(packed.unit).view(packed.dtype)
        return flat.as_strided(packed.shape, packed.stride, flat.storage_offset() + packed.offset)

    def owned(self, value: Any) -> Any:
        """``value`` with a copy of every tensor that is a view of lent memory, to outlive the loan."""
        tree = Tree(value)
        lent = [isinstance(leaf, torch.Tensor) and self.lent(leaf) is not None for leaf in tree.leaves]
        if not any(lent):
            return value
        return tree.filled([leaf.clone() if copy else leaf for leaf, copy in zip(tree.leaves, lent, strict=True)]).value

    def borrowed(self, value: Any) -> Any:
        """A placeholder given as an argument becomes the values, lent to the caller's frame."""
        return self.touched(value, "a module call") if isinstance(value, OffloadedParameter) else value

    def touched(self, placeholder: OffloadedParameter, function: str) -> torch.Tensor:
        """Values for an operation on a placeholder, if a running call may be lent its unit."""
        if isinstance(placeholder, TiledParameter) and (whole := placeholder.whole(function)) is not None:
            return whole
        index, slot = placeholder._place
        if slot in self.units[index].gathered:
            return self.units[index].gathered[slot]
        if not self.frames or self.closed:
            self.check()  # where there is an end of the engine to tell of, that is what the caller must know
            raise OffloadedError(away(placeholder, self.param_tiers[index], function))
        needs_grad = torch.is_grad_enabled() and placeholder.requires_grad
        able = [frame for frame in reversed(self.frames) if frame.differentiable or not needs_grad] or [self.frames[-1]]
        frame = next((frame for frame in able if index in frame.leaves), able[0])
        self.frames[-1].strays = True
        frame.lend([index])
        return frame.leaves[index][slot]

    def operate(self, function: str, run: Callable[[Callable[[Any], Any]], Any]) -> Any:
        """Calls ``run`` on real values; what is lent for it goes back afterwards, unless the result is a view of it."""

        def real(value: Any) -> Any:
            mine = isinstance(value, OffloadedParameter) and value._owner is self
            return self.touched(value, function) if mine else value

        if not self.frames or (torch.is_grad_enabled() and not self.frames[-1].packs):
            return run(real)
        outer = self.frames[-1]
        differentiable = any(frame.differentiable for frame in self.frames)
        with self.frame(function, (), outer.phase, differentiable=differentiable, packs=True) as frame:
            result = run(real)
            outer.own |= frame.own
            outer.strays |= frame.strays
            if any(self.lent(tensor) in frame.leaves for tensor in tensors_in(result)):
                outer.adopt(frame)
        return result

    @contextmanager
    def shown(self, placeholders: Sequence[OffloadedParameter], values: Sequence[nn.Parameter]) -> Iterator[None]:
        """Puts real parameters into the places of placeholders for a while."""
        places = [placeholder._place for placeholder in placeholders]
        for (index, slot), value in zip(places, values, strict=True):
            self.units[index].gathered[slot] = value
        for index, _ in places:
            self.units[index].refresh()
        try:
            yield
        finally:
            for index, slot in places:
                self.units[index].gathered.pop(slot, None)
            for index, _ in places:
                self.units[index].refresh()

    def may_require_grad(self, placeholder: OffloadedParameter) -> None:
        """Raises for a parameter that was frozen when the engine was made, so that no gradient is lost silently."""
        if not self.closed and not self.units[placeholder._place[0]].unit.trainable:
            raise OffloadedError(
                f"parameter {placeholder._name} was frozen when the engine was made, so it has no gradient and no "
                "optimizer state. Set requires_grad before infinity.initialize"
            )

    def gradient(self, placeholder: OffloadedParameter) -> torch.Tensor | None:
        """``None`` while there is no gradient; otherwise an error that says how to get it."""
        index, slot = placeholder._place
        if self.closed or not self.units[index].unit.trainable or not self.grads.deposited(index)[slot]:
            return None
        raise OffloadedError(
            f"the gradient of {placeholder._name} is accumulated on its own tier. Read it with "
            "infinity.get_full_grad(p); clip with gradient_clipping in the config; drop it with engine.zero_grad()"
        )

    def set_gradient(self, placeholder: OffloadedParameter, value: torch.Tensor | None) -> None:
        """Assigning None drops the gradient, as in plain torch."""
        if value is not None:
            raise OffloadedError(f"the gradient of {placeholder._name} cannot be assigned; let backward() produce it")
        for index, slot in placeholder.places:
            if not self.closed and self.units[index].unit.trainable:
                self.grads.discard(index, slot)

    def loss_factor(self) -> float:
        """What a bare ``loss.backward()`` still has to be multiplied by at the model's output."""
        return 1.0 if self.loss_is_scaled else self.scale / self.shares

    def loss_scale(self) -> float:
        """What accumulated gradients are to be divided by."""
        return self.scale

    def settle(self) -> None:
        """Waits until every update has been made and every write has reached its tier."""
        self.check()
        with self.alone(), self.watched():
            self.settle_parts()

    def close(self) -> None:
        """Ends every use. The leaves go: their hooks refer back to here by a way that the collector cannot see."""
        self.closed = True
        self._leaves.clear()

    def check(self) -> None:
        """Raises what ended an asynchronous part of the engine, before any value is computed from missing data."""
        if os.getpid() != self._process:
            raise ScheduleError(
                "this process was forked from the one that owns the engine, whose threads and swap files it has not "
                "got. Use the model in the process that called infinity.initialize"
            )
        if self.closed:
            raise ScheduleError(
                "this model's engine was destroyed, or nobody kept it, so the model cannot compute any more. Keep the "
                "engine for as long as the model is used, or end it by engine.destroy(restore_parameters=True)"
            )
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def say_once(self, message: str) -> None:
        """Logs a message the first time it is given."""
        if message not in self._said:
            self._said.add(message)
            log.warning(message)


_NOTHING = nullcontext()
