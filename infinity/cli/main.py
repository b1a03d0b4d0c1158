"""The ``infinity`` command: its sub-commands, their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import infinity
from infinity.cli import doctor as examination
from infinity.cli.failures import reported
from infinity.cli.findings import as_json, collect, exit_code, show

app = typer.Typer(
    name="infinity",
    help="Train models that fit neither the accelerator nor RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, the rest elsewhere.")]


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
            show(findings, Console())
        raise typer.Exit(exit_code(findings))
