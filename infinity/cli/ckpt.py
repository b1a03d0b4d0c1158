"""Lists checkpoints, checks every byte of them, exports their weights."""

from __future__ import annotations

import json as json_format
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.checkpoint.export import MAX_SHARD_BYTES, chosen, floating_dtype, saved_weights, write_weights
from infinity.checkpoint.folder import INCOMPLETE, Folder
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.model_config import write_config_files
from infinity.checkpoint.read import Checkpoint
from infinity.cli.failures import reported
from infinity.cli.findings import Finding, as_json, exit_code, fail, ok, show, warn
from infinity.config.size import format_bytes, parse_bytes
from infinity.errors import CheckpointError, InfinityError

app = typer.Typer(help="List checkpoints, check them.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, the rest elsewhere.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Source = Annotated[Path, typer.Argument(metavar="DIR", help="A directory of checkpoints, or one checkpoint in it.")]


@app.command("ls")
def ls_command(directory: Source, json: Json = False, debug: Debug = False) -> None:
    """List the checkpoints of a directory."""
    with reported(debug=debug):
        rows = listed(directory)
        if json:
            typer.echo(json_format.dumps({"checkpoints": rows}, indent=2))
            return
        if not rows:
            typer.echo(f"no checkpoint is in {directory}{_elsewhere(directory)}")
            return
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        for name in ("tag", "step", "ranks", "size", "saved", "state"):
            table.add_column(name, justify="right" if name in ("step", "ranks", "size") else "left")
        for row in rows:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved"]))
            step, ranks = ("-" if row[name] is None else str(row[name]) for name in ("step", "ranks"))
            table.add_row(row["tag"], step, ranks, format_bytes(row["bytes"]), when, row["state"])
        Console(emoji=False).print(table)


@app.command("verify")
def verify_command(directory: Source, json: Json = False, debug: Debug = False) -> None:
    """Read every byte of the checkpoints against its checksum; exit 1 if one is damaged."""
    with reported(debug=debug):
        findings = verified(directory)
        if json:
            typer.echo(as_json(findings))
        else:
            show(findings, Console(emoji=False))
        raise typer.Exit(exit_code(findings))


def export_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, or a directory: its latest.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory for the safetensors files.")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; by default what the model computes in.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Files are cut at this size.")] = f"{MAX_SHARD_BYTES}",
    trainable_only: Annotated[bool, typer.Option("--trainable-only", help="Leave frozen weights out.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the weights of a checkpoint as Hugging Face does: safetensors files, an index if there are several."""
    with reported(debug=debug):
        with Checkpoint(checkpoint_at(checkpoint)) as source:
            weights = list(saved_weights(source, chosen(dtype), trainable_only=trainable_only))
            paths = write_weights(out, weights, parse_bytes(max_shard_size))
            paths += write_config_files(out, source.state().get("model_config", {}), floating_dtype(weights))
        if json:
            typer.echo(json_format.dumps({"checkpoint": source.path, "files": paths}, indent=2))
        else:
            nbytes = sum(weight.nbytes for weight in weights)
            typer.echo(f"{len(weights)} tensors, {format_bytes(nbytes)}, from {source.path}")
            typer.echo("\n".join(paths))
            if not (out / "config.json").exists():
                typer.echo(
                    f"for from_pretrained, {out} needs a config.json too, which this checkpoint has not got: its model "
                    "is none of transformers'"
                )


def checkpoint_at(path: Path) -> str:
    """The directory of the checkpoint that ``path`` is, or of the latest in it."""
    return str(path) if (path / MANIFEST).is_file() else Folder(path).find()


def listed(directory: Path) -> list[dict[str, Any]]:
    """What ``ls`` shows, oldest first; a checkpoint that was not finished is there too, with its state."""
    folder = Folder(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist; expected a directory of checkpoints")
    try:
        latest = folder.latest()
    except InfinityError:
        latest = None
    rows = []
    for tag in folder.tags():
        path = Path(folder.find(tag))
        row: dict[str, Any] = {"tag": tag, "step": None, "ranks": None, "state": "latest" if tag == latest else ""}
        try:
            manifest = folder.manifest(tag)
            row |= {"step": manifest.step, "ranks": manifest.world_size}
        except InfinityError as error:
            row["state"] = f"damaged: {error}"
        rows.append(row | _size_of(path))
    for path in sorted(directory.glob(f"*{INCOMPLETE}")):
        if path.is_dir():
            tag = path.name.removesuffix(INCOMPLETE)
            rows.append({"tag": tag, "step": None, "ranks": None, "state": "incomplete"} | _size_of(path))
    return sorted(rows, key=lambda row: (row["saved"], row["tag"]))


def verified(directory: Path) -> list[Finding]:
    """One finding for every checkpoint in ``directory``, or for the one that it is."""
    single = (directory / MANIFEST).is_file()
    folder = Folder(directory.parent if single else directory)
    tags = [directory.name] if single else folder.tags()
    if not single and not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist; expected a directory of checkpoints")
    findings = []
    for tag in tags:
        try:
            with Checkpoint(str(directory) if single else folder.find(tag)) as checkpoint:
                nbytes = checkpoint.verify()
                step = checkpoint.manifest.step
            findings.append(ok(tag, f"step {step}, {format_bytes(nbytes)}, every byte as it was saved"))
        except InfinityError as error:
            findings.append(fail(tag, str(error), "go on from another one"))
    if not single:
        for path in sorted(directory.glob(f"*{INCOMPLETE}")):
            findings.append(warn(path.name, "was not finished", "nothing: the next save there removes it"))
        if not tags:
            findings.append(fail(str(directory), f"holds no complete checkpoint{_elsewhere(directory)}", "save one"))
    return findings


def _elsewhere(directory: Path) -> str:
    """Where a run has its checkpoints, if ``directory`` is the run's."""
    below = directory / "checkpoints"
    return f"; look into {below}" if Folder(below).tags() else ""


def _size_of(path: Path) -> dict[str, Any]:
    with os.scandir(path) as entries:
        nbytes = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return {"bytes": nbytes, "saved": int(path.stat().st_mtime), "path": str(path)}
