"""Predicts what a micro-batch takes of memory by running it on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from infinity.plan.micro_batch import MicroBatch, UnitInput, may_move
from infinity.shard.partition import compute_dtype
from infinity.tier import PAGE_BYTES, round_up


def predict(
    model: nn.Module,
    inputs: Any,
    *,
    recomputed: Collection[str],
    moved: Collection[str],
    blocks: Collection[str],
    dtype: torch.dtype | None,
) -> MicroBatch:
    """Forward and backward of ``model``, on the meta device or not, given one micro-batch; nothing is computed.

    ``inputs``: a tuple of arguments, a dict of keyword arguments, or one argument, of tensors on any device. ``moved``
    are the ``recomputed`` units (by path, as all) whose inputs leave the device, ``blocks`` those that repeat. Raises
    whatever the model raises where it looks at a value.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        stack.enter_context(_without_data(model, dtype))
        stack.enter_context(set_checkpoint_early_stop(False))
        given = tree_map(lambda leaf: _fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs)
        owned = {id(tensor.untyped_storage()) for tensor in [*model.parameters(), *model.buffers()]}
        owned |= {id(leaf.untyped_storage()) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
        watch = stack.enter_context(_LiveBytes(owned))
        calls = _Calls(watch)
        for path, module in model.named_modules():
            if path in recomputed:
                stack.enter_context(calls.recomputing(path, module, moves=path in moved))
            elif path in blocks:
                stack.enter_context(calls.keeping(path, module))
            if isinstance(module, nn.Linear) and not any(_inside(path, block) for block in blocks):
                stack.callback(module.register_forward_hook(calls.note_output).remove)
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)  # type: ignore[no-untyped-call]
        output = _called(model, given)
        loss = _scalar(output)
        del output
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        numbers = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        return MicroBatch(
            tuple(calls.inputs),
            calls.largest,
            watch.peak,
            calls.logits,
            max((leaf.numel() for leaf in numbers), default=0),
            tuple(calls.order),
        )


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up storages while they live; ``forget`` takes one out of the sum."""

    def __init__(self, owned: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = owned
        self._live: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._live or key in self._known:
            return
        self._live[key] = storage.nbytes()
        self._refs[key] = weakref.ref(storage, partial(self._gone, key))
        self.now += self._live[key]
        self.peak = max(self.peak, self.now)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """The storage is elsewhere from now on."""
        key = id(storage)
        if key in self._live:
            self.now -= self._live[key]
            self._live[key] = 0

    def remember(self, storage: torch.UntypedStorage) -> None:
        """The storage is here again, or still, until nobody uses it."""
        key = id(storage)
        if self._live.get(key) == 0:
            self._live[key] = storage.nbytes()
            self.now += self._live[key]
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, _: object) -> None:
        self.now -= self._live.pop(key, 0)
        self._refs.pop(key, None)


class _Calls:
    """Notes what blocks are given, in which order, which of it stays."""

    def __init__(self, watch: _LiveBytes) -> None:
        self._watch = watch
        self._seen: dict[tuple[int, bool], weakref.ref[torch.Tensor]] = {}
        self._number: dict[tuple[int, bool], int] = {}
        self._staying: dict[int, weakref.ref[torch.Tensor]] = {}
        self.inputs: list[UnitInput] = []
        self.order: dict[str, None] = {}
        self.largest = 0
        self.logits = 0

    def recomputing(self, path: str, module: nn.Module, *, moves: bool) -> AbstractContextManager[None]:
        """Inside, the module keeps its inputs only, as the engine has it."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.order[path] = None
            result = checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs
            )
            if torch.is_grad_enabled():
                self._note(path, _tensors(args, kwargs), moves)
            return result

        return _forward_is(module, run)

    def keeping(self, path: str, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, the module keeps its activations, which its inputs are taken to be part of."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.order[path] = None
            self._stay([tensor for tensor in _tensors(args, kwargs) if may_move(tensor)])
            return forward(*args, **kwargs)

        return _forward_is(module, run)

    def _stay(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._staying[id(tensor)] = weakref.ref(tensor)
            self._watch.remember(tensor.untyped_storage())

    def _note(self, path: str, tensors: list[torch.Tensor], moves: bool) -> None:
        together = 0
        mine = list({id(tensor): tensor for tensor in tensors if may_move(tensor)}.values())
        if not moves:
            self._stay(mine)
        for tensor in mine:
            nbytes = round_up(tensor.nbytes, PAGE_BYTES)
            together += nbytes
            key = id(tensor), moves
            known = self._seen.get(key)
            if known is None or known() is not tensor:
                self._seen[key] = weakref.ref(tensor)
                self._number[key] = len(self.inputs)
                self.inputs.append(UnitInput(path, nbytes, path, moves))
                staying = self._staying.get(id(tensor))
                if moves and (staying is None or staying() is not tensor):
                    self._watch.forget(tensor.untyped_storage())
            else:
                number = self._number[key]
                self.inputs[number] = replace(self.inputs[number], last=path)
        self.largest = max(self.largest, together if moves else 0)

    def note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of a linear layer that may be the head."""
        if isinstance(output, torch.Tensor):
            self.logits = max(self.logits, output.nbytes)


@contextmanager
def _forward_is(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = run
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.forward = own


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _without_data(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the model's tensors have shapes and dtypes only, as the engine would compute with them."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Any] = {}
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]  # which forward may set
    try:
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is None:
                        continue
                    persistent = store is module._parameters or name not in module._non_persistent_buffers_set
                    if id(tensor) not in made:
                        fake = torch.empty(
                            tensor.shape,
                            dtype=compute_dtype(tensor, dtype) if persistent else tensor.dtype,
                            device="cpu",
                        )
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    places.append((store, name, tensor))
                    store[name] = made[id(tensor)]
        yield
    finally:
        for store, name, tensor in places:
            store[name] = tensor
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    like: torch.Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return like.requires_grad_(tensor.requires_grad)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _called(model: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _scalar(output: Any) -> torch.Tensor:
    """The loss of a model's output; a sum where it has none."""
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"]  # type: ignore[no-any-return]
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return tensors[0] if tensors[0].numel() == 1 else tensors[0].sum()
