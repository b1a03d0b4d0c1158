"""What any number of ranks goes on from: the place in the training data, which counts samples; a seed for new ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.helpers import Launcher

CODE = """
import json
from infinity.engine.initialize import initialize
from tests.checkpoint.helpers import Model, configure
from tests.checkpoint.test_loader import Texts

class Numbered(Texts):
    def __getitem__(self, index):
        return index, super().__getitem__(index)

config = configure(ROOT + "/swap", "cpu", gradient_accumulation_steps=2 // RANKS)
engine, _, loader, _ = initialize(Model(dropout=0.0), config, training_data=Numbered(26))
torch.manual_seed(3)
if RESUMES:
    engine.load_checkpoint(ROOT + "/ckpt")
seen = []
for _ in range(loader.passes, 2):
    for numbers, rows in loader:
        seen.append(numbers.tolist())
        engine.backward(engine(rows))
        engine.step()
        if not RESUMES and len(seen) * RANKS == SAVE:
            engine.save_checkpoint(ROOT + "/ckpt")
            if STOPS:
                sys.exit(print(json.dumps(seen)))
print(json.dumps([seen, engine.get_global_grad_norm()]))
"""


def run(launcher: Launcher, tmp_path: Path, ranks: int, save: int, *, resumes: bool, stops: bool) -> list[str]:
    head = f"ROOT, SAVE, RESUMES, STOPS = {str(tmp_path)!r}, {save}, {resumes}, {stops}\n"
    return launcher.succeed(ranks, head + CODE)


def together(told: list[list[list[int]]]) -> list[list[int]]:
    """Batches in the order of the rounds, those of a round in the order of the ranks."""
    return [batch for round_ in zip(*told, strict=True) for batch in round_]


@pytest.mark.parametrize(("first", "second"), [(2, 1), (2, 2), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_other_ranks_serve_the_rest(launcher: Launcher, tmp_path: Path, first: int, second: int) -> None:
    """26 samples make 13 batches of 2, of which the last is too few for two ranks, so it is served by one alone."""
    whole = [json.loads(one)[0] for one in run(launcher, tmp_path, second, 4, resumes=False, stops=False)]
    head = [json.loads(one) for one in run(launcher, tmp_path, first, 4, resumes=False, stops=True)]
    rest = [json.loads(one)[0] for one in run(launcher, tmp_path, second, 4, resumes=True, stops=False)]
    assert len(together(head)) == 4
    if second == 2:
        assert together(head) + together(rest) == together(whole)
    else:  # the pass that two ranks began is finished by one, the tail included
        assert together(head) + rest[0][:9] == whole[0][:13]


DRAWS = """
import random, logging
import numpy
from tests.checkpoint.helpers import Model, configure, engine_of
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with engine_of(configure(ROOT + "/swap", "cpu")) as engine:
    torch.manual_seed(SEED + RANK)
    if RANKS == 1:
        engine.save_checkpoint(ROOT + "/ckpt")
    else:
        engine.load_checkpoint(ROOT + "/ckpt")
    print("drew", random.random(), numpy.random.rand(), float(torch.rand(())))
"""


def test_a_new_rank_draws_what_it_draws_in_every_such_resume(launcher: Launcher, tmp_path: Path) -> None:
    (alone,), first, second = (
        launcher.succeed(ranks, f"ROOT, SEED = {str(tmp_path)!r}, {seed}\n{DRAWS}")
        for ranks, seed in ((1, 7), (2, 8), (2, 9))
    )
    assert first == second
    assert "was saved by 1 rank, this run has 2" in first[0]
    drawn = [next(line for line in said.splitlines() if line.startswith("drew")) for said in (alone, *first)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[2].split())) == 4
