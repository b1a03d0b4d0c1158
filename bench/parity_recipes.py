"""What parity is checked on: small models trained in several ways, with a plain PyTorch loop for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity._native.cpu_adam import AdamStep, TorchKernels
from infinity.nn.decoder import Decoder, DecoderConfig

VOCABULARY = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Trace = dict[str, Tensor]
"""Everything a run is compared by, each value under the name it is reported with."""


class Residual(nn.Module):
    """A block with a keyword argument, a dict with None in it for a result, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, *, gain: Tensor) -> dict[str, Tensor | None]:
        added = self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        return {"hidden": x + gain * added, "state": None}


class Awkward(nn.Module):
    """What real models bring along: tied weights, a frozen block, parameters of the root, one without a gradient, a
    block that is left out in turn, so that the order of units changes every step."""

    def __init__(self, width: int = 32, blocks: int = 4, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.1)
        self.gain = nn.Parameter(torch.ones(width))
        self.never_used = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.turn = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            if number != self.turn % (len(self.blocks) + 1):
                x = block(x, gain=self.gain)["hidden"]
        self.turn += 1
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def decoder() -> nn.Module:
    """Three equal blocks, an embedding, a head."""
    return Decoder(DecoderConfig(d_model=32, n_layers=3, n_heads=2, d_ff=64, vocabulary=VOCABULARY))


@dataclass(frozen=True)
class Recipe:
    """A way of training; wherever its state is kept, the bits must come out the same.

    ``passes`` is the number of forwards, each with its backward, in one micro-step; ``together`` puts all of its
    forwards before its first backward. ``exact`` says that the plain loop adds up the same terms in the same order.
    ``in_backward`` lets its cells update units in backward, where gradients cannot be read any more.
    """

    name: str
    model: Callable[[], nn.Module] = decoder
    dtype: str = "fp32"
    steps: int = 3
    accumulation: int = 1
    clipping: float = 1.0
    passes: int = 1
    together: bool = False
    groups: bool = False
    overflow_at: int | None = None
    exact: bool = True
    in_backward: bool = False

    def config(self) -> dict[str, Any]:
        """The part of the config that says how to train."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "AdamW", "params": HYPER_PARAMETERS},
            "zero_optimization": {"stage": 3},
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
        return config

    def batches(self, step: int) -> Iterator[list[tuple[Tensor, Tensor, float]]]:
        """Per micro-step, each pass's tokens, targets, the factor on its loss."""
        generator = torch.Generator().manual_seed(1000 + step)
        factor = 1e38 if step == self.overflow_at else 1.0
        for _ in range(self.accumulation):
            pairs = [torch.randint(0, VOCABULARY, (2, 2, 16), generator=generator) for _ in range(self.passes)]
            yield [(pair[0], pair[1], factor) for pair in pairs]

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups with hyper-parameters of their own: matrices, the rest, one parameter alone."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self.groups:
            return [{"params": [p for _, p in named]}]
        return [
            {"params": [p for _, p in named[1:] if p.dim() > 1]},
            {"params": [p for _, p in named[1:] if p.dim() < 2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": [named[0][1]], "lr": 3e-3, "eps": 0.2},
        ]


HYPER_PARAMETERS = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 0.1, "weight_decay": 0.1}

RECIPES = (
    Recipe("fp32"),
    Recipe("bf16", dtype="bf16"),
    Recipe("fp16 with an overflow", dtype="fp16", steps=5, overflow_at=1),
    Recipe("fp32, 4 micro-steps, no clipping", accumulation=4, clipping=0.0),
    Recipe("bf16, 2 micro-steps of 2 passes", dtype="bf16", accumulation=2, passes=2),
    Recipe("fp32, 3 forwards then 3 backwards", passes=3, together=True),
    Recipe("fp32, parameter groups", groups=True),
    Recipe("awkward model", model=Awkward, steps=4, groups=True),
    Recipe("awkward model, bf16, 2 micro-steps", model=Awkward, dtype="bf16", steps=4, accumulation=2, exact=False),
    Recipe("fp32, updates in backward", clipping=0.0, in_backward=True),
    Recipe("bf16, updates in backward", clipping=0.0, dtype="bf16", groups=True, in_backward=True),
    Recipe("awkward model, updates in backward", model=Awkward, steps=5, clipping=0.0, in_backward=True),
)


@dataclass
class _Trained:
    """One parameter of the plain loop with its optimizer state, fp32."""

    name: str
    parameter: nn.Parameter
    group: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor | None = None
    steps: int = 0

    @property
    def state(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def run_plain(recipe: Recipe) -> Trace:
    """The recipe without any of the runtime: the module as it is, whole tensors, eager operations."""
    torch.manual_seed(0)
    model = recipe.model()
    groups = recipe.parameter_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [
        _Trained(names[id(p)], p, number, p.detach().flatten().clone(), *torch.zeros(2, p.numel()))
        for number, group in enumerate(groups)
        for p in group["params"]
    ]
    trained.sort(key=lambda item: list(names.values()).index(item.name))
    model.to(DTYPES[recipe.dtype])
    scale = 2.0**10 if recipe.dtype == "fp16" else 1.0
    trace: Trace = {}
    good_steps = 0
    for step in range(recipe.steps):
        for item in trained:
            item.gradient = None
        for micro, batch in enumerate(recipe.batches(step)):
            _plain_micro_step(recipe, model, trained, batch, scale / recipe.accumulation, f"{step}.{micro}", trace)
        if step == recipe.steps - 1 and not recipe.in_backward:
            trace.update(
                (f"gradient of {item.name}", (item.gradient / scale).view(item.parameter.shape))
                for item in trained
                if item.gradient is not None
            )
        norm = _norm(trained) / scale
        trace[f"norm {step}"] = torch.tensor(norm)
        if math.isfinite(norm):
            coefficient = min(1.0, recipe.clipping / (norm + 1e-6)) if recipe.clipping else 1.0
            _plain_update(trained, groups, coefficient / scale)
            good_steps += 1
            if recipe.dtype == "fp16" and good_steps % 2 == 0:
                scale *= 2
        else:
            scale, good_steps = scale / 2, 0
        if recipe.dtype == "fp16":
            trace[f"loss scale {step}"] = torch.tensor(scale)
    for item in trained:
        trace.update((f"{kind} of {item.name}", value.view(item.parameter.shape)) for kind, value in item.state.items())
    trace.update((f"parameter {name}", p.detach()) for name, p in model.named_parameters())
    return trace


def _plain_micro_step(
    recipe: Recipe,
    model: nn.Module,
    trained: list[_Trained],
    batch: list[tuple[Tensor, Tensor, float]],
    factor: float,
    place: str,
    trace: Trace,
) -> None:
    def backward(loss: Tensor) -> None:
        (loss if factor == 1.0 else loss.float() * factor).backward()  # type: ignore[no-untyped-call]
        for item in trained:
            gradient, item.parameter.grad = item.parameter.grad, None
            if gradient is not None:
                wide = gradient.float().flatten()
                item.gradient = wide if item.gradient is None else item.gradient + wide

    losses = []
    for number, (tokens, targets, weight) in enumerate(batch):
        loss = model(tokens, targets) * weight
        trace[f"loss {place}.{number}"] = loss.detach()
        if recipe.together:
            losses.append(loss)
        else:
            backward(loss)
    for loss in losses:
        backward(loss)


def _norm(trained: list[_Trained]) -> float:
    total = math.fsum(float(part) for item in trained if item.gradient is not None for part in _squares(item.gradient))
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _squares(gradient: Tensor) -> list[float]:
    wide = gradient.double()
    squares: list[float] = (wide * wide).tolist()
    return squares if all(map(math.isfinite, squares)) else [math.inf]


def _plain_update(trained: list[_Trained], groups: list[dict[str, Any]], grad_scale: float) -> None:
    kernels = TorchKernels()
    for item in trained:
        if item.gradient is None:
            continue
        item.steps += 1
        own = {**HYPER_PARAMETERS, **groups[item.group]}
        beta1, beta2 = own["betas"]
        step = AdamStep(own["lr"], beta1, beta2, own["eps"], own["weight_decay"], item.steps, True, grad_scale)
        kernels.adam(item.master, item.exp_avg, item.exp_avg_sq, item.gradient, None, step)
        with torch.no_grad():
            item.parameter.copy_(item.master.view(item.parameter.shape))


def run_adamw(recipe: Recipe) -> Trace:
    """The recipe, in fp32, as one would write it: ``torch.optim.AdamW`` after ``clip_grad_norm_``."""
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.AdamW(
        recipe.parameter_groups(model), lr=1e-2, betas=(0.9, 0.999), eps=0.1, weight_decay=0.1
    )
    trace: Trace = {}
    for step in range(recipe.steps):
        for micro, batch in enumerate(recipe.batches(step)):
            for number, (tokens, targets, _) in enumerate(batch):
                loss = model(tokens, targets)
                trace[f"loss {step}.{micro}.{number}"] = loss.detach()
                (loss / recipe.accumulation).backward()
        if recipe.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clipping)
        optimizer.step()
        optimizer.zero_grad()
    trace.update((f"master of {name}", p.detach()) for name, p in model.named_parameters())
    for name, p in model.named_parameters():
        trace.update((f"{kind} of {name}", optimizer.state[p][kind]) for kind in ("exp_avg", "exp_avg_sq"))
    return trace
