"""The ``infinity`` command: its sub-commands, their options."""

from __future__ import annotations

import json as json_format
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import infinity
from infinity.cli import ckpt, nvme
from infinity.cli import doctor as examination
from infinity.cli import plan as planning
from infinity.cli.failures import reported
from infinity.cli.findings import as_json, collect, exit_code, show
from infinity.cli.train import train as run_training
from infinity.config import Config

app = typer.Typer(
    name="infinity",
    help="Train models that fit neither the accelerator nor RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(nvme.app, name="nvme")
app.add_typer(ckpt.app, name="ckpt")
app.command("plan")(planning.plan)
app.command("export")(ckpt.export_command)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, the rest elsewhere.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A JSON or YAML file, such as configs/demo.json.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one dotted key, such as run.steps=10; may be repeated."),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"infinity {infinity.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train models that fit neither the accelerator nor RAM."""


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    floor: Annotated[
        bool,
        typer.Option("--floor", help="Measure first what torch and the activations alone cost; hold the peak to it."),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(help='"auto" goes on from the latest checkpoint of this run if there is one; or a directory.'),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the decoder that CONFIG describes on bytes of text."""
    with reported(debug=debug):
        console = Console(stderr=json, emoji=False)
        summary = run_training(_config(config, overrides), console, with_floor=floor, resume=resume)
        if int(os.environ.get("RANK", "0")):
            return  # rank 0 tells for all
        if json:
            typer.echo(json_format.dumps(summary.as_json()))
        else:
            summary.show(Console(emoji=False))


@app.command()
def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Directories meant for swap files; else the current one.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Try what training needs on this machine; exit 1 if something fails."""
    with reported(debug=debug):
        findings = list(collect(examination.probes(paths or [Path()])))
        if json:
            typer.echo(as_json(findings))
        else:
            show(findings, Console(emoji=False))
        raise typer.Exit(exit_code(findings))


def _config(path: Path, overrides: list[str] | None) -> Config:
    return Config.load(path).with_overrides(overrides or [])
