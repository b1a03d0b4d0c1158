"""How ranks end: each by itself, stopped, or with a process group that goes first."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.dist.helpers import Launcher
from tests.dist.test_engine import code

TRAIN = """
engine = start({stage}, "cpu", timeout={timeout})
for step in range({steps}):
    {before}
    engine.backward(engine(batch(step + RANK)))
    engine.step()
    print("step", step, flush=True)
{after}
"""


@pytest.mark.parametrize("after", ["", "torch.distributed.destroy_process_group()"], ids=["nothing", "the group"])
def test_a_program_may_end_without_ending_its_engine(after: str, launcher: Launcher, tmp_path: Path) -> None:
    late = "if RANK == 0: threading.Event().wait(0.2)"
    launcher.succeed(2, code(TRAIN.format(stage=2, timeout=20, steps=2, before=late, after=after), tmp_path / "swap"))


def test_a_rank_that_exits_in_the_middle_is_named(launcher: Launcher, tmp_path: Path) -> None:
    leaves = "if RANK == 1 and step == 1: sys.exit(3)"
    finished = launcher.run(
        2, code(TRAIN.format(stage=2, timeout=20, steps=3, before=leaves, after=""), tmp_path / "swap")
    )
    assert [one.code for one in finished] == [1, 3]
    assert "rank 1 ended its engine, or its program" in finished[0].err


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_rank_that_is_stopped_ends_the_others(stopped: int, launcher: Launcher, tmp_path: Path) -> None:
    """Rank 0 keeps the store in which the others look for news: it does not answer them either."""
    endless = TRAIN.format(stage=3, timeout=2, steps=10**6, before="", after="")
    children = launcher.start(2, code(endless, tmp_path / "swap"))
    children[stopped].await_line("step 2")
    children[stopped].send(signal.SIGSTOP)
    try:
        other = children[1 - stopped].finish()
    finally:
        children[stopped].send(signal.SIGCONT)
    last = children[stopped].finish()
    assert last.code == other.code == 1
    assert f"rank {stopped}" in other.err
    assert "infinity.timeout_seconds" in other.err
