"""However an engine ends, threads, descriptors, swap files end with it, whatever is not its own stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.faults.helpers import PROLOGUE, TinyRun, Zygote, leftovers

COUNT = """
import gc, time
swap = {swap!r}
def held():
    # The kernel counts a thread for a moment after it was joined; one that is never joined it counts for ever.
    for _ in range(5000):
        tasks = len(os.listdir("/proc/self/task"))
        if tasks <= 1:
            break
        time.sleep(0.001)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), left(swap), tasks
def start(model, **own):
    return initialize(model, configure(swap, **own), injected=Injected(poison=True))
start(Net())[0].destroy()  # what torch and OpenMP keep for good
before = held()
"""


def counted(tiny: TinyRun, code: str) -> str:
    return COUNT.format(swap=str(tiny.swap)) + code


@pytest.mark.parametrize("backend", ["io_uring", "aio", "threads", "libaio", "python"])
def test_twenty_engines_leave_what_was_before(zygote: Zygote, tiny: TinyRun, backend: str) -> None:
    code = """
for turn in range(20):
    engine, optimizer, *_ = start(Net(), io_engine=BACKEND)
    train(engine, 2)
    engine.destroy()  # with an update in flight
    engine.destroy()
    assert held() == before, (turn, held(), before)
"""
    zygote.library(counted(tiny, code.replace("BACKEND", repr(backend))))


def test_an_engine_that_nobody_keeps(zygote: Zygote, tiny: TinyRun) -> None:
    code = """
model = Net()
reference = [p.shape for p in model.parameters()]
engine, optimizer, loader, scheduler = start(model)
train(engine, 2)
del engine, optimizer, loader, scheduler
gc.collect()
for thread in threading.enumerate():
    if thread.name == "infinity-end":
        thread.join()
assert held() == before, (held(), before)
try:
    model(batch(0))
except Exception as error:
    print(type(error).__name__, error)
"""
    said = zygote.library(counted(tiny, code)).out
    assert said.startswith("ScheduleError this model's engine was destroyed, or nobody kept it")
    assert "Keep the engine" in said


@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(3)", "1 / 0", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_program_that_ends_without_destroying(zygote: Zygote, tiny: TinyRun, how: str) -> None:
    done = zygote.run(PROLOGUE + counted(tiny, f"engine = start(Net())[0]\ntrain(engine, 2)\nassert left(swap)\n{how}"))
    assert done.code == {"sys.exit(0)": 0, "sys.exit(3)": 3}.get(how, 1), done.err
    tiny.check_nothing_left()


def test_the_collector_may_come_in_a_lane(zygote: Zygote, tiny: TinyRun) -> None:
    """The engine becomes garbage while its updater runs, then the updater's own thread collects it."""
    code = """
entered, dropped = threading.Event(), threading.Event()
def in_the_lane():
    entered.set()
    dropped.wait()
    gc.collect()
dropped.set()
engine, optimizer, *_ = initialize(Net(), configure(swap), injected=Injected(delay=in_the_lane))
train(engine, 1)
engine.settle()
gc.disable()
dropped.clear()
entered.clear()
engine.backward(engine(batch(1)))
engine.step()
entered.wait()
del engine, optimizer, _
dropped.set()
for thread in [t for t in threading.enumerate() if t.name.startswith("infinity-")]:
    thread.join()
for thread in [t for t in threading.enumerate() if t.name.startswith("infinity-")]:
    thread.join()
assert held() == before, (held(), before)
"""
    zygote.library(counted(tiny, code))


def test_a_child_leaves_its_parents_files(zygote: Zygote, tiny: TinyRun) -> None:
    code = """
engine = start(Net())[0]
train(engine, 1)
engine.settle()
files = left(swap)
for end in (engine.destroy, lambda: sys.exit(0)):
    child = os.fork()
    if child == 0:
        import atexit
        try:
            end()
        except SystemExit:
            pass
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert left(swap) == files and files
train(engine, 2)
engine.destroy()
assert held() == before, (held(), before)
"""
    zygote.library(counted(tiny, code))


def test_user_code_that_raises_is_no_end(zygote: Zygote, tiny: TinyRun) -> None:
    """An exception in forward, between forward and backward, in backward: the next steps are those without it."""
    code = """
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, when):
        if armed == "forward":
            raise ValueError("mine")
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if armed == "backward":
            raise ValueError("mine")
        return gradient, None

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return Fails.apply(self.linear(x), None)

def weights(faults):
    global armed
    armed = None
    model = Net()
    torch.manual_seed(1)
    model.layers[1] = Part()
    engine = start(model, slabs=2)[0]
    for step in range(4):
        for armed in faults:
            try:
                loss = engine(batch(100 + step))
                if armed == "between":
                    raise ValueError("mine")
                engine.backward(loss)
            except ValueError as error:
                assert str(error) == "mine"
            else:
                raise AssertionError(armed)
            engine.zero_grad()
        armed = None
        train(engine, 1, start=step)
    state = engine.state_dict()
    engine.destroy()
    return state

plain, faulty = weights(()), weights(("forward", "between", "backward", "forward"))
assert all(torch.equal(plain[name], faulty[name]) for name in plain)
assert held() == before, (held(), before)
"""
    zygote.library(counted(tiny, code))


def test_short_reads_and_writes_change_nothing(zygote: Zygote, tiny: TinyRun) -> None:
    code = """
def weights(faults):
    engine = initialize(Net(), configure(swap), injected=Injected(poison=True, faults=faults))[0]
    train(engine, 4)
    state = engine.state_dict()
    engine.destroy()
    return state
plain = weights(None)
for seed in range(3):
    faulty = weights(Faults(seed=seed, short=0.6, delay_seconds=0.001, reorder=True))
    assert all(torch.equal(plain[name], faulty[name]) for name in plain)
"""
    zygote.library(counted(tiny, code))


def test_the_end_of_a_long_update_is_not_waited_for(zygote: Zygote, tiny: TinyRun) -> None:
    """Two hundred sub-groups at 0.1 s each: destroying must not read and write them all for nothing."""
    code = """
big = Net(width=512, layers=3)
config = configure(swap, slabs=8)
config["zero_optimization"]["sub_group_size"] = 4096
engine = initialize(big, config, injected=Injected(faults=Faults(delay_seconds=0.2)))[0]
engine.backward(engine(torch.ones(1, 512)))
engine.step()
start = time.monotonic()
engine.destroy()
print(time.monotonic() - start)
assert held() == before, (held(), before)
"""
    assert float(zygote.library(counted(tiny, code)).out) < 10


def test_foreign_files_are_never_touched(zygote: Zygote, tiny: TinyRun, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    old = tiny.swap / "infinity-swap-rank0-1-0123abcd"
    old.mkdir(parents=True)
    (old / "owner.lock").write_text("")
    (old / "param.swap").symlink_to(victim)
    (old / "notes.txt").write_text("mine")
    (old / "master.swap").write_bytes(b"x" * 10_000)
    (tiny.swap / "param.swap").write_text("mine")
    (tiny.swap / "infinity-swap-rank0-2-0123abcd").symlink_to(tmp_path)
    (tiny.swap / "infinity-swap-rank0-3-0123abcd").write_text("a file of that name")
    (tiny.swap / "infinity-swap-other").mkdir()
    expected = sorted(set(leftovers(tiny.swap)) - {str(old / "master.swap"), str(old / "owner.lock")})
    done = zygote.run(tiny.code())
    assert done.code == 0, done.err
    assert "reclaimed" in done.out
    assert f"left {old} in place" in done.out
    assert leftovers(tiny.swap) == expected
    assert victim.read_text() == "precious"
    assert (tiny.swap / "param.swap").read_text() == "mine"


def test_a_swap_directory_that_vanishes_is_a_clear_end(zygote: Zygote, tiny: TinyRun) -> None:
    code = """
import shutil
engine = start(Net())[0]
train(engine, 1)
shutil.rmtree(swap)
train(engine, 2)  # open files stay usable
engine.destroy()
assert held() == before, (held(), before)
"""
    zygote.library(counted(tiny, code))


def test_many_processes_share_one_directory(zygote: Zygote, tiny: TinyRun) -> None:
    """Each makes, reclaims, removes while the others do, the directory itself included."""
    code = counted(
        tiny, "for turn in range(12):\n    engine = start(Net())[0]\n    train(engine, 1)\n    engine.destroy()"
    )
    children = [zygote.start(PROLOGUE + code.replace("before = held()", "")) for _ in range(3)]
    for child in children:
        done = child.finish()
        assert done.code == 0, done.err
    assert leftovers(tiny.swap) == []


def test_a_killed_process_is_reclaimed(zygote: Zygote, tiny: TinyRun) -> None:
    """Wherever the kill comes, the next run finds room and leaves nothing. One that lives is left alone."""
    lives = zygote.start(tiny.code("run.steps=100000"))
    lives.await_line("step      2/")
    kept = leftovers(tiny.swap)
    other = tiny.directory / "other"
    for turn in range(6):
        child = zygote.start(tiny.code("run.steps=100000", f"run.output_dir={other}"))
        time.sleep(0.08 * turn)  # an instant of its own for each, not a synchronisation
        os.kill(child.pid, 9)
        assert child.finish().code == -9
    done = zygote.run(tiny.code(f"run.output_dir={other}"))
    assert done.code == 0, done.err
    assert leftovers(tiny.swap) == kept
    os.kill(lives.pid, 9)
    lives.finish()
    assert leftovers(tiny.swap) == kept
    assert "reclaimed" in zygote.run(tiny.code()).out
    assert leftovers(tiny.swap) == []
