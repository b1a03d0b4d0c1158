"""Runs several micro-batches through each unit before any of them goes on to the next.

Each micro-batch runs the model's own code on a thread of its own. A baton lets one of them run at a time and goes round
at every unit call, so that all micro-batches use unit k one after the other, while its parameters are on the device.
Backward is one pass over all losses: autograd runs nodes by their sequence numbers, highest first, and these are spread
so that unit k of every micro-batch, in the order of the micro-batches, comes before unit k-1 of any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.engine.runtime import Runtime
from infinity.engine.turn import Baton, Turn
from infinity.stream.params import Phase


def run(runtime: Runtime, model: Callable[..., Any], micro_batches: Sequence[Any], factor: float) -> torch.Tensor:
    """Forward and backward of every micro-batch; the losses, 1-D. Gradients are of their sum times ``factor``."""
    baton = Baton(len(micro_batches))
    turns = [Turn(baton, number, runtime.anchor) for number in range(len(micro_batches))]
    losses: list[torch.Tensor | None] = [None] * len(micro_batches)
    autocast = runtime.device.autocast_state()

    def work(number: int) -> None:
        failure: BaseException | None = None
        runtime.turn = turns[number]
        try:
            turns[number].begin()
            with runtime.device.autocast(autocast):
                losses[number] = _loss(_called(model, micro_batches[number]))
        except BaseException as error:  # raised again by the caller's thread
            failure = error
        finally:
            runtime.turn = None
            baton.leave(number, failure)

    threads = [
        threading.Thread(target=work, args=(number,), name=f"infinity-micro-batch-{number}")
        for number in range(len(micro_batches))
    ]
    with runtime.ledger.phase("forward"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if baton.failure is not None:
        raise baton.failure
    found = [loss for loss in losses if loss is not None]
    root = turns[0].call
    assert root is not None
    runtime.loss_is_scaled = True
    try:
        with runtime.frame(root.entry.name, root.entry.units, Phase.BACKWARD, differentiable=True):
            for turn in turns:
                if turn.call is not None:
                    turn.call.check_generations()
            gradients = [torch.full_like(loss, factor) for loss in found]
            with runtime.grads.open_for_long():
                torch.autograd.backward(found, gradients)
        for turn in turns:
            if turn.call is not None:
                turn.call.end(again=False)
    finally:
        runtime.loss_is_scaled = False
    return torch.stack([loss.detach() for loss in found])


def _called(model: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss(output: Any) -> torch.Tensor:
    """The loss of a model's output: itself, its ``loss``, or its first member."""
    if isinstance(output, dict) and "loss" in output:
        output = output["loss"]
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None) if hasattr(output, "loss") else output[0]
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        raise TypeError(
            "train_batch needs a model that returns its loss: a scalar tensor, an object or dict with `loss`, or a "
            f"tuple that begins with it; it returned {type(output).__name__}"
        )
    return output
