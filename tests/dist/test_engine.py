"""What users do with an engine on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.helpers import Launcher, blamed

PROLOGUE = """
import os, sys, threading
import torch
from torch import nn
import infinity
from infinity.engine.build import Injected
from infinity.engine.initialize import initialize

class Net(nn.Module):
    def __init__(self, width=48, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        self.skip = None
        self.register_buffer("seen", torch.full((3,), float(RANK)))
    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = layer(x)
        return self.head(x).square().mean()

def configure(stage=3, place="none", timeout=20, **more):
    zero = {"stage": stage}
    where = {"device": place, "nvme_path": SWAP} if place == "nvme" else {"device": place}
    if stage >= 1: zero["offload_optimizer"] = where
    if stage == 3: zero["offload_param"] = where
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}},
            "zero_optimization": zero, "infinity": {"timeout_seconds": timeout}, **more}

def start(*arguments, **more):
    torch.manual_seed(RANK)
    return initialize(Net(), configure(*arguments, **more), injected=Injected(poison=True))[0]

def batch(seed):
    return torch.randn(2, 48, generator=torch.Generator().manual_seed(seed))

def same_everywhere(engine, value):
    group = engine._parts.group
    words = group.talk("comparing", value.detach().float().contiguous().numpy().tobytes())
    assert len(set(words)) == 1
"""


def code(body: str, swap: Path) -> str:
    return f"SWAP = {str(swap)!r}\n{PROLOGUE}\n{body}"


USES = """
seen = []
for stage, place in ((0, "none"), (1, "cpu"), (2, "cpu"), (3, "nvme")):
    engine = start(stage, place)
    model = engine.module
    assert torch.equal(model.seen, torch.zeros(3))
    for name, parameter in model.named_parameters():
        same_everywhere(engine, infinity.get_full_param(parameter))
    weight = model.head.weight
    before = infinity.get_full_param(weight)
    with infinity.gathered(model.head, modifier_rank=1):
        if RANK == 1:
            with torch.no_grad():
                model.head.weight.mul_(2)
    assert torch.equal(infinity.get_full_param(weight), 2 * before)
    infinity.set_full_param(weight, before)
    assert torch.equal(infinity.get_full_param(weight), before)

    # evaluation on one rank only, no_sync, batches that one rank has more of
    model.eval()
    with torch.no_grad():
        if RANK == 1:
            engine(batch(9))
    model.train()
    ledger = engine._parts.ledger
    sent = ledger.bytes["reduce_sent"]
    with engine.no_sync():
        engine.backward(engine(batch(RANK)))
    engine.settle()
    assert (ledger.bytes["reduce_sent"] == sent) == (stage < 2)
    engine.backward(engine(batch(7 + RANK)))
    grads = {name: infinity.get_full_grad(p) for name, p in model.named_parameters()}
    same_everywhere(engine, grads["head.weight"])
    seen.append(grads)
    engine.step()
    done = 0
    for x, weight_of_loss in engine.padded([batch(10 + RANK + 2 * n) for n in range(2 + RANK)]):
        engine.backward(engine(x) * weight_of_loss)
        engine.step()
        done += 1
    assert done == 2 + RANKS - 1
    assert engine.averaged(float(RANK)) == (RANKS - 1) / 2

    # a block that one rank leaves out counts as zero there
    model.skip = 1 if RANK == 0 else None
    engine.backward(engine(batch(50 + RANK)))
    skipped = infinity.get_full_grad(model.layers[1][0].weight)
    same_everywhere(engine, skipped)
    assert skipped.abs().sum() > 0
    engine.step()
    for value in engine.state_dict().values():
        same_everywhere(engine, value)
    engine.settle()
    report = engine.report()
    for tier in report["tiers"].values():
        assert tier["peak_bytes"] <= tier["planned_bytes"]
    assert report["steady_allocations"] == {"device": 0, "host": 0}
    engine.destroy(restore_parameters=True)
    same = [p.detach().float() for p in model.parameters()]
    assert all(torch.isfinite(p).all() for p in same)
for name, gradient in seen[0].items():
    for other in seen[1:]:
        torch.testing.assert_close(other[name], gradient, rtol=1e-6, atol=1e-7)
assert not os.path.exists(SWAP) or not [f for _, _, files in os.walk(SWAP) for f in files if "rank" + str(RANK) in f]

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4 * RANKS + 3
    def __getitem__(self, index): return torch.tensor([index])
engine, _, loader, _ = initialize(Net(), configure(2), training_data=Data())
torch.manual_seed(3 + RANK)
mine = [int(v) for rows in loader for v in rows]
import json
words = [json.loads(w) for w in engine._parts.group.talk("samples", json.dumps(mine).encode())]
everything = [value for part in words for value in part]
assert len(mine) == 4 and len(set(everything)) == 4 * RANKS
torch.manual_seed(3)
alone = [int(v) for rows in torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True) for v in rows]
for number, index in enumerate(alone[:4 * RANKS]):
    turn, place = divmod(number, 2 * RANKS)
    assert words[place // 2][2 * turn + place % 2] == index
engine.destroy()

config = configure(3, "nvme")
with infinity.Init(config) as under_construction:
    model = Net()
assert (type(under_construction._values).__name__ == "ForgottenValues") == (RANK > 0)
engine = initialize(model, config)[0]
for value in engine.state_dict().values():
    same_everywhere(engine, value)
assert engine.state_dict()["head.weight"].abs().sum() > 0
engine.destroy()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_engine_is_used_as_on_one_rank(ranks: int, launcher: Launcher, tmp_path: Path) -> None:
    launcher.succeed(ranks, code(USES, tmp_path / "swap"))


TRAIN = """
engine = start({stage}, timeout=8)
for step in range(3):
    {before}
    engine.backward(engine(batch(step + RANK)))
    engine.step()
engine.destroy()
"""

FAULTS = {
    "killed": "if RANK == 1 and step == 1: os.kill(os.getpid(), 9)",
    "an exception in forward": "if RANK == 1 and step == 1: engine.module.layers[2].register_forward_hook(lambda *a: 1 / 0)",
    "a collective on one rank": "if RANK == 1 and step == 1: engine.averaged(1.0)",
    "a save on one rank": "if RANK == 1 and step == 1: engine.settle(); engine.save_checkpoint(SWAP)",
    "fewer steps": "if RANK == 1 and step == 2: engine.destroy(); threading.Event().wait(1.5); sys.exit(1)",
}


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_rank_ends_all_with_its_name(fault: str, stage: int, launcher: Launcher, tmp_path: Path) -> None:
    finished = launcher.run(3, code(TRAIN.format(stage=stage, before=fault), tmp_path))
    blamed(finished, 1)


def test_a_full_read_on_one_rank_only_ends_all(launcher: Launcher, tmp_path: Path) -> None:
    fault = "if RANK == 1 and step == 1: engine.state_dict()"
    finished = launcher.run(2, code(TRAIN.format(stage=3, before=fault), tmp_path))
    blamed(finished, 1)
    assert "rank 1 is at master of" in finished[0].err or "rank 1 is at param of" in finished[0].err


def test_other_configs_are_refused_on_every_rank(launcher: Launcher, tmp_path: Path) -> None:
    finished = launcher.run(2, code("start(3 if RANK else 2)", tmp_path))
    assert [one.code for one in finished] == [1, 1]
    assert all("other zero_optimization.stage" in one.err for one in finished)
