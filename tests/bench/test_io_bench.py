"""The I/O bench reads fio's report right, pairs runs round by round, leaves a missing peer out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench.io as bench_io
from bench.io import Result, alternate, peer_runs, worst_ratios
from bench.io_contestants import Cell, DeepSpeed, Unavailable, fio, fio_command, ours, parse_fio
from infinity.storage.traffic import Pattern, Sample, TrialFiles, Window

READ = Cell(Pattern.READ, 1 << 20, 8)
NBYTES = 1 << 20


def at_rates(cell: Cell, **rates: list[float]) -> Result:
    """Runs of 1 GB at the given GB/s, all with 1 ms of CPU time per contestant's position."""
    samples = {
        name.replace("_", "/", 1): [Sample(10**9, 1 / rate, 1e-3 * (place + 1)) for rate in values]
        for place, (name, values) in enumerate(rates.items())
    }
    return Result(cell, samples)


def job(read: tuple[int, int], write: tuple[int, int], error: int = 0) -> str:
    """A report as fio prints it, with a note before it; pairs are bytes, milliseconds."""
    ways = {way: {"io_bytes": n, "runtime": ms} for way, (n, ms) in (("read", read), ("write", write))}
    return "note: both iodepth >= 1\n" + json.dumps(
        {"jobs": [{"error": error, "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 500, **ways}]}
    )


def test_fio_reports_bytes_both_ways_the_longer_time_cpu_in_seconds() -> None:
    sample = parse_fio(job((3 * 10**9, 400), (10**9, 500)))
    assert sample.nbytes == 4 * 10**9
    assert sample.rate == pytest.approx(8.0)
    assert sample.cpu_per_gb == pytest.approx(0.2 * 0.5 / 4)


def test_a_fio_job_that_failed_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="Input/output error"):
        parse_fio(job((1, 1), (0, 0), error=5))


def test_fio_moves_the_same_bytes_in_the_same_blocks(tmp_path: Path) -> None:
    with TrialFiles([str(tmp_path / "a"), str(tmp_path / "b")], NBYTES) as files:
        command = fio_command(Cell(Pattern.MIX, 8192, 16), files, ())
        named = next(word for word in command if word.startswith("--filename=")).removeprefix("--filename=")
        assert {*command} >= {"--rw=rw", "--bs=8192", "--iodepth=16", "--direct=1", f"--size={4 * NBYTES}"}
        assert named.split(":") == [file.path for file in (*files.sources, *files.targets)]
    assert list(tmp_path.iterdir()) == []


def test_each_side_sends_the_engine_with_the_best_median() -> None:
    result = at_rates(READ, ours_a=[1, 9, 1], ours_b=[2, 2, 2], fio_x=[4, 1, 1], fio_y=[2, 1, 2])
    assert (result.best("ours"), result.best("fio"), result.best("deepspeed")) == ("ours/b", "fio/y", None)
    assert result.ratios() == {"fio": pytest.approx(1.0), "fio_cpu": pytest.approx(4 / 2)}


def test_a_ratio_is_the_median_of_pairs_not_the_pair_of_medians() -> None:
    # A disk that becomes faster in each round changes no pair.
    result = at_rates(READ, ours_a=[1, 2, 4], fio_x=[2, 4, 8])
    assert result.ratios()["fio"] == pytest.approx(0.5)


def test_the_worst_cell_of_each_kind_counts() -> None:
    results = [
        at_rates(READ, ours_a=[3], fio_x=[2], deepspeed_1=[1]),
        at_rates(READ, ours_a=[3], fio_x=[4], deepspeed_1=[2]),
        at_rates(Cell(Pattern.WRITE, 1 << 20, 8), ours_a=[3], fio_x=[3]),
    ]
    worst = worst_ratios(results)
    assert worst.keys() == {"read", "write", "cpu", "deepspeed_read", "deepspeed_cpu"}
    assert [worst["read"], worst["write"], worst["deepspeed_read"]] == pytest.approx([0.75, 1.0, 1.5])
    assert [worst["cpu"], worst["deepspeed_cpu"]] == pytest.approx([2.0, 3.0])


def test_contestants_take_turns_after_one_run_that_does_not_count() -> None:
    order: list[str] = []

    def run(name: str) -> Sample:
        order.append(name)
        return Sample(1, len(order), 0.0)

    samples = alternate({name: lambda name=name: run(name) for name in "abc"}, 4)  # type: ignore[misc]
    assert {name: len(runs) for name, runs in samples.items()} == {"a": 4, "b": 4, "c": 4}
    turns = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert turns == ["abc", "abc", "acb", "cab", "cba"]


def test_a_missing_peer_is_said_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("INFINITY_DEEPSPEED_VENV", str(tmp_path))
    said: list[str] = []
    with (
        TrialFiles([str(tmp_path / "swap")], NBYTES) as files,
        bench_io.start_deepspeed(["one"], NBYTES, said.append) as deepspeed,
    ):
        assert deepspeed is None
        assert peer_runs(READ, files, deepspeed, said.append) == {}
        with pytest.raises(Unavailable):
            fio(READ, files)
    with pytest.raises(Unavailable, match=r"setup_deepspeed\.sh"):
        DeepSpeed(NBYTES)
    assert len(said) == 2
    assert "bench/setup_deepspeed.sh" in said[0]
    assert "fio is not installed" in said[1]


@pytest.mark.parametrize("pattern", list(Pattern))
def test_every_backend_moves_what_it_says(tmp_path: Path, pattern: Pattern) -> None:
    cell, window = Cell(pattern, 65536, 4), Window(1 << 19)
    with TrialFiles([str(tmp_path / "swap")], NBYTES + 4096) as files:
        with ours(cell, files, window.bytes) as runs:
            for run in runs.values():
                sample = run()
                assert sample.nbytes == (2 if pattern is Pattern.MIX else 1) * (NBYTES + 4096)
                assert sample.seconds > 0
        written = torch.from_file(files.targets[0].path, size=files.nbytes, dtype=torch.uint8)
        assert written.to(torch.float32).mean().item() == pytest.approx(127.5, abs=2)
    assert {"ours/threads", "ours/python"} <= runs.keys()
