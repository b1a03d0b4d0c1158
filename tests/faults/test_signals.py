"""A signal ends ``infinity train`` with one sentence, exit code 128 + its number, no swap files."""

from __future__ import annotations

import signal

import pytest

from infinity.checkpoint.folder import Folder
from infinity.obs.metrics import read_metrics
from tests.faults.helpers import Finished, TinyRun, Zygote, leftovers

SIGNALS = [signal.SIGINT, signal.SIGTERM]
ENDLESS = "run.steps=100000"
STUCK = """
import infinity.cli.train
class Stuck(infinity.cli.train.Decoder):
    calls = 0
    def forward(self, *inputs):
        Stuck.calls += 1
        if Stuck.calls > 2:
            print("stuck", flush=True)
            import threading
            threading.Event().wait()
        return super().forward(*inputs)
infinity.cli.train.Decoder = Stuck
"""


def sentence(done: Finished, number: signal.Signals) -> str:
    assert done.code == 128 + number, (done.code, done.err)
    text = done.err.strip()
    assert text.startswith("stopped: ")
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal(zygote: Zygote, tiny: TinyRun, number: signal.Signals) -> None:
    child = zygote.start(tiny.code(ENDLESS))
    child.await_line("step      2/")
    assert leftovers(tiny.swap)
    child.send(number)
    text = sentence(child.finish(), number)
    assert "of 100000 steps; " in text
    assert "holds them, --resume auto goes on from there; the swap files are gone" in text
    assert leftovers(tiny.swap) == []
    metrics = read_metrics(tiny.output / "metrics.jsonl")
    assert metrics[-1]["event"] == "step"
    assert Folder(tiny.output / "checkpoints").latest() == f"global_step{metrics[-1]['step']}"


@pytest.mark.parametrize("number", SIGNALS)
def test_the_same_again_while_a_step_does_not_end(zygote: Zygote, tiny: TinyRun, number: signal.Signals) -> None:
    child = zygote.start(tiny.code(ENDLESS, before=STUCK))
    child.await_line("stuck")
    child.send(number)
    child.await_line("once more stops at once")
    child.send(number)
    text = sentence(child.finish(), number)
    assert "at once; the swap files are gone" in text
    assert leftovers(tiny.swap) == []
    assert zygote.run(tiny.code()).code == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_volley(zygote: Zygote, tiny: TinyRun, number: signal.Signals) -> None:
    """However many come, however fast: one sentence at most, and the next run has the directory to itself."""
    child = zygote.start(tiny.code(ENDLESS))
    child.await_line("step      1/")
    for _ in range(20):
        child.send(number)
    done = child.finish()
    assert done.code == 128 + number, (done.code, done.err)
    assert "Traceback" not in done.err
    assert done.err.count("\n") <= 1
    assert zygote.run(tiny.code()).code == 0
    assert leftovers(tiny.swap) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_model_is_built(zygote: Zygote, tiny: TinyRun, number: signal.Signals) -> None:
    slow = """
import infinity.cli.train
class Slow(infinity.cli.train.Decoder):
    def __init__(self, shape):
        super().__init__(shape)
        if next(self.parameters()).device.type != "meta":
            print("building", flush=True)
            import signal
            signal.sigwait([signal.SIGUSR1])
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
infinity.cli.train.Decoder = Slow
"""
    child = zygote.start(tiny.code(ENDLESS, before=slow))
    child.await_line("building")
    child.send(number)
    child.send(signal.SIGUSR1)
    assert "after 0 of 100000 steps" in sentence(child.finish(), number)
    assert leftovers(tiny.swap) == []
