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
