"""Where state is kept, what moves it, in how many pieces: none of it changes a bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import parity, parity_cells
from bench.parity import Outcome, check_recipe, differences, run_engine
from bench.parity_cells import ON_NVME, Cell
from bench.parity_recipes import RECIPES, Recipe
from infinity._native.cpu_adam import Kernels, open_kernels
from infinity.engine import build

FP32 = RECIPES[0]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", range(len(RECIPES)), ids=[recipe.name for recipe in RECIPES])
def test_every_bit_is_the_same(recipe: int, tmp_path: Path) -> None:
    outcome = Outcome()
    cells = parity.cells_of(recipe, quick=True)
    check_recipe(RECIPES[recipe], cells, str(tmp_path), outcome, lambda line: None)
    assert not outcome.different
    assert outcome.equal == len(cells) + RECIPES[recipe].exact


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clipping", [1.0, 0.0])
def test_ten_steps_of_torch_adamw(accumulation: int, clipping: float, tmp_path: Path) -> None:
    recipe = Recipe("ten steps", steps=10, accumulation=accumulation, clipping=clipping)
    outcome = Outcome()
    parity.check_adamw(recipe, Cell("", ON_NVME), str(tmp_path), outcome, lambda line: None)
    assert not outcome.different
    assert 0 < max(outcome.against_adamw.values()) <= 1e-6, "a gap of exactly 0 would mean that nothing was compared"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_choice_for_every_recipe(tmp_path: Path) -> None:
    outcome = parity.run(quick=False, swap=str(tmp_path))
    assert not outcome.different
    assert outcome.equal > 700


def test_the_quick_form_covers_every_choice() -> None:
    cells = parity.cells_of(0, quick=True)
    inside = [cell.infinity for cell in cells]
    assert {one.get("io_engine") for one in inside} >= {"io_uring", "aio", "threads", "libaio", "python"}
    assert {one.get("isa") for one in inside} >= {"scalar", "torch"}
    assert {one.get("slabs") for one in inside} >= {1, 2}
    assert {one.get("prefetch_units") for one in inside} >= {0, 1, 3}
    assert {one.get("recompute") for one in inside if not isinstance(one.get("recompute"), dict)} >= {True, False}
    offloads = [
        cell.rest["zero_optimization"] for cell in cells if "offload_param" in cell.rest.get("zero_optimization", {})
    ]
    pairs = {(one["offload_param"]["device"], one["offload_optimizer"]["device"]) for one in offloads}
    assert len(pairs - {("auto", "auto")}) == 8, "the ninth is the reference"
    assert any("ratio" in one["offload_param"] for one in offloads)
    assert ("auto", "auto") in pairs
    assert sum(cell.delay_seed is not None for cell in cells) >= 5


class OneBitOff:
    """Kernels that flip the lowest bit of one master, once."""

    def __init__(self, kernels: Kernels, call: int) -> None:
        self._kernels = kernels
        self._calls_left = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def adam(self, master: torch.Tensor, *rest: Any) -> None:
        self._kernels.adam(master, *rest)
        self._calls_left -= 1
        if self._calls_left == 0:
            master.view(torch.int32)[5] ^= 1


def test_one_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(isa: str, threads: int) -> Any:
        kernels = open_kernels(isa, threads)
        return OneBitOff(kernels, call=3) if isa == "scalar" else kernels

    monkeypatch.setattr(build, "open_kernels", spoiled)
    said: list[str] = []
    outcome = Outcome()
    cells = [Cell("sound", ON_NVME), Cell("spoiled", {**ON_NVME, "isa": "scalar"})]
    check_recipe(dataclasses.replace(FP32, steps=1), cells, str(tmp_path), outcome, said.append)
    assert outcome.equal == 2
    master, parameter = outcome.different["fp32 | spoiled"]  # in fp32 the parameter is its own master
    assert master.name.removeprefix("master of ") == parameter.name.removeprefix("parameter ")
    assert master.elements == 1
    assert 0 < master.largest < 1e-6
    assert said[0] == "different: fp32 | spoiled"
    assert master.name in said[1]


def test_differences_see_single_bits_shapes_and_absence() -> None:
    one = {"a": torch.zeros(4), "b": torch.tensor([float("nan"), 1.0])}
    other = {name: value.clone() for name, value in one.items()}
    assert differences(one, other) == []
    other["a"][2] = torch.finfo(torch.float32).smallest_normal * 2**-23
    assert [(found.name, found.elements) for found in differences(one, other)] == [("a", 1)]
    other = {"a": one["a"].double(), "c": one["b"]}
    assert len(differences(one, other)) == 3


def test_the_command_reports_and_exits_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(equal=7, against_adamw={"x": 2e-7})
    monkeypatch.setattr(parity, "run", lambda **options: outcome)
    assert parity.main(["--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "cells: 7 equal, 0 different"
    outcome.note("bad", [parity.Difference("master of x", 0.5, 1)], print)
    assert parity.main(["--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "different: bad"
    assert lines[1] == "    master of x: 1 elements differ, by up to 0.5"
    assert lines[-1] == "cells: 7 equal, 1 different"
    assert parity.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cells"] == {"equal": 7, "different": 1}


def test_a_delayed_run_is_really_delayed(tmp_path: Path) -> None:
    cell = next(cell for cell in parity_cells.axes() if cell.delay_seed is not None)
    injected = cell.injected()
    assert injected.delay is not None
    assert injected.faults is not None
    assert injected.faults.delay_seconds > 0
    assert run_engine(dataclasses.replace(FP32, steps=1), cell, str(tmp_path))
