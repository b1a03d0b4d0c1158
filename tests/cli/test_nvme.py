"""Swap directories are set up, measured, tuned from the command line; a config keeps what was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.cli.json_edit import put
from infinity.cli.main import app
from infinity.config import Config
from infinity.storage.disk import Disk, disk_of
from infinity.storage.traffic import Pattern, Sample, Setting
from infinity.storage.tuning import Trial, choose

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY = ("--size", "1MiB")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["nvme", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_init_makes_private_directories_leaves_them_empty(tmp_path: Path) -> None:
    code, text, _ = run("init", str(tmp_path / "a"), str(tmp_path / "b"), "--space", "1MiB", "--json")
    report = json.loads(text)
    assert (code, report["ok"]) == (0, True)
    assert [(path.name, path.stat().st_mode & 0o7777, list(path.iterdir())) for path in sorted(tmp_path.iterdir())] == [
        ("a", 0o700, []),
        ("b", 0o700, []),
    ]
    found = " ".join(finding["found"] for finding in report["findings"])
    assert "1.00 MiB reserved" in found
    assert f"same file system as {tmp_path / 'a'}" in found


def test_init_warns_of_a_directory_everybody_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    _, text, _ = run("init", str(tmp_path), "--space", "1MiB", "--json")
    remedies = [finding["remedy"] for finding in json.loads(text)["findings"]]
    assert f"chmod 700 {tmp_path}" in remedies


def test_init_prints_the_config_line(tmp_path: Path) -> None:
    _, text, _ = run("init", str(tmp_path), "--space", "1MiB")
    block = json.loads(text[text.index("For the config:") :].removeprefix("For the config:"))
    assert block == {"infinity": {"nvme_path": str(tmp_path)}}


def test_a_forgotten_mount_is_one_paragraph(tmp_path: Path) -> None:
    code, text, error = run("init", str(tmp_path / "mnt" / "swap"))
    assert (code, text) == (1, "")
    assert error.startswith("error: nvme_path does not exist")
    assert error.count("\n") == 1
    assert not (tmp_path / "mnt").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--size", "8"), "--size is 8, expected at least 1.00 MiB"),
        (("--size", "8G"), "--size: "),
        (("--engine", "io_urin"), "did you mean 'io_uring'"),
        (("--queue-depth", "0"), "queue_depth is 0"),
        (("--size", "900PiB"), "are free in"),
    ],
)
def test_what_cannot_be_measured_is_one_paragraph(tmp_path: Path, arguments: tuple[str, str], told: str) -> None:
    code, text, error = run("bench", str(tmp_path), "--engine", "threads", *arguments)
    assert (code, text) == (1, "")
    assert told in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_misspelt_directory_is_not_made(tmp_path: Path, command: str) -> None:
    code, text, error = run(command, str(tmp_path / "swpa"), *TINY)
    assert (code, text) == (1, "")
    assert error == (
        f"error: there is no directory {tmp_path / 'swpa'}. Name one that training will use; `infinity nvme init "
        f"{tmp_path / 'swpa'}` makes it\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_bench_measures_each_pattern_in_plain_lines(tmp_path: Path) -> None:
    code, text, error = run("bench", str(tmp_path), "--engine", "threads", *TINY, "--block-size", "64KiB")
    assert (code, error) == (0, "")
    line = next(line for line in text.splitlines() if "threads" in line)
    assert line.startswith("* threads")
    assert line.count("GB/s") == 3
    assert list(tmp_path.iterdir()) == []


def test_tune_keeps_the_rest_of_the_config(tmp_path: Path) -> None:
    config, disk = tmp_path / "c.json", tmp_path / "disk"
    disk.mkdir()
    before = (CONFIGS / "demo.json").read_text()
    config.write_text(before)
    config.chmod(0o640)
    code, text, _ = run("tune", str(disk), *TINY, "--seconds", "1", "--write", str(config), "--json")
    chosen = json.loads(text)
    assert code == 0
    assert {"best", "config", "trials", "warnings"} == chosen.keys()
    after = config.read_text()
    assert config.stat().st_mode & 0o7777 == 0o640
    lines = after.splitlines()
    assert all(line in lines for line in before.splitlines() if line not in ('    "recompute": true', "  }"))
    loaded, original = json.loads(after), json.loads(before)
    assert loaded.pop("aio") == chosen["config"]["aio"]
    assert loaded["infinity"].pop("io_engine") == chosen["best"]["engine"]
    assert loaded == original
    assert Config.load(config).aio.queue_depth == chosen["best"]["queue_depth"]
    assert list(disk.iterdir()) == []


def test_tune_writes_under_the_name_that_the_config_uses(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text('{ "aio": { "intra_op_parallelism": 1, "block_size": 4096 } }')
    code, _, error = run("tune", str(tmp_path), *TINY, "--seconds", "1", "--write", str(config))
    assert (code, error) == (0, "")
    assert json.loads(config.read_text())["aio"].keys() == {"intra_op_parallelism", "block_size", "queue_depth"}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.yaml", "steps_per_print: 1", "only a JSON config"),
        ("c.json", "{", "c.json"),
        ("c.json", '{"aio": {"block_sise": 1}}', "block_size"),
    ],
)
def test_a_config_that_cannot_be_changed_is_refused_before_measuring(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    config = tmp_path / name
    config.write_text(text)
    code, _, error = run("tune", str(tmp_path / "disk"), "--write", str(config))
    assert code == 1
    assert told in error
    assert config.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{}", '{\n  "a": { "b": 1 }\n}'),
        ('{"x": [1, {"a": 2}]}', '{"x": [1, {"a": 2}], "a": { "b": 1 }}'),
        ('{"a":{"b":2,"c":"}"} }', '{"a":{"b":1,"c":"}"} }'),
        ('{\n  "a": {\n    "c": 2\n  }\n}\n', '{\n  "a": {\n    "c": 2,\n    "b": 1\n  }\n}\n'),
        ('{"a": "auto", "\\"a": 3}', '{"a": { "b": 1 }, "\\"a": 3}'),
    ],
)
def test_put_changes_one_member_only(before: str, after: str) -> None:
    assert put(before, ["a", "b"], 1) == after
    json.loads(after)


def trial(setting: Setting, rate: float, cpu: float) -> Trial:
    runs = [Sample(10**9, 1 / rate, cpu)]
    return Trial(setting, dict.fromkeys(Pattern, runs))


def test_the_default_shape_wins_within_the_noise_then_the_cheapest() -> None:
    default, deep, small = Setting("aio"), Setting("aio", queue_depth=64), Setting("aio", block_size=4096)
    assert choose([trial(default, 3.95, 0.02), trial(deep, 4.0, 0.01)]).setting == default
    assert choose([trial(default, 3.0, 0.02), trial(deep, 4.0, 0.02), trial(small, 3.95, 0.01)]).setting == small
    engines = [trial(Setting("io_uring"), 4.0, 0.02), trial(Setting("aio"), 3.9, 0.01), trial(Setting("python"), 3, 0)]
    assert choose(engines).setting.engine == "aio"


@pytest.mark.parametrize(
    ("disk", "told"),
    [
        (Disk("vda", "/sys/devices/pci0000:00/0000:00:01.0/virtio1/block/vda"), "virtual disk (virtio)"),
        (Disk("loop0", "/sys/devices/virtual/block/loop0"), "software device"),
        (Disk("nvme1n1", "/sys/devices/pci0/nvme/nvme1/nvme1n1", "Amazon Elastic Block Store"), "network disk"),
        (Disk("sda", "/sys/devices/pci0/ata1/block/sda", "WD", rotational=True), "spins"),
        (Disk(None, None), "no block device"),
    ],
)
def test_what_falsifies_a_figure_is_said(disk: Disk, told: str) -> None:
    assert [told in doubt for doubt in disk.doubts()] == [True]


def test_a_plain_nvme_disk_raises_no_doubt() -> None:
    assert list(Disk("nvme0n1", "/sys/devices/pci0/nvme/nvme0/nvme0n1", "Samsung").doubts()) == []


def test_memory_has_no_disk_behind_it() -> None:
    assert disk_of("/dev/shm") == Disk(None, None)
