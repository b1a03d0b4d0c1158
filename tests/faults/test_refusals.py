"""``infinity train`` refuses what the machine cannot do: a paragraph, exit code 1, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.obs.metrics import read_metrics
from tests.faults.helpers import ROOT, TinyRun, Zygote, public_directory, tiny_run

LIMIT_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
LIMIT_LOCKED = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, 65_536))"
NO_URING = "forbid('io_uring_setup', 1)"
NO_KERNEL_AIO = NO_URING + "; forbid('io_setup', 38)"
NO_DIRECT = "import os; forbid('openat', 22, if_flag=(2, os.O_DIRECT))"
NO_LIBRARIES = "from infinity._native import library; library._open = lambda name: f'libinfinity_{name}.so is away'"


STALE_LIBRARIES = "from infinity._native import library; library.NEWEST = dict.fromkeys(library.NEWEST, 'not_yet')"


def losses(run: TinyRun) -> list[float]:
    return [record["loss"] for record in read_metrics(run.output / "metrics.jsonl") if record["event"] == "step"]


def test_a_file_size_limit_is_met_before_the_first_step(zygote: Zygote, tiny: TinyRun) -> None:
    text = zygote.run(tiny.code(before=LIMIT_FILES)).paragraph
    assert re.search(r"cannot reserve swap file \S+param.swap, \d+ bytes: File too large \(errno 27\)", text)
    assert "ulimit -f" in text
    tiny.check_nothing_left()


def test_a_full_disk_is_met_before_the_first_step(zygote: Zygote, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        "import os, subprocess\n"
        "if os.geteuid(): os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS) if hasattr(os, 'unshare') else None\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', {str(disk)!r}], check=True)\n"
        "import atexit; atexit.register(lambda: (print('left', sorted(os.listdir(DISK))), "
        "subprocess.run(['umount', '-l', DISK])))\n"
    ).replace("DISK", repr(str(disk)))
    done = zygote.run(tiny_run(tmp_path, swap=disk).code(before=mounted))
    assert re.search(r"swap needs \d+ bytes but only \d+ are free in \S+: No space left on device", done.paragraph)
    assert "infinity.placement" in done.paragraph
    assert "left []" in done.out


def test_a_directory_that_is_read_only_to_this_user(zygote: Zygote) -> None:
    with public_directory(Path(f"/tmp/infinity-faults-{os.getpid()}")) as directory:
        run = tiny_run(directory)
        closed, output = directory / "closed", run.output
        closed.mkdir(mode=0o755)
        output.mkdir()
        output.chmod(0o777)
        closed.chmod(0o555)
        user = "import os\nif os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)"
        text = zygote.run(run.code(f"infinity.nvme_path={closed}", before=user)).paragraph
        assert f"cannot create a swap directory in {closed}: Permission denied (errno 13). Choose" in text
        text = zygote.run(run.code(f"infinity.nvme_path={closed}/swap", before=user)).paragraph
        assert f"cannot create {closed}/swap: Permission denied" in text
        text = zygote.run(run.code(f"run.output_dir={closed}/out", before=user)).paragraph
        assert f"cannot write run.output_dir {closed}/out: Permission denied" in text
        assert list(closed.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("file", "nvme_path is not a directory: {}/file. Name"),
        ("file/below", "nvme_path is below something that is not a directory: {}/file/below. Name"),
        ("not/there", "nvme_path does not exist, nor does the directory above it: {}/not/there. Mount"),
        ("loop", "cannot create {}/loop"),
    ],
)
def test_a_swap_path_that_is_no_directory(zygote: Zygote, tiny: TinyRun, path: str, expected: str) -> None:
    (tiny.directory / "file").write_text("mine")
    (tiny.directory / "loop").symlink_to("loop/x")
    text = zygote.run(tiny.code(f"infinity.nvme_path={tiny.directory}/{path}")).paragraph
    assert expected.format(tiny.directory) in text or path == "loop"
    assert (tiny.directory / "file").read_text() == "mine"


@pytest.mark.parametrize("key", ["device_memory", "host_memory", "nvme_space"])
def test_the_smallest_budget_that_is_named_works(zygote: Zygote, tiny: TinyRun, key: str) -> None:
    whole = "infinity.tile_bytes=1GiB"  # by itself the plan cuts matrices into tiles before it gives up
    text = zygote.run(tiny.code(whole, f"infinity.{key}=20KB")).paragraph
    assert f"infinity.{key} is 20000" in text
    assert 'the largest unit is "blocks.0"' in text
    found = re.search(r"Raise it to at least (\d+) bytes", text)
    assert found is not None
    needed = int(found[1])
    assert zygote.run(tiny.code(whole, f"infinity.{key}={needed}")).code == 0
    assert f"at least {needed} bytes" in zygote.run(tiny.code(whole, f"infinity.{key}={needed - 1}")).paragraph
    tiny.check_nothing_left()


@pytest.mark.parametrize("key", ["device_memory", "host_memory"])
def test_a_budget_above_the_machine(zygote: Zygote, tiny: TinyRun, key: str) -> None:
    text = zygote.run(tiny.code(f"infinity.{key}=1000TiB")).paragraph
    assert f"infinity.{key} is {1000 << 40} (1000.00 TiB), but this machine, or the cgroup" in text


def test_a_plan_above_the_machine(zygote: Zygote, tiny: TinyRun) -> None:
    """Found before the model is built: building it alone would take longer than the time a child has."""
    huge = ("run.model.d_model=8192", "run.model.d_ff=32768", "run.model.n_layers=8")
    kept = ("infinity.device_memory=auto", "infinity.host_memory=auto", "zero_optimization.offload_param.device=none")
    text = zygote.run(tiny.code(*huge, *kept)).paragraph
    assert "RAM: the plan needs" in text or "host memory: the plan needs" in text
    assert "blocks.0" in text or "left. Offload" in text


def test_a_limit_on_address_space(zygote: Zygote, tiny: TinyRun) -> None:
    """Every 2 MiB above what the process has already, something else is the first that does not fit."""
    for more in range(2, 26, 8):
        limit = (
            f"import resource; size = int(open('/proc/self/statm').read().split()[0]) * 4096 + ({more} << 20)\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size, size))"
        )
        done = zygote.run(tiny.code(before=limit))
        assert done.code == 0 or done.paragraph
        tiny.check_nothing_left()
    done = zygote.run(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "from infinity.memory.host import HostMemory; HostMemory(2 << 40)"
    )
    assert "CapacityError: RAM: 2199025352704 bytes cannot be mapped: Cannot allocate memory. Raise" in done.err


def test_whatever_moves_the_bytes_gives_the_same_losses(zygote: Zygote, tiny: TinyRun) -> None:
    """io_uring, kernel AIO, O_DIRECT, locked memory, our own libraries: any of them may be away."""
    expected, told = None, {}
    ways = {"nothing": "", "locked": LIMIT_LOCKED, "uring": NO_URING, "aio": NO_KERNEL_AIO, "direct": NO_DIRECT}
    for name, before in {**ways, "libraries": NO_LIBRARIES, "stale": STALE_LIBRARIES}.items():
        done = zygote.run(tiny.code(before=before))
        assert done.code == 0, (name, done.err)
        told[name] = done.out
        expected = expected or losses(tiny)
        assert losses(tiny) == expected, name
        tiny.check_nothing_left()
    assert len(expected or []) == 2
    engines = {name: re.search(r", I/O (\w+)$", text, re.MULTILINE) for name, text in told.items()}
    assert [found[1] for found in engines.values() if found] == [
        "io_uring", "io_uring", "aio", "threads", "io_uring", "libaio", "libaio"
    ]  # fmt: skip
    assert "does not support direct I/O (O_DIRECT)" in told["direct"]
    assert "Adam torch" in told["libraries"]
    assert "libinfinity_cpu_adam.so is away" in told["libraries"]
    assert "was built from older sources; run `make build`" in told["stale"]


@pytest.mark.parametrize(
    ("engine", "before", "expected"),
    [
        ("io_uring", NO_URING, "it is forbidden, by seccomp"),
        ("aio", NO_KERNEL_AIO, "the kernel lacks it or seccomp hides it"),
        ("threads", NO_LIBRARIES, "libinfinity_aio.so is away"),
    ],
)
def test_an_engine_that_is_asked_for_is_never_replaced(
    zygote: Zygote, tiny: TinyRun, engine: str, before: str, expected: str
) -> None:
    text = zygote.run(tiny.code(f"infinity.io_engine={engine}", before=before)).paragraph
    assert expected in text
    assert f"infinity.io_engine asks for {engine}" in text
    tiny.check_nothing_left()


@pytest.mark.slow
def test_every_place_where_a_write_can_be_refused(zygote: Zygote, tiny: TinyRun) -> None:
    """The file size limit at every size up to the largest swap file: always the same end."""
    for limit in range(4096, 950_000, 45_000):
        text = zygote.run(tiny.code(before=LIMIT_FILES.replace("200_000", str(limit)))).paragraph
        assert "File too large" in text
        tiny.check_nothing_left()


@pytest.mark.slow
def test_a_package_without_its_libraries(tiny: TinyRun, zygote: Zygote, tmp_path: Path) -> None:
    """The command of a copy that was never built, from its own import to its own exit."""
    shutil.copytree(ROOT / "infinity", tmp_path / "copy" / "infinity", ignore=shutil.ignore_patterns("*.so", "*.txt"))
    assert zygote.run(tiny.code()).code == 0
    expected = losses(tiny)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "infinity", "train", str(tmp_path / "config.json")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Adam torch" in done.stdout
    assert "run `make build`, or install the package again" in done.stdout
    assert losses(tiny) == expected
    tiny.check_nothing_left()
