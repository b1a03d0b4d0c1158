"""Tries what training needs on this machine: libraries, I/O, paths, limits, accelerators.

Each probe imports what it tries, so that what cannot be imported is a finding instead of a crash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

import infinity
from infinity.cli.findings import Finding, Probe, fail, ok, warn
from infinity.config.size import format_bytes

IO_BACKENDS = ("io_uring", "aio", "libaio", "threads", "python")
MIN_AIO_EVENTS = 4096
MIN_SHM_BYTES = 64 << 20
MIN_FREE_BYTES = 1 << 30
HUGE_TRIAL_BYTES = 16 << 20


def probes(paths: Sequence[Path]) -> list[tuple[str, Probe]]:
    """Every check in the order of the report; ``paths`` are directories meant for swap files."""
    return [
        ("package", package),
        ("native libraries", native_libraries),
        ("OpenMP", openmp),
        *((f"I/O {backend}", partial(io_backend, backend)) for backend in IO_BACKENDS),
        ("I/O engine", io_engine),
        *((f"path {path}", partial(swap_path, path)) for path in paths),
        ("limits", limits),
        ("memory", memory),
        ("huge pages", huge_pages),
        ("accelerator", accelerator),
    ]


def package() -> Iterator[Finding]:
    """Which ``infinity`` this is, whether another one could be imported in its place."""
    ours = Path(infinity.__file__).resolve().parent
    yield ok(
        "package",
        f"infinity {infinity.__version__} in {ours}, Python {sys.version.split()[0]}, torch {torch.__version__}",
    )
    places = {Path(entry or ".").resolve() for entry in sys.path if not entry.endswith(".zip")}
    foreign = {
        candidate
        for place in places
        for candidate in (place / "infinity" / "__init__.py", place / "infinity.py")
        if candidate.exists() and candidate.resolve().parent != ours
    }
    providers = importlib.metadata.packages_distributions().get("infinity", [])
    others = sorted(set(providers) - {"infinity-offload"})
    if foreign or others:
        where = ", ".join([*map(str, sorted(foreign)), *(f"distribution {name}" for name in others)])
        remedy = f"pip uninstall {' '.join(others)}" if others else "remove it, or start from another directory"
        yield warn("package", f"a foreign `infinity` can shadow this one: {where}", remedy)


def native_libraries() -> Iterator[Finding]:
    """Loads both libraries, then compares one Adam step with PyTorch's bit for bit."""
    from infinity._native.cpu_adam import AdamStep, TorchKernels, open_kernels
    from infinity._native.library import why_missing

    rebuild = (
        "install a C++17 compiler (Debian, Ubuntu: apt install g++), then this package again: in its checkout, "
        "pip install --force-reinstall --no-deps ."
    )
    if (reason := why_missing("aio")) is None:
        yield ok("native I/O", "libinfinity_aio.so loads")
    else:
        yield warn("native I/O", f"{reason}. py-libaio or threads serve instead, slower", rebuild)
    if (reason := why_missing("cpu_adam")) is not None:
        yield warn("native Adam", f"{reason}. PyTorch does the arithmetic instead, slower", rebuild)
    kernels = open_kernels()
    start = [torch.linspace(-1, 1, 10_000), torch.rand(10_000), torch.rand(10_000), torch.linspace(1, -2, 10_000)]
    step = AdamStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
    results = []
    for body in (kernels, TorchKernels()):
        master, exp_avg, exp_avg_sq, grad = (tensor.clone() for tensor in start)
        body.adam(master, exp_avg, exp_avg_sq, grad, None, step)
        results.append(torch.cat([master, exp_avg, exp_avg_sq]))
    if torch.equal(*results):
        yield ok("Adam", f"{kernels.isa} body, threads: {kernels.threads}; a step has the bits of PyTorch's")
    else:
        yield fail(
            "Adam", f"the {kernels.isa} body differs from PyTorch", "set INFINITY_ISA=scalar; report this processor"
        )


def openmp() -> Iterator[Finding]:
    """How many OpenMP run-times this process has mapped, ours and torch's included."""
    from infinity._native.library import load

    load("cpu_adam")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    copies = sorted(set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)))
    names = ", ".join(copies) or "none"
    if len(copies) > 1:
        remedy = "two pools of threads fight for the same cores: keep one, usually torch's, and build against it"
        yield warn("OpenMP", f"{len(copies)} run-times: {names}", remedy)
    else:
        yield ok("OpenMP", f"{len(copies)} run-time: {names}")


def io_backend(backend: str) -> Iterator[Finding]:
    """A real transfer through one way of doing I/O."""
    from infinity.storage.io_engine import probe

    reason = probe(backend)
    if reason is None:
        yield ok(f"I/O {backend}", "a small transfer works")
        return
    remedy = {
        "io_uring": "containers often block it: run with --security-opt seccomp=unconfined or a profile that allows "
        "io_uring; sysctl kernel.io_uring_disabled=0",
        "aio": "raise sysctl fs.aio-max-nr, or allow io_setup in the container's seccomp profile",
        "libaio": "pip install libaio; needed only where the native library is missing",
        "threads": "build the native library (make build)",
        "python": "report this",
    }[backend]
    yield warn(f"I/O {backend}", reason, remedy)


def io_engine() -> Iterator[Finding]:
    """The engine that ``auto`` takes."""
    from infinity.storage.io_engine import open_io_engine

    engine = open_io_engine()
    try:
        yield ok("I/O engine", f"auto takes {engine.backend}")
    finally:
        engine.close()


def swap_path(path: Path) -> Iterator[Finding]:
    """Writes a file directly, in ever smaller pieces, then looks at the room that is left."""
    name = f"path {path}"
    if not path.is_dir():
        yield fail(name, "is not a directory", f"mkdir -p {path}")
        return
    try:
        descriptor, file = tempfile.mkstemp(prefix=".infinity-doctor-", dir=path)
    except OSError as error:
        yield fail(name, f"cannot create a file: {error.strerror}", "choose a directory this user may write to")
        return
    os.close(descriptor)
    try:
        alignment = direct_alignment(file)
    finally:
        os.unlink(file)
    kind = file_system(path)
    if kind in ("tmpfs", "ramfs"):
        yield warn(name, f"{kind}: swap files there take RAM", "choose a directory on an NVMe disk")
    elif alignment is None:
        remedy = "transfers go through the page cache, which takes RAM beside the budgets: use a local ext4 or xfs"
        yield warn(name, f"{kind} refuses direct I/O", remedy)
    elif alignment > mmap.PAGESIZE:
        remedy = "shards are padded to 4 KiB: choose a file system with blocks of at most that"
        yield fail(name, f"{kind} takes direct I/O in multiples of {alignment} bytes only", remedy)
    else:
        yield ok(name, f"{kind}, direct I/O in multiples of {alignment} bytes")
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    if free < MIN_FREE_BYTES:
        yield warn(name, f"{format_bytes(free)} free", "16 bytes per parameter are needed; free some")
    else:
        yield ok(name, f"{format_bytes(free)} free, room for {free / 16 / 1e9:.1f} billion parameters")


def direct_alignment(file: str) -> int | None:
    """The smallest power of two, 512 bytes to 64 KiB, in which ``file`` takes O_DIRECT writes; None if in none."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, 128 << 10) as buffer, memoryview(buffer) as view:
            for size in (512 << shift for shift in range(8)):
                try:
                    with view[size : 2 * size] as piece:
                        if os.pwrite(descriptor, piece, size) == size:
                            return size
                except OSError:
                    continue
        return None
    finally:
        os.close(descriptor)


def file_system(path: Path) -> str:
    """Type of the file system ``path`` is on."""
    resolved = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"


def limits() -> Iterator[Finding]:
    """Kernel AIO events, locked memory."""
    allowed, used = (int(Path(f"/proc/sys/fs/{name}").read_text()) for name in ("aio-max-nr", "aio-nr"))
    if allowed - used < MIN_AIO_EVENTS:
        remedy = "sysctl -w fs.aio-max-nr=1048576"
        yield warn("aio-max-nr", f"{allowed - used} of {allowed} kernel AIO events are left", remedy)
    else:
        yield ok("aio-max-nr", f"{used} of {allowed} kernel AIO events in use")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and torch.cuda.is_available():
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1) lets host budgets be pinned"
        yield warn("memlock", f"at most {format_bytes(soft)} may be locked", remedy)
    else:
        text = "unlimited" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)}, enough without an accelerator"
        yield ok("memlock", text)


def memory() -> Iterator[Finding]:
    """RAM, what the cgroup leaves of it, /dev/shm."""
    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    yield ok("RAM", f"{format_bytes(available)} available of {format_bytes(total)}")
    limit = cgroup_limit()
    if limit is not None and limit < total:
        remedy = "keep device_memory (on a CPU) + host_memory + 1 GiB below it, or the kernel ends the process"
        yield warn("cgroup", f"memory is limited to {format_bytes(limit)}", remedy)
    else:
        yield ok("cgroup", "no memory limit below the RAM")
    shm = Path("/dev/shm")
    free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize if shm.is_dir() else 0
    if free < MIN_SHM_BYTES:
        remedy = "several ranks on one machine talk through it: docker run --shm-size=1g"
        yield warn("/dev/shm", f"{format_bytes(free)} free", remedy)
    else:
        yield ok("/dev/shm", f"{format_bytes(free)} free")


def cgroup_limit() -> int | None:
    """The smallest memory limit from this process's cgroup up to the root, in version 1 or 2."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, file = (
            ("/sys/fs/cgroup", "memory.max") if not controllers else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        )
        own = Path(root) / name.lstrip("/")
        for directory in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            try:
                text = (directory / file).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(int(text))
    return min(found, default=None)


def huge_pages() -> Iterator[Finding]:
    """Asks for 2 MiB pages, touches them, counts what came."""
    before = anonymous_huge_bytes()
    with mmap.mmap(-1, HUGE_TRIAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            yield warn(
                "huge pages", f"the kernel has none: {error.strerror}", "disks run at a half to a third of their speed"
            )
            return
        for offset in range(0, HUGE_TRIAL_BYTES, mmap.PAGESIZE):
            buffer[offset] = 1
        got = anonymous_huge_bytes() - before
    if got > 0:
        yield ok("huge pages", f"{format_bytes(got)} of {format_bytes(HUGE_TRIAL_BYTES)} came as 2 MiB pages")
    else:
        remedy = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; without them disks run at half their speed"
        )
        yield warn("huge pages", "asked for, none came", remedy)


def anonymous_huge_bytes() -> int:
    """Bytes of this process on transparent huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    match = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def accelerator() -> Iterator[Finding]:
    """Computes on every GPU, looks for NCCL, for cupy."""
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not torch.cuda.is_available():
        if nodes:
            why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
            remedy = (
                "pip install torch from a CUDA index" if torch.version.cuda is None else "check nvidia-smi, the driver"
            )
            yield warn("accelerator", f"{len(nodes)} NVIDIA devices, but {why}", remedy)
        else:
            yield ok("accelerator", "none: the CPU computes, device memory is a budget of RAM")
        return
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        if (ones @ ones).sum().item() != 64**3:
            yield fail(f"cuda:{index}", "a product of matrices is wrong", "test the GPU: dcgmi diag -r 2")
            continue
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield ok(f"cuda:{index}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}")
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield ok("NCCL", version)
    except (AttributeError, RuntimeError) as error:
        yield warn("NCCL", f"not usable: {error}", "several GPUs need it: install a torch built with NCCL")
    try:
        cupy = importlib.import_module("cupy")
        total = int(cupy.arange(4).sum())
        yield (
            ok("cupy", f"{cupy.__version__} computes") if total == 6 else fail("cupy", "0+1+2+3 ≠ 6", "reinstall cupy")
        )
    except Exception as error:  # a broken driver pairing raises whatever it likes
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield warn("cupy", f"not usable: {first}", "pip install 'infinity-offload[gpu]'")
