"""Trains one model twice, by plain PyTorch or by an engine, for comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import infinity
from infinity.engine.build import Injected
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize

ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 0.1, "weight_decay": 0.1}
PLACEMENTS = ("none", "cpu", "nvme")

Loss = Callable[[nn.Module, Any], torch.Tensor]


def configure(
    swap: os.PathLike[str] | str, device: str = "nvme", *, gas: int = 1, **infinity_block: Any
) -> dict[str, Any]:
    """A config that keeps every state on ``device`` (none, cpu, nvme), without clipping."""
    offload = {"device": device, "nvme_path": str(swap)} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"slabs": 1, "adam_threads": 1, **infinity_block},
    }


@dataclass
class Trace:
    """What training showed: losses, gradients of the first step, weights at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def attached(model: nn.Module, config: dict[str, Any], **arguments: Any) -> Iterator[Engine]:
    """An engine whose freed slabs are filled with NaN; destroyed at the end."""
    engine, *_ = initialize(model, config, injected=Injected(poison=True), **arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def floats(batch: Any) -> list[torch.Tensor]:
    """Tensors of a batch that a gradient could reach."""
    members = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else [batch]
    return [value for value in members if isinstance(value, torch.Tensor) and value.requires_grad]


def train_plain(
    model: nn.Module, batches: Iterable[Any], loss_of: Loss, optimizer: torch.optim.Optimizer | None = None
) -> Trace:
    """The reference: torch.optim.AdamW, one step per batch."""
    torch.manual_seed(7)
    trace = Trace()
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        trace.losses.append(loss.detach())
        trace.inputs += [tensor.grad for tensor in floats(batch) if tensor.grad is not None]
        if number == 0:
            trace.grads = {n: None if p.grad is None else p.grad.float() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def train_attached(engine: Engine, batches: Iterable[Any], loss_of: Loss) -> Trace:
    """The same loop over an engine."""
    torch.manual_seed(7)
    trace, model = Trace(), engine.module
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        engine.backward(loss)
        trace.losses.append(loss.detach())
        trace.inputs += [tensor.grad for tensor in floats(batch) if tensor.grad is not None]
        if number == 0:
            trace.grads = {name: infinity.get_full_grad(p) for name, p in model.named_parameters()}
        engine.step()
    trace.weights = {name: infinity.get_full_param(p) for name, p in model.named_parameters()}
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def fresh(batches: Sequence[Any]) -> list[Any]:
    """Batches with no gradients from an earlier run."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            return {key: copied(member) for key, member in value.items()}
        return type(value)(copied(member) for member in value) if isinstance(value, (tuple, list)) else value

    return [copied(batch) for batch in batches]


def assert_equal(plain: Trace, other: Trace, *, exact: bool = True) -> None:
    """First loss, first gradients, input gradients bit for bit (or to 1e-6); what follows Adam to 1e-6."""

    def same(what: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        if a is None or b is None:
            assert a is None, f"{what}: plain has a gradient, the engine has none"
            assert b is None, f"{what}: the engine has a gradient, plain has none"
            return
        assert torch.isfinite(b).all(), f"{what} is not finite"
        if exact:
            assert torch.equal(a, b), f"{what} differs by {(a - b).abs().max():.3g}"
        else:
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")

    assert len(plain.losses) == len(other.losses)
    same("first loss", plain.losses[0], other.losses[0])
    assert plain.grads.keys() == other.grads.keys()
    for name, gradient in plain.grads.items():
        same(f"gradient of {name}", gradient, other.grads[name])
    assert len(plain.inputs) == len(other.inputs)
    if plain.inputs:
        same("first input gradient", plain.inputs[0], other.inputs[0])
    for a, b in zip([*plain.losses, *plain.inputs], [*other.losses, *other.inputs], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert plain.weights.keys() == other.weights.keys()
    for name, weight in plain.weights.items():
        # Where plain PyTorch rounds weights to 16 bit after each step the engine has fp32 masters.
        atol = 1e-3 if weight.dtype in (torch.bfloat16, torch.float16) else 1e-6
        found = other.weights[name]
        assert torch.allclose(found, weight.to(found.dtype), 0, atol), (
            f"{name} differs by {(found - weight).abs().max():.3g}"
        )
    assert plain.buffers.keys() == other.buffers.keys()
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(other.buffers[name], buffer, rtol=1e-5, atol=1e-6)


def check_model(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_of: Loss,
    swap: os.PathLike[str] | str,
    *,
    devices: Sequence[str] = PLACEMENTS,
    recompute: Sequence[bool] = (True, False),
    exact: bool = True,
    **infinity_block: Any,
) -> None:
    """Trains ``build()`` by plain PyTorch, then over placements with recompute on and off; all must agree."""
    plain = train_plain(_built(build), fresh(batches), loss_of)
    seen: dict[bool, Trace] = {}
    for choice in recompute:
        for device in devices:
            with attached(_built(build), configure(swap, device, recompute=choice, **infinity_block)) as engine:
                trace = train_attached(engine, fresh(batches), loss_of)
            assert_equal(plain, trace, exact=exact)
            first = seen.setdefault(choice, trace)
            for name, weight in first.weights.items():
                assert torch.equal(weight, trace.weights[name]), f"{name} depends on the placement ({device})"


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()
