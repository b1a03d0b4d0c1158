"""Every engine that runs on this machine moves the right bytes."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import platform
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ConfigError, StorageError
from infinity.memory.host import HostMemory
from infinity.storage import io_engine
from infinity.storage.blocks import BlockQueue, BlockTicket
from infinity.storage.io_engine import BACKENDS, IoEngine, open_io_engine, probe
from infinity.storage.swap_file import Descriptors, SwapFile, open_file
from infinity.tier import PAGE_BYTES

WORKING = [name for name in BACKENDS if probe(name) is None]

BLOCK = 8 * PAGE_BYTES

every_backend = pytest.mark.parametrize("backend", WORKING)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    """A page-aligned tensor of random bytes."""
    memory = HostMemory(count).bytes
    memory.copy_(torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return memory


def open_small(backend: str, queue_depth: int = 8) -> IoEngine:
    return open_io_engine(backend, queue_depth=queue_depth, block_size=BLOCK, threads=3)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    opened = open_file(str(tmp_path / "a.swap"), create=True)
    yield opened
    opened.close()


def syscall_works(number: int, *arguments: object) -> bool:
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    return int(result) >= 0


def test_what_must_run_here_runs() -> None:
    assert "threads" in WORKING, probe("threads")
    assert "python" in WORKING
    if syscall_works(425, 4, ctypes.create_string_buffer(120)):  # io_uring_setup, the same everywhere
        assert "io_uring" in WORKING, probe("io_uring")
    io_setup = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
    if io_setup is not None and syscall_works(io_setup, 4, ctypes.byref(ctypes.c_ulong(0))):
        assert "aio" in WORKING, probe("aio")


@every_backend
def test_round_trips_of_any_size_and_place(backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = open_file(str(tmp_path_factory.mktemp("swap") / "a"), create=True)
    source, into = random_bytes(6 * BLOCK), HostMemory(6 * BLOCK).bytes
    engine = open_small(backend)

    @settings(max_examples=60, deadline=None, database=None)
    @given(
        offset=st.one_of(st.integers(0, 8).map(lambda pages: pages * PAGE_BYTES), st.integers(0, 3 * BLOCK)),
        skew=st.one_of(st.just(0), st.integers(0, 5000)),
        length=st.one_of(
            st.integers(0, 5 * BLOCK), st.integers(0, 5).map(lambda blocks: blocks * BLOCK), st.integers(0, 9)
        ),
    )
    def round_trip(offset: int, skew: int, length: int) -> None:
        into.zero_()
        engine.write(file, offset, source[skew : skew + length]).wait()
        engine.read(file, offset, into[skew : skew + length]).wait()
        assert torch.equal(into[skew : skew + length], source[skew : skew + length])
        assert not into[:skew].any()
        assert not into[skew + length :].any()

    round_trip()
    engine.close()


@every_backend
def test_what_one_engine_writes_plain_python_reads(backend: str, file: SwapFile) -> None:
    source = random_bytes(3 * BLOCK + 1001)
    engine = open_small(backend)
    engine.write(file, PAGE_BYTES, source).wait()
    engine.close()
    assert Path(file.path).read_bytes()[PAGE_BYTES:] == bytes(source.numpy())


@every_backend
def test_many_in_flight_over_files_and_directories(backend: str, tmp_path: Path) -> None:
    files = []
    for name in ("a/0", "a/1", "b/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        files.append(open_file(str(tmp_path / name), create=True))
    engine = open_small(backend)
    sources = [random_bytes(size, seed) for seed, size in enumerate([BLOCK * 3, PAGE_BYTES, BLOCK + 5, 77] * 9)]
    places = [(files[i % 3], (i // 3) * 4 * BLOCK) for i in range(len(sources))]
    for ticket in [engine.write(*place, source) for place, source in zip(places, sources, strict=True)]:
        ticket.wait()
    intos = [torch.zeros_like(source) for source in sources]
    order = random.Random(1).sample(range(len(sources)), len(sources))
    tickets = [engine.read(*places[i], intos[i]) for i in order]
    # Writes elsewhere at the same time must not disturb the reads.
    tickets += [engine.write(file, offset + 3 * BLOCK + PAGE_BYTES, sources[0][:PAGE_BYTES]) for file, offset in places]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    assert all(torch.equal(into, source) for into, source in zip(intos, sources, strict=True))
    engine.close()


@every_backend
def test_several_threads_submit_and_wait(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    failures: list[int] = []

    def work(number: int) -> None:
        source, into = random_bytes(2 * BLOCK + PAGE_BYTES, number), HostMemory(2 * BLOCK + PAGE_BYTES).bytes
        for turn in range(8):
            offset = (number * 8 + turn) * 3 * BLOCK
            engine.write(file, offset, source).wait()
            into.zero_()
            engine.read(file, offset, into).wait()
            if not torch.equal(into, source):
                failures.append(offset)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    engine.close()


@every_backend
def test_registered_memory_costs_nothing_until_it_is_used(backend: str, file: SwapFile) -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as counters:
            return int(counters.read().split()[1]) * PAGE_BYTES

    used, unused = HostMemory(16 << 20), HostMemory(128 << 20)
    used.bytes.fill_(7)
    engine = open_small(backend)
    before = resident()
    engine.register([unused.bytes, used.bytes])
    engine.write(file, 0, used.bytes).wait()
    assert resident() - before < 64 << 20
    into = unused.bytes[: 16 << 20]
    engine.read(file, 0, into).wait()
    engine.close()
    assert torch.equal(into, used.bytes)


@every_backend
def test_nothing_to_move_is_done_at_once(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    for ticket in (
        engine.read(file, 10**9, torch.empty(0, dtype=torch.uint8)),
        engine.write(file, 3, random_bytes(9)[:0]),
    ):
        assert ticket.done()
        ticket.wait()
    assert os.path.getsize(file.path) == 0
    engine.close()


@every_backend
def test_reading_past_the_end_is_an_error(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    source = random_bytes(BLOCK + 100)
    engine.write(file, 0, source).wait()
    into = HostMemory(3 * BLOCK).bytes
    ticket = engine.read(file, 0, into)
    for _ in range(2):
        with pytest.raises(StorageError, match="past the end") as caught:
            ticket.wait()
        assert (caught.value.path, caught.value.offset, caught.value.length) == (file.path, BLOCK, BLOCK)
        assert caught.value.errno == errno.ENODATA
    assert torch.equal(into[: BLOCK + 100], source)
    engine.close()


@every_backend
def test_dropped_tickets_are_carried_out(backend: str, file: SwapFile) -> None:
    engine = open_small(backend, queue_depth=2)
    expected = b""
    for number in range(20):
        source = random_bytes(2 * BLOCK, number)
        expected += bytes(source.numpy())
        engine.write(file, number * 2 * BLOCK, source)
        del source
        HostMemory(2 * BLOCK).bytes.fill_(255)  # takes the place of memory that was given back too early
    engine.close()
    assert Path(file.path).read_bytes() == expected


@every_backend
def test_the_failure_of_a_dropped_ticket_is_logged(
    backend: str, file: SwapFile, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_small(backend)
    engine.read(file, 5 * BLOCK, HostMemory(PAGE_BYTES).bytes)
    engine.close()
    assert any("nobody waited" in record.message and file.path in record.message for record in caplog.records)


@every_backend
def test_an_engine_dropped_without_close_finishes_its_work(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    source = random_bytes(10 * BLOCK)
    ticket = engine.write(file, 0, source)
    del engine, ticket
    gc.collect()
    assert Path(file.path).read_bytes() == bytes(source.numpy())


@every_backend
def test_a_ticket_can_be_waited_for_after_close(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    ticket = engine.write(file, 0, random_bytes(3 * BLOCK))
    engine.close()
    engine.close()
    assert ticket.done()
    ticket.wait()
    with pytest.raises(StorageError, match="closed"):
        engine.write(file, 0, random_bytes(3))


def run_for_each_backend(directory: Path, body: str) -> str:
    """Runs ``body`` in one other process for every backend in turn; it may use ``engine`` and the new ``file``."""
    code = f"""
        import os, resource, sys, torch
        from infinity.errors import StorageError
        from infinity.storage.io_engine import open_io_engine
        from infinity.storage.swap_file import open_file
        kept = []
        for backend in {WORKING!r}:
            engine = open_io_engine(backend, block_size={BLOCK}, queue_depth=4)
            file = open_file(os.path.join({str(directory)!r}, backend), create=True)
    """
    code = textwrap.dedent(code) + textwrap.indent(textwrap.dedent(body), "    ")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    run_for_each_backend(
        tmp_path,
        """
        kept += [engine.write(file, i << 20, torch.full((1 << 20,), i, dtype=torch.uint8)) for i in range(4)]
        """,
    )
    for backend in WORKING:
        data = (tmp_path / backend).read_bytes()
        assert [data.count(bytes([i])) for i in range(4)] == [1 << 20] * 4


def test_a_forked_child_neither_hangs_nor_uses_the_engine(tmp_path: Path) -> None:
    printed = run_for_each_backend(
        tmp_path,
        """
        child = os.fork()
        if child == 0:
            try:
                engine.write(file, 0, torch.zeros(4096, dtype=torch.uint8))
            except StorageError as error:
                sys.exit(7 if "fork" in str(error) else str(error))
            sys.exit(1)
        engine.write(file, 0, torch.zeros(4096, dtype=torch.uint8)).wait()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert printed.split() == ["7"] * len(WORKING)


def test_a_file_size_limit_is_an_error_that_says_where(tmp_path: Path) -> None:
    printed = run_for_each_backend(
        tmp_path,
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * BLOCK}, resource.RLIM_INFINITY))
        try:
            engine.write(file, 0, torch.zeros({4 * BLOCK}, dtype=torch.uint8)).wait()
        except StorageError as error:
            print(error.errno, error.path == file.path, error.offset, error.length, "ulimit" in str(error))
        """,
    )
    expected = f"{errno.EFBIG} True {2 * BLOCK} {BLOCK} True"
    assert printed.splitlines() == [expected] * len(WORKING)


@every_backend
def test_closed_files_and_wrong_tensors_are_refused(backend: str, file: SwapFile) -> None:
    engine = open_small(backend)
    with pytest.raises(TypeError, match="uint8"):
        engine.write(file, 0, torch.zeros(4))
    with pytest.raises(TypeError, match="1-D"):
        engine.write(file, 0, torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        engine.read(file, 0, torch.zeros(8, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match="negative"):
        engine.read(file, -1, torch.zeros(8, dtype=torch.uint8))
    file.close()
    with pytest.raises(StorageError) as caught:
        engine.read(file, 4096, torch.zeros(8, dtype=torch.uint8))
    assert (caught.value.errno, caught.value.offset, caught.value.length) == (errno.EBADF, 4096, 8)
    assert caught.value.path == file.path
    engine.close()


@every_backend
def test_a_file_may_be_closed_while_requests_are_in_flight(backend: str, tmp_path: Path) -> None:
    """They hold its descriptors, whose numbers could otherwise mean another file by the time a block starts."""
    engine = open_small(backend, queue_depth=1)
    source = random_bytes(40 * BLOCK)
    file = open_file(str(tmp_path / "a"), create=True)
    descriptor = file.fileno()
    ticket = engine.write(file, 0, source)
    file.close()
    other = open_file(str(tmp_path / "b"), create=True)
    ticket.wait()
    assert (tmp_path / "a").read_bytes() == bytes(source.numpy())
    assert os.path.getsize(other.path) == 0
    del ticket
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    engine.close()


@every_backend
def test_a_descriptor_that_is_not_open_is_an_error(backend: str, tmp_path: Path) -> None:
    engine = open_small(backend)
    file = SwapFile(str(tmp_path / "a"), Descriptors(1_000_000), 0)
    try:
        with pytest.raises(StorageError) as caught:
            engine.write(file, PAGE_BYTES, random_bytes(2 * BLOCK)).wait()
        assert (caught.value.errno, caught.value.offset, caught.value.length) == (errno.EBADF, PAGE_BYTES, BLOCK)
    finally:
        file.descriptors.buffered = -1
    engine.close()


@every_backend
def test_buffered_files_work_alike(backend: str, tmp_path: Path) -> None:
    file = open_file(str(tmp_path / "a"), create=True, direct=False)
    assert not file.direct
    engine = open_small(backend)
    source, into = random_bytes(3 * BLOCK), HostMemory(3 * BLOCK).bytes
    engine.write(file, PAGE_BYTES, source).wait()
    engine.read(file, PAGE_BYTES, into).wait()
    assert torch.equal(source, into)
    engine.close()
    file.close()


def test_whole_pages_bypass_the_page_cache(file: SwapFile) -> None:
    """Direct means direct: what a direct write put down, no page of the cache holds."""
    assert file.direct, "the tests' temporary directory must be on a file system with direct I/O"
    engine = open_small("threads")
    engine.write(file, 0, random_bytes(4 * BLOCK)).wait()
    engine.close()
    flags = int(Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().split("flags:")[1].split()[0], 8)
    assert flags & os.O_DIRECT
    assert flags & os.O_CLOEXEC


def test_auto_takes_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_IO", raising=False)
    engine = open_io_engine()
    assert engine.backend == WORKING[0]
    engine.close()


def test_auto_passes_over_what_does_not_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("INFINITY_IO", raising=False)
    real = probe
    monkeypatch.setattr(io_engine, "probe", lambda name: "broken" if name == WORKING[0] else real(name))
    with caplog.at_level(logging.INFO):
        engine = open_io_engine()
    assert engine.backend == WORKING[1]
    assert f"{WORKING[0]} was passed over: broken" in caplog.text
    engine.close()


@pytest.mark.parametrize("forced", WORKING)
def test_the_environment_wins_over_auto_but_not_over_an_argument(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_IO", forced)
    for backend, expected in (("auto", forced), ("python", "python")):
        engine = open_io_engine(backend)
        assert engine.backend == expected
        engine.close()


def test_a_forced_backend_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_engine, "probe", lambda name: "the moon is in the wrong phase")
    monkeypatch.setenv("INFINITY_IO", "aio")
    for backend, by in (("auto", "INFINITY_IO"), ("threads", "infinity.io_engine")):
        with pytest.raises(StorageError, match=f"{by}.*wrong phase.*auto"):
            open_io_engine(backend)


@pytest.mark.parametrize(
    ("call", "number", "backend", "expected"),
    [
        ("aio", errno.EPERM, "io_uring", "seccomp"),
        ("aio", errno.ENOSYS, "io_uring", "kernel lacks it"),
        ("aio", errno.ENOMEM, "io_uring", "ulimit -l"),
        ("aio", errno.EAGAIN, "aio", "aio-max-nr"),
    ],
)
def test_the_reason_says_what_to_do(
    call: str, number: int, backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "infinity_aio_open")

    monkeypatch.setattr("infinity._native.aio.Engine", refuse)
    reason = probe(backend)
    assert reason is not None
    assert expected in reason
    assert errno.errorcode[number] in reason


def test_without_the_native_library_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_IO", raising=False)
    monkeypatch.setattr("infinity._native.library.load", lambda name: None)
    monkeypatch.setattr("infinity._native.library.why_missing", lambda name: "no compiler was found")
    for backend in ("io_uring", "aio", "threads"):
        reason = probe(backend)
        assert reason is not None
        assert "no compiler was found" in reason
    engine = open_io_engine()
    assert engine.backend in ("libaio", "python")
    engine.close()


def test_a_sandbox_without_kernel_queues_falls_back_to_threads() -> None:
    """As in a container: seccomp answers io_uring_setup and io_setup with EPERM."""
    io_setup = {"x86_64": 206, "aarch64": 0}[platform.machine()]
    code = f"""
        import ctypes, os, struct
        from infinity.errors import StorageError
        from infinity.storage.io_engine import open_io_engine, probe
        instructions = [  # load the number of the call; if it is one of two, answer EPERM, else allow
            (0x20, 0, 0, 0), (0x15, 2, 0, 425), (0x15, 1, 0, {io_setup}),
            (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001),
        ]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
        filter = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(program))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
        assert libc.prctl(22, 2, filter) == 0, "seccomp filter"
        os.environ.pop("INFINITY_IO", None)
        print(open_io_engine().backend)
        for forced in ("io_uring", "aio"):
            try:
                open_io_engine(forced)
            except StorageError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    chosen, uring, aio = done.stdout.splitlines()
    assert chosen == "threads"
    assert "io_uring" in uring
    assert "seccomp" in uring
    assert "aio" in aio
    assert "seccomp" in aio


@pytest.mark.parametrize(
    ("body", "expected"),
    [("raise ImportError('no such thing')", "pip install"), ("raise OSError('libaio.so.1: not found')", "libaio1")],
)
def test_what_libaio_lacks_is_named(body: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libaio.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libaio", raising=False)
    reason = probe("libaio")
    assert reason is not None
    assert expected in reason


def test_the_python_queue_is_shared_fairly(tmp_path: Path) -> None:
    """A long write, a long read, a write to another disk: each gets a third of what is in flight."""
    file = open_file(str(tmp_path / "a"), create=True)
    elsewhere = SwapFile(file.path, file.descriptors, file.device + 1)
    memory = random_bytes(20 * BLOCK)
    queue = BlockQueue(BLOCK, None)
    tickets = [BlockTicket(file, 0, memory, True), BlockTicket(file, 0, memory, False)]
    tickets.append(BlockTicket(elsewhere, 0, memory, True))
    for ticket in tickets:
        queue.put(ticket)
    taken = [block for _ in range(12) if (block := queue.take(block=False)) is not None]
    assert [sum(block.ticket is ticket for block in taken) for ticket in tickets] == [4, 4, 4]
    # The first disk does not answer: what the others finish is replaced by more of theirs.
    for _ in range(9):
        done = next(block for block in taken if block.ticket is tickets[2])
        taken.remove(done)
        assert not queue.finish(done, BLOCK)
        following = queue.take(block=False)
        assert following is not None
        assert following.ticket is tickets[2]
        taken.append(following)


def test_unknown_backends_and_wrong_sizes_are_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'iouring'.*did you mean 'io_uring'"):
        open_io_engine("iouring")
    with pytest.raises(ConfigError) as caught:
        open_io_engine("python", queue_depth=0, block_size=1000, threads=-1)
    assert len(caught.value.problems) == 3
    monkeypatch.setenv("INFINITY_IO", "nonsense")
    with pytest.raises(ConfigError, match="INFINITY_IO"):
        open_io_engine()
