"""Sets swap directories up, measures them, finds the I/O setting that suits them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infinity.cli import doctor
from infinity.cli.failures import reported
from infinity.cli.findings import Finding, as_json, exit_code, fail, ok, show, warn
from infinity.cli.json_edit import put
from infinity.config import Config
from infinity.config.size import format_bytes, parse_bytes
from infinity.errors import ConfigError, StorageError
from infinity.storage.disk import disk_of
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.traffic import Pattern, Setting, TrialFiles, Window
from infinity.storage.tuning import MAX_WINDOW_BYTES, Trial, Tuner, choose, tune, working_engines
from infinity.tier import PAGE_BYTES, round_up

app = typer.Typer(help="Set up, measure, tune the directories for swap files.", no_args_is_help=True)

Directories = Annotated[list[Path], typer.Argument(metavar="DIR...", help="One directory per disk.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, the rest elsewhere.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("init")
def init_command(
    directories: Directories,
    space: Annotated[str, typer.Option(help="Reserve this much in each for a trial, then give it back.")] = "1GiB",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make swap directories, try what training will do with them."""
    with reported(debug=debug):
        nbytes = _size(space, "--space")
        findings = [finding for directory in directories for finding in prepare(directory, nbytes)]
        findings += shared_disks(directories)
        if json:
            typer.echo(as_json(findings))
        else:
            show(findings, Console(emoji=False))
            if exit_code(findings) == 0:
                paths = [str(path.resolve()) for path in directories]
                block = {"infinity": {"nvme_path": paths[0] if len(paths) == 1 else paths}}
                typer.echo(f"\nFor the config: {_shown(block)}")
        raise typer.Exit(exit_code(findings))


@app.command("bench")
def bench_command(
    directories: Directories,
    engine: Annotated[str | None, typer.Option(help="One engine; else every one that works here.")] = None,
    block_size: Annotated[str, typer.Option(help="Bytes per block.")] = "1MiB",
    queue_depth: Annotated[int, typer.Option(help="Blocks in flight.")] = 32,
    threads: Annotated[int, typer.Option(help="For the engines that are pools of threads.")] = 4,
    size: Annotated[str, typer.Option(help="Of each of the two files per directory.")] = "512MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each engine; the median counts.")] = 3,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure reads, writes, both at once."""
    with reported(debug=debug):
        console = Console(stderr=json, emoji=False)
        block = _size(block_size, "--block-size", PAGE_BYTES)
        settings = [Setting(name, block, queue_depth, threads) for name in ([engine] if engine else working_engines())]
        for setting in settings:
            setting.open().close()  # a wrong one is an error before anything is written
        with measuring(directories, _size(size, "--size"), settings[0].window_bytes, console) as (tuner, notes):
            with console.status("measuring") as status:
                trials = tuner.measure(
                    settings, rounds, float("inf"), lambda setting: status.update(f"measuring {_name(setting)}")
                )
            report(trials, choose(trials), notes, console, as_document=json)


@app.command("tune")
def tune_command(
    directories: Directories,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="CONFIG.json", help="Put what is found into this config.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Time to measure for.")] = 40.0,
    size: Annotated[str, typer.Option(help="Of each of the two files per directory.")] = "256MiB",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find engine, block size, queue depth, threads, for the config."""
    with reported(debug=debug):
        console = Console(stderr=json, emoji=False)
        if write is not None:
            edited(write, Setting())  # a config that cannot be changed is an error before a minute of measuring
        with measuring(directories, _size(size, "--size"), MAX_WINDOW_BYTES, console) as (tuner, notes):
            with console.status("measuring") as status:
                best, trials = tune(
                    tuner, working_engines(), seconds, lambda setting: status.update(f"measuring {_name(setting)}")
                )
            report(trials, best, notes, console, as_document=json)
        if write is not None:
            replace(write, edited(write, best.setting))
            console.print(f"\nwrote aio, infinity.io_engine to {write}", highlight=False, markup=False)
        elif not json:
            typer.echo(f"\nFor the config: {_shown(config_block(best.setting))}")


def prepare(directory: Path, nbytes: int) -> Iterator[Finding]:
    """Makes ``directory``, tries direct I/O in it, reserves ``nbytes`` for a moment, looks at the disk behind it."""
    name = f"path {directory}"
    made = not directory.exists()
    if made and directory.absolute().parent.is_dir():
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(
                "cannot create",
                path=str(directory),
                errno=error.errno,
                action="Choose a directory this user may write to",
            ) from None
    start = time.perf_counter()
    swap = SwapDirectory(str(directory), rank=0, nbytes=nbytes)
    try:
        swap.create("reserved", nbytes)
        took = time.perf_counter() - start
    finally:
        swap.remove()
    yield from doctor.swap_path(directory)
    yield ok(name, f"{'made' if made else 'is there'}, {format_bytes(nbytes)} reserved in {took:.2f} s, given back")
    mode = directory.stat().st_mode
    if mode & 0o002 and not mode & 0o1000:
        yield warn(name, f"everybody may write to it ({mode & 0o7777:o})", f"chmod 700 {directory}")
    for doubt in disk_of(str(directory)).doubts():
        yield warn(
            name,
            doubt,
            "use the disk that training will use; `infinity nvme bench` measures it, with a --size beyond the caches",
        )


def shared_disks(directories: Sequence[Path]) -> Iterator[Finding]:
    """Directories that cannot be faster together."""
    first: dict[int, Path] = {}
    for directory in directories:
        device = directory.stat().st_dev
        if device in first:
            remedy = "name one directory per disk: two on one disk share its bandwidth"
            yield warn(f"path {directory}", f"is on the same file system as {first[device]}", remedy)
        first.setdefault(device, directory)
    names = [str(directory.resolve()) for directory in directories]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield fail(f"path {name}", "is given more than once", "name each directory once")


@contextmanager
def measuring(
    directories: Sequence[Path], nbytes: int, window_bytes: int, console: Console
) -> Iterator[tuple[Tuner, list[str]]]:
    """Trial files, memory, the reasons to doubt what will be measured; all of it is gone afterwards.

    A directory that is not there is refused: a misspelt one would be on another disk.
    """
    for directory in directories:
        if not directory.is_dir():
            raise StorageError(
                "there is no directory",
                path=str(directory),
                action=f"Name one that training will use; `infinity nvme init {directory}` makes it",
            )
    with console.status("writing trial files"):
        window = Window(window_bytes)
        files = TrialFiles([str(directory) for directory in directories], nbytes)
    try:
        with files:
            notes = [f"{path}: {doubt}" for path in directories for doubt in disk_of(str(path)).doubts()]
            if not files.direct:
                notes.append("direct I/O is refused: the page cache is measured, not the disk")
            if not window.huge_pages or doctor.anonymous_huge_bytes() < window_bytes // 2:
                notes.append(
                    "the memory is on 4 KiB pages, which halves the rate: "
                    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
                )
            yield Tuner(files, window.bytes), notes
    finally:
        window.free()


def report(trials: Sequence[Trial], best: Trial, notes: Sequence[str], console: Console, *, as_document: bool) -> None:
    """A table on a terminal, plain lines in a pipe, or one JSON document."""
    if as_document:
        document = {
            "best": _as_json(best),
            "config": config_block(best.setting),
            "trials": [_as_json(trial) for trial in trials],
            "warnings": list(notes),
        }
        return typer.echo(json.dumps(document))
    rows = [_row(trial, trial is best) for trial in trials]
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for title in ("", "engine", "block", "depth", "threads", "read", "write", "mix", "CPU"):
            table.add_column(title, justify="left" if title in ("", "engine") else "right", no_wrap=True)
        for row, trial in zip(rows, trials, strict=True):
            short = [cell.replace(".00 MiB", " MiB").replace(" GB/s", "").replace(" ms/GB", "") for cell in row]
            table.add_row(*short, style="green" if trial is best else None)
        table.caption, table.caption_justify = "read, write, mix (both at once) in GB/s; CPU in ms per GB", "left"
        console.print(table)
    else:
        for row in rows:
            mark, engine, block, depth, threads, read, write, mix, cpu = row
            typer.echo(
                f"{mark} {engine} {block} {depth}, {threads} threads: read {read}, write {write}, mix {mix}, CPU {cpu}"
            )
    for note in notes:
        console.print(
            f"warning: {note}", style="yellow", markup=False, highlight=False, soft_wrap=not console.is_terminal
        )
    return None


def config_block(setting: Setting) -> dict[str, Any]:
    """What a config says to get ``setting``."""
    return {
        "aio": {
            "block_size": setting.block_size,
            "queue_depth": setting.queue_depth,
            "thread_count": setting.threads,
        },
        "infinity": {"io_engine": setting.engine},
    }


def edited(path: Path, setting: Setting) -> str:
    """The text of the config at ``path`` with ``setting`` in it; ConfigError where it would not load."""
    if path.suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(f"{path}: only a JSON config is written; leave --write out and copy what is printed")
    Config.load(path)
    text = path.read_text(encoding="utf-8")
    given = json.loads(text).get("aio", {})
    block = config_block(setting)
    threads = "intra_op_parallelism" if "intra_op_parallelism" in given else "thread_count"
    block["aio"][threads] = block["aio"].pop("thread_count")
    for name, members in block.items():
        for key, value in members.items():
            text = put(text, [name, key], value)
    Config.load(json.loads(text))
    return text


def replace(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, all of it or nothing; a symbolic link keeps pointing to it."""
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.chmod(target.stat().st_mode & 0o7777)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _size(text: str, option: str, least: int = 1 << 20) -> int:
    """Whole pages."""
    try:
        nbytes = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if nbytes < least:
        raise ConfigError(f"{option} is {text}, expected at least {format_bytes(least)}")
    return round_up(nbytes, PAGE_BYTES)


def _name(setting: Setting) -> str:
    return f"{setting.engine}, {format_bytes(setting.block_size)} × {setting.queue_depth}"


def _row(trial: Trial, is_best: bool) -> list[str]:
    setting = trial.setting
    return [
        "*" if is_best else " ",
        f"{setting.engine:8}",
        f"{format_bytes(setting.block_size):>10}",
        f"× {setting.queue_depth:3}",
        f"{setting.threads:3}",
        *(f"{trial.rate(pattern):6.2f} GB/s" for pattern in Pattern),
        f"{trial.cpu_per_gb() * 1e3:5.1f} ms/GB",
    ]


def _as_json(trial: Trial) -> dict[str, Any]:
    return {
        "engine": trial.setting.engine,
        "block_size": trial.setting.block_size,
        "queue_depth": trial.setting.queue_depth,
        "threads": trial.setting.threads,
        "GB_per_second": {pattern.value: trial.rate(pattern) for pattern in Pattern},
        "cpu_seconds_per_GB": trial.cpu_per_gb(),
        "rounds": len(trial.samples[Pattern.READ]),
    }


def _shown(block: dict[str, Any]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(members)}" for name, members in block.items()]
    return "{\n" + ",\n".join(lines) + "\n}"
