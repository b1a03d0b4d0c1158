"""The hot path: lend a unit, compute, give it back, forward as well as backward.

An entry is a module whose ``forward`` was replaced on the instance. A call of it that needs a gradient is one
autograd node in the caller's graph:

    forward:   lend -> compute -> release
    backward:  lend -> gradients, deposited as each is complete -> release

*Recompute* keeps only the inputs; backward computes the forward again. *Keep* keeps the inner graph, whose references
to lent memory are replaced by handles that are resolved against wherever the unit is when backward needs it. Both give
the same bits as the plain module.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from infinity.engine.runtime import Frame, Runtime
from infinity.errors import ScheduleError
from infinity.stream.params import Phase

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


class EntryModule:
    """A module whose calls lend units: its own forward, the units, the mode."""

    def __init__(
        self, runtime: Runtime, path: str, module: torch.nn.Module, units: tuple[int, ...], recompute: bool, root: bool
    ) -> None:
        self.runtime = runtime
        self.name = path or "(root)"
        self.module = module
        self.units = units
        self.recompute = recompute
        self.compute: Callable[..., Any] = module.forward
        self.buffers = list(module.buffers()) if recompute else []
        self.trains = any(runtime.units[index].unit.trainable for index in units) or (root and runtime.trains)
        self._trusted = False
        functools.update_wrapper(self, self.compute, updated=())

    def install(self) -> None:
        """Puts this entry in the place of the module's forward."""
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self.runtime
        runtime.check()
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [runtime.borrowed(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        differentiable = torch.is_grad_enabled() and (self.trains or any(tensor.requires_grad for tensor in tensors))
        if not differentiable:
            with runtime.frame(self.name, self.units, runtime.phase or Phase.INFERENCE, differentiable=False):
                args, kwargs = tree_unflatten(leaves, spec)
                return self.compute(*args, **kwargs)
        call = Call(self, leaves, spec)
        anchor = None if any(tensor.requires_grad for tensor in tensors) else runtime.anchor
        outputs = UnitFunction.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        return call.rebuild(outputs)

    def recomputes(self, leaves: Sequence[Any]) -> bool:
        """Whether this call may be computed twice: not if it gets an object that the first pass could change."""
        if not self.recompute:
            return False
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                self.runtime.say_once(
                    f'unit "{self.name}" is given a {type(leaf).__name__}, which computing it twice would change '
                    "twice: its activations are kept instead. For a KV cache, pass use_cache=False to save the memory"
                )
                return False
        return True

    @contextmanager
    def unchanging(self, tensors: Sequence[torch.Tensor], call: Call) -> Iterator[None]:
        """Checks that a forward that is to be computed again changed none of its arguments."""
        before = [tensor._version for tensor in tensors]
        yield
        if before != [tensor._version for tensor in tensors]:
            raise ScheduleError(
                f'unit "{self.name}" changes one of its arguments in place, so computing it again in backward would '
                f'give wrong gradients. Set infinity.recompute to {{"{self.name}": false}}'
            )


class Call:
    """One differentiable call of an entry, from its forward to the end of its backward."""

    def __init__(self, entry: EntryModule, leaves: list[Any], spec: TreeSpec) -> None:
        self.entry = entry
        self.recompute = entry.recomputes(leaves)
        self.outermost = not entry.runtime.frames
        self.generations: dict[int, int] = {}
        self.rng: Any = None
        self.autocast: Any = None
        self.inner_inputs: list[torch.Tensor] = []
        self.inner_outputs: list[torch.Tensor] = []
        self._spec = spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._out_spec: TreeSpec | None = None
        self._out_leaves: list[Any] = []

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the module's own forward; returns the tensors in its result."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        self._out_leaves, self._out_spec = tree_flatten(self.entry.compute(*args, **kwargs))
        return [leaf for leaf in self._out_leaves if isinstance(leaf, torch.Tensor)]

    def rebuild(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The module's result with the autograd node's tensors in place of the inner ones."""
        fresh = iter(outputs)
        leaves = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._out_leaves]
        assert self._out_spec is not None
        result = tree_unflatten(leaves, self._out_spec)
        self._out_leaves = []
        return result

    def note_generations(self, frame: Frame) -> None:
        """Remembers which values this forward saw."""
        units = self.entry.runtime.units
        self.generations = {index: units[index].generation for index in frame.leaves}

    def check_generations(self) -> None:
        """Raises if a step changed a unit between this call's forward and its backward."""
        for index, generation in self.generations.items():
            bound = self.entry.runtime.units[index]
            if bound.generation != generation:
                raise ScheduleError(
                    f'step() updated unit "{bound.unit.name}" between a forward and its backward; the gradient would '
                    "belong to weights that are gone. Call backward() before step()"
                )


class UnitFunction(torch.autograd.Function):
    """One unit call as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        entry, runtime = call.entry, call.entry.runtime
        with runtime.frame(entry.name, entry.units, runtime.phase or Phase.FORWARD, differentiable=True) as frame:
            outputs = _forward_to_recompute(call, frame, tensors) if call.recompute else None
            if outputs is None:
                call.recompute = False
                outputs = _forward_to_keep(call, frame, tensors)
            call.note_generations(frame)
        if call.recompute:
            ctx.save_for_backward(*tensors)
            fixed = [output for output in outputs if not (output.is_floating_point() or output.is_complex())]
        else:
            fixed = [
                output for output, inner in zip(outputs, call.inner_outputs, strict=True) if not inner.requires_grad
            ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: Call = ctx.call
        entry, runtime = call.entry, call.entry.runtime
        runtime.check()
        saved = ctx.saved_tensors
        call.check_generations()
        factor = runtime.loss_factor() if call.outermost else 1.0
        with runtime.frame(entry.name, entry.units, Phase.BACKWARD, differentiable=True):
            if call.recompute:
                inputs = _fresh_inputs(saved)
                outputs = _compute_again(call, inputs)
                retain = False
            else:
                inputs, outputs = call.inner_inputs, call.inner_outputs
                retain = _graph_is_retained()
            pairs = [
                (output, gradient if factor == 1.0 else gradient * factor)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=retain)
            if not call.recompute and not retain:
                call.inner_outputs = []
            runtime.grads_complete(entry.units)
        results: list[torch.Tensor | None] = []
        for tensor in inputs:
            gradient, tensor.grad = tensor.grad, None
            results.append(gradient if gradient is None or factor == 1.0 else gradient / factor)
        return (None, None, *results)


def _forward_to_recompute(call: Call, frame: Frame, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Computes without a graph; None if this unit turned out to change itself and must be kept instead."""
    entry, device = call.entry, call.entry.runtime.device
    rng = device.rng_state()
    buffers = entry.buffers
    first = not entry._trusted
    copies = [buffer.clone() for buffer in buffers] if first else []
    versions = [buffer._version for buffer in buffers]
    with torch.no_grad(), entry.unchanging(tensors, call):
        outputs = call.compute(tensors)
    if versions != [buffer._version for buffer in buffers]:
        if not first:
            raise ScheduleError(
                f'unit "{entry.name}" began to change its buffers after its first call; set infinity.recompute to '
                f'{{"{entry.name}": false}}'
            )
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
        device.set_rng_state(rng)
        entry.recompute = False
        entry.runtime.say_once(
            f'unit "{entry.name}" updates its buffers in forward (as BatchNorm does): its activations are kept, '
            "because computing it twice would update them twice"
        )
        return None
    entry._trusted = True
    call.rng = None if device.same_rng_state(rng) else rng
    call.autocast = device.autocast_state()
    return [output.detach() for output in outputs]


def _forward_to_keep(call: Call, frame: Frame, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    call.inner_inputs = _fresh_inputs(tensors)
    hooks = torch.autograd.graph.saved_tensors_hooks(frame.runtime.pack, frame.runtime.unpack)
    with torch.enable_grad(), frame.runtime.device.uncached_autocast(), hooks:
        call.inner_outputs = call.compute(call.inner_inputs)
    return [output.detach() for output in call.inner_outputs]


def _compute_again(call: Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    device = call.entry.runtime.device
    now = device.rng_state() if call.rng is not None else None
    if call.rng is not None:
        device.set_rng_state(call.rng)
    try:
        with torch.enable_grad(), device.autocast(call.autocast):
            return call.compute(inputs)
    finally:
        if now is not None:
            device.set_rng_state(now)


def _fresh_inputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves with the same values; a tensor given twice stays one tensor."""
    fresh: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in fresh:
            fresh[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
    return [fresh[id(tensor)] for tensor in tensors]


def _graph_is_retained() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
