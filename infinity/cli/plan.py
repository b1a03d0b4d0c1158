"""``infinity plan``: bytes, seconds, wear of a training run that nobody started."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from infinity.cli.failures import reported
from infinity.cli.machine import measure_machine
from infinity.cli.train import decoder_config
from infinity.config import Config
from infinity.config.size import format_bytes, parse_bytes
from infinity.engine.planning import plan_for
from infinity.errors import ConfigError
from infinity.nn.decoder import Decoder
from infinity.plan.bill import Plan
from infinity.plan.links import Forecast, Machine, forecast, machine_from
from infinity.plan.traffic import StepTraffic, step_traffic
from infinity.plan.wear import Wear
from infinity.plan.zero import stage_bytes
from infinity.tier import StateKind, Tier

DEFAULT_ENDURANCE = "600TB"
"""TBW of a common 1 TB consumer drive; a data-centre drive has several times that."""


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A JSON or YAML file, such as configs/demo.json.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one dotted key; may be repeated."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face directory with a config.json, instead of the decoder of run.model."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share the states.")] = 1,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, help="Ranks on one machine; all of them by default.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine for a few seconds, then predict the step time.")
    ] = False,
    machine: Annotated[
        Path | None, typer.Option(help="Take the machine's numbers from the output of an earlier --measure --json.")
    ] = None,
    endurance: Annotated[str, typer.Option(help="TBW of the SSD, from its data sheet.")] = DEFAULT_ENDURANCE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what CONFIG would allocate, move, wear out; allocate nothing."""
    with reported(debug=debug):
        settings = Config.load(config).with_overrides(overrides or [])
        whole, batch = (_decoder if model is None else _hugging_face)(settings, model)
        found, planned = plan_for(whole, settings, world_size=ranks, micro_batch=batch)
        accumulation = settings.resolve_batch(ranks).accumulation_steps
        swapped = sum(line.total for line in planned.lines if line.purpose == "unit inputs, swap")
        traffic = step_traffic(planned, found, accumulation, inputs_swapped=accumulation * swapped)
        numbers = _machine(settings, measure=measure, saved=machine)
        predicted = None
        if numbers is not None and planned.waiting is not None:
            predicted = forecast(
                numbers,
                traffic,
                tokens=accumulation * planned.waiting.micro_batch.tokens,
                parameters=planned.parameters,
                trained=planned.trained_parameters // ranks,
                recompute=bool(planned.waiting.micro_batch.inputs),
            )
        on_host = ranks if ranks_per_host is None else min(ranks, ranks_per_host)
        wear = Wear(on_host * traffic.written, parse_bytes(endurance))
        if json:
            document = _document(planned, traffic, wear, numbers, predicted, ranks, on_host)
            typer.echo(json_format.dumps(document))
        else:
            page = Console(emoji=False)
            page.print(
                _page(planned, traffic, wear, predicted, ranks, on_host),
                markup=False, highlight=False, soft_wrap=not page.is_terminal,
            )  # fmt: skip


def _page(planned: Plan, traffic: StepTraffic, wear: Wear, predicted: Forecast | None, ranks: int, on_host: int) -> str:
    parts = [planned.render()]
    if ranks > 1:
        host = {tier: format_bytes(on_host * planned.total(tier), planned.decimal) for tier in Tier}
        shares = ", ".join(f"{tier.value} {size}" for tier, size in host.items())
        parts.append(f"the table is one rank's of {ranks}; {on_host} on one host take {shares}")
        stages = stage_bytes(planned.parameters, ranks)
        parts.append(
            f"16-bit Adam on {ranks} ranks, per rank: "
            + ", ".join(f"stage {stage} {format_bytes(nbytes, planned.decimal)}" for stage, nbytes in stages.items())
        )
    if traffic.read or traffic.written:
        steps = "never" if wear.steps is None else f"{wear.steps:,} steps"
        read, written = (format_bytes(size, planned.decimal) for size in (traffic.read, traffic.written))
        moved = f"{read} read, {written} written"
        parts.append(
            f"NVMe per step and rank: {moved}; an SSD rated for {format_bytes(wear.endurance, True)}, shared by "
            f"the ranks of a host, is worn out after {steps}"
        )
    if predicted is not None:
        parts.append(predicted.render())
    return "\n\n".join(parts)


def _document(
    planned: Plan,
    traffic: StepTraffic,
    wear: Wear,
    machine: Machine | None,
    predicted: Forecast | None,
    ranks: int,
    on_host: int,
) -> dict[str, Any]:
    return {
        **planned.as_json(),
        "ranks": ranks,
        "per_host_bytes": {tier.value: on_host * planned.total(tier) for tier in Tier},
        "zero_stage_bytes": stage_bytes(planned.parameters, ranks),
        "step_bytes": asdict(traffic),
        "wear": {"written_bytes": wear.written, "endurance_bytes": wear.endurance, "steps": wear.steps},
        "machine": None if machine is None else asdict(machine),
        "forecast": None if predicted is None else predicted.as_json(),
    }


def _machine(settings: Config, *, measure: bool, saved: Path | None) -> Machine | None:
    if saved is not None:
        try:
            return machine_from(json_format.loads(saved.read_text(encoding="utf-8"))["machine"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--machine {saved} cannot be used ({error}); expected what `infinity plan --measure --json` prints"
            ) from None
    if not measure:
        return None
    directories = next((d for kind in StateKind if (d := settings.swap_directories(kind))), ())
    return measure_machine(directories, settings.param_dtype)


def _decoder(settings: Config, _: Path | None) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    if settings.run.model is None:
        raise ConfigError(
            "there is no model to plan for: give --model DIR, a directory with a Hugging Face config.json, "
            "or the sizes of the built-in decoder in `run.model`; infinity.plan(model, config) plans for any other"
        )
    with torch.device("meta"):
        whole = Decoder(decoder_config(settings))
    tokens = _tokens(settings)
    return whole, (tokens, tokens)


def _hugging_face(settings: Config, directory: Path | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model that a config.json describes, on the meta device, with a micro-batch for it."""
    if directory is not None and directory.name == "config.json":
        directory = directory.parent
    if directory is None or not (directory / "config.json").is_file():
        raise ConfigError(
            f"--model {directory} has no config.json; expected a directory of a Hugging Face model (nothing is "
            "downloaded)"
        )
    try:
        import transformers
    except ImportError:
        raise ConfigError("--model needs transformers, which is not installed: pip install transformers") from None
    described = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    described.use_cache = False
    with torch.device("meta"):
        whole: nn.Module = transformers.AutoModelForCausalLM.from_config(described)
    tokens = _tokens(settings)
    return whole, {"input_ids": tokens, "labels": tokens}


def _tokens(settings: Config) -> torch.Tensor:
    size = settings.resolve_batch(1).micro_batch_size, settings.run.sequence_length
    return torch.zeros(size, dtype=torch.long, device="meta")
