"""A disk that fails during training: the caller learns which bytes, every time; taking down works at once."""

from __future__ import annotations

import json
import re

import pytest

from tests.faults.helpers import TinyRun, Zygote

EVERY_BLOCK = """
import errno, gc, logging
swap, own, backend, which, first, stop = {arguments!r}
logging.getLogger("infinity").addHandler(logging.NullHandler())
model = None
threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
reached = dict(start=0, train=0, settle=0, nothing=0)
for block in range(first, stop):
    faults = Faults(fail_at=block, errno=which)
    model, phase, engine, seen = Net(), "start", None, None
    try:
        config = configure(swap, io_engine=backend, **own)
        engine = initialize(model, config, injected=Injected(poison=True, faults=faults))[0]
        phase = "train"
        train(engine, 3)
        phase = "settle"
        engine.settle()
        phase = "nothing"
    except Exception as error:
        seen = error
    reached[phase] += 1
    if seen is not None:
        assert type(seen).__name__ == "StorageError", repr(seen)
        assert seen.errno == which and seen.path.endswith(".swap"), vars(seen)
        assert seen.offset % 4096 == 0 and seen.length > 0 and os.strerror(which) in str(seen), str(seen)
    if engine is not None and seen is not None:
        import infinity
        for use in (
            lambda: engine(batch(9)), engine.settle, engine.step, engine.state_dict,
            lambda: infinity.get_full_param(next(model.parameters())), lambda: model(batch(9)),
        ):
            for _ in range(2):
                try:
                    use()
                except Exception as again:
                    assert again is seen, (use, repr(again))
                else:
                    raise AssertionError((block, phase, use))
    if engine is not None:
        engine.destroy()
    seen = None
    assert left(swap) == [], left(swap)
    gc.collect()
    assert threading.active_count() == threads, threading.enumerate()
    assert len(os.listdir("/proc/self/fd")) == files, block
print(json.dumps(reached))
"""
EIO, ENOSPC = 5, 28
GRAD_ON_NVME = {
    "placement": {"param": "nvme", "grad": "nvme", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}
}


def every_block(zygote: Zygote, tiny: TinyRun, backend: str, errno: int, first: int, stop: int) -> dict[str, int]:
    arguments = (str(tiny.swap), GRAD_ON_NVME, backend, errno, first, stop)
    return dict(json.loads(zygote.library(EVERY_BLOCK.format(arguments=arguments)).out))


@pytest.mark.parametrize(("backend", "errno"), [("io_uring", EIO), ("python", ENOSPC)])
def test_every_block_of_the_first_steps_may_fail(zygote: Zygote, tiny: TinyRun, backend: str, errno: int) -> None:
    reached = every_block(zygote, tiny, backend, errno, 0, 60)
    assert reached["start"] > 0
    assert reached["train"] > 30
    assert reached["nothing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["io_uring", "aio", "threads", "libaio", "python"])
@pytest.mark.parametrize("errno", [EIO, ENOSPC])
def test_every_block_of_three_steps_may_fail(zygote: Zygote, tiny: TinyRun, backend: str, errno: int) -> None:
    reached = every_block(zygote, tiny, backend, errno, 0, 140)
    assert all(reached.values()), reached


@pytest.mark.parametrize(
    ("errno", "words"),
    [
        (EIO, "Input/output error (errno 5). The disk or its driver"),
        (ENOSPC, "No space left on device (errno 28). Free space"),
    ],
)
@pytest.mark.parametrize("block", [3, 20, 60, 100, 150])
def test_a_run_tells_which_bytes(zygote: Zygote, tiny: TinyRun, block: int, errno: int, words: str) -> None:
    faulty = f"""
import infinity.engine.build as build
from infinity.storage.faults import Faults
real, faults = build.open_io_engine, Faults(fail_at={block}, errno={errno})
build.open_io_engine = lambda *args, **options: real(*args, **{{**options, "faults": faults}})
"""
    text = zygote.run(tiny.code("run.steps=8", before=faulty)).paragraph
    assert re.search(r"cannot (read|write) \S+\.swap at byte \d+, \d+ bytes: ", text)
    assert words in text
    tiny.check_nothing_left()


def test_a_model_whose_disk_failed_while_it_was_moved_says_so(zygote: Zygote, tiny: TinyRun) -> None:
    code = f"""
model = Net()
try:
    initialize(model, configure({str(tiny.swap)!r}), injected=Injected(faults=Faults(fail_at=2)))
except Exception as error:
    print(type(error).__name__)
try:
    model(batch(0))
except Exception as error:
    print(type(error).__name__, error)
"""
    first, second = zygote.library(code).out.splitlines()
    assert first == "StorageError"
    assert second.startswith("OffloadedError")
    assert "build the model again" in second


def test_a_full_disk_below_the_metrics(zygote: Zygote, tiny: TinyRun) -> None:
    """The metrics' own disk fills up in the middle of the run."""
    small = tiny.directory / "small"
    small.mkdir()
    mounted = f"""
import atexit, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", {str(small)!r}], check=True)
atexit.register(lambda: subprocess.run(["umount", "-l", {str(small)!r}]))
"""
    text = zygote.run(tiny.code(f"run.output_dir={small}/out", "run.steps=100", before=mounted)).paragraph
    assert f"cannot write metrics to {small}/out/metrics.jsonl: No space left on device (errno 28). Free space" in text
    tiny.check_nothing_left()


@pytest.mark.parametrize(
    "before",
    [
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
        "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
        "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)",
        "import os; os.close(1)",
    ],
)
def test_an_output_that_nobody_can_write_to(zygote: Zygote, tiny: TinyRun, before: str) -> None:
    done = zygote.run(tiny.code("run.steps=50", before=before))
    assert done.code == 1
    assert "Traceback" not in done.err
    tiny.check_nothing_left()
