"""Stands in for the forward of a module whose call needs units."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.engine.changes import ModuleState
from infinity.engine.frame import Frame
from infinity.engine.inputs import Rejoined, reaches, seen_through
from infinity.engine.placeholder import OffloadedParameter
from infinity.engine.runtime import Runtime
from infinity.engine.tree import Tree, tensors_in
from infinity.engine.unit_function import Call, UnitFunction
from infinity.errors import OffloadedError, ScheduleError
from infinity.stream.activations import Activations, DeviceActivations
from infinity.stream.params import Phase

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


class EntryModule:
    """A module whose calls lend units: its own forward, the units, the mode.

    A *guest* lends only when it is called from outside of every other entry, which has its units otherwise. One that
    *joins* is computed as a part of the call around it, where that leaves every sum of gradients as it would be: its
    first call, which is a node of its own, shows whether it uses weights of other units.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: str,
        module: nn.Module,
        units: tuple[int, ...],
        *,
        recompute: bool,
        activations: Activations | None = None,
        guest: bool = False,
        joins: bool = False,
    ) -> None:
        self.runtime = runtime
        self.name = path or "(root)"
        self.module = module
        self.units = units
        self.recompute = recompute
        self.activations = activations or DeviceActivations()
        self.guest = guest
        self.joins = joins
        self.compute: Callable[..., Any] = module.forward
        self.state = ModuleState(module)
        self.trains = any(parameter.requires_grad for parameter in module.parameters())
        self._own_forward = module.__dict__.get("forward")
        self._load_hook: RemovableHandle | None = None
        self.is_self_contained: bool | None = None
        self._steady: set[tuple[bool, ...]] = set()
        functools.update_wrapper(self, self.compute, updated=())

    def install(self) -> None:
        """Puts this entry in the place of the module's forward."""
        self.module.forward = self
        self._load_hook = self.module.register_load_state_dict_pre_hook(self._refuse_load)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Gives the module its forward back."""
        del self.module.__dict__["forward"]
        if self._own_forward is not None:
            self.module.forward = self._own_forward
        if self._load_hook is not None:
            self._load_hook.remove()

    @staticmethod
    def _refuse_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raises once for a whole ``load_state_dict``, which would go on to collect an error per parameter."""
        for name, parameter in module._parameters.items():
            if isinstance(parameter, OffloadedParameter) and prefix + name in state:
                raise OffloadedError(
                    f"load_state_dict cannot put values into {parameter._name}, which is offloaded. Call "
                    "engine.load_weights(state_dict), which also takes files, or load before infinity.initialize"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadedError(
            f'module "{self.name}" belongs to an engine: it cannot be copied or pickled. Take its values from '
            "engine.state_dict(), or end the engine with engine.destroy(restore_parameters=True)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self.runtime
        if self.guest and runtime.frames:
            return self.compute(*args, **kwargs)
        if self.joins and runtime.frames and runtime.turn is None and self._may_join(args, kwargs):
            return self._join(args, kwargs)
        runtime.check()
        given = Tree((args, kwargs))
        leaves = [runtime.borrowed(leaf) for leaf in given.leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        differentiable = torch.is_grad_enabled() and (self.trains or needs_grad)
        packs = bool(runtime.frames) and runtime.frames[-1].packs
        watched = differentiable and packs and not self.recompute and self.state.is_watched()
        if not differentiable or watched:
            if any(leaf is not own for leaf, own in zip(leaves, given.leaves, strict=True)):
                args, kwargs = given.filled(leaves).value
            phase = runtime.phase or Phase.INFERENCE
            inputs: list[Rejoined] = []
            if watched:
                inputs, args, kwargs = self._rejoined(args, kwargs)
            with runtime.frame(
                self.name, self.units, phase, differentiable=differentiable, packs=packs, shares=not watched
            ):
                result = runtime.owned(self.compute(*args, **kwargs))
            return _ended(inputs, result)
        call = Call(self, given, leaves)
        turn = runtime.turn
        if turn is not None and not runtime.frames:
            return call.open(turn, tensors)
        if turn is not None and len(runtime.frames) == 1:
            turn.before_unit()
            runtime.frames[0].show()
            result = call.finish(UnitFunction.apply(call, None if needs_grad else runtime.anchor, *tensors))  # type: ignore[no-untyped-call]
            turn.after_unit()
            return result
        return call.finish(UnitFunction.apply(call, None if needs_grad else runtime.anchor, *tensors))  # type: ignore[no-untyped-call]

    def _may_join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Not a second time, for both gradients would be added in the compute dtype; nor with hidden inputs."""
        if torch.is_grad_enabled() and not self.is_self_contained:
            return False
        if self.name in self.runtime.frames[-1].joined:
            return False
        return not any(
            _has_grad(member)
            for value in (*args, *kwargs.values())
            if not isinstance(value, (torch.Tensor, *_PLAIN))
            for member in (value if type(value) is tuple else [value])
        )

    def _join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call as a part of the one around it. Gradients it has for a tensor are added up before the others are."""
        runtime = self.runtime
        frame = runtime.frames[-1]
        inputs: list[Rejoined] = []
        if frame.differentiable and torch.is_grad_enabled():
            inputs, args, kwargs = self._rejoined(args, kwargs)
        with frame.join(self.name, self.units), runtime.ledger.span(self.name):
            result = self.compute(*args, **kwargs)
        return _ended(inputs, result)

    def _rejoined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Rejoined], tuple[Any, ...], dict[str, Any]]:
        """Arguments with an alias for every tensor that has a gradient."""
        inputs: dict[int, Rejoined] = {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in inputs:
                inputs[id(value)] = Rejoined(self.runtime.borrowed(value))
        args = tuple(inputs[id(value)].alias if id(value) in inputs else value for value in args)
        kwargs = {key: inputs[id(value)].alias if id(value) in inputs else value for key, value in kwargs.items()}
        return list(inputs.values()), args, kwargs

    def see(self, outputs: Sequence[torch.Tensor], outer: Sequence[Frame], *, strays: bool) -> None:
        """Notes whether a call had gradients for weights that are not lent to it but to ``outer`` calls, or alone."""
        foreign = {id(leaf) for frame in outer for leaves in frame.leaves.values() for leaf in leaves}
        self.is_self_contained = not strays and not reaches(outputs, foreign)

    def may_recompute(self, leaves: Sequence[Any]) -> bool:
        """Whether a call may be computed twice: not if it gets an object that the first pass could change."""
        if not self.recompute:
            return False
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                self.runtime.say_once(
                    f"units are given a {type(leaf).__name__}, which computing them twice would change twice: their "
                    "activations are kept. If it is a KV cache, set model.config.use_cache = False to save the memory"
                )
                return False
        return True

    def is_steady(self) -> bool:
        """Whether a call in the present training mode was seen to leave the module as it was."""
        return self.state.mode() in self._steady

    def learn(self, changes: Sequence[tuple[nn.Module, str]], *, looked_back: bool, drew: bool) -> bool:
        """Notes what a call changed in the module or elsewhere; whether that call may be computed again."""
        if not changes and not looked_back and not drew:
            self._steady.add(self.state.mode())
            return True
        if changes:
            what = f'changes "{changes[0][1]}" of a {type(changes[0][0]).__name__}'
        else:
            what = "takes a gradient" if looked_back else "draws random numbers from Python or NumPy"
        self.runtime.say_once(
            f'unit "{self.name}" {what} in forward, so that it cannot be computed twice: its activations are kept'
        )
        return False

    def refuse(self, what: str) -> ScheduleError:
        """The error for a unit that cannot be computed twice after all."""
        return ScheduleError(
            f'unit "{self.name}" {what}, so computing it again in backward would give wrong gradients. Set '
            f'infinity.recompute to {{"{self.name}": false}}'
        )


def _ended(inputs: Sequence[Rejoined], result: Any) -> Any:
    """The result with the caller's own tensors in the places of their aliases, from which they go on."""
    for each in inputs:
        each.end()
    if isinstance(result, torch.Tensor):
        return _owned(inputs, result)
    tree = Tree(result)
    owned = [_owned(inputs, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree.leaves]
    if all(own is leaf for own, leaf in zip(owned, tree.leaves, strict=True)):
        return result
    return tree.filled(owned).value


def _owned(inputs: Sequence[Rejoined], output: torch.Tensor) -> torch.Tensor:
    """The caller's own tensor for its alias, the same view of it for a view of the alias, else the output."""
    for each in inputs:
        if output is each.alias:
            return each.tensor
        if (view := seen_through(each.alias, output)) is not None:
            return view.of(each.tensor)
    return output


def _has_grad(value: Any) -> bool:
    tensors = [value] if isinstance(value, torch.Tensor) else tensors_in(value)
    return any(tensor.requires_grad for tensor in tensors)
