"""``infinity train`` trains, writes what it did, ends cleanly whether it succeeds, fails or is told to stop."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from infinity.cli.floor import measure_floor
from infinity.cli.main import app
from infinity.config import Config
from infinity.obs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"def f{i}(x: int) -> int:\n    return x + {i * i}\n\n" for i in range(900))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrices this small lose by being shared out between threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.py").write_text(TEXT)
    settings = json.loads((ROOT / "configs" / "tiny.json").read_text())
    settings["infinity"]["nvme_path"] = str(tmp_path / "swap")
    settings["run"] |= {"data": str(tmp_path / "text.py"), "output_dir": str(tmp_path / "out")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    return path


def infinity(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def paragraph(result: Result) -> str:
    """Standard error of a failed command: one paragraph, no traceback, nothing on standard output."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    assert "\n\n" not in result.stderr.strip()
    return result.stderr


def test_a_run_learns_reports_and_leaves_no_swap_files(config: Path, tmp_path: Path) -> None:
    result = infinity("train", config, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["steps"] == 8
    assert summary["held_back"]["8"] < summary["held_back"]["0"] - 0.3
    assert summary["held_back"]["0"] == pytest.approx(math.log(256), rel=0.02)
    for name, tier in summary["tiers"].items():
        assert 0 < tier["peak"] <= tier["planned"], name
    assert summary["nvme_read_per_step"] > 0
    assert summary["memory"]["anonymous_peak"] >= summary["memory"]["anonymous_before_model"]
    assert summary["swap_left"] == []
    assert not (tmp_path / "swap").exists() or not any((tmp_path / "swap").rglob("*"))

    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [record["event"] for record in records] == ["start", "evaluation"] + ["step"] * 4 + ["evaluation"] + [
        "step"
    ] * 4 + ["evaluation", "end"]
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 9))
    for record in steps:
        assert set(record["time"]) == {"forward", "backward", "step", "update"}
        assert record["tokens_per_second"] > 0
        assert record["gradient_norm"] > 0
    assert max(record["learning_rate"] for record in steps) == pytest.approx(3e-3, rel=0.05)
    assert sum(record["links"]["nvme_read"]["bytes"] for record in steps) > 0
    resolved = Config.load(tmp_path / "out" / "config.resolved.json")
    assert resolved.run.steps == 8


def test_the_seed_decides_every_loss(config: Path, tmp_path: Path) -> None:
    losses = []
    for seed in (1, 1, 2):
        small = ("--set", "run.steps=2", "--set", f"run.seed={seed}", "--set", "run.eval_every=0")
        assert infinity("train", config, *small).exit_code == 0
        records = read_metrics(tmp_path / "out" / "metrics.jsonl")
        losses.append([record["loss"] for record in records if record["event"] == "step"])
    assert losses[0] == losses[1] != losses[2]


def test_where_the_states_live_changes_no_loss(config: Path, tmp_path: Path) -> None:
    losses = []
    for place in ("nvme", "cpu", "none"):
        where = [f"zero_optimization.{offload}.device={place}" for offload in ("offload_param", "offload_optimizer")]
        options = [part for override in (*where, "run.steps=3") for part in ("--set", override)]
        result = infinity("train", config, *options, "--set", "infinity.device_memory=auto")
        assert result.exit_code == 0, result.output
        records = read_metrics(tmp_path / "out" / "metrics.jsonl")
        losses.append([record["loss"] for record in records if record["event"] in ("step", "evaluation")])
    assert losses[0] == losses[1] == losses[2]


def test_plain_lines_carry_every_number(config: Path) -> None:
    result = infinity("train", config, "--set", "run.steps=2", "--set", "steps_per_print=1")
    lines = result.stdout.splitlines()
    step = next(line for line in lines if line.startswith("step 2/2 | loss"))
    for part in ("lr ", "grad norm ", "tokens/s", "forward ", "backward ", "update ", "stalls ", "nvme read ", "GB/s"):
        assert part in step
    assert "device 1.19 MB of 2.00 MB" in step
    assert any("held-back loss" in line and "unigram entropy" in line for line in lines)
    assert any(line.split()[:1] == ["host"] for line in lines[-15:])


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    assert "nowhere.json" in paragraph(infinity("train", tmp_path / "nowhere.json"))


def test_an_unknown_key_is_named_with_its_neighbour(config: Path) -> None:
    text = paragraph(infinity("train", config, "--set", "run.stepz=3"))
    assert "run.stepz" in text
    assert "steps" in text


def test_all_problems_come_at_once(config: Path) -> None:
    text = paragraph(infinity("train", config, "--set", "run.steps=-1", "--set", "infinity.device_memory=lots"))
    assert "2 problems" in text
    assert "run.steps" in text
    assert "infinity.device_memory" in text


def test_an_override_without_a_value_says_how_to_write_one(config: Path) -> None:
    assert "key=value" in paragraph(infinity("train", config, "--set", "run.steps"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.model=null", "`infinity train` needs the sizes"),
        ("run.model=some/path", "must be an object that describes the built-in decoder"),
        ('run.model={"d_model": 64}', "missing 3 required"),
        ("run.model.width=3", "`run.model.width` is not a key of the decoder"),
        ("run.model.n_heads=7", "multiple of 2 * n_heads"),
        ("run.model.n_heads=0", "`run.model` does not describe a decoder"),
        ("run.data=/no/such/text", "'/no/such/text' does not exist"),
        ("run.sequence_length=1000000", "run.sequence_length 1000000"),
        ("infinity.device_memory=20KB", "infinity.device_memory"),
        ("run.output_dir=/dev/null/x", "/dev/null"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(config: Path, override: str, expected: str) -> None:
    assert expected in paragraph(infinity("train", config, "--set", override))


def test_debug_lets_the_traceback_through(config: Path) -> None:
    result = infinity("train", config, "--debug", "--set", "run.data=/no/such/text")
    assert result.exit_code == 1
    assert "/no/such/text" in str(result.exception)


def test_the_plan_is_shown_and_nothing_is_made(config: Path, tmp_path: Path) -> None:
    result = infinity("plan", config)
    assert result.exit_code == 0, result.output
    assert "234,048 parameters" in result.stdout
    assert not (tmp_path / "swap").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_leaves_no_swap_files(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "infinity", "train", str(config), "--set", "run.steps=100000"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step      2/100000") for line in process.stdout)
        assert any((tmp_path / "swap").rglob("*.swap"))
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert errors.count("\n") == 1
    assert errors.startswith("stopped: after ")
    assert not (tmp_path / "swap").exists() or not any((tmp_path / "swap").rglob("*"))
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["event"] in ("step", "evaluation")


def test_the_floor_grows_with_the_activations_that_are_kept() -> None:
    shape = {"d_model": 64, "n_layers": 16, "n_heads": 4, "d_ff": 176}
    recomputed, kept = (
        measure_floor(shape, batch_size=16, sequence_length=256, dtype="float32", recompute=recompute)
        for recompute in (True, False)
    )
    assert 20 << 20 < recomputed < kept - (100 << 20)
