"""Notices micro-batches that go by without ``step()``, which counts them."""

from __future__ import annotations

from collections.abc import Callable


class MicroSteps:
    """What backward went through since the last ``step()``; ``say`` is told once if that is more than one batch.

    Only where gradients are accumulated over ``per_step`` > 1 calls of ``step()``: there a loop that calls it for the
    last micro-batch alone, as loops of plain PyTorch do, would train on fewer, larger steps without a sign of it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.per_step = 1
        self._say = say
        self._seen: set[str] = set()

    def backward(self, entry: str) -> None:
        """A call of ``entry`` by user code went through backward."""
        if self.per_step > 1 and entry in self._seen:
            self._say(
                "backward() came twice without step() in between, and gradient_accumulation_steps is "
                f"{self.per_step}: call step() after the backward() of every micro-batch, because it counts them; it "
                "changes the weights at every one that completes a step"
            )
        self._seen.add(entry)

    def step(self) -> None:
        """The micro-batch is over."""
        self._seen.clear()
