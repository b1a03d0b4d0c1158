"""NaN in a batch or a loss that explodes: the step is skipped, counted, named, in the end an error; weights stay."""

from __future__ import annotations

import json

from infinity.obs.metrics import read_metrics
from tests.faults.helpers import TinyRun, Zygote


def test_masters_are_unchanged_by_nan_in_the_data(zygote: Zygote, tiny: TinyRun) -> None:
    code = """
import infinity
said = []
import logging
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("infinity").addHandler(Keep())
config = configure(SWAP, non_finite_limit=3)
config["bf16"] = {"enabled": True}
model = Net()
engine = initialize(model, config, injected=Injected(poison=True))[0]
def one(x):
    engine.backward(engine(x.bfloat16()))
    engine.step()
bad = torch.full((2, 32), float("nan"))
one(batch(0))
state = lambda: {f"{n}.{k}": v.clone() for n, p in model.named_parameters() for k, v in (
    ("master", infinity.get_full_param(p)), ("m", infinity.get_full_optimizer_state(p, "exp_avg")),
    ("v", infinity.get_full_optimizer_state(p, "exp_avg_sq")))}
before = state()
one(bad); one(bad)
after = state()
assert all(torch.equal(before[k], after[k]) for k in before)
assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (2, 3, False)
one(batch(1))
assert engine.was_step_applied()
errors, before = [], state()
for _ in range(4):
    try:
        one(bad)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    else:
        errors.append(None)
after = state()  # readable after the error
assert all(torch.equal(before[k], after[k]) for k in before)
one(batch(2))
assert engine.was_step_applied()
engine.destroy(restore_parameters=True)
assert all(torch.isfinite(p).all() for p in model.parameters())
print(json.dumps({"errors": errors, "said": said}))
""".replace("SWAP", repr(str(tiny.swap)))
    seen = json.loads(zygote.library(code).out)
    first, second, third, fourth = seen["errors"]
    assert first is second is None
    assert third.startswith("NonFiniteError: 3 steps in a row had a non-finite gradient, first seen in layers.0.0.")
    assert fourth.startswith("NonFiniteError: 4 steps in a row")
    assert any("step 2 was skipped: the gradient of layers.0.0." in text for text in seen["said"])
    tiny.check_nothing_left()


def test_a_run_that_explodes(zygote: Zygote, tiny: TinyRun) -> None:
    wild = ("optimizer.params.lr=1e38", "scheduler=null", "run.steps=30", "infinity.non_finite_limit=4")
    done = zygote.run(tiny.code(*wild))
    assert "4 steps in a row had a non-finite gradient, first seen in " in done.paragraph
    assert "non_finite_limit" in done.paragraph
    assert "was skipped: the gradient of " in done.out
    records = read_metrics(tiny.output / "metrics.jsonl")
    assert any(record.get("gradient_norm", 0) is None for record in records)
    tiny.check_nothing_left()
