"""Trains the same model with its state in every place and compares every bit.

    python -m bench.parity [--quick] [--json] [--ranks 1,2,4]

Losses, gradients, masters, moments of every cell must be ``torch.equal`` to those of a run whose state never leaves
the device, and that run to a plain PyTorch loop. A last check compares ten fp32 steps with ``torch.optim.AdamW``, which
rounds differently, within 1e-6. With ``--ranks`` so many processes share the micro-batches of one, at every stage,
and are compared with that one. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from bench import parity_cells
from bench.parity_cells import Cell, config_of
from bench.parity_recipes import RECIPES, Recipe, Trace, run_adamw, run_plain
from infinity.engine.initialize import initialize

TOLERANCE = 1e-6
"""Against AdamW of torch, whose fp32 arithmetic has another order."""


def run_engine(recipe: Recipe, cell: Cell, swap: str) -> Trace:
    """The recipe with the runtime, its state where the cell says."""
    torch.manual_seed(0)
    model = recipe.model()
    config = config_of(recipe.config(), cell, swap)
    engine, _, _, _ = initialize(
        model, config, model_parameters=recipe.parameter_groups(model), injected=cell.injected()
    )
    trace: Trace = {}
    with engine:
        for step in range(recipe.steps):
            for micro, batch in enumerate(recipe.batches(step)):
                _micro_step(engine, recipe, batch, f"{step}.{micro}", trace)
                if micro < recipe.accumulation - 1:
                    engine.step()
            if step == recipe.steps - 1 and not recipe.in_backward:
                for name, parameter in model.named_parameters():
                    gradient = infinity.get_full_grad(parameter)
                    if gradient is not None:
                        trace[f"gradient of {name}"] = gradient
            before = _state(model) if step == recipe.overflow_at else {}
            engine.step()
            norm = engine.get_global_grad_norm()
            trace[f"norm {step}"] = torch.tensor(norm, dtype=torch.float64)
            if recipe.dtype == "fp16":
                trace[f"loss scale {step}"] = torch.tensor(engine.loss_scale)
            if step == recipe.overflow_at:
                touched = differences(before, _state(model))
                if touched or engine.was_step_applied():
                    raise AssertionError(f"a skipped step changed {touched}")
        trace.update(_state(model))
        trace.update(_parameters(model))
    return trace


def _micro_step(
    engine: infinity.Engine, recipe: Recipe, batch: Sequence[tuple[Tensor, Tensor, float]], place: str, trace: Trace
) -> None:
    losses = []
    for number, (tokens, targets, weight) in enumerate(batch):
        loss = engine(tokens, targets) * weight
        trace[f"loss {place}.{number}"] = loss.detach()
        if recipe.together:
            losses.append(loss)
        else:
            engine.backward(loss)
    for loss in losses:
        engine.backward(loss)


def _state(model: nn.Module) -> Trace:
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[f"master of {name}"] = infinity.get_full_param(parameter)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"{kind} of {name}"] = infinity.get_full_optimizer_state(parameter, kind)
    return state


def _parameters(model: nn.Module) -> Trace:
    with infinity.gathered(model):
        return {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Difference:
    """One value that is not what it is in the reference."""

    name: str
    largest: float
    elements: int

    def __str__(self) -> str:
        return f"{self.name}: {self.elements} elements differ, by up to {self.largest:.3g}"


def differences(expected: Trace, given: Trace) -> list[Difference]:
    """Every value whose bits differ, or that only one of the two has; NaN equals NaN."""
    found = []
    for name in sorted(expected.keys() | given.keys()):
        if name not in expected or name not in given:
            found.append(
                Difference(f"{name} (only in the {'cell' if name in given else 'reference'})", float("inf"), 0)
            )
            continue
        one, other = expected[name], given[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(Difference(f"{name} ({one.dtype} {one.shape}, {other.dtype} {other.shape})", float("inf"), 0))
            continue
        unequal = (one != other) & ~(one.isnan() & other.isnan())
        if unequal.any():
            gap = (one.double() - other.double()).abs()[unequal].max().item()
            found.append(Difference(name, gap, int(unequal.sum())))
    return found


@dataclass
class Outcome:
    """What was compared, what differed."""

    equal: int = 0
    different: dict[str, list[Difference]] = field(default_factory=dict)
    against_adamw: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, name: str, found: list[Difference], say: Callable[[str], None]) -> None:
        """Counts one cell."""
        if not found:
            self.equal += 1
            return
        self.different[name] = found
        say(f"different: {name}")
        for difference in found:
            say(f"    {difference}")

    def as_json(self) -> dict[str, Any]:
        return {
            "cells": {"equal": self.equal, "different": len(self.different)},
            "different": {name: [str(one) for one in found] for name, found in self.different.items()},
            "against_adamw": self.against_adamw,
            "seconds": round(self.seconds, 1),
        }


def check_recipe(
    recipe: Recipe, cells: Iterable[Cell], swap: str, outcome: Outcome, say: Callable[[str], None]
) -> None:
    """Compares the cells of one recipe with its reference, the reference with the plain loop."""
    reference = run_engine(recipe, parity_cells.REFERENCE, swap)
    if recipe.exact:
        outcome.note(f"{recipe.name} | plain PyTorch", differences(run_plain(recipe), _norms_as_fp32(reference)), say)
    for cell in cells:
        outcome.note(f"{recipe.name} | {cell.name}", differences(reference, run_engine(recipe, cell, swap)), say)


def _norms_as_fp32(trace: Trace) -> Trace:
    """The plain loop adds the squares one by one, which moves the last bit of the double, never what Adam is given."""
    return {name: value.float() if name.startswith("norm") else value for name, value in trace.items()}


def check_adamw(recipe: Recipe, cell: Cell, swap: str, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Compares with torch's own optimizer, within the tolerance."""
    expected, given = run_adamw(recipe), run_engine(recipe, cell, swap)
    gaps = {name: (value.double() - given[name].double()).abs().max().item() for name, value in expected.items()}
    name = f"{recipe.name} | torch.optim.AdamW"
    outcome.against_adamw[name] = max(gaps.values())
    beyond = [Difference(value, gap, 0) for value, gap in gaps.items() if not gap <= TOLERANCE]
    outcome.note(name, beyond, say)


def run(*, quick: bool, swap: str, say: Callable[[str], None] = lambda line: None) -> Outcome:
    """Every cell, or the quick choice of them."""
    outcome, start = Outcome(), time.monotonic()
    for number, recipe in enumerate(RECIPES):
        check_recipe(recipe, cells_of(number, quick=quick), swap, outcome, say)
    base = Recipe("", steps=10)
    for accumulation in (1, 4):
        for clipping in (1.0, 0.0):
            name = f"fp32, 10 steps of {accumulation} micro-steps, clipping {clipping}"
            recipe = replace(base, name=name, accumulation=accumulation, clipping=clipping)
            check_adamw(recipe, Cell("", parity_cells.ON_NVME), swap, outcome, say)
    outcome.seconds = time.monotonic() - start
    return outcome


def cells_of(number: int, *, quick: bool) -> list[Cell]:
    """Every choice for the first recipe, some for the others, all for all in the long form."""
    cells = _cells_of(number, quick=quick)
    return parity_cells.in_backward(cells) if RECIPES[number].in_backward else cells


def _cells_of(number: int, *, quick: bool) -> list[Cell]:
    if not quick:
        every = [*parity_cells.placements(), *parity_cells.axes(), *parity_cells.split()]
        return [*every, *parity_cells.mixed(40, seed=number)]
    if number == 0:
        return [*parity_cells.placements(), *parity_cells.axes(), *parity_cells.split()]
    some = parity_cells.split()[number % 3 :: 3]
    return [Cell("everything on nvme", parity_cells.ON_NVME), *some, *parity_cells.mixed(4, seed=number)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every choice once, a few of them together")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--swap", default=".", help="directory for swap files (default: %(default)s)")
    parser.add_argument("--ranks", help="numbers of ranks, such as 1,2,4, to compare with one rank instead")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    say = (lambda line: None) if given.json else print
    with tempfile.TemporaryDirectory(prefix="parity-", suffix=".swap", dir=os.path.abspath(given.swap)) as swap:
        if given.ranks:
            from bench import parity_ranks  # which begins with this module

            counts = [int(count) for count in given.ranks.split(",")]
            outcome = parity_ranks.check(counts, quick=given.quick, swap=swap, say=say)
        else:
            outcome = run(quick=given.quick, swap=swap, say=say)
    if given.json:
        print(json.dumps(outcome.as_json()))
    else:
        say_gap(outcome)
        print(f"cells: {outcome.equal} equal, {len(outcome.different)} different")
    return 1 if outcome.different else 0


def say_gap(outcome: Outcome) -> None:
    """The comparison with torch's optimizer, where there was one."""
    if outcome.against_adamw:
        gap = max(outcome.against_adamw.values())
        print(f"largest gap to torch.optim.AdamW: {gap:.2g} (allowed {TOLERANCE:g}); {outcome.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
