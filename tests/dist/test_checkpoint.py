"""A checkpoint of any ranks, stage and placement is taken up by any other, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.checkpoint.helpers import Model
from tests.dist.helpers import Launcher

PLACES = {
    "1 rank, stage 0": (1, 0, "none", "none"),
    "1 rank, stage 3, nvme": (1, 3, "nvme", "nvme"),
    "2 ranks, stage 0": (2, 0, "none", "none"),
    "2 ranks, stage 1, optimizer nvme": (2, 1, "none", "nvme"),
    "2 ranks, stage 2, optimizer cpu": (2, 2, "none", "cpu"),
    "2 ranks, stage 3, nvme": (2, 3, "nvme", "nvme"),
    "4 ranks, stage 1": (4, 1, "none", "none"),
    "4 ranks, stage 3, cpu, optimizer nvme": (4, 3, "cpu", "nvme"),
}
QUICK = ("1 rank, stage 3, nvme", "2 ranks, stage 1, optimizer nvme")

CODE = """
import hashlib, json
from pathlib import Path
import torch
from bench.parity_ranks import stage
from tests.checkpoint.helpers import Model, batch, configure, engine_of, everything

def digest(engine):
    state = everything(engine)
    del state["seen"]
    sums = hashlib.sha256()
    for name in sorted(state):
        sums.update(name.encode() + state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()[:16]

def config(place):
    made = configure(Path(ROOT) / "swap")
    made |= stage(*PLACES[place][1:]) | {"gradient_accumulation_steps": 4 // RANKS}
    for block in ("offload_param", "offload_optimizer"):
        if made["zero_optimization"].get(block, {}).get("device") == "nvme":
            made["zero_optimization"][block]["nvme_path"] = str(Path(ROOT) / "swap")
    return made

def train(engine, start, stop):
    for step in range(start, stop):
        for micro in range(RANK, 4, RANKS):
            engine.backward(engine(batch(4 * step + micro)))
            engine.step()

def attached(place):
    return engine_of(config(place), Model(dropout=0.0))

mine = [place for place, (ranks, *_) in PLACES.items() if ranks == RANKS]
"""

SAVE = """
for place in mine:
    with attached(place) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(Path(ROOT) / "ckpt", place.replace(", ", "-").replace(" ", "_"))
        engine.save_pretrained(Path(ROOT) / "weights" / place, max_shard_bytes=20_000)
        if place == next(iter(PLACES)):
            train(engine, 2, 4)
            print(digest(engine))
"""

RESUME = """
for place in mine:
    for saved in PLACES:
        with attached(place) as engine:
            engine.load_checkpoint(Path(ROOT) / "ckpt", saved.replace(", ", "-").replace(" ", "_"))
            assert engine.global_steps == 2
            train(engine, 2, 4)
            found = digest(engine)
            if RANK == 0:
                print(json.dumps([saved, place, found]))
    with attached(place) as engine:
        engine.load_weights(Path(ROOT) / "weights" / place)
        digest(engine)
"""


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(PLACES), marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["some", "all"]
)
def test_saved_by_some_taken_up_by_others(
    launcher: Launcher, tmp_path: Path, names: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    places = {name: PLACES[name] for name in names}
    head = f"ROOT, PLACES = {str(tmp_path)!r}, {places!r}\n{CODE}"
    worlds = sorted({ranks for ranks, *_ in places.values()})
    (expected, *_) = [launcher.succeed(ranks, head + SAVE)[0].split()[-1:] for ranks in worlds]
    rows = []
    for ranks in worlds:
        told = launcher.succeed(ranks, head + RESUME)
        rows += [json.loads(line) for line in told[0].splitlines() if line.startswith("[")]
    record_property("table", rows)
    assert len(rows) == len(places) ** 2
    assert [(saved, place) for saved, place, found in rows if [found] != expected] == []
    weights = {}
    for name in names:
        files = sorted((tmp_path / "weights" / name).glob("*.safetensors"))
        weights[name] = {key: value for file in files for key, value in load_file(file).items()}
        assert weights[name].keys() == Model().state_dict().keys() - {"head.weight"}
    first = weights[names[0]]
    for name, other in weights.items():
        assert [key for key in first if key != "seen" and not first[key].equal(other[key])] == [], name


FAILING = """
import infinity
from infinity.checkpoint import disk, save
with attached(mine[0]) as engine:
    train(engine, 0, 1)
    engine.save_checkpoint(Path(ROOT) / "ckpt", "a")
    if RANK == 1:
        disk.Disk.sync = lambda self, descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        engine.save_checkpoint(Path(ROOT) / "ckpt", "b")
    except infinity.StorageError as error:
        print(error)
    train(engine, 1, 2)
    path, _ = engine.load_checkpoint(Path(ROOT) / "ckpt")
    assert path.endswith("/a"), path
    if RANK == 0:
        assert sorted(p.name for p in (Path(ROOT) / "ckpt").iterdir()) == ["a", "latest"]
"""


def test_a_rank_that_cannot_write_ends_the_save_for_all(launcher: Launcher, tmp_path: Path) -> None:
    places = {"2 ranks, stage 3, nvme": PLACES["2 ranks, stage 3, nvme"]}
    told = launcher.succeed(2, f"ROOT, PLACES = {str(tmp_path)!r}, {places!r}\n{CODE}{FAILING}")
    assert "rank 1 could not do its part: cannot make durable" in told[0]
    assert "No space left on device" in told[1]


TILED = """
import infinity
from safetensors.torch import load_file

def state(engine):
    found = engine.state_dict()
    del found["seen"]
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {kind}"] = infinity.get_full_optimizer_state(parameter, kind)
    return found

def cut(place, tile_bytes):
    made = config(place)
    if tile_bytes:
        made["infinity"]["tile_bytes"] = tile_bytes
    return engine_of(made, Model(width=160, layers=1, dropout=0.0))

def check(found, name):
    known = torch.load(Path(ROOT) / name, weights_only=True)
    assert found.keys() <= known.keys()
    assert [key for key, value in found.items() if not known[key].equal(value)] == []
"""
TILED_SAVE = """
with cut(mine[0], 6000) as engine:
    sliced = [unit.unit for unit in engine._runtime.units if unit.unit.layout.used_numel > unit.unit.layout.shard_numel]
    assert len(sliced) > 30, len(sliced)
    train(engine, 0, 2)
    engine.save_checkpoint(Path(ROOT) / "ckpt", "tiled")
    engine.save_pretrained(Path(ROOT) / "out", max_shard_bytes=100_000)
    found = state(engine)
    if RANK == 0:
        torch.save(found, Path(ROOT) / "saved.pt")
"""
TILED_RESUME = """
with cut(mine[0], None) as engine:
    engine.load_checkpoint(Path(ROOT) / "ckpt", "tiled")
    assert engine.global_steps == 2
    check(state(engine), "saved.pt")
    weights = {}
    for file in (Path(ROOT) / "out").glob("*.safetensors"):
        weights |= load_file(file)
    weights["head.weight"] = weights["embedding.weight"]
    Model(width=160, layers=1).load_state_dict(weights, strict=True)
    assert [key for key, value in weights.items() if not engine.state_dict()[key].to(value.dtype).equal(value)] == []
    train(engine, 2, 3)
    engine.save_checkpoint(Path(ROOT) / "ckpt", "whole", wait=False)  # several ranks wait all the same
    torch.save(state(engine), Path(ROOT) / "whole.pt")
"""
TILED_BACK = """
with cut(mine[0], 20_000) as engine:
    engine.load_checkpoint(Path(ROOT) / "ckpt", "whole")
    check(state(engine), "whole.pt")
    engine.load_weights(Path(ROOT) / "ckpt" / "tiled")
    check({name: value for name, value in state(engine).items() if " " not in name}, "saved.pt")
"""


@pytest.mark.parametrize(
    "several",
    [
        "2 ranks, stage 3, nvme",
        pytest.param("2 ranks, stage 1, optimizer nvme", marks=pytest.mark.slow),
        pytest.param("4 ranks, stage 3, cpu, optimizer nvme", marks=pytest.mark.slow),
    ],
)
def test_tiles_on_ranks_are_taken_up_whole_by_one(launcher: Launcher, tmp_path: Path, several: str) -> None:
    places = {name: PLACES[name] for name in ("1 rank, stage 3, nvme", several)}
    head = f"ROOT, PLACES = {str(tmp_path)!r}, {places!r}\n{CODE}{TILED}"
    ranks = PLACES[several][0]
    launcher.succeed(ranks, head + TILED_SAVE)
    launcher.succeed(1, head + TILED_RESUME)
    launcher.succeed(ranks, head + TILED_BACK)
