"""The hot path: lend a unit, compute, give it back, forward as well as backward.

An entry is a module whose ``forward`` was replaced on the instance. A call of it that needs a gradient is one
autograd node in the caller's graph:

    forward:   lend -> compute -> release
    backward:  lend -> gradients, deposited as each is complete -> release

*Recompute* keeps only the inputs; backward computes the forward again. *Keep* keeps the inner graph, whose references
to lent memory are replaced by handles that are resolved against wherever the unit is when backward needs it. Both give
the same bits as the plain module. Where units never move, a call that keeps joins the one around it instead.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from infinity.engine.changes import ModuleState, draws_elsewhere, version
from infinity.engine.frame import Frame
from infinity.engine.inputs import View, aliases, go_on, leaves_like, seen_through, taken
from infinity.engine.runtime import Runtime
from infinity.engine.tree import Tree, echo
from infinity.engine.turn import Turn
from infinity.errors import ScheduleError
from infinity.stream.activations import ON_DEVICE, Activations, Inputs
from infinity.stream.params import Phase


class Entry(Protocol):
    """The module that is called."""

    runtime: Runtime
    name: str
    units: tuple[int, ...]
    state: ModuleState
    activations: Activations
    compute: Callable[..., Any]
    joins: bool
    is_self_contained: bool | None

    def may_recompute(self, leaves: Sequence[Any]) -> bool: ...
    def is_steady(self) -> bool: ...
    def learn(self, changes: Sequence[tuple[nn.Module, str]], *, looked_back: bool, drew: bool) -> bool: ...
    def see(self, outputs: Sequence[torch.Tensor], outer: Sequence[Frame], *, strays: bool) -> None: ...
    def refuse(self, what: str) -> ScheduleError: ...


class Call:
    """One differentiable call of an entry, from its forward to the end of its backward."""

    def __init__(self, entry: Entry, given: Tree, leaves: list[Any]) -> None:
        self.entry = entry
        self.recompute = entry.may_recompute(leaves)
        self.outermost = not entry.runtime.frames
        self.rng: Any = None
        self.autocast: Any = None
        self.mode: tuple[bool, ...] = ()
        self.fingerprint: list[int] = []
        self.inputs: list[torch.Tensor] = []
        self.moved: Inputs = ON_DEVICE
        self.outputs: list[torch.Tensor] | None = None
        self.same: dict[int, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {}
        self.dirty: list[tuple[torch.Tensor, int]] = []
        self.running = False
        self.looked_back = False
        self.changes: list[tuple[nn.Module, str]] = []
        self._given = given
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.lent: tuple[int, ...] = ()
        self._generations: dict[int, int] = {}
        self._firsts: list[int] = []
        self._written: list[Any] = []
        self._assigned: list[tuple[nn.Module, str]] = []
        self._result: Tree | None = None

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the module's own forward; the tensors in its result, in lists or dicts it wrote to, its attributes."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        arguments = self._given.filled(leaves)
        args, kwargs = arguments.value
        before = self.entry.state.snapshot()
        result = self.entry.compute(*args, **kwargs)
        self.changes = self.entry.state.changed(before)
        written = arguments.changed()
        self._written = [original for original, _ in written]
        self._assigned = [(module, key) for module, key in self.changes if _is_computed(module.__dict__.get(key))]
        attributes = [module.__dict__[key] for module, key in self._assigned]
        self._result = Tree((result, [now for _, now in written], attributes))
        return [leaf for leaf in self._result.leaves if isinstance(leaf, torch.Tensor)]

    def finish(self, outputs: Sequence[torch.Tensor] | None) -> Any:
        """The module's result, with the autograd node's tensors in place of the inner ones wherever those went."""
        assert self._result is not None
        found = list(outputs or ())
        for place, same_as in self.same.items():
            found[place] = same_as(found)
        fresh = iter(found)
        leaves = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._result.leaves]
        result, contents, attributes = self._result.filled(leaves).value
        for original, content in zip(self._written, contents, strict=True):
            echo(original, content)
        for (module, key), value in zip(self._assigned, attributes, strict=True):
            module.__dict__[key] = value
        for (tensor, count), written in zip(self.dirty, fresh, strict=True):
            go_on(tensor, written, count)
        self._result = None
        self.same, self.dirty = {}, []
        return result

    def first_pass(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs forward with a graph, which is empty if the unit is known to be fit for a second run.

        Sets ``outputs``; returns what it gave the module. The graph is built even where it is thrown away, so that
        code that looks at it sees what it sees in the plain model.
        """
        entry, runtime = self.entry, self.entry.runtime
        steady = self.recompute and entry.is_steady()
        rng = runtime.device.rng_state() if self.recompute else None
        drawn = draws_elsewhere() if self.recompute and not steady else ()
        self.inputs = leaves_like(tensors)
        self.running = True
        with torch.enable_grad(), self._saving(steady=steady):
            given = aliases(self.inputs)
            self.outputs = self.compute(given)
        self.running = False
        if steady and self.changes:
            raise entry.refuse(f'changes "{self.changes[0][1]}" of a {type(self.changes[0][0]).__name__}')
        if self.recompute and not steady:
            drew = draws_elsewhere() != drawn
            self.recompute = entry.learn(self.changes, looked_back=self.looked_back, drew=drew)
        if self.recompute:
            self.mode = entry.state.mode()
            self.fingerprint = runtime.device.fingerprint(self.outputs)
            self.rng = None if runtime.device.same_rng_state(rng) else rng
            self.autocast = runtime.device.autocast_state()
            self.inputs = []
        return given

    def _saving(self, *, steady: bool) -> AbstractContextManager[object]:
        """How the inner graph saves tensors: not at all, by handles, or as ever where what is lent never moves."""
        if steady:
            return torch.autograd.graph.saved_tensors_hooks(_nothing, self._gone)
        if self.entry.joins and not self.recompute:
            return _AS_EVER
        return torch.autograd.graph.saved_tensors_hooks(self.entry.runtime.pack, _unpacker(self))

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Lets go of everything but the inputs, which go where they are to be until backward; those that stay."""
        runtime = self.entry.runtime
        self.outputs = None
        self._given.forget_values()
        first: dict[int, int] = {}
        self._firsts = [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
        self.moved, staying = self.entry.activations.keep(tensors, lambda tensor: runtime.lent(tensor) is not None)
        return staying

    def open(self, turn: Turn, tensors: Sequence[torch.Tensor]) -> Any:
        """Forward of the whole model for one of several micro-batches; its graph waits for their common backward."""
        entry, runtime = self.entry, self.entry.runtime
        turn.call = self
        self.recompute = False
        with runtime.frame(entry.name, entry.units, Phase.FORWARD, differentiable=True, packs=True) as frame:
            self.first_pass(tensors)
            self.begin(frame)
        for module, key in self.changes:
            if key not in module._buffers and not turn.changes(module, key):
                raise ScheduleError(
                    f'"{key}" of a {type(module).__name__} is changed by every forward. train_batch computes several '
                    "micro-batches side by side, which would see each other's. Train each by engine(...), "
                    "engine.backward(loss), engine.step()"
                )
        return self.finish(self.outputs)

    def _gone(self, packed: Any) -> torch.Tensor:
        if self.running:
            raise self.entry.refuse("takes a gradient inside its forward")
        raise self.entry.refuse("lets a tensor out by another way than its result (a hook, a list in a closure)")

    def compute_again(self, saved: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs with outputs of a second run that sees random numbers, autocast, training mode of the first.

        Whatever else the module looks at may have changed, so the outputs must be those of the first, bit for bit.
        """
        entry, device = self.entry, self.entry.runtime.device
        now = device.rng_state() if self.rng is not None else None
        if self.rng is not None:
            device.set_rng_state(self.rng)
        given = self.moved.tensors(saved)  # among which one that was given twice may be two by now
        inputs = leaves_like([given[first] for first in self._firsts])
        try:
            with torch.enable_grad(), device.autocast(self.autocast), entry.state.in_mode(self.mode):
                outputs = self.compute(inputs)
        finally:
            if now is not None:
                device.set_rng_state(now)
        self._result = None
        if device.fingerprint(outputs) != self.fingerprint:
            raise entry.refuse(
                "computed other values when its forward was run again (an attribute, a buffer, a global or a generator "
                "of random numbers is not what it was in the first run)"
            )
        return inputs, outputs

    def kept(self, *, retain: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs with outputs of the inner graph, which is given up unless it is to be used once more."""
        if self.outputs is None:
            raise RuntimeError(
                f'Trying to backward through unit "{self.entry.name}" a second time. Specify retain_graph=True in the '
                "first backward()"
            )
        inputs, outputs = self.inputs, self.outputs
        if not retain:
            self.outputs = None
        return inputs, outputs

    def begin(self, frame: Frame) -> None:
        """Remembers which values this forward saw; its backward will deposit gradients for what it was lent."""
        runtime = self.entry.runtime
        self._generations = {index: runtime.units[index].generation for index in frame.used}
        self.lent = tuple(frame.used if self.recompute else frame.own)  # calls in a kept graph speak for themselves
        runtime.grads.begin(self, self.lent)

    def end(self, *, again: bool) -> None:
        """Says that the backward is over, or that there may be another one of the same graph."""
        self.entry.runtime.grads.finish(self, self.lent, again=again)

    def check_generations(self) -> None:
        """Raises if a step changed a unit between this call's forward and its backward."""
        for index, generation in self._generations.items():
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
        versions = [version(tensor) for tensor in tensors]
        phase = runtime.phase or Phase.FORWARD
        with runtime.frame(entry.name, entry.units, phase, differentiable=True, packs=True) as frame:
            given = call.first_pass(tensors)
            inner = call.outputs or []
            outputs = [runtime.owned(output.detach()) for output in inner]
            call.same = _same(inner, given, tensors)
            call.begin(frame)
            if entry.joins and entry.is_self_contained is None:
                entry.see(inner, runtime.frames[:-1], strays=frame.strays)
            written = {id(t): n for n, (t, v) in enumerate(zip(tensors, versions, strict=True)) if version(t) != v}
            if call.recompute:
                if written:
                    raise entry.refuse("changes one of its arguments in place")
                ctx.save_for_backward(*call.keep(tensors))
        if not call.recompute:
            inner += [given[n] for n in written.values()]
            call.dirty = [(tensors[n], tensors[n]._version) for n in written.values()]
            outputs += [given[n].detach() for n in written.values()]
        ctx.mark_non_differentiable(*(o for o, i in zip(outputs, inner, strict=True) if not i.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: Call = ctx.call
        entry, runtime = call.entry, call.entry.runtime
        if torch.is_grad_enabled():
            raise ScheduleError(
                f'unit "{entry.name}" was differentiated with create_graph=True; second derivatives of an offloaded '
                "model are not supported"
            )
        runtime.check()
        saved = ctx.saved_tensors
        call.check_generations()
        factor = runtime.loss_factor() if call.outermost else 1.0
        again: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        with runtime.frame(entry.name, entry.units, Phase.BACKWARD, differentiable=True):
            retain = again and not call.recompute
            inputs, outputs = call.compute_again(saved) if call.recompute else call.kept(retain=retain)
            pairs = [
                (output, gradient if factor == 1.0 else gradient * factor)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            received = _flow(pairs, inputs, retain) if pairs else [None] * len(inputs)
            del inputs, outputs, pairs
            call.moved.release(again=again)
        call.end(again=again)
        if call.outermost:
            runtime.micro_steps.backward(entry.name)
        return (None, None, *(g if g is None or factor == 1.0 else g / factor for g in received))


def _flow(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], inputs: Sequence[torch.Tensor], retain: bool
) -> list[torch.Tensor | None]:
    """Lets gradients flow from outputs to weights, which deposit theirs, and inputs, whose gradients are returned."""
    outputs, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
    if torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
        torch.autograd.backward(outputs, gradients, retain_graph=retain)
        return [taken(tensor) for tensor in inputs]
    # The caller is autograd.grad() or backward(inputs=...): weights get nothing.
    wanted = list({id(tensor): tensor for tensor in inputs if tensor.requires_grad}.values())
    found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=retain, allow_unused=True) if wanted else ()
    for tensor, gradient in zip(wanted, found, strict=True):
        tensor.grad = gradient
    return [taken(tensor) for tensor in inputs]


def _same(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> dict[int, Callable[[Sequence[torch.Tensor]], torch.Tensor]]:
    """Which outputs are an argument, a view of one, an output before them: the caller may write to either of two.

    Each as a function of all outputs that gives what the caller gets in its place.
    """
    before: dict[int, int] = {}
    same: dict[int, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {}
    for place, output in enumerate(outputs):
        if id(output) in before:
            same[place] = operator.itemgetter(before[id(output)])
            continue
        before[id(output)] = place
        for inner, tensor in zip(given, tensors, strict=True):
            if output is inner:
                same[place] = functools.partial(_itself, tensor)
            elif (view := seen_through(inner, output)) is not None:
                same[place] = functools.partial(_viewed, view, tensor)
    return same


def _itself(tensor: torch.Tensor, found: object) -> torch.Tensor:
    return tensor


def _viewed(view: View, tensor: torch.Tensor, found: object) -> torch.Tensor:
    return view.of(tensor)


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _unpacker(call: Call) -> Callable[[Any], torch.Tensor]:
    """Unpacks for a call without keeping it alive: it owns the graph whose saved tensors own this."""
    known, runtime = weakref.ref(call), call.entry.runtime

    def unpack(packed: Any) -> torch.Tensor:
        call = known()
        if call is not None:
            call.looked_back |= call.running
        return runtime.unpack(packed)

    return unpack


def _nothing(tensor: torch.Tensor) -> None:
    """What a forward that will be computed again saves."""


_AS_EVER = nullcontext()
