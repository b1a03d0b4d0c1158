"""``infinity train`` goes on from its checkpoints; ``ckpt`` and ``export`` read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from infinity.checkpoint.folder import Folder
from infinity.cli.main import app
from infinity.errors import CheckpointError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.obs.metrics import read_metrics
from tests.cli.test_train import config, infinity, one_thread, paragraph

__all__ = ["app", "config", "one_thread"]

QUIET = ("--set", "run.eval_every=0", "--set", "scheduler.params.total_num_steps=6")


def run(path: Path, steps: int, *options: str) -> Any:
    result = infinity("train", path, "--json", *QUIET, "--set", f"run.steps={steps}", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def losses(tmp_path: Path, name: str = "out") -> list[float]:
    return [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["event"] == "step"]


def test_a_run_in_parts_is_the_run_in_one(config: Path, tmp_path: Path) -> None:
    whole = run(config, 6, "--set", f"run.output_dir={tmp_path / 'whole'}")
    assert os.listdir(tmp_path / "whole" / "checkpoints") != []
    for steps in (2, 4, 6):
        part = run(config, steps, "--resume", "auto", "--set", "run.checkpoint_every=1")
        assert (part["steps"], part["steps_done"]) == (steps, 2)
    assert part["last_loss"] == whole["last_loss"]
    assert losses(tmp_path) == losses(tmp_path, "whole")
    assert sorted(os.listdir(tmp_path / "out" / "checkpoints")) == ["global_step5", "global_step6", "latest"]
    again = infinity("train", config, *QUIET, "--set", "run.steps=6", "--resume", "auto")
    assert "nothing is left to do: 6 steps are done; raise run.steps" in again.stdout

    listed = json.loads(infinity("ckpt", "ls", tmp_path / "out" / "checkpoints", "--json").stdout)["checkpoints"]
    assert [(row["tag"], row["step"], row["state"]) for row in listed] == [
        ("global_step5", 5, ""), ("global_step6", 6, "latest"),
    ]  # fmt: skip
    assert "global_step6" in infinity("ckpt", "ls", tmp_path / "out" / "checkpoints").stdout
    above = infinity("ckpt", "ls", tmp_path / "out").stdout
    assert above == f"no checkpoint is in {tmp_path / 'out'}; look into {tmp_path / 'out' / 'checkpoints'}\n"

    result = infinity("export", tmp_path / "out" / "checkpoints", tmp_path / "weights", "--dtype", "fp32", "--json")
    (file,) = json.loads(result.stdout)["files"]
    shape = json.loads(config.read_text())["run"]["model"]
    Decoder(DecoderConfig(**shape)).load_state_dict(load_file(file), strict=True)

    # Elsewhere, with states elsewhere, the same goes on.
    elsewhere = ["zero_optimization.offload_optimizer.device=cpu", f"run.output_dir={tmp_path / 'other'}"]
    options = [part for override in elsewhere for part in ("--set", override)]
    first = tmp_path / "out" / "checkpoints" / "global_step5"
    assert run(config, 6, "--resume", str(first), *options)["last_loss"] == whole["last_loss"]


def test_none_is_saved_if_none_is_to_be_kept(config: Path, tmp_path: Path) -> None:
    run(config, 2, "--set", "run.keep_last=0", "--set", "run.checkpoint_every=1", "--resume", "auto")
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_verify_finds_one_wrong_bit(config: Path, tmp_path: Path) -> None:
    run(config, 2, "--set", "run.checkpoint_every=1")
    folder = tmp_path / "out" / "checkpoints"
    (folder / "global_step9.incomplete").mkdir()
    result = infinity("ckpt", "verify", folder)
    assert result.exit_code == 0, result.output
    assert "every byte as it was saved" in result.stdout
    for path in sorted((folder / "global_step2").iterdir()):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            result = infinity("ckpt", "verify", folder, "--json")
            assert result.exit_code == 1, (path, place)
            verdicts = {found["check"]: found["verdict"] for found in json.loads(result.stdout)["findings"]}
            assert verdicts == {"global_step1": "OK", "global_step2": "FAIL", "global_step9.incomplete": "WARN"}
        path.write_bytes(whole[:-2])
        assert infinity("ckpt", "verify", folder / "global_step2").exit_code == 1
        path.write_bytes(whole)
    assert infinity("ckpt", "verify", folder / "global_step2").exit_code == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resume", "/nowhere"], "--resume /nowhere: no checkpoint is there"),
        (["--resume", "auto", "--set", "run.sequence_length=32"], "resume with the same run.data"),
        (["--resume", "auto", "--set", "run.model.d_ff=352"], "have another shape"),
    ],
)
def test_what_cannot_be_resumed_is_told_in_a_sentence(config: Path, options: list[str], expected: str) -> None:
    run(config, 1)
    assert expected in paragraph(infinity("train", config, *options))


def test_commands_name_what_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in paragraph(infinity("ckpt", "ls", tmp_path / "none"))
    assert "does not exist" in paragraph(infinity("ckpt", "verify", tmp_path / "none"))
    assert "does not exist" in paragraph(infinity("export", tmp_path / "none", tmp_path / "out"))
    assert "/none does not exist" in paragraph(infinity("export", tmp_path / "none", tmp_path / "out"))
    assert "no checkpoint was completed here" in paragraph(infinity("export", tmp_path, tmp_path / "out"))


def test_a_checkpoint_where_its_directory_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "step3").mkdir()
    (tmp_path / "step3" / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=rf'the directory that it is in, {tmp_path}, with the tag "step3"'):
        Folder(tmp_path / "step3").find()
